"""Each kind of decoder layer of a model, and what is around the layers, run once, forward and backward, on fake
tensors: what the planner composes its forecasts of.

A layer is the real one, on one rank alone: its experts are those of one ep rank, its parameters unsharded and in the
compute dtype, as FSDP has gathered them. What FSDP does beside is arithmetic
(`training.planning.planner.step_order`).

Shape suffixes: e experts of this rank, R rows for them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ....moe.dispatch import exchange
from ....moe.dispatch.alltoall import LocalDispatcher
from ....moe.dispatch.dedup import OnceDispatcher, Rows
from ....moe.dispatch.dispatcher_entries import PLAIN_ENTRY
from ....moe.dispatch.dispatcher_registry import DISPATCHERS, Dispatcher, DispatchOptions, NodeGroups
from ....moe.experts.forward import Forward
from ....moe.experts.lora import store_frozen
from ....moe.experts.model_layers import decoder_layers, moe_layers, moe_shape
from ....moe.experts.router_stats import RouterStats
from ....moe.hf_model.build import count_parameters, fp32_parameters
from ....moe.hf_model.counts import ParameterCounts
from ....moe.kernels.expert_products import even
from ....moe.linear import quantized as quantised
from ....moe.torch_private import replacing_attention, replacing_collectives
from ....moe.transformers_private import never_tracing, replacing_calls
from ....moe.util.errors import ExpertMeshError
from ....sharding.collectives import context_parallel
from ....sharding.collectives.context_parallel import CPGroup
from ....sharding.collectives.groups import ALL_GATHER, REDUCE_SCATTER
from ....sharding.collectives.tensor_parallel import TPGroup
from ....sharding.parallelize.offload import offload_inputs
from ....sharding.parallelize.recompute import checkpoint_layers, keep_products
from ....sharding.pipeline.survey import survey
from ....sharding.stages import Stages
from ....sharding.state import divided_of, parameters_of
from ....sharding.topology import Axis, rows_of
from ...config.train_config import TrainConfig
from ...data.batch import Batch
from ...engine import compute_dtype
from ...fused.liger_norm import is_by_liger
from ...loss.balance import LossWeights
from ...micro_batch import forward_of, token_loss_sum
from ...model_setup.rates import Work
from ...monitoring.attribution import Parts
from ...optim.optimizer import matrix_parts, state_bytes
from ...tensor_parallel import regions
from ..planner.measured import (
    BlockUpdate,
    LayerExchange,
    LayerParameters,
    Mark,
    MeasuredModel,
    ModelCuts,
    ModelParameters,
    Parameter,
    Workload,
)
from .dispatched import check_recorded, expected_rows, telling_rows
from .fake_tensors import FakeTensors
from .gpu_stand_in import as_on_gpu
from .layer_kinds import kinds_of_layers
from .live_memory import LiveTensors
from .recorder import Event, Recorder, recording_triton
from .recurrent_stand_in import computed_by, recorded, replaced_functions
from .seen_spans import SeenSpans, Tape, between
from .triton_stand_in import import_kernels
from .world import Splits, _fused_attention, batch_of, what_failed

_AT_ONCE: dict[str, LayerExchange] = {
    "all_to_all_single": "all-to-all",
    ALL_GATHER: "all-gather",
    REDUCE_SCATTER: "reduce-scatter",
    "all_reduce": "all-reduce",
}
"""Functions of torch.distributed that a layer calls and waits for."""
Part = int | Literal["root"]
"""A kind of decoder layer, or what is around the layers."""
T = TypeVar("T")


class Measurer:
    """Measures one model.

    Args:
        model: from `build_rehearsed`; it cannot be trained afterwards.
        config: of the run; what a `Workload` says too, goes by that.
    """

    def __init__(self, model: Any, config: TrainConfig):
        counts = count_parameters(model)
        if (kind := config.quantized_base) is not None:
            store_frozen(model, kind)
        self.model = model.train()
        self.config = config
        self.layers: list[Any] = list(decoder_layers(model))
        # layers that keep outputs of expert GEMMs are of another kind
        keep_products(model, config.keep_expert_products)
        self.kinds = kinds_of_layers(model)
        self.first = [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]
        self.weights = LossWeights(config.router_aux_loss_coef or 0.0, config.router_z_loss_coef)
        self.num_experts, self.top_k = moe_shape(model).num_experts, moe_shape(model).top_k
        self.parts = Parts(model)
        self.fake = FakeTensors()
        self.calls: dict[Workload, dict[int, _Call]] = {}
        self.seen: dict[tuple[Part, Workload], SeenSpans] = {}
        firsts = [self.layers[number] for number in self.first]
        in_layers = [module for layer in firsts for module in layer.modules()]
        self.recurrent = replaced_functions(in_layers)
        self.divided = {model.get_parameter(name) for name in divided_of(model)}
        self.tp: TPGroup | None = None
        if config.tp_size > 1:
            ranks: Any = _Group(config.tp_size, "tp")
            self.tp = TPGroup(config.tp_size, 0, ranks)
            model.tensor_parallel.place(self.tp, set(model.divided.values()))
        # read before the model's parameters are exchanged for those of a rank
        self.parameters = replace(
            _parameters(model, self.layers, self.kinds, config, counts),
            looped=computed_by(in_layers),
            by_liger=any(map(is_by_liger, model.modules())),
        )
        self.kept = set(fp32_parameters(model).values())
        self.whole = [
            (module, name, parameter)
            for module in self._measured_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def _measured_modules(self) -> Iterator[nn.Module]:
        left_out = {
            module for number, layer in enumerate(self.layers) if number not in self.first for module in layer.modules()
        }
        yield from (module for module in self.model.modules() if module not in left_out)

    def __call__(self, workload: Workload) -> MeasuredModel:
        """Measure one forward and backward of a rank.

        Raises:
            ExpertMeshError: an operator fails, as it would in training.
        """
        built_for = self.config.cp_size, self.config.tp_size
        assert (workload.cp_size, workload.tp_size) == built_for, "the model was built to share sequences so"
        # made once in a process: not of tensors that hold no memory
        quantised.nf4_pairs(torch.device("cpu")), quantised.mxfp4_pairs(torch.device("cpu"))
        parts: list[Part] = [*range(len(self.first)), "root"]
        found = {part: self._known(part, workload) for part in parts}
        missing = [part for part, seen in found.items() if seen is None]
        if missing:
            for part, seen in self._measured(missing, workload).items():
                self.seen[part, self._scope(part, workload)] = found[part] = seen
        *kinds, root = (seen.measured() for seen in found.values() if seen is not None)
        return MeasuredModel(tuple(kinds), root)

    def _measured(self, parts: Sequence[Part], workload: Workload) -> dict[Part, SeenSpans]:
        if workload.device == "cuda":
            import_kernels()
        try:
            with as_on_gpu() if workload.device == "cuda" else nullcontext(), self.fake:
                return _Measurement(self, workload).run(parts)
        except ExpertMeshError:
            raise
        except Exception as error:
            dtype = "bf16" if workload.bf16 else "fp32"
            where = what_failed(error, self.parts)
            raise ExpertMeshError(f"a step of {type(self.model).__name__} in {dtype} fails{where}") from error

    def _scope(self, part: Part, workload: Workload) -> Workload:
        """The workload as it matters to a part: nothing of experts for a layer without them, nor of what layers keep
        for what is around them."""
        if part == "root":
            return _around(workload)
        return workload if moe_layers(self.layers[self.first[part]]) else _without_experts(workload)

    def _known(self, part: Part, workload: Workload) -> SeenSpans | None:
        """What was seen of it, or follows from what was seen with fewer and with more sequences."""
        scope = self._scope(part, workload)
        if (part, scope) in self.seen:
            return self.seen[part, scope]
        nearest = _nearest(((other, seen) for (of, other), seen in self.seen.items() if of == part), scope)
        return nearest and between(*nearest)


class _Measurement:
    """The measurement of one workload."""

    def __init__(self, measurer: Measurer, workload: Workload):
        self.of = measurer
        self.model, self.layers = measurer.model, measurer.layers
        self.workload = workload
        self.dtype = torch.bfloat16 if workload.bf16 else torch.float32
        self.recorder: _Recorder | None = None
        self.in_common = 0
        self._place()
        _checkpoint(self.model, workload)
        self.batch = _batch(workload, measurer.tp)

    def _place(self) -> None:
        """Give the modules that are measured their parameters, as a rank computes with them."""
        made: dict[nn.Parameter, nn.Parameter] = {}
        experts = {layer.mlp for layer in moe_layers(self.model)}
        for module, name, whole in self.of.whole:
            if whole not in made:
                own = module in experts
                is_cast = whole.is_floating_point() and (not own or self.workload.experts_gathered)
                is_cast = is_cast and whole not in self.of.kept
                shape = list(whole.shape)
                if own:
                    shape[0] //= self.workload.ep_size
                elif whole in self.of.divided:
                    shape[0] //= self.workload.tp_size
                tensor = torch.empty(shape, dtype=self.dtype if is_cast else whole.dtype)
                made[whole] = nn.Parameter(tensor, whole.requires_grad)
                if own and not self.workload.experts_gathered and self.workload.has_gradients and whole.requires_grad:
                    made[whole].grad = torch.empty(shape, dtype=whole.dtype)
            module._parameters[name] = made[whole]
        for layer in (each for number in self.of.first for each in moe_layers(self.layers[number])):
            layer.dispatcher = self._dispatcher()
            layer.mlp.working = type(layer.mlp.working)()
            layer.mlp.working.are_kept = self.workload.keeps_casts

    def _dispatcher(self) -> Dispatcher:
        w, num_experts = self.workload, self.of.num_experts
        if w.ep_size == 1:
            return LocalDispatcher(num_experts)
        group: Any = _Group.of(w, "ep")
        nodes = None
        if w.ranks_per_node > 1:
            across: Any = _Group.of(w, "ep across nodes")
            inside: Any = _Group.of(w, "ep inside node")
            nodes = NodeGroups(across, inside)
        check_recorded(w.dispatch)
        sum_dtype = torch.float32 if w.sums_in_fp32 else None
        return DISPATCHERS[w.dispatch](DispatchOptions(num_experts, group, w.overlap_chunks, nodes, sum_dtype))

    def run(self, parts: Iterable[Part]) -> dict[Part, SeenSpans]:
        """What each of these parts does."""
        around = _around(self.workload)
        with self._told():
            if around not in self.of.calls:
                self.of.calls[around] = self._calls()
            calls = self.of.calls[around]
            return {part: self._root(calls) if part == "root" else self._layer(part, calls) for part in parts}

    def _record_kernel(self, *kernel: Any) -> None:
        assert self.recorder is not None
        self.recorder.kernel(*kernel)

    def _calls(self) -> dict[int, "_Call"]:
        """How the model calls the first layer of each kind, and what that gives."""
        found: dict[int, _Call] = {}
        numbers = {layer: number for number, layer in enumerate(self.layers)}

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            kind = self.of.kinds[numbers[layer]]
            if kind not in found:
                with torch.no_grad():
                    given = original[type(layer)](layer, *args, **kwargs)
                found[kind] = _call_of(args, kwargs, given)
            if len(found) == len(self.of.first):
                raise _AllSeen
            return _stand_in(found[kind], args, kwargs)

        original = {type(layer): type(layer).__call__ for layer in self.layers}
        # within a recording, which answers what the host would ask of the device
        with self._recording([]), replacing_calls(self.layers, call), suppress(_AllSeen):
            token_loss_sum(self.model, self.batch)
        return found

    def _root(self, calls: dict[int, "_Call"]) -> SeenSpans:
        """What is around the layers, each of which only gives tensors of the right shapes."""
        numbers = {layer: number for number, layer in enumerate(self.layers)}
        last = len(self.layers) - 1
        in_layers = {module for layer in self.layers for module in layer.modules()}
        held = [
            tensor
            for module in self.model.modules()
            if module not in in_layers
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ]
        with self._recording(held) as tape:

            def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
                number = numbers[layer]
                if number == 0:
                    tape.cut("start")
                    tape.note(("keep",), sum(t.nbytes for t in _carried(args, kwargs)))

                def returning(grads: int) -> None:
                    if number == last:
                        tape.cut("start")
                        tape.note(("keep_backward",), grads)

                def returned() -> None:
                    if number == 0:
                        tape.drop()

                out = _stand_in(calls[self.of.kinds[number]], args, kwargs, returning, returned)
                if number == last:
                    tape.drop()
                return out

            around = _regions_around(self.model, self.layers)
            with _marking_regions(around, tape), replacing_calls(self.layers, call):
                loss = token_loss_sum(self.model, self.batch)
            tape.turn()
            loss.backward()
            tape.cut("start")
            return tape.seen()

    def _layer(self, kind: int, calls: dict[int, "_Call"]) -> SeenSpans:
        layer = self.layers[self.of.first[kind]]
        call = calls[kind]
        experts = moe_layers(layer)
        if self.workload.keeps_casts:
            # they last from the first step on
            with self._recording([]), torch.no_grad(), forward_of(self.batch):
                args, kwargs = call.arguments(None, self.dtype)
                layer(*args, **kwargs)
        held = [*layer.parameters(), *layer.buffers(), *call.constant]
        held += [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        held += [cast for each in experts for _, cast in each.mlp.working._kept.values()]
        with self._recording(held) as tape, tape.live.noting_casts() as casts, ExitStack() as hooks:
            for each in experts:
                hooks.enter_context(_marking(each.mlp, tape, self.workload.experts_gathered))
            hooks.enter_context(_marking_regions(_regions(self.model, layer.modules()), tape))
            start = torch.zeros((), requires_grad=True)
            # FSDP reduces a layer's gradients where the one of its input is there
            args, kwargs = call.arguments(start, self.dtype, lambda: tape.cut("start"))
            self.in_common = 0
            with forward_of(self.batch, self.of.weights.of_routers) as forward:
                out = layer(*args, **kwargs)
            del args, kwargs
            stats = forward.take_stats(moe_layers(layer))
            loss = _MeasureSink.apply(*_differentiable(out), *self._in_losses(stats))
            del out, stats
            tape.turn()
            # those that last from step to step are none of what a forward keeps
            tape.note(("casts",), 0 if self.workload.keeps_casts else tape.live.bytes_of(casts))
            loss.backward()
            tape.note(("carried",), call.carried(self.dtype))
            tape.note(("common",), self.in_common)
        for parameter in layer.parameters():
            if not self.workload.has_gradients:
                parameter.grad = None
        return tape.seen()

    def _in_losses(self, stats: Iterable[RouterStats]) -> list[Tensor]:
        """What auxiliary losses take of a layer's routing."""
        sums = [each.prob_sum_E for each in stats if self.of.weights.balance > 0]
        sums += [each.z_sum for each in stats if self.of.weights.z > 0]
        return [total for total in sums if total is not None]

    @contextmanager
    def _recording(self, held: Iterable[Tensor]) -> Iterator["_Tape"]:
        self.recorder = _Recorder(self.of.parts)
        tape = _Tape(held, self.recorder)
        is_gpu = self.workload.device == "cuda"
        self.live = tape.live
        with recording_triton(self.recorder) if is_gpu else nullcontext(), tape.live, self.recorder:
            yield tape

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Within it, what depends on data or on a GPU is given: every expert gets as many rows as any other."""
        w, K = self.workload, self.of.top_k
        sent = even(w.micro_batch * w.length * K, w.ep_size)
        received = even(w.rows_received, w.ep_size)

        def exchange_counts(counts_E: Tensor, group: Any, sizes: Sequence[int]) -> tuple[Tensor, Splits]:
            assert self.recorder is not None
            self.recorder.all_to_all(group, counts_E).is_read = True
            return torch.empty_like(counts_E), Splits(sent, received, sizes)

        def told_once(dispatcher: OnceDispatcher) -> Rows:
            most = w.rows_received / (w.micro_batch * w.length * K * w.ep_size)
            shares = [most] + [(1 - most) / (w.ep_size - 1)] * (w.ep_size - 1)
            return expected_rows(dispatcher, w.length, K, shares, w.micro_batch)

        def exchange_all(counts_C: Tensor, group: Any) -> None:
            assert self.recorder is not None
            self.recorder.all_to_all(group, counts_C.new_empty(w.ep_size, counts_C.numel())).is_read = True

        def exchange_at_once(kind: LayerExchange) -> Any:
            def call(*tensors: Tensor, group: "_Group", op: Any = None) -> None:
                assert self.recorder is not None
                if not self.recorder.is_paused:
                    self.recorder.exchange(kind, group, max(tensor.nbytes for tensor in tensors))

            return call

        gather = regions.gather_once

        def gather_once(forward: Forward, x: Tensor, dim: int, group: TPGroup) -> Tensor:
            assert self.recorder is not None
            # what all layers have in common is gathered in the first one alone
            self.in_common += 0 if id(x) in forward.gathered else x.nbytes * group.size
            with self.recorder.paused(), self.live.paused():
                return gather(forward, x, dim, group)

        with ExitStack() as stack:
            patches: list[Any] = [
                *(mock.patch.object(m, "UnderWay", partial(_UnderWay, self)) for m in (exchange, context_parallel)),
                telling_rows(exchange_counts, told_once, exchange_all),
                replacing_collectives({name: exchange_at_once(kind) for name, kind in _AT_ONCE.items()}),
                mock.patch.object(regions, "gather_once", gather_once),
                never_tracing(),
            ]
            if w.device == "cuda":
                patches += [replacing_attention(_fused_attention), recorded(self.of.recurrent, self._record_kernel)]
            for patch in patches:
                stack.enter_context(patch)
            yield


def _without_experts(workload: Workload) -> Workload:
    """The workload without what concerns experts."""
    local = replace(workload, ep_size=1, rows_received=0, overlap_chunks=1)
    local = replace(local, dispatch=PLAIN_ENTRY.name, ranks_per_node=1, sums_in_fp32=False)
    return replace(local, experts_gathered=False, has_gradients=False, keeps_casts=False)


def _around(workload: Workload) -> Workload:
    """The workload as what is around the layers depends on it."""
    return replace(_without_experts(workload), checkpointing="none", offload_activations=False)


def _one_sequence(workload: Workload) -> Any:
    """All of a workload but its number of sequences."""
    number = workload.micro_batch
    rest = replace(workload, micro_batch=1, targets=0, rows_received=0)
    return rest, workload.targets / number, workload.rows_received / number


def _nearest(found: Iterable[tuple[Workload, T]], workload: Workload) -> tuple[T, T, int, int] | None:
    """Among workloads that differ in their number of sequences alone: what was found at the next ones with fewer and
    with more, how far beyond the former this one is, and how far these are apart."""
    number = workload.micro_batch
    others = [(each.micro_batch, value) for each, value in found if _one_sequence(each) == _one_sequence(workload)]
    fewer = max((each for each in others if each[0] < number), key=lambda each: each[0], default=None)
    more = min((each for each in others if each[0] > number), key=lambda each: each[0], default=None)
    if fewer is None or more is None:
        return None
    return fewer[1], more[1], number - fewer[0], more[0] - fewer[0]


class _Recorder(Recorder):
    """A recorder of collectives that no operator calls."""

    def __init__(self, parts: Parts):
        super().__init__(parts)
        self.micro = 0

    def doing(self) -> str:
        """What part of a step the newest event is of."""
        place = self.events[-1].place if self.events else None
        return str(place.part if place else "") + (", recomputed" if place and place.is_recomputed else "")

    def all_to_all(self, group: "_Group", sent: Tensor, received: Tensor | None = None) -> Event:
        """Add an all-to-all of a tensor that goes to all ranks evenly."""
        return self.exchange("all-to-all", group, max(sent.nbytes, 0 if received is None else received.nbytes))

    def exchange(self, kind: LayerExchange, group: "_Group", largest: int) -> Event:
        """Add a collective of which the larger one of input and result has so many bytes."""
        event = self._event(kind, self.parts.here())
        rounds = 2 if kind == "all-reduce" else 1
        event.collective, event.group, event.sent = kind, group.group_name, rounds * largest * (1 - 1 / group.ranks)
        return event

    def arrive(self, group: "_Group") -> None:
        """Wait for the group's oldest all-to-all under way."""
        event = self._event("wait", self.parts.here())
        event.group, event.waits = group.group_name, True


class _UnderWay:
    """Stands in for `moe.dispatch.exchange.UnderWay`."""

    def __init__(
        self, of: _Measurement, out: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], group: Any
    ):
        assert of.recorder is not None
        self.recorder, self.out, self.group = of.recorder, out, group
        self.recorder.all_to_all(group, rows, out).travels = True

    def wait(self) -> Tensor:
        self.recorder.arrive(self.group)
        return self.out


class _Tape(Tape):
    """Notes what `live` and `recorder` see."""

    def __init__(self, held: Iterable[Tensor], recorder: _Recorder):
        super().__init__()
        self.recorder = recorder
        self.live = LiveTensors(held)
        self.live.changed = lambda storage, more, is_gone: self.note(("change", recorder.doing()), more)
        self.events = self.calls = 0

    def freed(self) -> None:
        """What went right now was not there while the span lasts."""
        self.note(("freed", self.recorder.doing()))

    def cut(self, mark: Mark, region: int = 0) -> None:
        """The span ends here, and with `mark` the next one begins."""
        for event in self.recorder.events[self.events :]:
            self.note_event(event)
        self.note(("cut", mark, self.recorder.doing(), region), self.recorder.num_calls - self.calls)
        self._pass_over()

    def drop(self) -> None:
        """What was seen since the last cut is no part of anything."""
        self.note(("begin", "start", self.recorder.doing()))
        self._pass_over()

    def _pass_over(self) -> None:
        self.events, self.calls = len(self.recorder.events), self.recorder.num_calls

    def turn(self) -> None:
        """Forward has ended, backward begins."""
        self.cut("start")
        self.note(("turn",))


class _AllSeen(Exception):
    """Raised when a layer of every kind has been called: the forward need not go on."""


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class _Spec:
    """Describes a tensor that is created anew each time."""

    shape: torch.Size
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class _Call:
    """How a layer is called: args and kwargs, and what it gives, with a `_Spec` in the place of each tensor that comes
    from the layer before it."""

    given: tuple[tuple[Any, ...], dict[str, Any]]
    out: Any

    def carried(self, dtype: torch.dtype) -> int:
        """Bytes of what comes from the layer before, in the compute dtype."""
        specs = [leaf for leaf in tree_leaves(self.given) if isinstance(leaf, _Spec)]
        return sum(spec.shape.numel() for spec in specs) * dtype.itemsize

    @property
    def constant(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(self.given) if isinstance(leaf, Tensor)]

    def arguments(
        self, start: Tensor | None, dtype: torch.dtype, returned: Callable[[], None] = _nothing
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, made anew, cast as FSDP casts a unit's. Where there is a `start` they are differentiable, and
        `returned` is called once the gradient of one has been made."""

        def fresh(leaf: Any) -> Any:
            if isinstance(leaf, _Spec):
                return leaf.make() if start is None else _Source.apply(start, leaf, returned)
            is_cast = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype
            return leaf.to(dtype) if is_cast else leaf

        arguments: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(fresh, self.given)
        return arguments


def _call_of(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Call:
    carried = {id(tensor) for tensor in _carried(args, kwargs)}

    def spec(leaf: Any) -> Any:
        return _Spec(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf

    given = tree_map(lambda leaf: spec(leaf) if id(leaf) in carried else leaf, (args, kwargs))
    return _Call(given, tree_map(spec, out))


def _carried(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Those arguments that come from the layer before."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    # that of the first layer has no gradient where the embedding is frozen
    return [tensor for tensor in tensors if tensor.requires_grad or tensor is (args or (None,))[0]]


def _stand_in(
    call: _Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    returning: Callable[[int], None] = _nothing,
    returned: Callable[[], None] = _nothing,
) -> Any:
    """What a layer returns, without computing anything. returning, returned: called before its backward, with
    the bytes of the gradients that come, and after it."""
    leaves, tree = tree_flatten(call.out)
    specs = [leaf for leaf in leaves if isinstance(leaf, _Spec)]
    # so that there is a backward also where the embedding is frozen
    start = torch.zeros((), requires_grad=True)
    kept = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.requires_grad]
    made = iter(_Through.apply(specs, kept, returning, returned, start, *_differentiable(_carried(args, kwargs))))
    return tree_unflatten([next(made) if isinstance(leaf, _Spec) else leaf for leaf in leaves], tree)


def _differentiable(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]


class _Source(torch.autograd.Function):
    """A tensor that is made anew. returned: called when its gradient is there."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, spec: _Spec, returned: Callable[[], None]) -> Tensor:
        ctx.returned = returned
        return spec.make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.returned()
        return None, None, None


class _Through(torch.autograd.Function):
    """A layer that only gives tensors of the right shapes, forward and backward. Masks and the like, which all layers
    have in common, it keeps for backward."""

    @staticmethod
    def forward(
        ctx: Any, specs: list[_Spec], kept: list[Tensor], returning: Any, returned: Any, start: Tensor, *inputs: Tensor
    ) -> Any:
        ctx.kept = kept
        ctx.inputs, ctx.returning, ctx.returned = [_Spec(x.shape, x.dtype) for x in inputs], returning, returned
        made = tuple(spec.make() for spec in specs)
        ctx.mark_non_differentiable(*(tensor for tensor in made if not tensor.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        ctx.returning(sum(grad.nbytes for grad in grads if grad is not None))
        made = [spec.make() for spec in ctx.inputs]
        ctx.kept = None
        ctx.returned()
        return None, None, None, None, None, *made


class _MeasureSink(torch.autograd.Function):
    """What follows a layer: gives its results their gradients."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> Tensor:
        ctx.results = [_Spec(x.shape, x.dtype) for x in results]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(spec.make() for spec in ctx.results)


class _Reduced(torch.autograd.Function):
    """Marks the experts' rows: its backward runs when that of the experts is done, where FSDP reduces their
    gradients."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        return tuple(rows_RD.view_as(rows_RD) for rows_RD in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.done()
        return None, *grads


@contextmanager
def _marking(mlp: nn.Module, tape: _Tape, is_gathered: bool) -> Iterator[None]:
    """Within it, a layer's experts cut the tape where FSDP's hooks on them would act."""

    def reduce() -> None:
        tape.cut("reduce experts")
        if is_gathered:
            for parameter in mlp.parameters():
                parameter.grad = None
            tape.freed()

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tape.cut("use experts")
        sent, *others = args
        return (_Reduced.apply(reduce, *sent), *others)

    def after(module: nn.Module, args: tuple[Any, ...], returned: list[Tensor]) -> None:
        tape.cut("leave experts")
        # backward comes to the last part first
        if returned[-1].requires_grad:
            returned[-1].register_hook(lambda grad: tape.cut("use experts"))

    handles = [mlp.register_forward_pre_hook(before), mlp.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_Region = tuple[nn.Module, list[str]]
"""A module that tensor parallelism divides, with the names in it of what is divided."""


def _regions(model: Any, modules: Iterable[nn.Module]) -> list[_Region]:
    """Those of these modules."""
    parts, found = {*modules}, defaultdict(list)
    for name, path in getattr(model, "divided", {}).items():
        if (module := model.get_submodule(path)) in parts:
            found[module].append(name.removeprefix(f"{path}."))
    return [*found.items()]


def _regions_around(model: Any, layers: Iterable[nn.Module]) -> list[_Region]:
    """Those in none of the decoder layers."""
    in_layers = {module for layer in layers for module in layer.modules()}
    return _regions(model, (module for module in model.modules() if module not in in_layers))


@contextmanager
def _marking_regions(regions: Iterable[_Region], tape: _Tape) -> Iterator[None]:
    with ExitStack() as stack:
        for number, (region, divided) in enumerate(regions):
            stack.enter_context(_marking_region(region, divided, number, tape))
        yield


@contextmanager
def _marking_region(region: nn.Module, divided: Sequence[str], number: int, tape: _Tape) -> Iterator[None]:
    """Within it, a region cuts the tape where FSDP's hooks on it would act."""

    def reduce() -> None:
        tape.cut("reduce region", number)
        for name in divided:
            region.get_parameter(name).grad = None
        tape.freed()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape.cut("use region", number)
        leaves, tree = tree_flatten((args, kwargs))
        marked = iter(_Reduced.apply(reduce, *_differentiable(leaves)) if _differentiable(leaves) else ())
        is_marked = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        parts = zip(leaves, is_marked, strict=True)
        return tree_unflatten([next(marked) if is_taken else leaf for leaf, is_taken in parts], tree)

    def after(module: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
        tape.cut("leave region", number)
        if given := _differentiable(returned):
            given[0].register_hook(lambda grad: tape.cut("use region", number))

    handles = [
        # before the exchanges of the region, as FSDP's own
        region.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        region.register_forward_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _Group:
    """Stands in for a process group, of which no more is needed."""

    ranks: int
    group_name: Axis

    @staticmethod
    def of(workload: Workload, axis: Axis) -> "_Group":
        return _Group(workload.ranks(axis), axis)

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


def _checkpoint(model: Any, workload: Workload) -> None:
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
    checkpoint_layers(model, workload.checkpointing)
    if workload.offload_activations:
        offload_inputs(model, workload.device)


def _batch(workload: Workload, tp: TPGroup | None) -> Batch:
    group: Any = _Group.of(workload, "cp")
    cp_group = CPGroup(workload.cp_size, 0, group) if workload.cp_size > 1 else None
    if tp is not None:
        sharing: Any = _Group.of(workload, "sequences")
        cp_group = CPGroup(sharing.size(), 0, sharing, tp, cp_group)
    return batch_of(workload.micro_batch, workload.length, workload.targets, cp_group)


def _blocks(shape: tuple[int, int], config: TrainConfig) -> tuple[BlockUpdate, ...]:
    kernels_of = config.optimizer_entry.matrix_kernels
    assert kernels_of is not None
    return tuple(
        BlockUpdate(block, number, tuple((flops, Work(kind, flops), times) for kind, flops, times in kernels))
        for block, number, kernels in kernels_of(shape, config)
    )


def _parameters(
    model: Any, layers: list[Any], kinds: list[int], config: TrainConfig, counts: ParameterCounts
) -> ModelParameters:
    expert_of = {part.tensor: part.expert for part in parameters_of(model).values()}
    for part in parameters_of(model).values():
        if part.scales is not None:
            expert_of[part.scales] = part.expert
    of_matrices = set()
    if config.optimizer_entry.takes_matrices:
        of_matrices = {part.tensor for parts in matrix_parts(model) for part in parts}
    computed = 2 if config.bf16 else 4
    kept = set(fp32_parameters(model).values())

    def told(parameter: Tensor) -> Parameter:
        rows = rows_of(tuple(parameter.shape))
        expert, row = expert_of[parameter], parameter.numel() // rows
        matrix_rows = 0
        if parameter in of_matrices:
            matrix_rows = rows if expert is None else expert.rows_an_expert
        return Parameter(
            rows,
            row,
            parameter.element_size(),
            computed if parameter.is_floating_point() and parameter not in kept else parameter.element_size(),
            state_bytes(parameter, config, matrix_rows),
            parameter.requires_grad,
            matrix_rows * row,
            _blocks((matrix_rows, row), config) if matrix_rows else (),
        )

    own: list[LayerParameters] = []
    for kind in range(max(kinds) + 1):
        layer = layers[kinds.index(kind)]
        experts = {p for each in moe_layers(layer) for p in each.mlp.parameters()}
        regions = [[module.get_parameter(name) for name in names] for module, names in _regions(model, layer.modules())]
        divided = {p for region in regions for p in region}
        dense = [p for p in layer.parameters() if p not in experts | divided and p not in kept]
        parts = (tuple(map(told, each)) for each in (dense, experts, *regions))
        own.append(LayerParameters(next(parts), next(parts), tuple(parts)))
    # what is kept in fp32 is gathered as long as the root is
    in_layers = {p for layer in layers for p in layer.parameters()} - kept
    root = {name: p for name, p in model.named_parameters() if p not in in_layers}
    around = enumerate(_regions_around(model, layers))
    numbers = {module.get_parameter(name): number for number, (module, names) in around for name in names}
    shape = moe_shape(model)
    return ModelParameters(
        tuple(own),
        tuple(kinds),
        tuple(told(p) for p in root.values()),
        sum(buffer.nbytes for buffer in model.buffers()),
        shape.num_experts,
        shape.top_k,
        counts,
        tuple(root),
        tuple(numbers.get(parameter, -1) for parameter in root.values()),
    )


def cuts_of(model: Any, config: TrainConfig, root_names: Sequence[str]) -> ModelCuts:
    """Where a model can be cut into the stages of a pipeline.

    Args:
        model: from `build_rehearsed`, on the meta device.
        root_names: of `ModelParameters`.

    Raises:
        ExpertMeshError: nowhere.
    """
    found = survey(model, compute_dtype(config))
    uncut = Stages(found, (range(found.num_layers),), 1)
    places = tuple(tuple(sorted(uncut.places(name))) for name in root_names)
    return ModelCuts(found.name, found.flops, found.skips, places)
