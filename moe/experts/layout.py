"""Where the experts of one layer have their weights, and where transformers has them.

Which matrix is gate, up or down, which is transposed, which rows are interleaved and whether there are biases is read
from the module that transformers marks with `use_experts_implementation`: never from a shape, nor from a family's name.

Shape suffixes: E experts, D model width, F expert width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..util.errors import ExpertMeshError
from .shape import MoEShape


@dataclass(frozen=True)
class Place:
    """Where a tensor of transformers' experts module has the rows of one of our parameters.

    Row f of expert n is at index n of the tensor's dim 0 and, along `dim`, at first + step · f.
    """

    tensor: str
    dim: int
    first: int = 0
    step: int = 1


@dataclass(frozen=True)
class ExpertParameter:
    """One of a layer's expert weights, (E · rows_an_expert, *row): row f of expert n is row n · rows_an_expert + f.

    place: for an adapter's parameter, that of the weight it is added to.
    """

    name: str
    rows_an_expert: int
    row: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class ExpertLayout:
    """The parameters of a layer's experts, and the shapes of the tensors that transformers has in their place.

    parameters: w1 (gate), v1 (up) and w2 (down, transposed), each (E·F, D): MegaBlocks' layout. Without a gate w1 is
        up, and there is no v1. Biases: w1_bias, v1_bias (E·F,) and w2_bias (E·D,).
    adapters: LoRA's parameters beside these (see `moe.experts.lora`); none by default.
    """

    shape: MoEShape
    parameters: tuple[ExpertParameter, ...]
    tensors: dict[str, tuple[int, ...]]
    adapters: tuple[ExpertParameter, ...] = ()

    @property
    def is_transposed(self) -> bool:
        """Whether transformers' tensors hold (in, out) per expert, where a linear layer has (out, in)."""
        return self.parameters[0].place.dim == 2


def read_layout(experts: Any, top_k: int, where: str) -> ExpertLayout:
    """The layout of an experts module of transformers; it may be on the meta device.

    Raises:
        ExpertMeshError: it holds an unknown parameter.
    """
    has_gate, has_bias = bool(experts.has_gate), bool(experts.has_bias)
    is_transposed, is_concatenated = bool(experts.is_transposed), bool(experts.is_concatenated)
    into, out = "gate_up_proj" if has_gate else "up_proj", "down_proj"
    known = {into, out, *((f"{into}_bias", f"{out}_bias") if has_bias else ())}
    tensors = {name: tuple(parameter.shape) for name, parameter in experts.named_parameters(recurse=False)}
    if set(tensors) != known:
        raise ExpertMeshError(
            f"{where}: its experts have the tensors {', '.join(sorted(tensors))}, expected "
            f"{', '.join(sorted(known))}; this kind of experts is not supported"
        )
    num_experts, *matrix = tensors[out]
    width, model_width = matrix if is_transposed else reversed(matrix)
    shape = MoEShape(model_width, width, num_experts, top_k, has_gate, has_bias)
    columns, rows = (2, 1) if is_transposed else (1, 2)
    first, step = (width, 1) if is_concatenated else (1, 2)
    row = (model_width,)
    parameters = [ExpertParameter("w1", width, row, Place(into, columns, 0, step if has_gate else 1))]
    if has_gate:
        parameters.append(ExpertParameter("v1", width, row, Place(into, columns, first, step)))
    parameters.append(ExpertParameter("w2", width, row, Place(out, rows)))
    if has_bias:
        parameters.append(ExpertParameter("w1_bias", width, (), Place(f"{into}_bias", 1, 0, step if has_gate else 1)))
        if has_gate:
            parameters.append(ExpertParameter("v1_bias", width, (), Place(f"{into}_bias", 1, first, step)))
        parameters.append(ExpertParameter("w2_bias", model_width, (), Place(f"{out}_bias", 1)))
    return ExpertLayout(shape, tuple(parameters), tensors)


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, module) of every experts module that transformers has marked, in the model's order."""
    for path, module in model.named_modules():
        if all(hasattr(module, flag) for flag in ("has_gate", "has_bias", "is_transposed", "is_concatenated")):
            yield path, module
