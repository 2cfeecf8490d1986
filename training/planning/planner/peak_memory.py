"""What a rank holds when it holds the most, term by term, in bytes.

A step is followed action by action (`training.planning.planner.step_order`). What layers hold while they compute was
measured; what FSDP holds beside follows its code (`_fsdp_param_group.py` and `_fsdp_collectives.py` in torch): buffers
into which parameters are gathered and out of which they are copied, gradients that wait to be summed up, in fp32, and
the parts of them that stay.

In a pipeline each stage's forward and backward are followed once, at the moment of the schedule when other
micro-batches keep the most.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....sharding.pipeline.schedule import Kind
from ....sharding.topology import Axis
from ...config.optimizers import OPTIMIZERS
from ..memory import Communicator, Memory, slack
from .measured import Measured, MeasuredModel, MeasuredSpan, ModelParameters
from .pipelines import beside_actions, queued_bytes
from .setting import Setting
from .step_order import ROOT, Act, Name, PlannedRun
from .units import Unit


@dataclass(frozen=True)
class Peak:
    """memory: what a rank holds at the most; when: the moment of a step. least: the peak of what any batch needs,
    however short. On a GPU these include what the allocator and the driver take; tensors: the
    most bytes that tensors hold, without that, which may be at another moment.
    """

    when: str
    memory: Memory
    least: Memory
    tensors: float


def peak(run: PlannedRun) -> Peak:
    """What the rank holds that holds the most, when it does."""
    return largest([held for _, held in peaks(run)])


def peaks(run: PlannedRun) -> list[tuple[int, Peak]]:
    """What ranks hold, of pp indices by their numbers: those of which others are like one."""
    return [(each.pp_rank, _peak_of_rank(each)) for each in _unlike(run)]


def largest(peaks: Sequence[Peak]) -> Peak:
    """The largest of several ranks' peaks, and the largest of each figure beside."""
    most = max(peaks, key=lambda each: each.memory.total)
    least = max((each.least for each in peaks), key=lambda memory: memory.lasting + memory.gathered)
    return replace(most, least=least, tensors=max(each.tensors for each in peaks))


def least_held(model: ModelParameters, setting: Setting) -> float:
    """Bytes that every rank holds at the least, whatever layers compute: what lasts, with what FSDP has gathered when
    backward comes to the first experts, or with what the update takes. 0 for a pipeline, whose layers are not
    distributed yet."""
    if setting.pp_size > 1:
        return 0.0
    run = PlannedRun(model, MeasuredModel((), Measured((), (), 0)), setting)
    rank = _Rank(run)
    first = next((number for number, kind in enumerate(model.layers) if model.kinds[kind].experts), 0)
    for name, each in run.units.items():
        # the gradients of layers before this one, and of what is in none, are not there yet
        rank.gradients += 0.0 if setting.offload or name.layer <= first else each.gradient
    rank.shared = sum(run.units[name].gathered for name in (ROOT, *run.of_layer(first)) if name.kind != "region")
    rank.note("backward", 0.0)
    rank.gradients = 0.0 if setting.offload else sum(each.gradient for each in run.units.values())
    rank.shared = 0
    rank.note("update", update_working(run))
    return rank.most_total


def fullest(run: PlannedRun) -> PlannedRun:
    """The run of the pp index that holds the most."""
    return max(_unlike(run), key=lambda each: _peak_of_rank(each).memory.total)


def _unlike(run: PlannedRun) -> list[PlannedRun]:
    """The runs of pp indices, of those with the same layers two: the first, which keeps the most micro-batches in
    flight, and the last, which has the most of them waiting for their weight gradients."""
    first: dict[object, PlannedRun] = {}
    last: dict[object, PlannedRun] = {}
    for each in run.by_pp_rank:
        layers = tuple(tuple(run.model.layers[layer] for layer in run.all_stages[stage]) for stage in each.stages)
        ends = (each.pp_rank == 0, each.pp_rank == run.setting.pp_size - 1)
        key = layers, ends, each.root_numbers
        first.setdefault(key, each)
        last[key] = each
    later = last if run.setting.schedule == "zero-bubble" else ()
    return [*first.values(), *(last[key] for key in later if last[key] is not first[key])]


def _peak_of_rank(run: PlannedRun) -> Peak:
    rank = _Rank(run)
    if run.setting.device == "cpu":
        # over gloo what is sent lies in memory that is there from the first step on
        rank.micro_batch()
        rank = rank.after_a_step()
    for _ in range(min(run.setting.accumulation, 2)):
        rank.micro_batch()
    rank.level = rank.others = rank.casts_of_others = 0.0
    rank.note("update", update_working(run))
    return Peak(rank.when, rank.most, rank.least, rank.tensors)


def _kept_by_others(run: PlannedRun) -> dict[tuple[Kind, int], tuple[float, float]]:
    """Bytes that other micro-batches keep at the most while a stage computes one, and buffers of what is received ahead
    and sent; and of these bytes, those of experts' weights in the compute dtype."""
    kept = [_kept_of(run, stage) for stage in run.stages]
    casts = [sum(_measured_of(run, layer).kept_casts for layer in run.all_stages[stage]) for stage in run.stages]
    queued = [sum(queued_bytes(run, layer) for layer in run.all_stages[stage]) for stage in run.stages]
    each, of_casts = np.array([*kept, *queued], dtype=float), np.array([*casts, *[0] * len(queued)], dtype=float)
    buffers = _exchanged(run)
    found = {}
    for key, counts in beside_actions(run.setting)[run.pp_rank].items():
        held = counts @ each
        most = held.argmax()
        found[key] = float(held[most]) + buffers, float(counts[most] @ of_casts)
    return found


def _kept_of(run: PlannedRun, stage: int) -> float:
    """Bytes that a micro-batch keeps from a stage's forward to its backward: of its layers, around them, and what the
    last one gave."""
    layers, root = run.all_stages[stage], run.measured.root
    is_last = stage == len(run.all_stages) - 1
    around = run.measured.around.after[-1].end if is_last else root.kept + _carried(run, layers.stop)
    around += run.measured.in_common
    return around + sum(_measured_of(run, layer).kept for layer in layers)


def _measured_of(run: PlannedRun, layer: int) -> Measured:
    return run.measured.kinds[run.model.layers[layer]]


def _carried(run: PlannedRun, layer: int) -> int:
    """Bytes that come to a layer from the one before."""
    return _measured_of(run, layer).carried


def _exchanged(run: PlannedRun) -> float:
    """Bytes of what a rank receives ahead, from either side, and of gradients that it sends."""
    stages = run.all_stages
    before = [_carried(run, stages[stage].start) for stage in run.stages if stage > 0]
    after = [_carried(run, stages[stage].stop) for stage in run.stages if stage < len(stages) - 1]
    return 2.0 * max(before, default=0) + max(after, default=0)


class _Rank:
    """What a rank holds, action by action."""

    def __init__(self, run: PlannedRun):
        self.run = run
        self.units = run.units
        held = self.units.values()
        on_device = not run.setting.offload
        self.is_gpu = run.setting.device == "cuda"
        in_host = self.is_gpu * sum(unit.in_host for unit in held)
        self.parameters = on_device * sum(unit.stored for unit in held) - in_host + run.model.buffers
        self.optimizer = on_device * sum(unit.state for unit in held)
        self.reduced: set[Name] = set()
        # of layers between forward and backward, and around them
        self.kept = self.around = self.in_common = 0.0
        self.casts = _lasting_casts(run)
        self.nccl = sum(each.size for each in communicators(run))
        # of what is being computed
        self.level = 0.0
        self.buffers = _Pool() if run.setting.device == "cpu" else _Allocator()
        self.gathering: dict[Name, _MemoryPiece | None] = {}
        self.deferred: _MemoryPiece | None = None
        self.sending: _MemoryPiece | None = None
        self.shared = 0
        self.summed = 0.0
        self.gradients = 0.0
        # of other micro-batches in a pipeline
        self.others = self.casts_of_others = 0.0
        self.kept_by_others: dict[tuple[Kind, int], tuple[float, float]] = {}
        self.acts: dict[int, tuple[list[Act], list[Act]]] = {}
        # what has been noted
        self.when, self.most, self.least = "", Memory(), Memory()
        self.most_total = self.least_total = self.tensors = 0.0

    def note(self, when: str, working: float, more: float = 0.0) -> None:
        """Note a moment: bytes in use by computation, and bytes that FSDP holds beyond what it keeps."""
        casts = self.casts + self.casts_of_others
        gathered = self.shared + self.buffers.held + casts + self.summed + more
        lasting = self.parameters + self.gradients + self.optimizer
        kept = self.kept + self.around + self.in_common + self.others - self.casts_of_others
        rest = kept + gathered + working
        self.tensors = max(self.tensors, lasting + rest)
        beside = 0.0 if self.run.setting.device == "cpu" else slack(self.nccl, rest)
        total = lasting + rest + beside
        if total <= self.most_total and lasting + gathered <= self.least_total:
            return
        memory = Memory(self.parameters, 0, self.gradients, self.optimizer, kept, gathered, working, beside)
        if total > self.most_total:
            self.when, self.most, self.most_total = when, memory, total
        if lasting + gathered > self.least_total:
            self.least, self.least_total = memory, lasting + gathered

    def after_a_step(self) -> "_Rank":
        """The same rank after a step: with what stays in shared memory, and nothing noted."""
        other = _Rank(self.run)
        other.buffers = self.buffers
        return other

    def micro_batch(self) -> None:
        """Follow a forward and backward of each stage."""
        is_pipeline = self.run.setting.pp_size > 1
        if is_pipeline and not self.kept_by_others:
            self.kept_by_others = _kept_by_others(self.run)
        others = self.kept_by_others
        for stage in self.run.stages:
            if stage not in self.acts:
                self.acts[stage] = self.run.acts_of(stage)
            forward, backward = self.acts[stage]
            self.in_common = self.run.measured.in_common
            self.others, self.casts_of_others = others.get(("forward", stage), (0.0, 0.0))
            self.go_through(forward)
            if is_pipeline and stage < len(self.run.all_stages) - 1:
                # until backward a stage keeps what it gave
                self.around += _carried(self.run, self.run.all_stages[stage].stop)
            self.others, self.casts_of_others = others.get(("backward", stage), (0.0, 0.0))
            self.go_through(backward)

    def go_through(self, acts: Iterable[Act]) -> None:
        for act in acts:
            self.do(act)

    def do(self, act: Act) -> None:
        match act.doing:
            case "compute":
                self._compute(act)
            case "gather":
                self._gather(act.unit)
            case "use":
                self._use(act.unit, act.in_forward)
            case "let go":
                self.shared -= self.units[act.unit].gathered
            case "reduce":
                self._reduce(act.unit)
            case "turn":
                self._free("deferred")
            case "end":
                self._free("sending")
                self.around = self.in_common = self.level = self.summed = 0.0

    def _compute(self, act: Act) -> None:
        span, measured = act.span, act.measured
        assert span is not None
        assert measured is not None
        if act.layer is None:
            # what is kept around the layers is part of these spans
            self.around = 0.0
        elif act.is_backward and span is measured.backward[0]:
            self._keep(measured, -1)
        self.note(_said(act), span.peak + self._coming(act, measured))
        self.level = span.end
        if act.layer is not None:
            if span is measured.forward[-1]:
                self._keep(measured, 1)
                self.level = 0.0
            elif act.is_backward and span is measured.backward[-1]:
                # of a pipeline's layer: what its weight gradients are computed of
                self.others += queued_bytes(self.run, act.layer)
        else:
            self._compute_around(span)

    def _keep(self, measured: Measured, times: int) -> None:
        """Keep what a layer's forward leaves for backward, or with -1 let it go."""
        self.kept += times * (measured.kept - measured.kept_casts)
        self.casts += times * measured.kept_casts

    def _compute_around(self, span: MeasuredSpan) -> None:
        root, around = self.run.measured.root, self.run.measured.around
        after = {id(around.before[-1]): root.kept, id(around.after_backward[-1]): root.kept_backward}
        after[id(around.after[-1])] = span.end
        if id(span) in after:
            self.around, self.level = after[id(span)], 0.0

    def _coming(self, act: Act, measured: Measured) -> int:
        """The input of the layer before, on its way back from host memory while this one is in backward."""
        comes = self.run.setting.offload_activations and act.is_backward and bool(act.layer)
        return measured.carried if comes else 0

    def _gather(self, name: Name) -> None:
        unit = self.units[name]
        self.gathering[name] = None
        brought = unit.stored if self.run.setting.offload else self.is_gpu * unit.in_host
        if unit.ranks == 1:
            # there until it is copied to where it is used
            self.shared += self.is_gpu * unit.in_host
        else:
            self.gathering[name] = self.buffers.take(unit.gathered)
            self.note(f"gathering of {_name(name)}", self.level, unit.cast + brought)

    def _use(self, name: Name, in_forward: bool) -> None:
        unit, piece = self.units[name], self.gathering.pop(name)
        if in_forward:
            self._free("deferred")
        self.shared += unit.gathered
        self.note(f"gathering of {_name(name)}", self.level)
        if unit.ranks == 1:
            self.shared -= self.is_gpu * unit.in_host
        if piece is not None and in_forward:
            self.deferred = piece
        elif piece is not None:
            self.buffers.free(piece)

    def _reduce(self, name: Name) -> None:
        """Note a reduce-scatter: first the gradients and the fp32 send buffer; then that buffer and its sum, of which
        this rank keeps its shard. A lone rank divides its copy by 1 into another."""
        unit, setting = self.units[name], self.run.setting
        when = f"reduction of {_name(name)}"
        self.shared -= unit.gathered
        self._free("sending")
        if unit.trained > 0:
            self._sum(name, unit, when)
        if name.kind == "layer":
            self.level = 0.0
            experts = Name("experts", name.layer)
            if not setting.experts_are_gathered and experts in self.units:
                self._keep_gradients(experts)

    def _sum(self, name: Name, unit: Unit, when: str) -> None:
        setting = self.run.setting
        sent = 4 * unit.trained * unit.ranks
        self.sending = self.buffers.take(sent)
        self.note(when, self.level)
        self.level -= sent // 4 * (2 if setting.bf16 else 4)
        summed = 4 * unit.trained
        # over gloo what others send has a place of its own
        received = self.buffers.take(summed) if unit.ranks > 1 and setting.device == "cpu" else None
        divided = sent if unit.ranks == 1 else 0
        self.note(when, self.level, summed + divided)
        if unit.gradient != summed:
            self.note(when, self.level, summed + unit.gradient)
        # what is summed over replicas is held until the end of backward, beside the gradient where that is another
        if unit.replicas > 1 and (unit.gradient != summed or name in self.reduced):
            self.summed += summed
        self._keep_gradients(name)
        if received is not None:
            self.buffers.free(received)

    def _keep_gradients(self, name: Name) -> None:
        """Keep a unit's gradients: those of later micro-batches are added to those of the first."""
        if name not in self.reduced and not self.run.setting.offload:
            self.gradients += self.units[name].gradient
        self.reduced.add(name)

    def _free(self, which: str) -> None:
        piece = getattr(self, which)
        if piece is not None:
            self.buffers.free(piece)
            setattr(self, which, None)


@dataclass
class _MemoryPiece:
    size: int
    is_free: bool = False


class _Allocator:
    """Memory that is given back at once."""

    def __init__(self) -> None:
        self.held = 0

    def take(self, size: int) -> _MemoryPiece:
        self.held += size
        return _MemoryPiece(size)

    def free(self, piece: _MemoryPiece) -> None:
        self.held -= piece.size


class _Pool(_Allocator):
    """As `sharding.collectives.gloo.SharedMemory` hands it out: what is given back stays for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[_MemoryPiece] = []

    def take(self, size: int) -> _MemoryPiece:
        free = sorted((piece for piece in self.pieces if piece.is_free), key=lambda piece: piece.size)
        piece = next((piece for piece in free if piece.size >= size), None)
        if piece is None:
            if free:
                self.pieces.remove(free[-1])
                self.held -= free[-1].size
            piece = super().take(size)
            self.pieces.append(piece)
        piece.is_free = False
        return piece

    def free(self, piece: _MemoryPiece) -> None:
        piece.is_free = True


def communicators(run: PlannedRun) -> list[Communicator]:
    """The communicators in which a rank has collectives: of all ranks, of those that hold the same experts, of an ep
    group, and of those in which it exchanges tokens and heads."""
    s = run.setting
    is_hybrid = s.dense_shard == "hybrid" and s.ep_size > 1
    axes: dict[Axis, set[str]] = {
        "world": {"all-reduce"},
        "dp": {"all-gather"},
        "ep": {"all-to-all", "all-gather"} if is_hybrid else {"all-to-all"},
        "cp": {"all-to-all"},
    }
    in_layers: defaultdict[Axis, set[str]] = defaultdict(set)
    for each in run.measured.kinds:
        for span in (*each.forward, *each.backward):
            for stretch in span.stretches:
                in_layers[stretch.group].add(stretch.exchange)
    of_sequences: tuple[Axis, ...] = ("tp", "sequences")
    axes |= {axis: in_layers[axis] for axis in of_sequences if in_layers[axis]}
    if s.tp_size > 1:
        axes["dense of tp"] = {"all-gather"}
    if s.workload(run.model).ranks_per_node > 1:
        axes |= {"ep across nodes": {"all-to-all"}, "ep inside node": {"all-to-all"}}
    if s.pp_size > 1:
        axes["stage"] = {"all-gather"}
    groups = {str(axis): (len(s.group(axis)), kinds) for axis, kinds in axes.items()}
    if s.tp_size > 1:
        groups["dp (divided by tp)"] = s.ranks_per_stage // s.dense_ranks, {"all-reduce"}
    if s.pp_size > 1:
        # with a neighbour on either side
        groups |= {"pp (forward)": (3, {"send", "receive"}), "pp (backward)": (3, {"send", "receive"})}
    return [Communicator.of(name, ranks, kinds) for name, (ranks, kinds) in groups.items() if ranks > 1]


def _lasting_casts(run: PlannedRun) -> float:
    """Bytes of the weights that experts which are no FSDP unit keep in the compute dtype (see
    `moe.experts.bf16_copies`)."""
    if not run.setting.keeps_casts:
        return 0.0
    return float(sum(unit.cast for name, unit in run.units.items() if name.kind == "experts"))


def update_working(run: PlannedRun) -> float:
    """Bytes in use only during the update (see `UpdateTensors`)."""
    tensors = OPTIMIZERS.get(run.setting.optimizer).tensors
    number = float(tensors.on_gpu if run.setting.device == "cuda" else tensors.on_cpu)
    if run.setting.offload:
        return 0.0
    match tensors.as_large_as:
        case "parameter":
            return number * 4 * max((elements for elements, *_ in run.alike), default=0)
        case "parameters alike":
            sizes = ((elements * at_once, tensors.copied * (at_once > 1)) for elements, at_once, _ in run.alike)
            return 4 * max((size * (number + copied) for size, copied in sizes), default=0.0)
        case "stack":
            in_bytes = run.setting.compute_bytes
        case "stack in fp32":
            in_bytes = 4
    return number * in_bytes * max((each.elements for each in run.stacks if each.number), default=0)


def _said(act: Act) -> str:
    """What is computed, in words."""
    assert act.span is not None
    layer = "" if act.layer is None else f" of layer {act.layer}"
    return f"{'backward' if act.is_backward else 'forward'}{layer}, {act.span.when}"


def _name(name: Name) -> str:
    return {
        "root": "embedding and LM head",
        "layer": f"layer {name.layer}",
        "experts": f"layer {name.layer}'s experts",
        "region": "embedding or LM head" if name.layer < 0 else f"what tp divides in layer {name.layer}",
    }[name.kind]
