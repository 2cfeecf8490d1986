"""What torchrun tells a process."""

import os


def read_environment() -> tuple[int, int, int]:
    """(rank, world size, local rank) from torchrun's variables; a lone process when they are not set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, world_size, local_rank = (int(os.environ.get(name, "1" if name == "WORLD_SIZE" else "0")) for name in names)
    return rank, world_size, local_rank
