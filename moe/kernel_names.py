"""What `--expert-kernel` and `--expert-precision` can say."""

from typing import Literal

from moe.errors import ExpertMeshError

KERNEL_NAMES = ("loop", "torch-grouped", "megablocks-sparse", "megablocks-grouped")
"""The keys of `moe.KERNELS`, for those who need no kernel."""

Precision = Literal["same", "fp8"]
"""What experts' products are computed in: the dtype of everything else, or fp8."""


def check_kernel_name(name: str) -> None:
    """
    Raises:
        ExpertMeshError: no kernel is called `name`.
    """
    if name not in ("auto", *KERNEL_NAMES):
        raise ExpertMeshError(f"--expert-kernel {name} is unknown; use auto, {', '.join(KERNEL_NAMES)}")
