"""The optimizers of `--optim`. Nothing here imports torch, as flags are read before it is loaded: the code that
computes updates is named, and is `training.optim`'s.

One of your own is one call of `training.optim.optimizer.register_optimizer`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

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
        state_settings: from a run's settings, those that must be the same for its state to be resumed.
        parameters_in_bf16: trained parameters and their gradients are bf16.
        is_tried_where_nothing_fits: `plan` tries it then, as its state is smaller.
        state_bytes: bytes of state for each element of a trained parameter.
        takes_matrices: whether it computes with whole matrices, not element by element.
        dry_run: settings with which the one step of a dry run is as almost all steps of a run are.
        build: makes it of a sharded model, the settings and a mesh, for the parameters that are trained and here
            (`sharding.state.trainable_of`).
        occasional: functions that its step calls only now and then, each by its name in its module, and every how many
            steps, by the settings: in a dry run, which takes one step, they count as a part of themselves.

    Both may be named in words (see `moe.util.registry`).
    """

    name: str
    help: str
    aliases: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    heeds: tuple[str, ...]
    state_settings: Callable[[Mapping[str, Any]], list[StateSetting]] = no_settings
    parameters_in_bf16: bool = False
    is_tried_where_nothing_fits: bool = False
    state_bytes: "Callable[[ParameterShape, TrainConfig], float]"
    takes_matrices: bool = False
    dry_run: Mapping[str, Any] = field(default_factory=dict)
    build: "str | Callable[[Any, TrainConfig, Any], Any]"
    occasional: "str | Callable[[TrainConfig], Mapping[Any, int]]" = "training.optim.optimizer:nothing_occasional"


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


# Shampoo


def first_roots(start: int | None, frequency: int) -> int:
    """The step with Shampoo's first preconditioner.

    Args:
        start, frequency: by `--shampoo-start` and `--shampoo-frequency`.
    """
    return frequency if start is None else start


def block_shapes(shape: tuple[int, int], size: int) -> Counter[tuple[int, int]]:
    """How many blocks of each shape a matrix has (see `training.optim.matrices.blocks_of_matrix`)."""
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
    build="training.optim.optimizer:adamw",
)
ADAMW_8BIT = OptimizerEntry(
    name="adamw_torch_8bit",
    help="AdamW with 8-bit state",
    others={"--optim adamw_torch_8bit": "optim=*adamw_*bit optim=adam_8bit"},
    heeds=_OF_ADAMW,
    is_tried_where_nothing_fits=True,
    state_bytes=_state_bytes_8bit,
    build="training.optim.optimizer:adamw_8bit",
)
ADAMW_BF16 = OptimizerEntry(
    name="adamw_bf16",
    help="AdamW with parameters, gradients and state in bf16 and stochastic rounding",
    others={"--optim adamw_bf16": "optim=adamw_anyprecision", "--bf16 --optim adamw_bf16": "pure_bf16"},
    heeds=_OF_ADAMW,
    parameters_in_bf16=True,
    is_tried_where_nothing_fits=True,
    state_bytes=lambda parameter, config: 2 * parameter.element_size,
    build="training.optim.optimizer:adamw_bf16",
)
MUON = OptimizerEntry(
    name="muon",
    help="Muon for attention's and the experts' matrices, with AdamW for the rest",
    others={"--optim muon": "use_muon"},
    heeds=_OF_ADAMW,
    state_bytes=lambda parameter, config: 4 if parameter.matrix_rows else 8,
    takes_matrices=True,
    build="training.optim.optimizer:muon",
)
SHAMPOO = OptimizerEntry(
    name="shampoo",
    help="Distributed Shampoo for the same",
    heeds=(*_OF_ADAMW, *_OF_SHAMPOO, "shampoo_start"),
    state_settings=_shampoo_state_settings,
    state_bytes=_shampoo_state_bytes,
    takes_matrices=True,
    dry_run={"shampoo_start": 1},  # with the preconditioners that it begins to have there
    build="training.optim.optimizer:shampoo",
    occasional="training.optim.optimizer:shampoo_occasional",
)

OUR_OPTIMIZERS = (ADAMW_FUSED, ADAMW_8BIT, ADAMW_BF16, MUON, SHAMPOO)
OPTIMIZERS = Registry("--optim", ours=OUR_OPTIMIZERS)


def optimizers_in_words() -> str:
    """The help of `--optim`."""
    return "; ".join(f"{entry.name}: {entry.help}" for entry in OPTIMIZERS.entries())
