"""How long a step takes.

Three things overlap, as on a GPU's streams: kernels, one after the other; all-to-alls, which kernels wait for where
their rows are needed; and FSDP's gathering and reducing, each slower than alone while others run beside it. A layer's
kernels wait until its parameters are gathered, and until the host has called them; where the host has to know how many
rows come to a layer's experts, it waits for the kernels.

In a pipeline that is done for each stage, and its schedule run with the seconds of their forwards and backwards: a rank
waits for the others.

Left out: stragglers, data loading, and in a pipeline that different collectives meet on a link.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ....sharding.pipeline.timeline import Costs
from ....sharding.topology import Axis
from ...config.optimizers import OPTIMIZERS
from ...model_setup.rates import MEMORY, Work
from .clock import Clock, StepTime, Transfer
from .hardware import Device, Hardware
from .measured import MeasuredRange, MeasuredSpan
from .pipelines import expert_spans, leaves_weights, pipeline_seconds
from .setting import Setting
from .step_order import Act, Name, PlannedRun
from .traffic import (
    all_gather,
    all_reduce,
    axis_of,
    ranks_a_node,
    reduce_scatter,
    share_away,
    sharing,
    stage_output,
)
from .units import Unit

UNIT_CALLS = {"gather": (6, 1), "use": (2, 2), "reduce": (7, 1)}
"""Operators that FSDP calls for a unit, and for each of its parameters, as counted in a rehearsal."""
SUMS = 3
"""All-reduces of a few numbers among all ranks in a step: of tokens, of the loss, of the gradient norm."""


def kernel_seconds(flops: float, moved: float, work: Work, hardware: Hardware) -> float:
    """Seconds of a kernel: of its matmuls or of its memory traffic, whichever is longer, and its launch."""
    device, rates = hardware.device, hardware.rates
    operator = work.operator if work.operator == "update" else "memory"
    memory = moved / (device.memory_bandwidth * rates.share(operator, max(moved, 1.0)))
    if flops == 0:
        return memory + rates.launch
    return max(flops / (best_rate(work.operator, device) * rates.share(*work)), memory) + rates.launch


def best_rate(operator: str, device: Device) -> float:
    """FLOPs per second of a class of kernels with matmuls, at best."""
    if operator == "grouped matmul fp8":
        return device.fp8
    return device.fp32 if operator in ("matmul fp32", "eigendecomposition") else device.matrix


def seconds_among(kind: str, sent: float, ranks: Sequence[int], hardware: Hardware, gpus_per_node: int) -> float:
    """Seconds of a collective in which each of `ranks` sends so many bytes: the slower of its links, and its messages'
    latencies: n - 1 in a ring inside a node; across nodes the number of nodes less one, beside those inside; an
    all-to-all sends all at once."""
    away = share_away(kind, ranks, gpus_per_node)
    inside, between, rates = hardware.inside, hardware.between, hardware.rates
    here = ranks_a_node(ranks, gpus_per_node)
    nodes = -(-len(ranks) // here)
    is_direct = kind in ("all-to-all", "send", "receive")
    share_inside = rates.share("all-to-all inside" if is_direct else "ring inside", here)
    share_between = rates.share("all-to-all between" if is_direct else "ring between", nodes)
    transfer = max(
        sent * (1 - away) / (inside.bandwidth * share_inside), sent * away / (between.bandwidth * share_between)
    )
    if kind in ("all-to-all", "send"):
        return transfer + (between.latency if away > 0 else inside.latency)
    rounds = 2 if kind == "all-reduce" else 1
    return transfer + rounds * ((here - 1) * inside.latency + (nodes - 1) * between.latency)


def step_time(run: PlannedRun, hardware: Hardware, gpus_per_node: int) -> StepTime:
    """Seconds of a step, in a pipeline of the rank that computes most. hardware: from `products_in`."""
    return step_times([run], hardware, gpus_per_node)[0]


def step_times(runs: "Sequence[PlannedRun]", hardware: Hardware, gpus_per_node: int) -> list[StepTime]:
    """The same of several runs, which takes less than one after another: stages that are alike take as long in all of
    them, and pipelines of one schedule are run together."""
    known: dict[Hashable, MicroStep] = {}
    stages = [_stage_times(run, hardware, gpus_per_node, known) for run in runs]
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        s = run.setting
        alike[s.schedule, s.pp_size, s.chunks, s.accumulation].append(number)
    seconds = [0.0] * len(runs)
    for numbers in alike.values():
        setting = runs[numbers[0]].setting
        if setting.pp_size > 1:
            costs = [_costs(runs[number], stages[number], hardware, gpus_per_node) for number in numbers]
            for number, found in zip(numbers, pipeline_seconds(setting, costs), strict=True):
                seconds[number] = found
    return [_together(*each, hardware, gpus_per_node) for each in zip(runs, stages, seconds, strict=True)]


def _together(
    run: PlannedRun, stages: "Sequence[MicroStep]", seconds: float, hardware: Hardware, gpus_per_node: int
) -> StepTime:
    """The time of the rank that computes most, with what it waits for others: until the pipeline's `seconds` are
    over."""
    ranks = _rank_times(run, stages, hardware)
    slowest = max(range(len(ranks)), key=lambda pp_rank: ranks[pp_rank].total)
    time, update = ranks[slowest], max(each.update for each in ranks)
    bubble = max(0.0, seconds - (time.total - time.update)) if run.setting.pp_size > 1 else 0.0
    world = run.setting.group("world")
    sums = SUMS * seconds_among("all-reduce", 0.0, world, hardware, gpus_per_node) if len(world) > 1 else 0.0
    sums += _sharing_seconds(run, hardware, gpus_per_node)
    return replace(time, all_to_alls=time.all_to_alls + sums, update=update, bubble=bubble)


def _rank_times(run: PlannedRun, stages: "Sequence[MicroStep]", hardware: Hardware) -> list[StepTime]:
    """Of each pp index. Those with the same stages take as long."""
    found: dict[Hashable, StepTime] = {}
    ranks = []
    for each in run.by_pp_rank:
        own = [stages[stage] for stage in each.stages]
        key = tuple(map(id, own))
        if key not in found:
            found[key] = _rank_time(each, own, hardware)
        ranks.append(found[key])
    return ranks


def _rank_time(run: PlannedRun, stages: "Sequence[MicroStep]", hardware: Hardware) -> StepTime:
    """Seconds of a step of one rank without what it waits for others."""
    often = run.setting.accumulation
    update_calls = _update_calls(run)
    call = hardware.rates.call
    host = call * (often * sum(stage.calls for stage in stages) + update_calls)
    time = StepTime.of([(often, stage.clock) for stage in stages], host)
    update = max(_update_seconds(run, hardware, update_calls), call * update_calls)
    return replace(time, update=update + _rounding_seconds(run, hardware))


def _stage_times(
    run: PlannedRun, hardware: Hardware, gpus_per_node: int, known: "dict[Hashable, MicroStep]"
) -> "list[MicroStep]":
    """Forward and backward of one micro-batch, of every stage.

    Args:
        known: stages of any runs, by what their time depends on.
    """
    s = run.setting
    # whatever the pipeline, as long as what is computed is the same; further micro-batches are like the second
    alike = replace(
        s,
        world_size=s.ranks_per_stage,
        pp_size=1,
        chunks=1,
        stage_layers=None,
        schedule="zero-bubble" if leaves_weights(run) else "1f1b",
        accumulation=min(s.accumulation, 2),
    )
    of_run = id(run.measured), alike
    stages = []
    for number, layers in enumerate(run.all_stages):
        each = run.by_pp_rank[number % s.pp_size]
        ends = number == 0, number == len(run.all_stages) - 1
        key = of_run, tuple(run.model.layers[layer] for layer in layers), ends, each.root_numbers
        if key not in known:
            known[key] = MicroStep(each, number, hardware, gpus_per_node)
        stages.append(known[key])
    return stages


def _costs(run: PlannedRun, stages: "Sequence[MicroStep]", hardware: Hardware, gpus_per_node: int) -> Costs:
    """What the timeline of a pipeline's schedule takes of each stage."""
    ranks = run.setting.group("pp")
    send = seconds_among("send", stage_output(run), ranks, hardware, gpus_per_node)
    weights = [stage.weights for stage in stages]
    return Costs(
        [stage.forward for stage in stages],
        [stage.backward - later for stage, later in zip(stages, weights, strict=True)],
        weights,
        send,
    )


def _sharing_seconds(run: PlannedRun, hardware: Hardware, gpus_per_node: int) -> float:
    """Of adding up the gradients of parameters of which several pp indices have a copy."""
    sent = sum(traffic.total for traffic in sharing(run))
    ranks = run.setting.group("pp")
    return seconds_among("all-reduce", sent, ranks, hardware, gpus_per_node) if sent else 0.0


@dataclass(frozen=True)
class _StretchTime:
    """What a stretch takes: calls of the host; seconds of kernels with matmuls, of all others, and of its
    all-to-all."""

    stretch: MeasuredRange
    calls: float
    products: float
    others: float
    exchange: float


_SPANS: dict[Hashable, tuple[object, list[_StretchTime]]] = {}
"""By numbers of the span and of the hardware, which live as long as these are keys."""


class MicroStep:
    """Forward and backward of one micro-batch of a stage on the clock.

    Attributes:
        forward, backward: seconds of each, in all. weights: the part of `backward` that a schedule may leave for later.
    """

    def __init__(self, run: PlannedRun, stage: int, hardware: Hardware, gpus_per_node: int):
        self.run, self.stage = run, stage
        self.hardware = hardware
        self.gpus_per_node = gpus_per_node
        self.clock = Clock(hardware.rates)
        self.calls = 0.0
        self.done: dict[Name, Transfer] = {}
        forward, backward = run.acts_of(stage)
        for act in forward:
            self.do(act)
        self.forward = self.clock.now
        for act in backward:
            self.do(act)
        self.backward = self.clock.now - self.forward

    @cached_property
    def weights(self) -> float:
        """A matmul for a weight's gradient has the FLOPs of its forward."""
        if not leaves_weights(self.run):
            return 0.0
        spans = (span for layer in self.run.all_stages[self.stage] for span in expert_spans(self.run, layer))
        return sum(each.products for span in spans for each in self._known(span))

    def do(self, act: Act) -> None:
        unit = self.run.units[act.unit]
        each, a_parameter = UNIT_CALLS.get(act.doing, (0, 0))
        self._call(each + a_parameter * unit.num_parameters)
        match act.doing:
            case "compute":
                self._compute(act)
            case "gather":
                # cast to the compute dtype, then put at their place in the buffer
                self._move(unit.stored + 3 * unit.computed if unit.ranks > 1 else 0)
                if unit.in_host:
                    # first copied to the GPU; it begins to gather once it has all of it
                    self.clock.shard(unit.in_host / self.hardware.device.host_bandwidth)
                sent = all_gather(unit)
                self.done[act.unit] = self._shard("all-gather", sent, act.unit, unit.ranks)
            case "use":
                self.clock.until(self.done.pop(act.unit))
                self._move(2 * unit.gathered if unit.ranks > 1 else unit.stored + unit.computed)
            case "reduce":
                c = self.run.setting.compute_bytes
                self._move(unit.trained * unit.ranks * (c + 4))
                self._reduce_scatter(act.unit, unit)
                if unit.replicas > 1:
                    self._shard("all-reduce", all_reduce(unit.replicas, 4 * unit.trained), None, unit.replicas)
                if self.run.setting.accumulation > 1:
                    self._call(unit.num_trained)
                    self._move(3 * unit.gradient)
            case "end":
                self.clock.end()

    def _call(self, operators: float) -> None:
        self.calls += operators
        self.clock.call(operators * self.hardware.rates.call)

    def _compute(self, act: Act) -> None:
        assert act.span is not None
        for each in self._known(act.span):
            self._call(each.calls)
            self.clock.kernel(each.products + each.others, matrices=each.products)
            self.clock.launch()
            stretch = each.stretch
            if stretch.then == "send":
                self.clock.send(stretch.group, each.exchange)
            elif stretch.then == "arrive":
                self.clock.arrive(stretch.group)
            elif stretch.then == "exchange" and stretch.exchange in ("all-gather", "reduce-scatter"):
                self.clock.gather(each.exchange)
            elif stretch.then == "exchange":
                self.clock.wait(each.exchange)
            if stretch.is_read:
                self.clock.read()

    def _known(self, span: MeasuredSpan) -> "list[_StretchTime]":
        """What the stretches of a span take, which many layers and many layouts have in common."""
        s = self.run.setting
        key = id(span), id(self.hardware), self.gpus_per_node, s.ranks_of_ep
        if key not in _SPANS:
            _SPANS[key] = (span, self.hardware), self._timed(span)
        return _SPANS[key][1]

    def _timed(self, span: MeasuredSpan) -> "list[_StretchTime]":
        # the host's calls are counted for all stretches together: as many for each kernel
        kernels = [1 + sum(times for *_, times in stretch.kernels) for stretch in span.stretches]
        return [
            _StretchTime(
                stretch,
                span.calls * number / sum(kernels),
                *self._seconds(stretch),
                self._among(stretch.exchange, stretch.sent, stretch.group)
                if stretch.then in ("send", "exchange")
                else 0.0,
            )
            for stretch, number in zip(span.stretches, kernels, strict=True)
        ]

    def _seconds(self, stretch: MeasuredRange) -> tuple[float, float]:
        """Returns the seconds of kernels with matmuls, and of all others."""
        products = others = 0.0
        for flops, moved, work, times in stretch.kernels:
            seconds = times * kernel_seconds(flops, moved, work, self.hardware)
            products, others = products + seconds * (flops > 0), others + seconds * (flops == 0)
        return products, others

    def _move(self, moved: float) -> None:
        if moved:
            self.clock.launch()
            self.clock.kernel(kernel_seconds(0.0, moved, MEMORY, self.hardware))

    def _reduce_scatter(self, name: Name, unit: Unit) -> None:
        if unit.ranks > 1 and name.kind == "experts" and leaves_weights(self.run):
            # what is left for later overlaps with nothing (see `sharding.parallelize.weight_gradients`)
            self.clock.wait(self._among("reduce-scatter", reduce_scatter(unit), "dp"))
        else:
            self._shard("reduce-scatter", reduce_scatter(unit), name, unit.ranks)

    def _shard(self, kind: str, sent: float, name: Name | None, ranks: int) -> Transfer:
        if ranks == 1 or sent == 0:
            return self.clock.shard(0.0)
        axis: Axis = "dp" if name is None else axis_of(name)
        return self.clock.shard(self._among(kind, sent, axis))

    def _among(self, kind: str, sent: float, axis: Axis) -> float:
        ranks = self.run.setting.group(axis)
        return seconds_among(kind, sent, ranks, self.hardware, self.gpus_per_node)


def tokens_per_second(setting: Setting, seconds: float) -> float:
    """Tokens per second of one rank; the pp indices share theirs."""
    return setting.tokens * setting.accumulation / seconds / setting.pp_size


def model_flops(run: PlannedRun) -> float:
    """Operations of the forward and backward of the mean rank that the model needs: without recomputation, as measured,
    where experts' are those of the rank with most rows."""
    kinds, root, s = run.measured.kinds, run.measured.root, run.setting
    mean = s.tokens * run.model.top_k / s.rows_received(run.model.num_experts, run.model.top_k)
    needed = sum(
        span.needed * (mean if span.mark == "use experts" else 1.0)
        for each in (root, *(kinds[kind] for kind in run.model.layers))
        for span in each.forward + each.backward
    )
    return needed / s.pp_size


def update_moved(run: PlannedRun) -> float:
    """Bytes that an update reads and writes: the norm reads gradients, clipping reads and writes them, by itself or in
    the optimizer's kernel; the optimizer reads them, and reads and writes parameters and state."""
    units = run.units.values()
    gradients, state = sum(unit.gradient for unit in units), sum(unit.state for unit in units)
    s = run.setting
    clips = OPTIMIZERS.get(s.optimizer).clips and s.device == "cuda" and not s.offload
    # a trained parameter has its gradient's dtype
    return (3 if clips else 4) * gradients + 2 * gradients + 2 * state


def _update_seconds(run: PlannedRun, hardware: Hardware, kernels: float) -> float:
    """Optimizers of matrices compute with these besides."""
    moved = update_moved(run)
    bandwidth = hardware.device.memory_bandwidth * hardware.rates.share("update", moved)
    products = sum(
        times * flops / (best_rate(work.operator, hardware.device) * hardware.rates.share(*work))
        for flops, work, times in update_kernels(run)
    )
    return moved / bandwidth + products + kernels * hardware.rates.launch


def _rounding_seconds(run: PlannedRun, hardware: Hardware) -> float:
    """Of rounding experts' weights that are kept in the compute dtype: once after each update."""
    if not run.setting.keeps_casts:
        return 0.0
    experts = (each for name, each in run.units.items() if name.kind == "experts" and each.cast)
    return sum(
        each.num_parameters * kernel_seconds(0.0, (each.stored + each.cast) / each.num_parameters, MEMORY, hardware)
        for each in experts
    )


def update_kernels(run: PlannedRun) -> list[tuple[float, Work, float]]:
    """What an optimizer of matrices computes with them in a step: FLOPs, class and size, and how often; of a group's
    first rank. Eigendecompositions of a stack are made one after the other."""
    return [
        (
            each.size * flops,
            work if work.operator == "eigendecomposition" else work._replace(size=each.size * flops),
            often,
        )
        for each in run.stacks
        for flops, work, times in each.kernels
        for often in (each.blocks / each.size * times,)
        if often
    ]


def _update_calls(run: PlannedRun) -> float:
    """Operators of the optimizer's step; those of clipping, for all parameters together, are few."""
    calls = OPTIMIZERS.get(run.setting.optimizer).calls
    blocks = sum(
        calls.run * each.runs + (calls.lot + calls.exchange * each.is_exchanged) * each.number for each in run.stacks
    )
    blocks += sum(calls.alike * updates for _, _, updates in run.alike)
    return calls.parameter * sum(unit.num_trained for unit in run.units.values()) + blocks
