"""What a module whose code runs in a step is, as it says itself, for dry runs, cost breakdowns and profiles: which part
of a step its operators are, which of its functions make what outlives a step, and what its Triton kernels write."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from .errors import ExpertMeshError

StepPart = Literal[
    "router",
    "dispatch",
    "permute, combine",
    "expert GEMMs",
    "experts' activation",
    "dequantization",
    "adapters",
    "norms",
    "rotary",
    "LM head, loss",
    "pipeline",
    "clipping",
    "optimizer step",
    "the step",
]
"""The parts of a step that code is. "the step" is everything else: the code that calls all parts, and `backward`, so
that in a backward it says nothing."""


@dataclass(frozen=True)
class Writes:
    """written: names of a kernel's parameters that it writes without reading them. updated: that it reads and writes.
    Its other tensors are read."""

    written: frozenset[str] = frozenset()
    updated: frozenset[str] = frozenset()


def writes(*written: str, updates: tuple[str, ...] = ()) -> Writes:
    """To which tensors a Triton kernel writes.

    Args:
        written: names of parameters that it writes without reading them.
        updates: names of those that it reads and writes.
    """
    return Writes(frozenset(written), frozenset(updates))


@dataclass(frozen=True)
class StepModule:
    """What a module is to a step.

    part: that its operators belong to; None, as for helpers: that of the module's caller. lasting: qualified names of
    its functions that make what outlives a step, such as optimizer state, or compute nothing: what they and their
    callees do is part of no step. kernels: what its kernels write, Triton's and each `Compiled`, by the names of their
    functions.
    """

    part: StepPart | None
    lasting: tuple[str, ...] = ()
    kernels: Mapping[str, Writes] = field(default_factory=dict)


_OF_TORCH: Mapping[str, StepModule] = {
    "torch.distributed.tensor._sharding_prop": StepModule(
        None, lasting=("ShardingPropagator._propagate_tensor_meta_non_cached",)
    ),
    "torch.optim.adam": StepModule("optimizer step", lasting=("Adam._init_group",)),
}
STEP_PARTS = dict(_OF_TORCH)
"""By module, of those that were imported. The operators of one that is not in it are part of its caller, or of the
module of the model."""


def register_step_part(
    module: str, part: StepPart | None, *, lasting: tuple[str, ...] = (), kernels: Mapping[str, Writes] | None = None
) -> None:
    """Say what a module is to a step, so that dry runs, cost breakdowns and `--profile` count its operators as that. To
    be called before the run or the dry run begins, best by the module itself, as our own do.

    Args:
        module: its `__name__`, also where that is "__main__".
        part, lasting, kernels: see `StepModule`.

    Raises:
        ExpertMeshError: there is no such part, or something else is known of a module with this name.
    """
    if part is not None and part not in get_args(StepPart):
        raise ExpertMeshError(
            f"{module} cannot be registered as part {part!r} of a step: the parts are "
            f"{', '.join(get_args(StepPart))}; None is that of the caller"
        )
    code = StepModule(part, tuple(lasting), dict(kernels or {}))
    known = STEP_PARTS.setdefault(module, code)
    if known != code:
        raise ExpertMeshError(f"{module} is registered already, as part {known.part!r} of a step")


def has_modules_from_outside() -> bool:
    """Whether a module that is not of this project is registered, whose text no digest of our sources includes."""
    ours = __name__.partition(".")[0]
    return any(name.partition(".")[0] != ours for name in STEP_PARTS.keys() - _OF_TORCH)


def is_lasting(function: Callable[..., Any]) -> bool:
    """Whether a function makes what outlives a step."""
    # torch.compile takes optimizers' for itself once any package, such as bitsandbytes, has imported it
    function = inspect.unwrap(function)
    code = STEP_PARTS.get(function.__globals__["__name__"])
    return code is not None and function.__code__.co_qualname in code.lasting


def written_by(kernel: Any) -> Writes:
    """What a kernel writes; nothing for one that is not in the table, whose tensors then all count as read."""
    code = STEP_PARTS.get(kernel.fn.__module__)
    return Writes() if code is None else code.kernels.get(kernel.fn.__qualname__, Writes())
