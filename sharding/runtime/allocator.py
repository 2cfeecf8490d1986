"""How torch allocates GPU memory: set before torch is loaded, so this file must not import it."""

from collections.abc import MutableMapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""What torch reads its allocator's settings from: the first by its present name, then those of old."""


def let_segments_grow(environment: MutableMapping[str, str]) -> None:
    """Have torch's allocator use expandable segments. In segments of fixed sizes the rows of MoE layers, more or fewer
    with each forward, leave gaps that nothing fits into.

    If one of `VARIABLES` is set already, nothing changes.
    """
    if not any(name in environment for name in VARIABLES):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
