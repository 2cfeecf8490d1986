"""Parameters that only some ranks' sequences reach, as a compressor that takes longer ones than a rank has.

FSDP reduces the gradients that a rank has, so that ranks whose sequences reach different parameters would add up
different things, or wait for one another for ever. Here a rank without a gradient gives zeros. What no rank's
sequences reach has no gradient after all, as in one process: no momentum, no weight decay.

Shape suffixes: N trained parameters.
"""

from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...moe.torch_private import changed
from ..mesh import Mesh
from ..state import StateTensor, parameters_of


class Unreached:
    """The parameters whose gradient is nothing but zeros that were given here in its place.

    Attributes:
        parameters: this rank's, sharded.
    """

    def __init__(self) -> None:
        self.parameters: set[Tensor] = set()
        self._parts: list[StateTensor] | None = None

    def parts(self, model: nn.Module) -> list[StateTensor]:
        """The parameters of the model, which is sharded: listed once, as it takes milliseconds."""
        if self._parts is None:
            self._parts = list(parameters_of(model).values())
        return self._parts

    def fill(self, group: Any) -> None:
        """Before an FSDP unit's gradients are reduced: give zeros where there is none.

        Args:
            group: FSDP's parameters of a unit.
        """
        if not is_reducing(group):
            return
        for own in group.fsdp_params:
            gathered, sharded = own.unsharded_param, own.sharded_param
            if not gathered.requires_grad:
                continue
            if gathered.grad is not None or own.unsharded_accumulated_grad is not None:
                self.parameters.discard(sharded)
                continue
            if sharded.grad is None:
                self.parameters.add(sharded)
            gathered.grad = torch.zeros_like(gathered)

    def lacks(self, part: StateTensor) -> bool:
        """Whether nothing on this rank has reached a parameter of which it has a part."""
        return part.trainable and part.is_here and (part.tensor.grad is None or part.tensor in self.parameters)


def is_reducing(group: Any) -> bool:
    """Whether FSDP's parameters of a unit had a part in this backward, and do not only add up."""
    return bool(group._training_state.name == "PRE_BACKWARD" and group.reduce_grads)


def reduce_unreached(model: nn.Module, units: Iterable[FSDPModule]) -> None:
    """Have FSDP units reduce zeros where sequences reach a parameter on other ranks alone, in place.

    Raises:
        ExpertMeshError: this release of torch does it otherwise than is known here.
    """
    unreached = Unreached()
    model.unreached = unreached  # type: ignore[assignment]
    for unit in units:
        state = unit._get_fsdp_state()
        group: Any = state._fsdp_param_group
        if group is None:
            continue
        for name in ("post_backward", "fsdp_params", "reduce_grads", "_training_state"):
            if not hasattr(group, name):
                raise changed(f"FSDPParamGroup.{name} is gone")
        group.post_backward = _filling_first(unreached, group)


def _filling_first(unreached: Unreached, group: Any) -> Any:
    reduce = group.post_backward

    @wraps(reduce)
    def fill_and_reduce(*unused: Any) -> Any:
        unreached.fill(group)
        return reduce(*unused)

    return fill_and_reduce


def num_lacking(model: nn.Module) -> int:
    """How many trained parameters of which this rank has a part nothing on it has reached."""
    unreached = _unreached(model)
    return sum(map(unreached.lacks, unreached.parts(model)))


def sharded_parts(model: nn.Module) -> list[StateTensor]:
    """The parameters of a sharded model."""
    return _unreached(model).parts(model)


@torch.no_grad()
def agree_on_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Give every trained parameter that some rank's sequences have reached a gradient on all ranks that hold it, zeros
    if need be, and the others none. All ranks call it together, after the last backward of a step."""
    unreached = _unreached(model)
    # those of other stages of a pipeline too: all ranks must count the same ones
    parts = [part for part in unreached.parts(model) if part.trainable]
    reached = [part.is_here and not unreached.lacks(part) for part in parts]
    reached_N = torch.tensor(reached, dtype=torch.int32, device=mesh.grid.device_type)
    dist.all_reduce(reached_N)
    for part, count in zip(parts, reached_N.tolist(), strict=True):
        if count == 0:
            part.tensor.grad = None
        elif part.is_here and part.tensor.grad is None:
            part.tensor.grad = torch.zeros_like(part.tensor)
    unreached.parameters.clear()


def _unreached(model: nn.Module) -> Unreached:
    unreached = model.unreached
    assert isinstance(unreached, Unreached)
    return unreached
