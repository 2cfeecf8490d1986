"""The values of `--expert-kernel` and `--expert-precision`."""

from typing import Literal

from ..util.errors import ExpertMeshError

KERNEL_NAMES = ("loop", "torch-grouped", "megablocks-sparse")
"""The keys of `KERNELS`, for code that needs no kernel."""

Precision = Literal["same", "fp8"]
"""The precision of experts' matmuls: the dtype of everything else, or fp8."""


def check_kernel_name(name: str) -> None:
    """
    Raises:
        ExpertMeshError: no kernel is called `name`.
    """
    if name == "megablocks-grouped":
        raise ExpertMeshError(f"--expert-kernel {name} is gone: use torch-grouped, torch's own grouped GEMMs")
    if name not in ("auto", *KERNEL_NAMES):
        raise ExpertMeshError(f"--expert-kernel {name} is unknown; use auto, {', '.join(KERNEL_NAMES)}")
