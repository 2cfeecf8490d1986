"""A pipeline's step: which layers each stage has, how long its schedule takes, and what its ranks hold. First by the
step of one stage of all layers, which many pipelines have in common; then by dry runs of a few of its ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import get_args

from ....sharding.pipeline.balance import StageCosts, StageMemory, cut_stages
from ....sharding.pipeline.schedule import Kind, ScheduleName, make_schedule
from ....sharding.pipeline.timeline import Costs, Timetable
from ..memory import FRAGMENTATION, LASTING, NEAR, Memory
from .account import Account, LayerCosts, action_name
from .asked import Asked
from .costs import seconds_among
from .facts import Cuts, Held, ModelFacts, lasting_on_rank
from .forecasts import Forecasts

STEADY = 3
"""After so many rounds, of as many micro-batches as there are pp indices, each takes as long as the one before."""


def one_stage(asked: Asked) -> Asked:
    """The step of all layers on the ranks of one pp index."""
    config = asked.config
    stage = replace(
        config,
        pp_size=1,
        pipeline_chunks=1,
        pipeline_schedule=None,
        pipeline_layers=None,
        global_batch_size=None,
        gradient_accumulation_steps=min(2, config.micro_batches(asked.world_size)),
    )
    ranks = asked.world_size // config.pp_size
    return replace(asked, config=stage, world_size=ranks, rank=asked.routing.loaded)


@dataclass(frozen=True)
class PlannedPipeline:
    """A pipeline's step.

    Attributes:
        asked: of any of its ranks, with its schedule; layers may be left open.
        facts, cuts: of the model. whole: the step of `one_stage`.
        longer: by how much actions of a kind take longer in a dry run of a pipeline than the layers' sum: nothing was
            gathered before a stage begins, and what it reduces last is waited for.
    """

    asked: Asked
    facts: ModelFacts
    cuts: Cuts
    whole: Account
    longer: Mapping[Kind, float] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        """Bytes that a rank is to hold at the most."""
        return NEAR * self.asked.cluster.memory

    @property
    def pp_size(self) -> int:
        return self.asked.config.pp_size

    @property
    def number(self) -> int:
        """Of stages."""
        return self.pp_size * self.asked.config.pipeline_chunks

    @property
    def leaves_weights(self) -> bool:
        """Whether the experts' weight gradients are computed later than the other ones."""
        return self.asked.config.schedule_name == "zero-bubble" and can_leave_weights(self.facts)

    @cached_property
    def of_kinds(self) -> list[LayerCosts]:
        """Costs of each kind of layer. Of what its experts' products read and write, weights wait for nothing."""
        found = []
        for kind, facts in enumerate(self.facts.kinds):
            costs, weights = self.whole.layer_costs[str(kind)], facts.experts.computed / self.asked.config.ep_size
            found.append(replace(costs, queued=self.leaves_weights * max(0.0, costs.queued - weights)))
        return found

    @property
    def around(self) -> tuple[LayerCosts, LayerCosts]:
        """What the first and the last stage take beside their layers."""
        costs, first, last = self.whole.layer_costs, self.facts.first.computed, self.facts.last.computed
        root = costs.get("root", LayerCosts())
        share = first / max(1, first + last)
        before, after = (costs.get(name, LayerCosts()) for name in ("before", "after"))
        return before + root * share, after + root * (1 - share)

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The layers of each stage: as asked for; else so that the stage that takes longest takes as short as can be,
        among the cuts whose every stage fits by estimate.

        Raises:
            ExpertMeshError: the model cannot be cut into so many stages.
        """
        config, chunks = self.asked.config, self.asked.config.pipeline_chunks
        first, last = self.around
        each = [self.of_kinds[kind] for kind in self.facts.layers]
        seconds = StageCosts.alike(self.number, [one.seconds for one in each], first.seconds, last.seconds)
        by_time = cut_stages(self.cuts, self.pp_size, chunks, config.layers_of_stages, seconds)
        if config.layers_of_stages is not None or max(held.total for held in self.held(by_time)) <= self.limit:
            return by_time
        by_memory = cut_stages(self.cuts, self.pp_size, chunks, None, seconds, self._memory(by_time))
        return min((by_memory, by_time), key=lambda cut: max(held.total for held in self.held(cut)))

    def _memory(self, stages: tuple[range, ...]) -> StageMemory:
        """What stages hold by their layers: of several on a rank each may hold as much."""
        chunks, held, layers = self.asked.config.pipeline_chunks, self.held(stages), []
        for moments in _held_by_stages(*self._steady):
            of_kinds = [
                self._lasting(kind.dense, kind.experts)
                + (1 + FRAGMENTATION) * max(costs.held(*moment) for moment in moments)
                for kind, costs in zip(self.facts.kinds, self.of_kinds, strict=True)
            ]
            layers.append([of_kinds[kind] for kind in self.facts.layers])
        own, beside = StageCosts(layers, [0.0] * self.number), []
        for stage in range(self.number):
            rank = stage % self.pp_size
            on_rank = sum(own.of(other, stages[other]) for other in range(rank, self.number, self.pp_size))
            beside.append((held[rank].total - on_rank) / chunks)
        return StageMemory(StageCosts(layers, beside), self.limit / chunks)

    def _lasting(self, dense: Held, experts: Held) -> float:
        """Bytes on a rank of what lasts."""
        if self.asked.config.offload:
            return 0.0
        return lasting_on_rank(dense, experts, self.asked.topology)

    @property
    def _steady(self) -> tuple[ScheduleName, int, int, int]:
        """A schedule of a few rounds, that has all that the complete one has at once."""
        config = self.asked.config
        micro_batches = min(config.micro_batches(self.asked.world_size), STEADY * self.pp_size)
        return config.schedule_name, self.pp_size, config.pipeline_chunks, micro_batches

    def held(self, stages: tuple[range, ...]) -> list[Memory]:
        """What the ranks of each pp index hold at their peak, by estimate: what lasts of their layers, what these keep
        of all micro-batches on the way, and what one stage of all layers has at its peak beside that."""
        whole, facts = self.whole.memory.kinds, self.facts
        of_model = self._lasting(facts.dense, facts.experts)
        moments = _held_by_stages(*self._steady)
        # experts that are not gathered keep their weights in the compute dtype, each layer and micro-batch its own
        keeps_casts = self.asked.topology.dp_size == 1 and not self.asked.config.offload_experts
        found = []
        for rank in range(self.pp_size):
            own = range(rank, self.number, self.pp_size)
            layers = [layer for stage in own for layer in stages[stage]]
            kinds = [facts.kinds[facts.layers[layer]] for layer in layers]
            dense = sum((kind.dense for kind in kinds), Held())
            dense += (facts.first if 0 in own else Held()) + (facts.last if self.number - 1 in own else Held())
            share = self._lasting(dense, sum((kind.experts for kind in kinds), Held())) / of_model if of_model else 0.0
            each = [[self.of_kinds[facts.layers[layer]] for layer in stages[stage]] for stage in own]
            kept = sum(
                max(sum(costs.held(*moment) for costs in of_stage) for moment in moments[stage])
                for stage, of_stage in zip(own, each, strict=True)
            )
            around = self.around[1].kept if self.number - 1 in own else 0.0
            lasting = {term: share * getattr(whole, term) for term in LASTING}
            in_flight = max(moment[0] for stage in own for moment in moments[stage])
            gathered = whole.gathered * (in_flight * len(layers) / len(facts.layers) if keeps_casts else 1.0)
            found.append(replace(whole, **lasting, activations=kept + around, gathered=gathered))
        return found

    def seconds(self, stages: tuple[range, ...], run: Mapping[str, float] = MappingProxyType({})) -> float:
        """From the first forward of a step to the last backward. run: seconds of actions that were dry-run, by name.

        Of many rounds of micro-batches the later ones are alike: so many are left out, and added as often as there are.
        """
        config = self.asked.config
        pp_size, accumulation = self.pp_size, config.micro_batches(self.asked.world_size)
        costs = self._costs(stages, run)
        few = STEADY * pp_size + accumulation % pp_size
        name, chunks = config.schedule_name, config.pipeline_chunks
        if accumulation <= few + pp_size:
            (found,) = _timetable(name, pp_size, chunks, accumulation).seconds([costs])
            return found
        (first,), (second,) = (
            _timetable(name, pp_size, chunks, number).seconds([costs]) for number in (few, few + pp_size)
        )
        return first + (accumulation - few) // pp_size * (second - first)

    def _costs(self, stages: tuple[range, ...], run: Mapping[str, float] = MappingProxyType({})) -> Costs:
        config, cluster = self.asked.config, self.asked.cluster
        ends = self.around
        of_stages = []
        for stage, layers in enumerate(stages):
            costs = sum((self.of_kinds[self.facts.layers[layer]] for layer in layers), LayerCosts())
            costs += ends[0] if stage == 0 else LayerCosts()
            of_stages.append(costs + (ends[1] if stage == self.number - 1 else LayerCosts()))
        weights = [costs.weights * self.leaves_weights for costs in of_stages]
        tokens = config.per_device_train_batch_size * config.sequences_per_row * config.max_seq_length
        output = tokens // config.ranks_per_sequence * self.facts.width * (2 if config.bf16 else 4)
        ranks = self.asked.topology.group("pp", 0)
        seconds: dict[Kind, list[float]] = {
            "forward": [costs.forward for costs in of_stages],
            "backward": [costs.backward - later for costs, later in zip(of_stages, weights, strict=True)],
            "weights": weights,
        }
        return Costs(
            **{
                kind: [
                    run.get(action_name(kind, stage), self.longer.get(kind, 1.0) * each)
                    for stage, each in enumerate(of_kind)
                ]
                for kind, of_kind in seconds.items()
            },
            send=seconds_among("send", output, ranks, cluster.hardware, cluster.gpus_per_node),
        )

    def rehearsed(self) -> list[Asked]:
        """The ranks that are dry-run, of which one holds the most: those of the ends, and that which does by
        estimate."""
        stages = self.stages
        held = [each.total for each in self.held(stages)]
        config = replace(self.asked.config, pipeline_layers=",".join(str(len(each)) for each in stages))
        indices = sorted({0, held.index(max(held)), self.pp_size - 1})
        loaded, ranks = self.asked.routing.loaded, self.asked.topology.ranks_per_stage
        return [replace(self.asked, config=config, rank=index * ranks + loaded) for index in indices]

    def by_dry_runs(self, accounts: Sequence[Account]) -> tuple[Account, "PlannedPipeline"]:
        """The account of the rank that holds the most, whose time is that of the pipeline; and the step with what its
        actions take longer.

        Args:
            accounts: of `rehearsed`.
        """
        by_layers = replace(self, longer={})._costs(self.stages)
        estimated = {
            action_name(kind, stage): seconds
            for kind in _KINDS
            for stage, seconds in enumerate(getattr(by_layers, kind))
        }
        shown = accounts[0].actions
        longer: dict[Kind, float] = {}
        for kind in _KINDS:
            names = [name for name in shown if name.startswith(kind) and estimated[name]]
            if names:
                longer[kind] = sum(shown[name] for name in names) / sum(estimated[name] for name in names)
        step = replace(self, longer=longer)
        run = {name: seconds for account in accounts for name, seconds in account.actions.items()}
        seconds = step.seconds(step.stages, run)
        busiest = max(accounts, key=lambda account: sum(account.actions.values()))
        waited = seconds - busiest.forwards * sum(busiest.actions.values())
        update = max(account.time.update for account in accounts)
        fullest = max(accounts, key=lambda account: account.memory.peak)
        time = replace(busiest.time, update=update, bubble=max(0.0, waited))
        return replace(fullest, time=time, needed=self.account().needed), step

    def account(self) -> Account:
        """The account of the rank that holds the most, by estimate; its time is that of the pipeline."""
        stages = self.stages
        held = self.held(stages)
        rank = max(range(self.pp_size), key=lambda rank: held[rank].total)
        whole, micro_batches = self.whole, self.asked.config.micro_batches(self.asked.world_size)
        layers = sum(len(stages[stage]) for stage in range(rank, self.number, self.pp_size))
        share = layers / len(self.facts.layers)
        often = share * micro_batches / whole.forwards
        time = whole.time * often
        time = replace(time, update=whole.time.update * share)
        seconds = self.seconds(stages)
        return replace(
            whole,
            rank=rank * self.asked.topology.ranks_per_stage,
            forwards=micro_batches,
            layers=(layers, len(self.facts.layers)),
            stages=",".join(str(len(each)) for each in stages),
            memory=replace(whole.memory, peak=round(held[rank].total), kinds=held[rank]),
            sent=tuple(
                replace(each, times=round(each.times * often), total=each.total * often, between=each.between * often)
                for each in whole.sent
            ),
            time=replace(time, bubble=max(0.0, seconds - (time.total - time.update))),
            needed=whole.needed / self.pp_size * micro_batches / whole.forwards,
        )


_KINDS: tuple[Kind, ...] = get_args(Kind)


def can_leave_weights(facts: ModelFacts) -> bool:
    """Whether all experts are trained, so that their weight gradients can wait."""
    return all(kind.experts.gradient == kind.experts.stored for kind in facts.kinds)


@cache
def _timetable(name: ScheduleName, pp_size: int, chunks: int, micro_batches: int) -> Timetable:
    return Timetable(make_schedule(name, pp_size, chunks, micro_batches))


@cache
def _held_by_stages(name: ScheduleName, pp_size: int, chunks: int, micro_batches: int) -> list[list[tuple[int, int]]]:
    """Of each stage, how many micro-batches are in flight, and of how many the weight gradients wait, at any moment."""
    is_split = name == "zero-bubble"
    found: list[set[tuple[int, int]]] = [set() for _ in range(pp_size * chunks)]
    for actions in make_schedule(name, pp_size, chunks, micro_batches):
        now = dict.fromkeys((action.stage for action in actions), (0, 0))
        for action in actions:
            in_flight, waiting = now[action.stage]
            in_flight += {"forward": 1, "backward": -1, "weights": 0}[action.kind]
            waiting += is_split * {"forward": 0, "backward": 1, "weights": -1}[action.kind]
            now[action.stage] = in_flight, waiting
            found[action.stage].add((in_flight, waiting))
    return [sorted(moments) for moments in found]


def pipelined(
    forecasts: Forecasts, asked: Asked, longer: Mapping[Kind, float] = MappingProxyType({})
) -> PlannedPipeline:
    """
    Raises:
        ExpertMeshError: the model cannot be cut, or not compute this.
    """
    config = asked.config
    return PlannedPipeline(
        asked, forecasts.facts(config), forecasts.cuts(config), forecasts.account(one_stage(asked)), longer
    )


def dry_run_pipeline(forecasts: Forecasts, step: PlannedPipeline) -> tuple[Account, PlannedPipeline]:
    """`PlannedPipeline.by_dry_runs`, with these.

    Raises:
        ExpertMeshError: a dry run has failed.
    """
    return step.by_dry_runs(forecasts.all_accounts(step.rehearsed()))
