"""The expert kernels: the values of `--expert-kernel`, and what checks, forecasts and the table of
docs/explanation/kernels.md read of them. Nothing here imports torch: what computes is an entry's `code`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..util.errors import ExpertMeshError
from ..util.registry import Registry, loaded

if TYPE_CHECKING:
    from .kernel_registry import ExpertKernel

Precision = Literal["same", "fp8"]
"""The precision of experts' matmuls: the dtype of everything else, or fp8."""


@dataclass(frozen=True)
class KernelEntry:
    """
    Attributes:
        name: the value of `--expert-kernel`.
        how, where: for people: how it computes; which experts, dtypes and devices it is for.
        beside_fp8: whether it can be asked for with `--expert-precision fp8`. It then multiplies by adapters' matrices.
        keeps_products: whether `--keep-expert-products` works: the outputs of an expert's first GEMMs are computed
            by `moe.kernels.expert_rows.ExpertRows.kept_product`.
        recorded_as: the kernel whose operators a forecast records in its place; itself, if it runs on fake tensors of
            a CPU, or a dry run has a stand-in for its package.
        implementation: its `ExpertKernel` (see `moe.util.registry`).
    """

    name: str
    how: str
    where: str
    beside_fp8: bool
    keeps_products: bool
    recorded_as: str
    implementation: "str | ExpertKernel"

    @property
    def code(self) -> "ExpertKernel":
        """What computes."""
        return loaded(self.implementation)


LOOP_ENTRY = KernelEntry(
    "loop",
    how="One matmul per expert: the reference, and the default on a CPU and in fp32.",
    where="anywhere",
    beside_fp8=False,
    keeps_products=True,
    recorded_as="loop",
    implementation="moe.kernels.loop:LOOP",
)
TORCH_GROUPED_ENTRY = KernelEntry(
    "torch-grouped",
    how="`grouped_mm` of torch over all experts.",
    where="widths that are multiples of 16 bytes; on a GPU fewer than 2^31 elements of a rank's rows",
    beside_fp8=True,
    keeps_products=True,
    recorded_as="torch-grouped",
    implementation="moe.kernels.torch_grouped:TORCH_GROUPED",
)
MEGABLOCKS_SPARSE_ENTRY = KernelEntry(
    "megablocks-sparse",
    how="Block-sparse matmuls by stanford-stk's Triton kernels.",
    where="a GPU; plain SwiGLU; widths that are multiples of 128",
    beside_fp8=False,
    keeps_products=False,
    # torch's keep as much, but for the product in the activation
    recorded_as="torch-grouped",
    implementation="moe.kernels.megablocks:MEGABLOCKS_SPARSE",
)
QUACK_ENTRY = KernelEntry(
    "quack",
    how="Grouped GEMMs of quack-kernels, plain SwiGLU's activation in them.",
    where="bf16 on GPUs of compute capability 9 and 10; widths that are multiples of 8; fewer than 2^31 elements of a "
    "rank's rows",
    beside_fp8=True,
    keeps_products=True,
    recorded_as="quack",
    implementation="moe.kernels.quack:QUACK",
)

KERNELS = Registry(
    "--expert-kernel", ("auto",), (LOOP_ENTRY, TORCH_GROUPED_ENTRY, MEGABLOCKS_SPARSE_ENTRY, QUACK_ENTRY)
)
"""All that can be asked for; `moe.kernels.kernel_registry.register_expert_kernel` adds to it."""


def kernels_that(can: Callable[[KernelEntry], bool]) -> str:
    """The names of those kernels, the default on a CPU last, to be suggested in place of another."""
    *others, last = [entry.name for entry in reversed(KERNELS.entries()) if can(entry)]
    return f"{', '.join(others)} or {last}" if others else last


def check_kernel_name(name: str) -> None:
    """
    Raises:
        ExpertMeshError: no kernel is called `name`.
    """
    if name == "megablocks-grouped":
        raise ExpertMeshError(f"--expert-kernel {name} was removed; use torch-grouped, torch's own grouped GEMMs")
    if name != "auto":
        KERNELS.get(name)


BESIDE_FP8 = "--expert-precision fp8 brings its own GEMMs; leave out --expert-kernel {expert_kernel}"


def check_beside_fp8(name: str) -> None:
    """
    Raises:
        ExpertMeshError: --expert-precision fp8 leaves nothing to the kernel called `name`.
    """
    if not is_beside_fp8(name):
        raise ExpertMeshError(BESIDE_FP8.format(expert_kernel=name))


def is_beside_fp8(name: str) -> bool:
    """Whether --expert-precision fp8 leaves something to the kernel called `name`."""
    return name == "auto" or KERNELS.get(name).beside_fp8


def help_of_kernels() -> str:
    """What `--help` says of `--expert-kernel`."""
    return f"Expert kernel: {', '.join(KERNELS.choices())}"
