"""Which layers each stage of a pipeline has: by the seconds that each kind of layer takes by forecast, and by what
stages hold. Plans, dry runs and runs cut by this."""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import replace

from ....sharding.pipeline.balance import StageCosts, StageMemory, cut_stages
from ..memory import FRAGMENTATION
from .cost import MicroStep
from .hardware import Hardware
from .measured import MeasuredModel
from .peak_memory import Peak, largest, peaks
from .pipelines import held_by_stages, queued_bytes
from .step_order import Act, PlannedRun


def balanced(run: PlannedRun, hardware: Hardware, gpus_per_node: int, memory: float) -> tuple[PlannedRun, Peak]:
    """The run with its layers distributed over its stages, and its peak memory: the stage that takes longest takes as
    short as can be, among the cuts whose every stage fits. What was asked for stays.

    What a stage holds is a sum over its layers beside a part that is taken from the forecast of the cut by seconds
    alone: no more than the two cuts are forecast.

    Args:
        memory: bytes that a rank may hold. Of a CPU, whose free memory is another at every start, none is too much: a
            run that resumes has the stages that it had.

    Raises:
        ExpertMeshError: the model cannot be cut into so many stages.
    """
    s = run.setting
    if s.pp_size == 1 or s.stage_layers is not None:
        return run, largest([held for _, held in peaks(run)])
    seconds = _seconds(run, hardware, gpus_per_node)
    by_time = _cut(run, seconds)
    found = peaks(by_time)
    held = largest([each for _, each in found])
    if held.memory.total <= memory or s.device == "cpu":
        return by_time, held
    by_memory = _cut(run, seconds, _memory(by_time, dict(found), memory))
    if by_memory.setting == by_time.setting:
        return by_time, held
    held_then = largest([each for _, each in peaks(by_memory)])
    return (by_memory, held_then) if held_then.memory.total < held.memory.total else (by_time, held)


def _cut(run: PlannedRun, seconds: StageCosts, memory: StageMemory | None = None) -> PlannedRun:
    assert run.cuts is not None
    stages = cut_stages(run.cuts, run.setting.pp_size, run.setting.chunks, None, seconds, memory)
    return replace(run, setting=replace(run.setting, stage_layers=tuple(map(len, stages))))


def _one_stage(run: PlannedRun) -> PlannedRun:
    """The run of all layers on the ranks of one pp index."""
    setting = replace(run.setting, world_size=run.setting.ranks_per_stage, pp_size=1, chunks=1, stage_layers=None)
    return replace(run, setting=setting, cuts=None, pp_rank=0)


_KNOWN: dict[Hashable, tuple[MeasuredModel, "_LayerSeconds"]] = {}
"""By what was measured, which lives as long as its number is a key, and by setting and hardware: a search has the same
layers in many pipelines."""


def _seconds(run: PlannedRun, hardware: Hardware, gpus_per_node: int) -> StageCosts:
    """Of forward and backward of a micro-batch. Layers of a kind take the mean of what they take among all others."""
    complete = _one_stage(run)
    # what waits for a bubble is computed all the same, and further micro-batches are like the second
    setting = replace(complete.setting, schedule="1f1b", accumulation=min(run.setting.accumulation, 2))
    key = id(run.measured), setting, hardware, gpus_per_node
    if key not in _KNOWN:
        _KNOWN[key] = run.measured, _LayerSeconds(replace(complete, setting=setting), hardware, gpus_per_node)
    step, kinds = _KNOWN[key][1], run.model.layers
    means = {
        kind: sum(step.spent[layer] for layer, other in enumerate(kinds) if other == kind) / kinds.count(kind)
        for kind in set(kinds)
    }
    number = run.setting.pp_size * run.setting.chunks
    first, last = (share * step.spent["root"] for share in _root_shares(run))
    return StageCosts.alike(
        number, [means[kind] for kind in kinds], first + step.spent["before"], last + step.spent["after"]
    )


def _root_shares(run: PlannedRun) -> tuple[float, float]:
    """Of the parameters that are in no layer, the part on the first stage, and the part on the last one."""
    assert run.cuts is not None
    sizes = [parameter.rows * parameter.row for parameter in run.model.root]
    places = list(zip(sizes, run.cuts.root_places, strict=True))
    after = run.cuts.num_layers
    last = sum(size for size, used in places if after in used)
    return sum(size for size, used in places if set(used) != {after}) / sum(sizes), last / sum(sizes)


class _LayerSeconds(MicroStep):
    """A step of all layers on one stage, with the seconds that each takes: of its kernels, and of what they wait for,
    the host too.

    spent: by layer; "before" and "after" them, what the first and the last stage alone compute; "root": what FSDP does
    with the parameters that are in no layer.
    """

    def __init__(self, run: PlannedRun, hardware: Hardware, gpus_per_node: int):
        self.spent: dict[Hashable, float] = defaultdict(float)
        super().__init__(run, 0, hardware, gpus_per_node)

    def do(self, act: Act) -> None:
        now = self.clock.now
        super().do(act)
        self.spent[self._where(act)] += self.clock.now - now

    def _where(self, act: Act) -> Hashable:
        around = self.run.measured.around
        if act.layer is not None:
            return act.layer
        if act.doing == "compute":
            # the forward before the layers is computed on all stages
            places = {"before": around.before_backward, None: around.before}
            return next((place for place, spans in places.items() if any(act.span is span for span in spans)), "after")
        return "root" if act.unit.layer < 0 else act.unit.layer


def _memory(run: PlannedRun, found: Mapping[int, Peak], limit: float) -> StageMemory:
    """What stages hold by their layers, so that those of `run` hold what was forecast of them. Of several stages on a
    rank each may hold as much.

    Args:
        found: the peaks of pp indices, of those like others of one.
        limit: of a rank.
    """
    pp_size, chunks = run.setting.pp_size, run.setting.chunks
    complete, kinds = _one_stage(run), run.model.layers
    queued = {kind: queued_bytes(complete, kinds.index(kind)) for kind in set(kinds)}
    kept = {(stage, kind): n for stage in range(pp_size * chunks) for kind, n in _kept(run, stage, queued).items()}
    lasting = _lasting(run)
    layers = [[lasting[kind] + kept[stage, kind] for kind in kinds] for stage in range(pp_size * chunks)]
    costs = StageCosts(layers, [0.0] * (pp_size * chunks))
    beside = []
    for stage in range(pp_size * chunks):
        like = _like(stage % pp_size, found, pp_size)
        own = sum(costs.of(other, run.all_stages[other]) for other in range(like, pp_size * chunks, pp_size))
        beside.append((found[like].memory.total - own) / chunks)
    return StageMemory(StageCosts(layers, beside), limit / chunks)


def _like(pp_rank: int, found: Mapping[int, Peak], pp_size: int) -> int:
    """The nearest pp index with a peak; the ends, which hold what is around the layers, are like no other."""
    ends = {0, pp_size - 1}
    return min(found, key=lambda other: ((other in ends) != (pp_rank in ends), abs(other - pp_rank)))


def _lasting(run: PlannedRun) -> dict[int, float]:
    """Bytes of a layer's parameters, gradients and optimizer state on a rank, by its kind."""
    units = _one_stage(run).units
    on_device = not run.setting.offload
    return {
        kind: on_device
        * sum(
            unit.stored - unit.in_host + unit.state + unit.gradient
            for name, unit in units.items()
            if name.layer == layer
        )
        for layer, kind in enumerate(run.model.layers)
    }


def _kept(run: PlannedRun, stage: int, queued: Mapping[int, float]) -> dict[int, float]:
    """Bytes that a layer keeps for backward on a stage, in all micro-batches that are in flight there at a time, and
    for its weight gradients; by its kind.

    Args:
        queued: bytes of these, of one micro-batch.
    """
    kept, moments = run.measured.kinds, held_by_stages(run.setting)[stage]
    return {
        kind: (1 + FRAGMENTATION) * max(in_flight * kept[kind].kept + waiting * each for in_flight, waiting in moments)
        for kind, each in queued.items()
    }
