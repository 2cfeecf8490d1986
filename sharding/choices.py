"""What a run can choose of memory against time, by name."""

from typing import Literal

Checkpointing = Literal["none", "full", "selective"]
"""What a decoder layer computes again in backward (see `sharding.checkpointing`)."""
