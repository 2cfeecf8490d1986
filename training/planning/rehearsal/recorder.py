"""Records every operator, kernel and collective of a step: what it computes, reads, writes and sends.

Bytes are those of an operator's inputs and results, each once: what a kernel that reads its inputs once and writes its
results once moves to and from the device's memory. Views move nothing. Elements that a caller only allocates are
counted by the operator that fills them.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ....moe.dispatch.exchange import UnderWay
from ....moe.experts.model_facts import Attention
from ....moe.hf_model.counts import seen_pairs
from ....moe.hf_model.image_costs import is_known, is_on_host
from ....moe.kernels.fp8_casts import MULTIPLE
from ....moe.torch_private import (
    CalledDirectly,
    FakeTensor,
    FSDPParamGroup,
    _current_autograd_node,
    _resolve_process_group,
)
from ....moe.util.gpu import is_gpu
from ....moe.util.step_parts import written_by
from ....moe.util.tensors import tensors_in
from ....sharding.pipeline.schedule import Action, SendReceive
from ....sharding.state import has_dtensor
from ...model_setup.rates import EIGEN_FLOPS, MEMORY, Operator, Work
from ...monitoring.attribution import FSDP, LASTING, Parts, StepPlace
from ...steps.pipelined import PipelinedStep
from ..planner.account import Moment
from .liger_stand_in import recorded_liger
from .live_memory import Pausable
from .quack_stand_in import recorded_quack
from .triton_stand_in import kinds_of_kernels

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default


@dataclass
class Event:
    """One operator of a step.

    place: part of the step and layer. come_to: layer that the step has come to. phase: forward, backward,
    recomputation or optimizer step. micro: number of the micro-batch in the step. flops: that it computes; needed:
    those of them that forward and backward take without recomputation. sent: bytes to other ranks, of a collective
    among `ranks`, whose process group has the name `group`. travels: whether it is an all-to-all that other kernels
    overlap. waits: whether here the oldest of these among `ranks` is waited for, or what `unit` gathers, and nothing
    else done. unit: number of the FSDP unit whose parameters are gathered, or waited for. from_host: bytes that are
    copied from host memory beside kernels. is_read: whether the host waits for it, and for all kernels before. stalls:
    whether the host waits for the device before the next event. read, written: bytes. work: class and size of its
    kernel. calls: operators that the host has called since the event before, this one included. action: what of a
    pipeline's schedule is being computed, or was last. to_each,
    from_each: of an all-to-all, bytes for and from each of `ranks`.
    """

    name: str
    place: StepPlace
    phase: str
    micro: int | None
    flops: float = 0.0
    needed: float = 0.0
    sent: float = 0.0
    collective: str | None = None
    group: str = ""
    ranks: tuple[int, ...] = ()
    read: int = 0
    written: int = 0
    travels: bool = False
    waits: bool = False
    is_read: bool = False
    stalls: bool = False
    work: Work = MEMORY
    calls: int = 0
    action: Action | None = None
    come_to: int | None = None
    unit: int | None = None
    from_host: int = 0
    to_each: tuple[int, ...] = ()
    from_each: tuple[int, ...] = ()

    @property
    def is_kernel(self) -> bool:
        return self.collective is None and not self.waits and not self.is_read and not self.from_host

    @property
    def gathers_activations(self) -> bool:
        """Whether a tensor-parallel group gathers activations, or sums them up."""
        is_of_parameters = self.place.part == FSDP or self.phase == "optimizer step"
        is_late = self.action is not None and self.action.kind == "weights"
        return self.collective in _GATHERING and not is_of_parameters and not is_late

    @property
    def moved(self) -> int:
        return self.read + self.written

    @property
    def layer(self) -> int | None:
        """That it is of, or that the step has come to."""
        return self.come_to if self.place.layer is None else self.place.layer

    @property
    def of_moment(self) -> tuple[Any, ...]:
        """What its moment consists of."""
        action = None if self.action is None else (self.action.kind, self.action.stage)
        return self.phase, self.micro, action, self.layer, self.place.part or "other", self.name

    @property
    def moment(self) -> Moment:
        return Moment(*self.of_moment)

    @property
    def told(self) -> str:
        """Phase, layer and part, in words."""
        layer = "" if self.place.layer is None else f" of layer {self.place.layer}"
        return f"{self.phase}{layer}, {self.place.part or 'other'}"


@dataclass(frozen=True)
class Change:
    """A storage has grown by so many bytes, or shrunk."""

    storage: int
    more: int


@dataclass(frozen=True)
class Maker:
    """Origin of a storage: place, phase and micro-batch of the operator that made it, and the layer that the step had
    come to."""

    place: StepPlace
    phase: str
    micro: int | None
    come_to: int | None = None

    @property
    def layer(self) -> int | None:
        """As of an `Event`."""
        return self.come_to if self.place.layer is None else self.place.layer


class Recorder(CalledDirectly, Pausable, TorchDispatchMode):
    """Within it every operator leaves an `Event`. Values that the host would read from a tensor are 1, as there are
    none.

    Attributes:
        events: in the order of their calls.
        log: the same, with changes of memory.
        layer: that the step has come to; None: to none.
        makers: by a storage's number.
        num_calls: operators called until now, views included: what the host has to launch.
        update_begins: how long `events` and `log` were then.
    """

    def __init__(self, parts: Parts):
        super().__init__()
        self.parts = parts
        self.events: list[Event] = []
        self.log: list[Event | Change] = []
        self.makers: dict[int, Maker] = {}
        self.num_calls = 0
        self.micro: int | None = None
        self.action: Action | None = None
        self._receiving: Action | None = None
        self.is_update, self.update_begins = False, (0, 0)
        self.layer: int | None = None
        self._unmade: list[int] = []
        self._called = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator is _DEVICE and isinstance(args[0], FakeTensor):
            # asked for at every second step, and known
            return args[0].fake_device
        if has_dtensor(types):
            return NotImplemented  # what it does with its local tensor comes here by itself
        if operator is aten._local_scalar_dense.default:
            if not is_on_host(args[0]) and is_gpu(args[0].device.type):
                self._wait()
            if not is_known(args[0]):
                return 1.0 if args[0].is_floating_point() else 1
        result = operator(*args, **kwargs)
        # a real tensor's device is no operator
        if self.is_paused or operator.namespace in ("prim", "profiler"):
            return result
        place = self.parts.here()
        self._made_by(place)
        # what is made once in a run is of no step
        if place.part != LASTING:
            self.num_calls += 1
            known = _KNOWN.get(operator) or _known_of(operator)
            if not known.moves_nothing:
                self._record(known, place, args, kwargs, result)
            if operator in _SIZED_BY and is_gpu(result.device.type) and not _is_sized(operator, args, kwargs):
                self._wait()
        return result

    def kernel(
        self,
        name: str,
        read: list[Tensor],
        written: list[Tensor],
        flops: float = 0.0,
        needed: float | None = None,
        operator: Operator = "matmul",
        groups: int = 1,
    ) -> None:
        """Record a kernel that is no operator of torch.

        Args:
            flops: of its matmuls. needed: those of them without recomputation; None: all. operator: their class.
            groups: experts, of a grouped one.
        """
        self.num_calls += 1
        event = self._event(name, self.parts.here())
        event.work = Work(operator, flops / groups) if flops else self._no_matmul(event)
        event.flops = flops
        event.needed = 0.0 if event.phase == "recomputation" else flops if needed is None else needed
        event.read, event.written = _bytes_read(read), sum(map(_bytes, written))

    @contextmanager
    def shared_by(self, steps: int) -> Iterator[None]:
        """Within it, what is called is done in one of so many steps: each of them has a fraction of the figures."""
        events = len(self.events)
        yield
        for event in self.events[events:]:
            event.flops /= steps
            event.read //= steps
            event.written //= steps
            event.calls //= steps
        self._called = self.num_calls

    def wait(self, ranks: tuple[int, ...]) -> None:
        """Record the wait for the oldest all-to-all under way among these ranks."""
        event = self._event("wait", self.parts.here())
        event.ranks, event.waits = ranks, True

    def bring(self, size: int) -> None:
        """Record that so many bytes are copied from host memory, beside kernels."""
        self._event("from host memory", self.parts.here()).from_host = size

    def gathers(self, unit: object, begun: int) -> None:
        """Note which FSDP unit has begun to gather, since so many events were recorded."""
        for event in self.events[begun:]:
            if event.collective == "all-gather":
                event.unit = id(unit)

    def wait_for(self, unit: object) -> None:
        """Record the wait for what an FSDP unit gathers."""
        event = self._event("wait", self.parts.here())
        event.unit, event.waits = id(unit), True

    def read(self) -> None:
        """Record that the host waits here for all that was launched."""
        self._event("read", self.parts.here()).is_read = True
        self._wait()

    def bring_blocking(self) -> None:
        """Record that the host waits here for a copy from its memory, which is not pinned."""
        if not self.is_paused and self.parts.here().part != LASTING:
            self._wait()

    def _wait(self) -> None:
        if self.events:
            self.events[-1].stalls = True

    @property
    def waits(self) -> int:
        """How often the host waits for the device: for what it reads of it, or brings there from memory that is not
        pinned, with something launched in between."""
        return sum(event.stalls for event in self.events)

    def next_forward(self, model: Any, args: Any) -> None:
        """Begin a micro-batch; to be called before each forward of the model."""
        self.micro = 0 if self.micro is None else self.micro + 1
        self.mark(None)

    def begin(self, action: Action) -> None:
        """Begin a part of a micro-batch, in a pipeline."""
        self.micro, self.action = action.micro_batch, action
        self.mark(None)

    @contextmanager
    def receiving(self, action: Action | None) -> Iterator[None]:
        """Within it, what is received is this action's input."""
        self._receiving = action
        yield
        self._receiving = None

    def begin_update(self) -> None:
        """Begin what follows the last backward of a step."""
        self.is_update, self.micro, self.action = True, None, None
        self.update_begins = len(self.events), len(self.log)
        self.mark(None)

    def mark(self, layer: int | None) -> None:
        """Note which layer the step comes to, in its forward or in its backward; None: what is in none."""
        self.layer = layer

    def changed(self, storage: int, more: int, is_gone: bool) -> None:
        """Note a change of memory (see `LiveTensors`)."""
        self.log.append(Change(storage, more))
        if storage not in self.makers and not is_gone:
            self._unmade.append(storage)

    @property
    def phase(self) -> str:
        """The phase that the step has come to."""
        if self.is_update:
            return "optimizer step"
        is_backward = _current_autograd_node() is not None or (
            self.action is not None and self.action.kind != "forward"
        )
        return "backward" if is_backward else "forward"

    def _event(self, name: str, place: StepPlace) -> Event:
        if place.layer is None and place.part in _IN_SOME_LAYER:
            place = replace(place, layer=self.layer)
        phase = "recomputation" if place.is_recomputed else self.phase
        event = Event(
            name, place, phase, self.micro, calls=self.num_calls - self._called, action=self.action, come_to=self.layer
        )
        self._called = self.num_calls
        self.events.append(event)
        self.log.append(event)
        return event

    def _no_matmul(self, event: Event) -> Work:
        return Work("update", 1.0) if event.phase == "optimizer step" else MEMORY

    def _made_by(self, place: StepPlace) -> None:
        """Note the origin of storages that are new since the last operator."""
        if not self._unmade:
            return
        maker = Maker(place, "recomputation" if place.is_recomputed else self.phase, self.micro, self.layer)
        self.makers.update(dict.fromkeys(self._unmade, maker))
        self._unmade.clear()

    def _record(self, known: "_Known", place: StepPlace, args: Any, kwargs: Any, result: Any) -> None:
        name = known.name
        event = self._event(name, place)
        inputs, changed = known.inputs(args, kwargs)
        if name in _FILLED:
            inputs = []
        elif name == _FILLS_A_PART:
            # the other argument is the buffer
            inputs = list(args[0])
        results = tensors_in(result)
        fresh = _fresh(results, inputs + changed)
        if name in _GATHERS:
            index = [tensor for tensor in inputs[1:] if not tensor.is_floating_point()]
            event.read = _bytes_read(index) + sum(map(_bytes, fresh))
        else:
            event.read = _bytes_read(inputs, () if name in _OVERWRITE else changed)
        event.written = event.read if name == _FILLS_A_PART else sum(map(_bytes, changed + fresh))
        matmul = _MATMULS.get(name)
        if matmul is not None:
            event.flops = 2.0 * matmul.products(inputs + changed, results, args) * _seen(known.operator, inputs, args)
        event.work = self._no_matmul(event)
        if matmul is not None and event.flops:
            event.work = matmul.work(inputs + changed, args, event.flops, name)
            if event.phase not in ("recomputation", "optimizer step"):
                event.needed = event.flops * matmul.needed
            elif event.phase == "optimizer step" and matmul.operator == "matmul" and inputs[0].dtype != torch.bfloat16:
                event.work = event.work._replace(operator="matmul fp32")
        if (collective := _COLLECTIVES.get(name)) is not None:
            event.collective = collective
            event.group, event.ranks = _group_of(args, kwargs)
            if collective in SENDS:
                # the third argument is the other rank's number in the group
                event.ranks = (dist.get_rank(), event.ranks[args[2]])
                if collective == "send":
                    event.sent = float(sum(map(_bytes, inputs)))
                else:
                    # which its schema does not say that it writes
                    event.read = 0
                    event.written += sum(map(_bytes, inputs))
                    assert self._receiving is not None
                    event.micro, event.action = self._receiving.micro_batch, self._receiving
                return
            largest = max(map(_bytes, inputs + changed + results), default=0)
            rounds = 2 if collective == "all-reduce" else 1
            event.sent = largest * rounds * (1 - 1 / len(event.ranks))
            if collective == "all-to-all":
                out, rows, _, received, sent = args[:5]
                event.to_each = _bytes_of_parts(rows, sent, len(event.ranks))
                event.from_each = _bytes_of_parts(out, received, len(event.ranks))


def _group_of(args: Any, kwargs: Any) -> tuple[str, tuple[int, ...]]:
    """Name and ranks of the group that a collective is given, by its name or as an object."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            argument = str(dist.ProcessGroup.unbox(argument).group_name)
        if isinstance(argument, str):
            group = _resolve_process_group(argument)  # type: ignore[arg-type]
            return argument, tuple(dist.get_process_group_ranks(group))
    raise AssertionError("a collective without a group")


def _fresh(results: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The results that lie in no storage of the inputs."""
    given = {tensor.untyped_storage()._cdata for tensor in inputs}
    return [tensor for tensor in results if tensor.untyped_storage()._cdata not in given]


_IN_SOME_LAYER = frozenset({"gradients added up", "other"})
"""Parts of a step whose operators nobody calls that would say for which layer: the one that backward has come to."""


def _named(names: str, space: str = "aten") -> frozenset[str]:
    return frozenset(f"{space}::{name}" for name in names.split())


_NO_KERNEL = _named(
    "empty.memory_format empty_strided empty_like new_empty new_empty_strided resize_ set_.source_Storage lift_fresh "
    "_unsafe_view record_stream"
) | _named("barrier", "c10d")
_OVERWRITE = (
    _named(
        "copy_ zero_ fill_.Scalar fill_.Tensor _foreach_copy_ _foreach_zero_ split_with_sizes_copy.out _chunk_cat.out"
    )
    | _named("split_with_sizes_copy chunk_cat", "fsdp")
    | _named("_allgather_base_ _reduce_scatter_base_ alltoall_base_", "c10d")
    | _named("all_gather reduce_scatter", "expertmesh")
)
"""Operators that write to an argument without having read it."""
_GATHERS = _named("index_select gather embedding index.Tensor")
"""Operators that read as much of their first argument as they give."""
_FILLED = _named("zeros_like ones_like full_like new_zeros new_ones new_full")
"""Operators that make a tensor like another one, of which they read no number."""
_FILLS_A_PART = "fsdp::all_gather_copy_in"
"""Writes as much as it reads, of its first argument, to a part of what it gives."""
_WRITTEN_WITH = {("aten::_fused_adamw_", "grads"): "grad_scale"}
"""Arguments that an operator says it changes, and does so only where it is given another one, too: gradients that are
scaled are written back."""


class _Argument(NamedTuple):
    """An argument that an operator declares. is_written: whether it says that it changes it. only_with: the argument
    without which it does not."""

    name: str
    is_written: bool
    only_with: str


class _Known(NamedTuple):
    """What is asked of an operator at each of its calls, found out once: a step calls few of them very often.

    moves_nothing: whether it is no kernel.
    """

    operator: Any
    name: str
    moves_nothing: bool
    arguments: tuple[_Argument, ...]

    def inputs(self, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
        """(read, changed) tensors among its arguments."""
        read: list[Tensor] = []
        changed: list[Tensor] = []
        here = len(args)
        for number, argument in enumerate(self.arguments):
            if number < here:
                value = args[number]
            elif argument.name in kwargs:
                value = kwargs[argument.name]
            else:
                continue
            if not (tensors := tensors_in(value)):
                continue
            is_written = argument.is_written and (not argument.only_with or self._is_given(argument, args, kwargs))
            into = changed if is_written else read
            into += tensors
        return read, changed

    def _is_given(self, argument: _Argument, args: Any, kwargs: Any) -> bool:
        names = (each.name for each in self.arguments)
        by_name = dict(zip(names, args, strict=False)) | kwargs
        return by_name.get(argument.only_with, True) is not None


_SIZED_BY = {
    aten.nonzero.default: 0,
    aten.masked_select.default: 1,
    aten.masked_scatter_backward.default: 1,
    aten.repeat_interleave.Tensor: 0,
    aten.index.Tensor: 1,
    aten.index_put.default: 1,
    aten.index_put_.default: 1,
    aten._index_put_impl_.default: 1,
}
"""Operators for which the host waits where an argument's values are on a device, as these tell the size of the result,
or how many places are written: by the number of this argument; of indices only masks are such values."""


def _is_sized(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host knows how large the result of one of these operators is, or how many places it writes."""
    given = args[_SIZED_BY[operator]]
    if isinstance(given, Tensor):
        return kwargs.get("output_size") is not None or is_on_host(given)
    return all(is_on_host(index) for index in given if index is not None and index.dtype == torch.bool)


_KNOWN: dict[Any, _Known] = {}
"""By operator."""


def _known_of(operator: Any) -> _Known:
    name = operator.name()
    arguments = tuple(
        _Argument(
            each.name,
            each.alias_info is not None and each.alias_info.is_write,
            _WRITTEN_WITH.get((name, each.name), ""),
        )
        for each in operator._schema.arguments
    )
    _KNOWN[operator] = _Known(operator, name, operator.is_view or name in _NO_KERNEL, arguments)
    return _KNOWN[operator]


def _bytes_read(*groups: Sequence[Tensor]) -> int:
    """Bytes of the tensors: parts of one storage add up, but within a group none counts twice."""
    of_storages: dict[int, int] = {}
    for tensors in groups:
        parts: dict[Any, tuple[int, int]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            parts[storage._cdata, tensor.storage_offset(), tensor.shape] = _bytes(tensor), storage.nbytes()
        for (storage, _, _), (size, whole) in parts.items():
            of_storages[storage] = min(of_storages.get(storage, 0) + size, whole)
    return sum(of_storages.values())


def _bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, those along an expanded dimension once."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.numel() * tensor.element_size()
    shown = prod(size for size, stride in zip(tensor.shape, strides, strict=True) if stride != 0 or size == 0)
    return int(shown) * tensor.element_size()


def _bytes_of_parts(tensor: Tensor, sizes: Sequence[int], parts: int) -> tuple[int, ...]:
    """Bytes of each part along dim 0; without sizes they are equally large."""
    of_row = _bytes(tensor) // max(len(tensor), 1)
    return tuple(of_row * size for size in sizes or [len(tensor) // parts] * parts)


class _Matmul(NamedTuple):
    """An operator with matmuls.

    products: multiplications, each with an addition, by its inputs, results and arguments. operator: its class. needed:
    the share that forward and backward take without recomputation. segments: which argument has those of attention
    within segments.
    """

    products: Callable[[list[Tensor], list[Tensor], Any], float]
    operator: Operator = "matmul"
    needed: float = 1.0
    segments: int | None = None

    def work(self, inputs: list[Tensor], args: Any, flops: float, name: str) -> Work:
        """Class and size."""
        if self.segments is not None:
            lengths = args[self.segments]
            return Work(self.operator, sum(length**2 for length in lengths) / sum(lengths))
        if self.operator in _ENDS and name != "aten::_scaled_mm":  # which has no figures but those of one group
            # experts' matrices, or where the rows of each end
            groups = inputs[1].shape[0] if inputs[1].dim() == 3 else inputs[_ENDS[self.operator]].numel()
            return Work(self.operator, flops / groups)
        if self.operator == "eigendecomposition":
            return Work(self.operator, flops * inputs[0].shape[-1] ** 2 / inputs[0].numel())  # of one matrix at a time
        if "attention" in self.operator:
            query_BHSA = inputs[1 if "backward" in self.operator else 0]
            return Work(self.operator, float(query_BHSA.shape[2]))
        return Work(self.operator, flops)


def _product(inputs: list[Tensor], results: list[Tensor], args: Any) -> float:
    return float(results[0].numel()) * inputs[0].shape[-1]


def _added_product(inputs: list[Tensor], results: list[Tensor], args: Any) -> float:
    return _product(inputs[1:], results, args)


def _grouped(inputs: list[Tensor], results: list[Tensor], args: Any) -> float:
    a, b = inputs[0], inputs[1]
    if b.dim() == 3:
        return float(a.shape[0]) * b.shape[1] * b.shape[2]
    return float(a.shape[0]) * a.shape[1] * b.shape[1]


def _scaled_grouped(inputs: list[Tensor], results: list[Tensor], args: Any) -> float:
    """inputs: operands, their scales, and where experts' rows end. Where rows are summed over, what follows the last
    expert's rows is padding that is not multiplied (see `fp8_casts.Runs`)."""
    a, b, ends_e = inputs[0], inputs[1], inputs[-1]
    if b.dim() == 3:
        return _grouped(inputs, results, args)
    return float(a.shape[0]) * (a.shape[1] - MULTIPLE * len(ends_e)) * b.shape[1]


def _eigenvectors(inputs: list[Tensor], results: list[Tensor], args: Any) -> float:
    return EIGEN_FLOPS / 2 * inputs[0].numel() * inputs[0].shape[-1]


def _convolution(inputs: list[Tensor], results: list[Tensor], args: Any) -> float:
    return float(results[0].numel()) * inputs[1][0].numel()


def _convolution_backward(inputs: list[Tensor], results: list[Tensor], args: Any) -> float:
    """Of the gradients of what it was given, and of its weight, one product each; of the bias none."""
    return float(inputs[0].numel()) * inputs[2][0].numel() * sum(each.dim() > 1 for each in results)


def _seen(operator: Any, inputs: list[Tensor], args: Any) -> float:
    """How many pairs of positions see one another, over those of causal attention, of which masks are made here."""
    declared = operator._schema.arguments
    at = next((number for number, each in enumerate(declared) if each.name == "is_causal"), None)
    has_mask = len(inputs) > sum(str(each.type) == "Tensor" for each in declared)
    if at is None or has_mask or (len(args) > at and args[at]):
        return 1.0
    positions = inputs["backward" in operator.name()].shape[2]
    return 2 * positions / (positions + 1)


def _causal_pairs(query_BHSA: Tensor) -> float:
    """Pairs of positions that see one another, over sequences and heads, in causal attention, which is square here."""
    rows, heads, positions, _ = query_BHSA.shape
    return rows * heads * positions * (positions + 1) / 2


def _attention(inputs: list[Tensor], results: list[Tensor], args: Any) -> float:
    query, _, value = inputs[:3]
    return _causal_pairs(query) * (query.shape[-1] + value.shape[-1])


def _attention_backward(inputs: list[Tensor], results: list[Tensor], args: Any) -> float:
    _, query, _, value = inputs[:4]
    # scores once more, and gradients of values, scores' weights, queries and keys
    return _causal_pairs(query) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _in_segments(operator: Operator, first: int, products: int, needed: float = 1.0) -> _Matmul:
    """Attention within segments, all heads as wide. first: of the arguments segments, scale and window. products: per
    pair of positions that see one another."""

    def count(inputs: list[Tensor], results: list[Tensor], args: Any) -> float:
        (segments, _, window), (_, heads, width) = args[first : first + 3], inputs[0].shape
        (pairs,) = seen_pairs([Attention(window, heads * width)], map(range, segments))
        return float(pairs) * heads * width * products

    return _Matmul(count, operator, needed, first)


_BACKWARD = 0.8
"""Share of a fused attention's backward that is needed: of five products, scores are computed again."""
_FUSED: tuple[tuple[str, Operator, Operator], ...] = (
    ("flash_attention", "attention", "attention backward"),
    ("efficient_attention", "efficient attention", "efficient attention backward"),
    ("flash_attention_for_cpu", "attention", "attention backward"),
)
_MATMULS = {
    **dict.fromkeys(_named("mm mm.out bmm addmm_"), _Matmul(_product)),
    **dict.fromkeys(_named("addmm baddbmm"), _Matmul(_added_product)),
    "aten::convolution": _Matmul(_convolution),
    "aten::convolution_backward": _Matmul(_convolution_backward),
    "aten::_grouped_mm": _Matmul(_grouped, "grouped matmul"),
    "aten::_scaled_grouped_mm": _Matmul(_scaled_grouped, "grouped matmul fp8"),
    "aten::_scaled_mm": _Matmul(_product, "grouped matmul fp8"),
    "aten::_linalg_eigh": _Matmul(_eigenvectors, "eigendecomposition"),
    **{f"aten::_scaled_dot_product_{name}": _Matmul(_attention, forward) for name, forward, _ in _FUSED},
    **{
        f"aten::_scaled_dot_product_{name}_backward": _Matmul(_attention_backward, backward, _BACKWARD)
        for name, _, backward in _FUSED
    },
    "expertmesh::flash_attention": _in_segments("packed attention", 4, 2),
    "expertmesh::flash_attention_backward": _in_segments("packed attention backward", 6, 5, _BACKWARD),
}
"""Operators with matmuls, by name."""
_ENDS = {"grouped matmul": 2, "grouped matmul fp8": -1}
"""Which input says where experts' rows end, where rows are summed over."""

_COLLECTIVES = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    # over gloo (see `sharding.collectives.gloo`)
    "expertmesh::all_gather": "all-gather",
    "expertmesh::reduce_scatter": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
    "c10d::alltoall_base_": "all-to-all",
    "c10d::send": "send",
    "c10d::recv_": "receive",
}
_GATHERING = ("all-gather", "reduce-scatter")
SENDS = ("send", "receive")
"""Of a pipeline's stages. `Event.ranks` of these are this rank and the other one."""


@contextmanager
def recording_waits(recorder: Recorder) -> Iterator[None]:
    """Have `recorder` know which all-to-alls and all-gathers others run beside, and where they are waited for."""
    begin, gather, use = UnderWay.__init__, FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard

    def begun(self: UnderWay, *args: Any) -> None:
        begin(self, *args)
        recorder.events[-1].travels = True

    def wait(self: UnderWay) -> Tensor:
        recorder.wait(tuple(dist.get_process_group_ranks(self.group)))
        return self.out

    def gathered(self: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
        before = len(recorder.events)
        gather(self, *args, **kwargs)
        recorder.gathers(self, before)

    def used(self: FSDPParamGroup) -> None:
        if self._all_gather_result is not None:
            recorder.wait_for(self)
        use(self)

    with (
        mock.patch.multiple(UnderWay, __init__=begun, wait=wait),
        mock.patch.multiple(FSDPParamGroup, unshard=gathered, wait_for_unshard=used),
    ):
        yield


@contextmanager
def recording_actions(recorder: Recorder) -> Iterator[None]:
    """Have `recorder` know which action of a pipeline's schedule is computed."""
    compute, exchange, run = PipelinedStep.compute, PipelinedStep.exchange, PipelinedStep.run

    def computed(self: PipelinedStep, action: Action) -> None:
        recorder.begin(action)
        compute(self, action)

    def exchanged(self: PipelinedStep, begun: SendReceive) -> None:
        with recorder.receiving(begun.receive):
            exchange(self, begun)

    def done(self: PipelinedStep, events: Any) -> None:
        run(self, events)
        recorder.begin_update()

    with mock.patch.multiple(PipelinedStep, compute=computed, exchange=exchanged, run=done):
        yield


@contextmanager
def sharing_occasional(recorder: Recorder, functions: Mapping[Callable[..., Any], int]) -> Iterator[None]:
    """Have `recorder` count as a step does on average what is done every so many steps.

    functions: those that do it, each of which its module calls by its name, and every how many steps.
    """

    def counted(function: Callable[..., Any], every: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with recorder.shared_by(every):
                return function(*args)

        return call

    with ExitStack() as patches:
        for function, every in functions.items():
            module = sys.modules[function.__module__]
            patches.enter_context(mock.patch.object(module, function.__name__, counted(function, every)))
        yield


@contextmanager
def recording_triton(recorder: Recorder) -> Iterator[None]:
    """Have Triton kernels, liger's too, what is compiled to one, and quack's, leave an event with `recorder` in place
    of being run."""

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        by_name = dict(zip(inspect.signature(kernel.fn).parameters, args, strict=False)) | kwargs
        tensors = {name: value for name, value in by_name.items() if isinstance(value, Tensor)}
        of_kernel = written_by(kernel)
        recorder.kernel(
            kernel.fn.__name__,
            [tensor for name, tensor in tensors.items() if name not in of_kernel.written],
            [tensor for name, tensor in tensors.items() if name in of_kernel.written | of_kernel.updated],
        )

    with ExitStack() as patches:
        patches.enter_context(recorded_liger(recorder.kernel))
        patches.enter_context(recorded_quack(recorder.kernel))
        for kind in kinds_of_kernels():
            patches.enter_context(mock.patch.object(kind, "run", launch))
        yield
