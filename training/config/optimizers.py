"""The optimizers of `--optim`: all that is said of one beside the code that computes its updates, which is
`training.optim`'s. Nothing here imports torch, as flags are read before it is loaded.

One of your own is one call of `training.optim.optimizer.register_optimizer`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...moe.util.registry import Registry

if TYPE_CHECKING:
    from .train_config import TrainConfig


class ParameterShape(NamedTuple):
    """What the state of a trained parameter depends on.

    shape: unsharded. element_size: bytes of an element. matrix_rows: rows of each of its matrices, for an optimizer of
    matrices; 0: it is not one of those that such an optimizer takes as matrices.
    """

    shape: Sequence[int]
    element_size: int
    matrix_rows: int


STACK_ELEMENTS = 2**23
"""Of the matrices of one shape that an optimizer computes with as one tensor, if it is not more in one of them: enough
for kernels that take longer than their launch, and no more than a matrix of attention has, as 4,096 x 2,048."""


def stack_size(elements: int, number: int, ranks: int) -> int:
    """Of so many matrices that these ranks share, each of as many elements, how many one of them computes with at once:
    all have about as many, in as few rounds as `STACK_ELEMENTS` allows."""
    rounds = -(-number // (max(1, STACK_ELEMENTS // elements) * ranks))
    return -(-number // (rounds * ranks))


LARGEST_ALIKE = 2**21
"""Elements of the largest part of a parameter that low-bit AdamW copies into a stack of others of its shape: copying
more would take a GPU longer than the host takes to launch an update of its own."""


def alike_size(elements: int, number: int) -> int:
    """Of so many parameters whose parts have one shape, each of as many elements, how many are updated at once."""
    return 1 if elements > LARGEST_ALIKE else stack_size(max(1, elements), number, 1)


def num_elements(shape: tuple[int, int], has_factors: bool) -> int:
    """Of a matrix, or of its larger factor (see `OptimizerEntry.has_factors`)."""
    return max(shape) ** 2 if has_factors else shape[0] * shape[1]


class UpdateKernel(NamedTuple):
    """A kernel of a step's update of one block of a matrix.

    operator: a matmul in the compute dtype, a matmul in fp32 or double, or an eigendecomposition. flops: of one.
    times: how often in a step, on average.
    """

    operator: Literal["matmul", "matmul fp32", "eigendecomposition"]
    flops: float
    times: float


class BlockKernels(NamedTuple):
    """What is computed of the blocks of one shape that a matrix has: their shape, their number, the kernels of one."""

    shape: tuple[int, int]
    number: int
    kernels: list[UpdateKernel]


class UpdateCalls(NamedTuple):
    """Operators that a step's update calls beside those of clipping, as counted in a dry run: for each trained
    parameter, for each run of matrices' rows, for each lot of matrices (see `training.optim.matrices`), for the
    exchange of a lot between ranks, and for each update of parameters of one shape (see `alike_size`). Those for all
    parameters together are few."""

    parameter: int
    run: int
    lot: int
    exchange: int
    alike: int = 0


class UpdateTensors(NamedTuple):
    """Memory in use only during an update: that of so many tensors on a CPU or a GPU, as large as the largest parameter
    on a rank, or as the largest parameters that are updated together, in fp32, or as the largest stack of matrices,
    unsharded, in the compute dtype or in fp32.

    copied: of as many tensors more, where several parameters are updated together.
    """

    on_cpu: float
    on_gpu: float
    as_large_as: Literal["parameter", "parameters alike", "stack", "stack in fp32"]
    copied: float = 0


class StateSetting(NamedTuple):
    """A setting that must be the same where a run is resumed: its flag, its value, and words on where that is from."""

    flag: str
    value: Any
    origin: str


def no_settings(settings: Mapping[str, Any]) -> list[StateSetting]:
    """`state_settings` of an optimizer whose state means the same with all settings."""
    return []


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """An optimizer, as flags, forecasts, resumes and messages know it.

    Attributes:
        name: of `--optim`. help: what it is, in its part of that flag's help.
        aliases: other names of the same in transformers.
        others: what other tools call it (see `training.config.other_tools.OtherTools`).
        heeds: the settings that it reads beside learning_rate: those of `OptimizerSettings` that are not in here have
            no effect with it, and a run says so.
        forecast_reads: the settings that `state_bytes` and `matrix_kernels` read.
        state_settings: from a run's settings, those that must be the same for its state to be resumed.
        parameters_in_bf16: trained parameters and their gradients are bf16.
        is_tried_where_nothing_fits: `plan` tries it then, as its state is smaller.
        state_bytes: bytes of state for each element of a trained parameter.
        matrix_kernels: what a step computes of a matrix of this shape on its owner, beside what moves memory alone, for
            an optimizer that computes with whole matrices; None: it computes element by element.
        clips: its update scales gradients, as clipping has it, in the kernel that reads them on a GPU.
        has_factors: it keeps square matrices as large as a matrix's sides.
        calls, tensors: of an update.
        dry_run: settings with which the one step of a dry run is as almost all steps of a run are.
    """

    name: str
    help: str
    aliases: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    heeds: tuple[str, ...]
    forecast_reads: tuple[str, ...] = ()
    state_settings: Callable[[Mapping[str, Any]], list[StateSetting]] = no_settings
    parameters_in_bf16: bool = False
    is_tried_where_nothing_fits: bool = False
    state_bytes: "Callable[[ParameterShape, TrainConfig], float]"
    matrix_kernels: "Callable[[tuple[int, int], TrainConfig], list[BlockKernels]] | None" = None
    clips: bool = False
    has_factors: bool = False
    calls: UpdateCalls
    tensors: UpdateTensors
    dry_run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def takes_matrices(self) -> bool:
        """Whether it computes with whole matrices."""
        return self.matrix_kernels is not None


# Low-bit AdamW

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 64
"""Values of 8-bit state that share a scale: at most as many as in torchao and bitsandbytes; with fewer than the
smallest, their scales would weigh too much."""


def block_size(shape: Sequence[int]) -> int | None:
    """Values of a parameter of this shape that share a scale: the largest of 64 to 256 that divides its rows, as 240 of
    2,880; None: there is none, or it is no matrix."""
    if len(shape) != 2:
        return None
    sizes = range(LARGEST_BLOCK, SMALLEST_BLOCK - 1, -1)
    return next((size for size in sizes if shape[1] % size == 0), None)


def _state_bytes_8bit(parameter: ParameterShape, config: "TrainConfig") -> float:
    block = block_size(parameter.shape)
    return 8 if block is None else 2 + 8 / block


# Muon

NEWTON_SCHULZ_ITERATIONS = 5
"""torch.optim.Muon's default."""


def _muon_kernels(shape: tuple[int, int], config: "TrainConfig") -> list[BlockKernels]:
    """The matmuls of `newton_schulz`: of a matrix of n rows and m >= n columns, two of 2·n²·m FLOPs and one of 2·n³ in
    each iteration."""
    n, m = sorted(shape)
    kernels = [
        UpdateKernel("matmul", 2.0 * n * n * m, 2 * NEWTON_SCHULZ_ITERATIONS),
        UpdateKernel("matmul", 2.0 * n**3, NEWTON_SCHULZ_ITERATIONS),
    ]
    return [BlockKernels(shape, 1, kernels)]


# Shampoo

EIGEN_FLOPS = 9
"""FLOPs of the eigenvalues and eigenvectors of a symmetric matrix of n rows, over n³ (Golub and Van Loan, Matrix
Computations, section 8.3)."""


def first_roots(start: int | None, frequency: int) -> int:
    """The step with Shampoo's first preconditioner.

    Args:
        start, frequency: by `--shampoo-start` and `--shampoo-frequency`.
    """
    return frequency if start is None else start


def block_shapes(shape: tuple[int, int], size: int) -> Counter[tuple[int, int]]:
    """How many blocks of each shape a matrix has (see `training.optim.matrices.blocks_of`)."""
    rows, columns = ([min(size, side - start) for start in range(0, side, size)] for side in shape)
    return Counter((num_rows, num_columns) for num_rows in rows for num_columns in columns)


def _shampoo_state_settings(settings: Mapping[str, Any]) -> list[StateSetting]:
    """The shapes of its state depend on the one, and whether there are roots yet on the other."""
    start, frequency = settings["shampoo_start"], settings["shampoo_frequency"]
    by_default = ", by default its --shampoo-frequency" if start is None else ""
    return [
        StateSetting("--shampoo-block-size", settings["shampoo_block_size"], ""),
        StateSetting("--shampoo-start", first_roots(start, frequency), by_default),
    ]


def _shampoo_state_bytes(parameter: ParameterShape, config: "TrainConfig") -> float:
    """Of a matrix also its factors' and roots'."""
    if not parameter.matrix_rows:
        return 8
    shape = (parameter.matrix_rows, parameter.shape[1])
    blocks = block_shapes(shape, config.shampoo_block_size).items()
    squares = sum(number * (rows**2 + columns**2) for (rows, columns), number in blocks)
    return 8 + 2 * 4 * squares / (shape[0] * shape[1])


def _shampoo_kernels(shape: tuple[int, int], config: "TrainConfig") -> list[BlockKernels]:
    blocks = block_shapes(shape, config.shampoo_block_size).items()
    return [
        BlockKernels(block, number, _shampoo_block_kernels(block, config.shampoo_frequency)) for block, number in blocks
    ]


def _shampoo_block_kernels(shape: tuple[int, int], frequency: int) -> list[UpdateKernel]:
    """Of a block on average, once roots are taken: in each step two matmuls for its factors and two with their roots,
    every `frequency` steps the two roots."""
    rows, columns = shape
    kernels = [UpdateKernel("matmul fp32", 2.0 * rows * columns * side, 2) for side in shape]
    for side in shape:
        kernels.append(UpdateKernel("eigendecomposition", EIGEN_FLOPS * float(side) ** 3, 1 / frequency))
        kernels.append(UpdateKernel("matmul fp32", 2.0 * side**3, 1 / frequency))
    return kernels


_OF_ADAMW = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_OF_SHAMPOO = ("shampoo_frequency", "shampoo_block_size")

ADAMW_FUSED = OptimizerEntry(
    name="adamw_torch_fused",
    help="AdamW",
    aliases=("adamw_torch",),  # the same without the fused kernel
    others={
        "--optim adamw_torch_fused": "optim=adamw optim=adam optim=adamw_hf optim=fused_adam optim=adamw_apex_fused "
        "optim=adamw_torch_npu_fused optim=adamw_torch_xla",
        "--optim adamw_torch_fused --offload": "optim=paged_adamw optim=paged_adamw_32bit",
    },
    heeds=_OF_ADAMW,
    state_bytes=lambda parameter, config: 8,
    clips=True,
    calls=UpdateCalls(parameter=0, run=0, lot=0, exchange=0),
    tensors=UpdateTensors(on_cpu=0, on_gpu=0, as_large_as="parameter"),
)
ADAMW_8BIT = OptimizerEntry(
    name="adamw_torch_8bit",
    help="AdamW with 8-bit state",
    others={"--optim adamw_torch_8bit": "optim=*adamw_*bit optim=adam_8bit"},
    heeds=_OF_ADAMW,
    is_tried_where_nothing_fits=True,
    state_bytes=_state_bytes_8bit,
    calls=UpdateCalls(parameter=1, run=0, lot=0, exchange=0, alike=15),
    tensors=UpdateTensors(on_cpu=8, on_gpu=0, as_large_as="parameters alike", copied=2.5),
)
ADAMW_BF16 = OptimizerEntry(
    name="adamw_bf16",
    help="AdamW with parameters, gradients and state in bf16 and stochastic rounding",
    others={"--optim adamw_bf16": "optim=adamw_anyprecision", "--bf16 --optim adamw_bf16": "pure_bf16"},
    heeds=_OF_ADAMW,
    parameters_in_bf16=True,
    is_tried_where_nothing_fits=True,
    state_bytes=lambda parameter, config: 2 * parameter.element_size,
    calls=UpdateCalls(parameter=1, run=0, lot=0, exchange=0, alike=15),
    tensors=UpdateTensors(on_cpu=8, on_gpu=0, as_large_as="parameters alike", copied=2),
)
MUON = OptimizerEntry(
    name="muon",
    help="Muon for attention's and the experts' matrices, with AdamW for the rest",
    others={"--optim muon": "use_muon"},
    heeds=_OF_ADAMW,
    state_bytes=lambda parameter, config: 4 if parameter.matrix_rows else 8,
    matrix_kernels=_muon_kernels,
    calls=UpdateCalls(parameter=0, run=12, lot=22, exchange=9),
    tensors=UpdateTensors(on_cpu=5, on_gpu=5, as_large_as="stack"),
)
SHAMPOO = OptimizerEntry(
    name="shampoo",
    help="Distributed Shampoo for the same matrices, with AdamW for the rest",
    heeds=(*_OF_ADAMW, *_OF_SHAMPOO, "shampoo_start"),
    forecast_reads=_OF_SHAMPOO,
    state_settings=_shampoo_state_settings,
    state_bytes=_shampoo_state_bytes,
    matrix_kernels=_shampoo_kernels,
    has_factors=True,
    calls=UpdateCalls(parameter=0, run=21, lot=23, exchange=21),
    tensors=UpdateTensors(on_cpu=12, on_gpu=12, as_large_as="stack in fp32"),
    dry_run={"shampoo_start": 1},  # with the preconditioners that it begins to have there
)

OUR_OPTIMIZERS = (ADAMW_FUSED, ADAMW_8BIT, ADAMW_BF16, MUON, SHAMPOO)
OPTIMIZERS = Registry("--optim", ours=OUR_OPTIMIZERS)


def optimizers_in_words() -> str:
    """The help of `--optim`."""
    return "; ".join(f"{entry.name}: {entry.help}" for entry in OPTIMIZERS.entries())
