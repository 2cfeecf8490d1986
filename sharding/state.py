"""Everything that makes up a model: its parameters and its buffers, in one enumeration; and for checkpoints, which rows
of each are here, and who holds the others.

Loading, saving, resuming, exporting, clipping, the comparison of replicas and the grouping of parameters for optimizers
read it, and nothing else.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..moe.experts.expert_mlp import ExpertMLP
from ..moe.experts.layout import ExpertParameter
from ..moe.experts.lora import TOKENS, is_adapter
from ..moe.hf_model.build import fp32_parameters
from ..moe.linear.linear import is_transposed
from ..moe.linear.quantized import LARGE_EXPONENT, SCALES, Storage, dequantize, fill, storages_of
from .stages import stages_of
from .topology import DENSE, DIVIDED, EXPERT, REPLICATED, Layout, Topology, rows_of

_BYTES_AT_ONCE = 2**28
"""Most that a GPU holds, beside its shards, of what is loaded into them."""


@dataclass(frozen=True)
class StateTensor:
    """A parameter or buffer of a model, complete or sharded.

    Attributes:
        name: in the model. A parameter that has several is enumerated once, under the first.
        tensor: sharded, a DTensor; a buffer is a plain tensor on every rank.
        layout: over which axes of ranks its rows are sharded.
        expert: which of the experts' parameters it is; None for a non-expert parameter.
        is_parameter: False for a buffer.
        persistent: whether checkpoints hold it. A buffer that is not is computed from the config.
        is_here: whether this rank has a part in holding it. The layers of a pipeline's other stages are on the meta
            device.
        is_adapter: whether it belongs to an adapter, and not to the model that a checkpoint of it holds.
        transposed: whether it is the transpose of transformers' own; of experts' parameters `expert` says how they lie.
        storage, scales: of a quantized frozen weight; `tensor` is then its codes, in bytes.
    """

    name: str
    tensor: Tensor
    layout: Layout
    expert: ExpertParameter | None
    is_parameter: bool
    persistent: bool
    is_here: bool = True
    is_adapter: bool = False
    transposed: bool = False
    storage: Storage | None = None
    scales: Tensor | None = None

    @property
    def trainable(self) -> bool:
        return self.tensor.requires_grad

    @property
    def is_expert(self) -> bool:
        return self.expert is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape; of a quantized weight, that of the values that it stands for."""
        if self.storage is not None:
            return (self.tensor.shape[0], self.storage.columns)
        return tuple(self.tensor.shape)

    @property
    def num_rows(self) -> int:
        return rows_of(self.shape)

    @property
    def local(self) -> Tensor:
        """This rank's rows, sharing memory with the tensor; a scalar is one row."""
        local = local_tensor(self.tensor.detach())
        return local.view(1) if local.dim() == 0 else local


def state_of(model: nn.Module) -> dict[str, StateTensor]:
    """All of a model's parameters and buffers by name, in the model's order: first the parameters, then the buffers."""
    owners, stages, divided = dict(model.named_modules()), stages_of(model), divided_of(model)
    state = {}
    for name, parameter in model.named_parameters():
        owner, _, own_name = name.rpartition(".")
        storages = storages_of(owners[owner])
        if own_name.removesuffix(SCALES) in storages and own_name not in storages:
            continue  # goes with its codes
        expert = None
        if isinstance(module := owners[owner], ExpertMLP):
            parts = (*module.layout.parameters, *module.layout.adapters)
            expert = next(part for part in parts if part.name == own_name)
        layout, is_here = EXPERT if expert is not None else DIVIDED if name in divided else DENSE, True
        if stages is not None:
            layout, is_here = layout.on(stages.pp_ranks(name)), stages.is_here(name)
        transposed = is_transposed(owners[owner]) and own_name == "weight"
        part = StateTensor(name, parameter, layout, expert, True, True, is_here, is_adapter(own_name), transposed)
        if own_name in storages:
            scales = owners[owner].get_parameter(own_name + SCALES)
            part = replace(part, storage=storages[own_name], scales=scales)
        state[name] = part
    for name, buffer in model.named_buffers():
        owner, _, own_name = name.rpartition(".")
        persistent = own_name not in owners[owner]._non_persistent_buffers_set
        state[name] = StateTensor(name, buffer, REPLICATED, None, False, persistent)
    return state


def divided_of(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that tensor parallelism divides."""
    return frozenset(getattr(model, "divided", ()))


def saved_state(model: nn.Module) -> dict[str, StateTensor]:
    """The part of the state that checkpoints of the model itself hold."""
    return {name: part for name, part in state_of(model).items() if part.persistent and not part.is_adapter}


def adapters_of(model: nn.Module) -> dict[str, StateTensor]:
    """Adapters, and rows of new tokens that are trained alone."""
    return {name: part for name, part in state_of(model).items() if part.is_adapter}


def token_rows_of(model: nn.Module) -> dict[str, StateTensor]:
    """The rows of new tokens that are trained alone."""
    return {name: part for name, part in adapters_of(model).items() if name.endswith(TOKENS)}


def new_tokens_of(model: nn.Module, path: str) -> list[int]:
    """Of which tokens a module has rows that are trained alone, in their order."""
    module: Any = model.get_submodule(path)
    return list(module.new_tokens.tolist())


def whole_beside_adapters(model: nn.Module) -> dict[str, StateTensor]:
    """What is trained whole beside adapters, and buffers in the same modules; nothing of a model without adapters."""
    state = {name: part for name, part in state_of(model).items() if part.persistent}
    if not any(part.is_adapter for part in state.values()):
        return {}
    trained = {name for name, part in state.items() if part.trainable and not part.is_adapter}
    owners = {name.rpartition(".")[0] for name in trained}
    return {
        name: p
        for name, p in state.items()
        if name in trained or (not p.is_parameter and name.rpartition(".")[0] in owners)
    }


def changing_state(model: nn.Module) -> dict[str, StateTensor]:
    """The part of the state that a run changes and so must save: with adapters, all other parameters are as they were
    loaded, but for those that are trained whole."""
    state = {name: part for name, part in state_of(model).items() if part.persistent}
    if not any(part.is_adapter for part in state.values()):
        return state
    return {name: part for name, part in state.items() if part.is_adapter or part.trainable or not part.is_parameter}


def parameters_of(model: nn.Module) -> dict[str, StateTensor]:
    return {name: part for name, part in state_of(model).items() if part.is_parameter}


def trainable_of(model: nn.Module) -> dict[str, StateTensor]:
    """The parameters of a model that are not frozen, as far as they are here."""
    return {name: part for name, part in parameters_of(model).items() if part.trainable and part.is_here}


def set_parameter_dtype(model: nn.Module, dtype: torch.dtype, frozen_alone: bool = False) -> None:
    """Cast a model's parameters to `dtype`, in place, before they are sharded; buffers, such as a router's correction
    bias, are never rounded. `frozen_alone`: only those that are not trained."""
    parameters = model.named_parameters()
    set_parameter_dtypes(model, {name: dtype for name, p in parameters if not (frozen_alone and p.requires_grad)})


def set_parameter_dtypes(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Cast the floating-point parameters that are named, but for those that the family keeps in fp32; in place, before
    they are sharded."""
    kept = fp32_parameters(model).keys()
    named = {p: dtypes[name] for name, p in model.named_parameters() if name in dtypes and name not in kept}
    converted: dict[nn.Parameter, nn.Parameter] = {}  # a tied one stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in named and parameter.is_floating_point():
                if parameter not in converted:
                    new = parameter.detach().to(named[parameter])
                    converted[parameter] = nn.Parameter(new, parameter.requires_grad)
                module._parameters[name] = converted[parameter]


def has_dtensor(types: Iterable[type]) -> bool:
    """Whether there is a DTensor among an operator's arguments: a dispatch mode that returns NotImplemented then is
    called again with the local tensors.

    Args:
        types: as `__torch_dispatch__` gets them: those of the arguments that have a dispatch of their own, in lists
            too.
    """
    # asked at every operator of a dry run: a generator would take as long as all of this
    for kind in types:  # noqa: SIM110
        if issubclass(kind, DTensor):
            return True
    return False


@contextmanager
def computing_with(module: nn.Module, values: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Within it, a module computes with these tensors in the place of its parameters of these names."""
    parameters: dict[str, Any] = module._parameters
    own = {name: parameters[name] for name in values}
    parameters.update(values)
    try:
        yield
    finally:
        parameters.update(own)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_storage(tensor: Tensor) -> torch.UntypedStorage:
    """The memory of this rank's part."""
    # with gradients `to_local` calls operators
    with torch.no_grad():
        return local_tensor(tensor).untyped_storage()


class ShardedParameter:
    """One parameter of a sharded model, or a buffer that checkpoints hold.

    Attributes:
        local: this rank's rows, sharing memory with the parameter; of a quantized weight, their codes. Not to be read
            where `rows` is empty.
        rows: which they are.
        row_shape: shape of one row.
        owners: (rank, rows) of all rows, in row order, one owner a row.
        is_owner: whether this rank is among them; else it holds a replica.
    """

    def __init__(self, part: StateTensor, topology: Topology):
        self.local = part.local
        self.storage = part.storage
        self.scales = None if part.scales is None else local_tensor(part.scales.detach())
        self.rows = topology.rows(part.num_rows, part.layout, dist.get_rank())
        self.row_shape = torch.Size(part.shape[1:])
        self.owners = list(topology.owners(part.num_rows, part.layout))
        self.is_owner = any(rank == dist.get_rank() for rank, _ in self.owners)
        assert not part.is_here or self.local.shape[0] == len(self.rows), (self.local.shape, self.rows)

    def fill(self, rows: range, values: Tensor) -> Tensor:
        """Write some of this rank's rows; returns what was written or, of a quantized weight, its scales, which are
        finite where all values are."""
        target = self.view(rows)
        if self.storage is None:
            step = max(1, _BYTES_AT_ONCE // max(values.element_size() * self.row_shape.numel(), 1))
            for part, into in zip(values.split(step), target.split(step), strict=True):
                # first their bytes: a copy from a CPU to a GPU converts them on the CPU, in a single thread
                into.copy_(part.to(into.device))
            return target
        assert self.scales is not None
        start = rows.start - self.rows.start
        scales = self.scales[start : start + len(rows)]
        fill(target, scales, values, self.storage)
        return scales.contiguous().view(torch.float32)

    def fill_packed(self, rows: range, codes: Tensor, scales: Tensor) -> Tensor:
        """Write bytes of codes and scales of mxfp4 as a checkpoint has them; returns the values of those rows that
        could be not finite."""
        assert self.scales is not None
        assert self.storage is not None
        start = rows.start - self.rows.start
        own = self.view(rows).view(torch.uint8), self.scales[start : start + len(rows)].view(torch.uint8)
        for target, values in zip(own, (codes, scales), strict=True):
            target.zero_()[:, : values.shape[1]] = values.to(target.device)
        is_large = (scales >= LARGE_EXPONENT).any(dim=1)
        return dequantize(codes[is_large], scales[is_large], self.storage, torch.bfloat16)

    def view(self, rows: range) -> Tensor:
        """Some of this rank's rows."""
        start = rows.start - self.rows.start
        return self.local[start : start + len(rows)]


def sharded_parameters(
    model: nn.Module, topology: Topology, parts: Mapping[str, StateTensor] | None = None
) -> dict[str, ShardedParameter]:
    """All that checkpoints of the model hold, or `parts` of it, by name; what is tied appears once."""
    parts = saved_state(model) if parts is None else parts
    return {name: ShardedParameter(part, topology) for name, part in parts.items()}
