"""The expert kernels of this project, and which of all kernels a run takes."""

from dataclasses import dataclass, replace

from ..util.errors import ExpertMeshError
from .fp8 import FP8, check_fp8
from .kernel_entries import Precision, check_kernel_name, kernels_that
from .kernel_registry import KERNELS, ExpertKernel, KernelNeeds
from .loop import LOOP
from .megablocks import MEGABLOCKS_SPARSE
from .torch_grouped import TORCH_GROUPED

for _kernel in (LOOP, TORCH_GROUPED, MEGABLOCKS_SPARSE):
    KERNELS.register(_kernel)


@dataclass(frozen=True)
class KernelChoice:
    """most_apart: how many experts it may multiply one after the other (see `ExpertRows`)."""

    kernel: ExpertKernel
    why: str
    most_apart: int = 1

    @property
    def name(self) -> str:
        return self.kernel.name


def choose_kernel(name: str, needs: KernelNeeds, precision: Precision = "same") -> KernelChoice:
    """The kernel for `--expert-kernel name`; "auto" picks by device, experts, dtype and what is installed. In fp8, it
    is the kernel for adapters.

    Raises:
        ExpertMeshError: the name is unknown, or that kernel is not installed, or cannot compute these experts.
    """
    check_kernel_name(name)
    if precision == "fp8":
        check_fp8(name, needs)
        is_cpu = needs.device_type == "cpu"
        how = "emulated on a CPU" if is_cpu else "grouped, with row-wise scales; MFU is of the bf16 peak"
        beside = choose_kernel(name, needs).kernel
        return KernelChoice(replace(FP8, low_rank=beside.low_rank or beside.product), how)
    if name == "auto":
        return _choose(needs)
    check_kernel(name, needs)
    kernel = KERNELS.get(name)
    note = kernel.note(needs)
    return KernelChoice(kernel, f"asked for; {note}" if note else "asked for")


def _choose(needs: KernelNeeds) -> KernelChoice:
    """The default kernel: the first in `auto`'s order of those that can compute these experts, `loop` at the latest."""
    able = [kernel for kernel in KERNELS.entries() if _can_compute(kernel.name, needs)]
    places = [(kernel, place) for kernel in able if (place := kernel.auto(needs)) is not None]
    kernel, place = max(places, key=lambda each: each[1].preference)
    return KernelChoice(kernel, f"auto: {place.why}")


def _can_compute(name: str, needs: KernelNeeds) -> bool:
    try:
        check_kernel(name, needs)
    except ExpertMeshError:
        return False
    return True


def check_kernel(name: str, needs: KernelNeeds) -> None:
    """
    Raises:
        ExpertMeshError: the kernel is not installed, or cannot compute these experts in this dtype on this device.
    """
    kernel = KERNELS.get(name)
    if kernel.product is None and not needs.is_swiglu:
        raise ExpertMeshError(
            f"--expert-kernel {name} computes plain SwiGLU only; this model's experts have biases, "
            "adapters or another activation; use "
            f"{kernels_that(lambda entry: KERNELS.get(entry.name).product is not None)}"
        )
    kernel.check(needs)
