"""Which expert kernel a run takes."""

from dataclasses import dataclass, replace

from ..util.errors import ExpertMeshError
from .fp8 import FP8, check_fp8
from .kernel_entries import KERNELS, KernelEntry, Precision, check_kernel_name, kernels_that
from .kernel_registry import AutoPlace, KernelNeeds, NotInstalled


@dataclass(frozen=True)
class KernelChoice:
    """most_apart: how many experts it may multiply one after the other (see `ExpertRows`). lost: which kernel `auto`
    would take, and why, if it were installed; empty: none.
    """

    kernel: KernelEntry
    why: str
    most_apart: int = 1
    lost: str = ""

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
        beside = choose_kernel(name, needs).kernel.code
        code = replace(FP8.code, low_rank=beside.low_rank or beside.product)
        return KernelChoice(replace(FP8, implementation=code), how)
    if name == "auto":
        return _choose(needs)
    check_kernel(name, needs)
    kernel = KERNELS.get(name)
    note = kernel.code.note(needs)
    return KernelChoice(kernel, f"asked for; {note}" if note else "asked for")


def _choose(needs: KernelNeeds) -> KernelChoice:
    """The default kernel: the first in `auto`'s order of those that can compute these experts, `loop` at the latest."""
    places = [(kernel, place) for kernel in KERNELS.entries() if (place := kernel.code.auto(needs)) is not None]
    # a check may import a package, which takes seconds
    able = [(kernel, place) for kernel, place in places if _can_compute(kernel.name, needs)]
    kernel, place = max(able, key=lambda each: each[1].preference)
    return KernelChoice(kernel, f"auto: {place.why}", lost=_lost(needs, place))


def _lost(needs: KernelNeeds, taken: AutoPlace) -> str:
    for kernel in KERNELS.entries():
        place = kernel.code.auto(needs)
        if place is not None and place.preference > taken.preference:
            try:
                check_kernel(kernel.name, needs)
            except NotInstalled as error:
                return f"{error}: without it experts are slower, as {place.why}"
            except ExpertMeshError:
                continue
    return ""


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
    kernel = KERNELS.get(name).code
    if kernel.product is None and not needs.is_swiglu:
        raise ExpertMeshError(
            f"--expert-kernel {name} computes plain SwiGLU only; this model's experts have biases, "
            "adapters or another activation; use "
            f"{kernels_that(lambda entry: entry.code.product is not None)}"
        )
    kernel.check(needs)
