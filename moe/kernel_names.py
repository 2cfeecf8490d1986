"""What `--expert-kernel` can say."""

from moe.errors import ExpertMeshError

KERNEL_NAMES = ("loop", "torch-grouped", "megablocks-sparse", "megablocks-grouped")
"""The keys of `moe.KERNELS`, for those who need no kernel."""


def check_kernel_name(name: str) -> None:
    """
    Raises:
        ExpertMeshError: no kernel is called `name`.
    """
    if name not in ("auto", *KERNEL_NAMES):
        raise ExpertMeshError(f"--expert-kernel {name} is unknown; use auto, {', '.join(KERNEL_NAMES)}")
