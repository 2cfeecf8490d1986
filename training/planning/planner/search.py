"""Every way to run a model on a number of GPUs: which of them are tried, by estimates that what was tried corrects, and
what these take, best first."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from math import log
from typing import Any, get_args

from ....moe.util.errors import ExpertMeshError
from ....sharding.parallelize.choices import Checkpointing
from ....sharding.pipeline.schedule import (
    Kind,
    ScheduleName,
    make_schedule,
    peak_in_flight,
    schedule_without_queue,
)
from ....sharding.topology import DenseShard, Topology, divisors
from ...config.train_config import TrainConfig
from ..imbalance import EVEN, GivenRouting
from ..memory import LASTING, Fit, Memory
from .account import Account
from .asked import Asked, Tried
from .costs import Cluster, seconds_among
from .facts import ModelFacts, lasting_on_rank
from .forecasts import Forecasts
from .pipelines import STEADY, PlannedPipeline, can_leave_weights, dry_run_pipeline, one_stage, pipelined

TP_SIZES = (2, 4, 8)
"""Ranks of a tensor-parallel group that are tried beside none, where no size is given."""
CHUNKS = (1, 2, 4)
"""Stages of a pp index that are tried."""
MOST_PP_RANKS = 32
"""More are tried only when told."""
ROUNDS, AT_ONCE = 5, 4
"""So many times are the most promising layouts dry-run, so many at a time."""
SURE = 1.05
"""An estimate of memory may be so far off, and a layout is tried all the same."""
NEARLY = 0.97
"""An estimate of speed may be so far below the best's, and a layout is tried beside it."""
PIPELINES = 4
"""So often ranks of a pipeline are dry-run that would be the best by estimate."""


@dataclass(frozen=True)
class Plan:
    """A run with its forecast.

    Attributes:
        config: of the run. account: of the rank that holds the most. facts: of the model.
        pipeline: whose account it is, if it is one. is_estimate: whether none of the pipeline's ranks was dry-run.
    """

    config: TrainConfig
    world_size: int
    cluster: Cluster
    account: Account
    facts: ModelFacts
    pipeline: PlannedPipeline | None = None
    is_estimate: bool = False

    @property
    def topology(self) -> Topology:
        return self.config.topology(self.world_size)

    @cached_property
    def fit(self) -> Fit:
        return self.account.fit(self.cluster.memory)

    @cached_property
    def memory(self) -> Memory:
        """On the GPU."""
        return self.account.on_card(self.cluster.memory)

    @property
    def fits(self) -> bool:
        return self.fit.is_enough

    @property
    def seconds(self) -> float:
        return self.account.time.total

    @property
    def inside(self) -> float:
        """Bytes that a rank sends in a step inside its node."""
        return sum(each.total - each.between for each in self.account.sent)

    @property
    def between(self) -> float:
        """Bytes that it sends to other nodes."""
        return sum(each.between for each in self.account.sent)

    @property
    def tokens(self) -> int:
        """Of a rank's micro-batch; the pp indices share theirs."""
        config = self.config
        sequences = config.per_device_train_batch_size * config.sequences_per_row
        return sequences * config.max_seq_length // config.ranks_per_sequence

    @property
    def tokens_per_second(self) -> float:
        """Of one rank."""
        return self.tokens * self.account.forwards / self.seconds / self.config.pp_size

    @property
    def share_of_peak(self) -> float:
        """The model's FLOPs over those of the card in the time of the step: MFU."""
        return self.account.needed / (self.seconds * self.cluster.hardware.device.matrix)

    def if_longer(self, longer: Mapping[Kind, float]) -> "Plan":
        """The same where a pipeline's actions take by so much longer (see `PlannedPipeline`)."""
        assert self.pipeline is not None
        pipeline = replace(self.pipeline, longer=longer)
        return replace(self, account=pipeline.account(), pipeline=pipeline)

    def as_json(self) -> dict[str, Any]:
        c = self.config
        memory = self.memory
        return {
            "pp": c.pp_size,
            "chunks": c.pipeline_chunks,
            "schedule": c.schedule_name,
            "stage_layers": c.layers_of_stages,
            "dp": self.topology.dp_size,
            "ep": c.ep_size,
            "cp": c.cp_size,
            "tp": c.tp_size,
            "dense_shard": c.dense_shard,
            "gradient_checkpointing": c.gradient_checkpointing,
            "micro_batch": c.per_device_train_batch_size,
            "accumulation": self.account.forwards,
            "fits": self.fits,
            "is_estimate": self.is_estimate,
            "memory": {**{name: round(n) for name, n in memory.terms().items()}, "total": round(memory.total)},
            "peak_at": self.account.memory.when,
            "bytes_a_step": {
                f"{s.kind}, {s.group}": {"times": s.times, "bytes": round(s.total)} for s in self.account.sent
            },
            "bytes_inside_node": round(self.inside),
            "bytes_between_nodes": round(self.between),
            "seconds": {**vars(self.account.time), "total": self.seconds},
            "model_flops": self.account.needed,
            "tokens_per_second_a_gpu": self.tokens_per_second,
        }


def layouts(
    facts: ModelFacts, base: TrainConfig, tried: Tried, world_size: int, gpus_per_node: int
) -> list[TrainConfig]:
    """All parallel layouts of so many ranks that this model can have. All-to-alls are cut into as many chunks as `base`
    says, or as a rank has experts. Left out are those whose micro-batches the global batch fills less than others'."""
    most, sizes = min(gpus_per_node, world_size), tried.tp_sizes
    if sizes is None:
        sizes = [1, *(size for size in TP_SIZES if most % size == 0 and 1 in tried.micro_batches)]
    found: list[TrainConfig] = []
    for tp_size in sizes:
        # with two sequences or more half as many ranks per group, or none, compute as many tokens each with fewer
        # exchanges
        own = replace(tried, micro_batches=(1,)) if tried.tp_sizes is None and tp_size > 1 else tried
        for pipeline in _pipelines(replace(base, tp_size=tp_size), facts, own, world_size):
            found += _layouts(pipeline, facts, own, world_size, gpus_per_node)
    if base.global_batch_size is None or not found:
        return found
    filled = [sequences_per_step(config, world_size) for config in found]
    return [config for config, number in zip(found, filled, strict=True) if number == min(filled)]


def _layouts(
    pipeline: TrainConfig, facts: ModelFacts, tried: Tried, world_size: int, gpus_per_node: int
) -> Iterator[TrainConfig]:
    ranks = world_size // pipeline.pp_size
    for ep_size in divisors(facts.num_experts) if tried.ep_size is None else [tried.ep_size]:
        if ranks % ep_size or ranks % pipeline.ranks_per_sequence:
            continue
        is_open = tried.pp_size is None and tried.ep_size is None
        if is_open and pipeline.pp_size > 1 and gpus_per_node < ep_size < ranks:
            # a pipeline is what spares the links between nodes, or lets an ep group be all of its stage
            continue
        chunks = 1 if ep_size == 1 else pipeline.overlap_chunks
        if tried.ep_size is None:
            chunks = min(chunks, facts.num_experts // ep_size)
        shards = _dense_shards(pipeline, ranks, ep_size, tried)
        ways = get_args(Checkpointing) if tried.checkpointing is None else [tried.checkpointing]
        for dense_shard, checkpointing, micro_batch in product(shards, ways, sorted(tried.micro_batches)):
            config = replace(
                pipeline,
                ep_size=ep_size,
                overlap_chunks=chunks,
                dense_shard=dense_shard,
                gradient_checkpointing=checkpointing,
                keep_expert_products=pipeline.keep_expert_products if checkpointing == "selective" else 0,
                offload_activations=pipeline.offload_activations and checkpointing != "none",
                per_device_train_batch_size=micro_batch,
            )
            if config.pp_size <= config.micro_batches(world_size) or tried.pp_size is not None:
                yield config


def _dense_shards(pipeline: TrainConfig, ranks: int, ep_size: int, tried: Tried) -> Iterable[DenseShard]:
    """The ways to shard non-expert parameters that are tried at an ep size."""
    can_be_hybrid = ep_size % pipeline.tp_size == 0
    if tried.dense_shard is not None:
        return [tried.dense_shard] if tried.dense_shard == "full" or can_be_hybrid else []
    # with one replica, or one rank a replica's shard, the two are the same or no sharding at all
    return get_args(DenseShard) if 1 < ep_size < ranks and can_be_hybrid else ["full"]


def _pipelines(base: TrainConfig, facts: ModelFacts, tried: Tried, world_size: int) -> Iterator[TrainConfig]:
    """The base with each pipeline that is tried."""
    is_pp_size_given = tried.pp_size is not None
    for pp_size in [tried.pp_size] if tried.pp_size is not None else divisors(world_size):
        if pp_size == 1:
            yield replace(base, pp_size=1, pipeline_chunks=1, pipeline_schedule=None, pipeline_layers=None)
            continue
        for chunks in CHUNKS if tried.chunks is None else [tried.chunks]:
            if not is_pp_size_given and (pp_size > MOST_PP_RANKS or pp_size * chunks > len(facts.layers)):
                continue
            if base.layers_of_stages is not None and len(base.layers_of_stages) != pp_size * chunks:
                continue
            for schedule in (schedule_without_queue(chunks), "zero-bubble"):
                if tried.schedule in (None, schedule) and (schedule != "zero-bubble" or can_leave_weights(facts)):
                    yield replace(base, pp_size=pp_size, pipeline_chunks=chunks, pipeline_schedule=schedule)


def sequences_per_step(config: TrainConfig, world_size: int) -> int:
    """Sequences that complete micro-batches have in a step, or pairs."""
    return config.micro_batches(world_size) * config.sequences_per_micro_batch(world_size)


@dataclass
class Search:
    """A search for the best of some layouts.

    Args:
        compared: tensor-parallel sizes of each of which a layout is dry-run, however slow it may be.
        keeps_products: whether the best layout may keep outputs of expert GEMMs, where nobody said in how many layers.

    Attributes:
        refused: why there is no plan of a tensor-parallel size.
    """

    forecasts: Forecasts
    facts: ModelFacts
    layouts: Sequence[TrainConfig]
    world_size: int
    cluster: Cluster
    routing: GivenRouting = EVEN
    compared: Sequence[int] = ()
    keeps_products: bool = False
    plans: list[Plan] = field(default_factory=list)
    refused: dict[int, ExpertMeshError] = field(default_factory=dict)
    _sizes: "dict[tuple[Any, ...], _Sizes]" = field(default_factory=dict)

    def asked(self, config: TrainConfig) -> Asked:
        """The question what a layout takes."""
        return Asked(config, self.world_size, self.cluster, 0, self.routing)

    def sizes(self, config: TrainConfig) -> "_Sizes":
        """What estimates take of a layout, reckoned once."""
        layout = tuple(getattr(config, name) for name in _OF_LAYOUT)
        if layout not in self._sizes:
            self._sizes[layout] = _Sizes(self, config)
        return self._sizes[layout]

    def smallest(self) -> TrainConfig:
        """The layout that holds least of what lasts."""
        return min(self.layouts, key=lambda config: estimate_lasting(self.facts, config, self.world_size))

    def run(self) -> list[Plan]:
        """Forecasts of the most promising layouts: those that fit first, by tokens per second, then the others by
        memory.

        First one layout of each way to recompute is dry-run; by what these take the others are estimated, and those
        tried that may be the fastest; each that was tried corrects the estimates of those like it. It ends when none
        that is left is estimated to be faster. Of pipelines one stage of all layers is run at first, and ranks of those
        that would be the best.

        Raises:
            ExpertMeshError: the model can be trained in none of those that were tried; says why not in the first.
        """
        left = list(self.layouts)
        self._try(self._first_of_each_way(left), left)
        self._try(self._largest_of_each_way(left), left)
        for _ in range(ROUNDS):
            promising = self._promising(left)
            if not promising:
                break
            self._try(promising[:AT_ONCE], left)
        self._try(self._beside_the_best(left), left)
        if self.keeps_products and self.plans:
            self._keep_products(best_first(self.plans)[0])
        runs = 0
        # while the best one is a pipeline's by estimate
        while runs < PIPELINES and self.plans and (best := best_first(self.plans)[0]).is_estimate:
            runs += self._dry_run(best)
            self._try(self._promising(left)[:AT_ONCE], left)
        if not self.plans:
            raise next(iter(self.refused.values()))
        return best_first(self.plans)

    def _dry_run(self, plan: Plan) -> bool:
        """Dry-run ranks of a pipeline; by as much as its step takes longer than was estimated those of others do.
        Returns whether they ran."""
        assert plan.pipeline is not None
        self.plans.remove(plan)
        try:
            account, pipeline = dry_run_pipeline(self.forecasts, plan.pipeline)
        except ExpertMeshError as error:
            self.refused.setdefault(plan.config.tp_size, error)
            return False
        now, then = account.time, replace(plan.pipeline, longer={}).account().time
        longer = dict.fromkeys(pipeline.longer, (now.total - now.update) / (then.total - then.update))
        self.plans = [each.if_longer(longer) if each.is_estimate else each for each in self.plans]
        self.plans.append(replace(plan, account=account, pipeline=pipeline, is_estimate=False))
        return True

    def _first_of_each_way(self, left: Sequence[TrainConfig]) -> list[TrainConfig]:
        """Of each way to recompute, the layout that holds least of what lasts, with one stage if there is one, and the
        smallest micro-batch."""
        found: dict[tuple[str, int], TrainConfig] = {}
        least = min((config.tp_size for config in left), default=1)

        def rank(config: TrainConfig) -> tuple[Any, ...]:
            own = estimate_lasting(self.facts, config, self.world_size)
            inside = config.ep_size <= self.cluster.gpus_per_node
            return config.pp_size, round(own), not inside, -config.ep_size, config.per_device_train_batch_size

        for config in sorted(left, key=rank):
            if config.tp_size == least or config.tp_size in self.compared:
                found.setdefault((config.gradient_checkpointing, config.tp_size), config)
        return list(found.values())

    def _largest_of_each_way(self, left: Sequence[TrainConfig]) -> list[TrainConfig]:
        """Of the layouts that were dry-run, each with the largest micro-batch that is estimated to fit: kernels are
        faster the more tokens they have."""
        found = []
        for plan in self.plans:
            alike = [config for config in left if _apart(plan.config, config) <= {"per_device_train_batch_size"}]
            fitting = [config for config in alike if Estimate.of(self, config).memory <= self.cluster.memory]
            found += [max(fitting, key=lambda config: config.per_device_train_batch_size)] if fitting else []
        return found

    def _beside_the_best(self, left: Sequence[TrainConfig]) -> list[TrainConfig]:
        """Those that differ from the best in the ep size or the micro-batch alone, by a factor of two, which are
        estimated to fit; in both, where they are estimated to be nearly as fast."""
        fitting = [plan for plan in self.plans if plan.fits]
        if not fitting:
            return []
        best = best_first(fitting)[0]
        found = []
        for config in left:
            apart = _apart(best.config, config)
            by_two = [getattr(config, name) / getattr(best.config, name) in (0.5, 2.0) for name in apart & _BY_TWO]
            if apart and apart <= _BY_TWO and all(by_two):
                estimate = Estimate.of(self, config)
                is_near = len(apart) == 1 or estimate.speed >= NEARLY * best.tokens_per_second
                found += [config] if is_near and estimate.memory <= SURE * self.cluster.memory else []
        return found

    def _keep_products(self, best: Plan) -> None:
        """In the place of the best layout, if it recomputes selectively and leaves memory: the same with the outputs of
        the first expert GEMMs kept in as many layers as fit, where that is faster."""
        config, most = best.config, self.facts.layers_with_experts
        if not best.fits or config.gradient_checkpointing != "selective" or config.pp_size > 1:
            return
        while most > 0:
            (found,) = forecast(self.forecasts, [self.asked(replace(config, keep_expert_products=most))])
            if isinstance(found, ExpertMeshError):
                return
            if found.fits:
                if found.tokens_per_second > best.tokens_per_second:
                    self.plans[self.plans.index(best)] = found
                return
            # each layer's are as large
            room = (self.cluster.memory - best.memory.total) / (found.memory.total - best.memory.total)
            most = min(most - 1, int(most * room))

    def _promising(self, left: Sequence[TrainConfig]) -> list[TrainConfig]:
        """Those that may be faster than the best that fits, or smaller than the smallest; most promising first."""
        if not self.plans:
            # with another tensor-parallel size the model may be trained
            return self._first_of_each_way([config for config in left if config.tp_size not in self.refused])
        estimates = [Estimate.of(self, config) for config in left]
        best = max((plan.tokens_per_second for plan in self.plans if plan.fits), default=0.0)

        def likely(each: Estimate) -> float:
            """The fastest first, those later whose memory may not suffice."""
            return -each.speed * (1.0 if each.memory <= self.cluster.memory else 0.5)

        fitting = [each for each in estimates if each.memory <= SURE * self.cluster.memory and each.speed > best]
        if fitting or best:
            return [each.config for each in sorted(fitting, key=likely)]
        smallest = min(plan.memory.total for plan in self.plans)
        smaller = [each for each in estimates if each.memory < smallest]
        return [each.config for each in sorted(smaller, key=lambda each: each.memory)]

    def _try(self, configs: Sequence[TrainConfig], left: list[TrainConfig]) -> None:
        pipelines = [each for each in configs if each.pp_size > 1]
        # of those that differ in nothing else the same is run
        alike = [other for other in left if any(_apart(each, other) <= _OF_SCHEDULE for each in pipelines)]
        configs = [*(each for each in configs if each.pp_size == 1), *alike]
        for config in configs:
            left.remove(config)
        asked = [self.asked(config) for config in configs]
        for each, found in zip(asked, forecast(self.forecasts, asked), strict=True):
            if isinstance(found, ExpertMeshError):
                self.refused.setdefault(each.config.tp_size, found)
                if "--tp-size" in str(found):
                    # what a size does not divide, its multiples do not either
                    left[:] = [other for other in left if other.tp_size % each.config.tp_size]
            else:
                self.plans.append(found)
                if not found.fits:
                    # larger micro-batches do not either
                    left[:] = [other for other in left if not _is_larger(other, found.config)]


def _is_larger(other: TrainConfig, config: TrainConfig) -> bool:
    """Whether two layouts differ in nothing but the micro-batch, which is larger in the first."""
    but = {name: getattr(config, name) for name in ("per_device_train_batch_size", "pipeline_layers")}
    is_it = other.per_device_train_batch_size > config.per_device_train_batch_size
    return is_it and vars(other) | but == vars(config)


def forecast(forecasts: Forecasts, asked: Sequence[Asked]) -> list[Plan | ExpertMeshError]:
    """What several settings take, and what refuses them; of a pipeline by estimate (see `pipelines`)."""
    needed = [one_stage(each) if each.config.pp_size > 1 else each for each in asked]
    # pipelines of other schedules have the same
    once = [each for number, each in enumerate(needed) if each not in needed[:number]]
    accounts = forecasts.accounts(once)
    return [_plan(forecasts, each, accounts[once.index(of)]) for each, of in zip(asked, needed, strict=True)]


def _plan(forecasts: Forecasts, asked: Asked, account: Account | ExpertMeshError) -> Plan | ExpertMeshError:
    if isinstance(account, ExpertMeshError):
        return account
    config, facts, pipeline = asked.config, forecasts.facts(asked.config), None
    if config.pp_size > 1:
        try:
            pipeline = pipelined(forecasts, asked)
            account = pipeline.account()
        except ExpertMeshError as error:
            return error
        config = replace(config, pipeline_layers=account.stages)
    return Plan(config, asked.world_size, asked.cluster, account, facts, pipeline, is_estimate=pipeline is not None)


def estimate_lasting(facts: ModelFacts, config: TrainConfig, world_size: int) -> float:
    """Bytes on a rank of what lasts."""
    return lasting_on_rank(facts.dense, facts.experts, config.topology(world_size)) / config.pp_size


@dataclass(frozen=True)
class Estimate:
    """What a layout may take, by the nearest that was dry-run. memory: bytes. speed: tokens a second of a rank."""

    config: TrainConfig
    memory: float
    speed: float

    @staticmethod
    def of(search: Search, config: TrainConfig) -> "Estimate":
        like = min(search.plans, key=lambda plan: _distance(plan.config, config))
        then, now = search.sizes(like.config), search.sizes(config)
        tokens, lasting = now.tokens / then.tokens, now.lasting / then.lasting
        memory, time, each = like.memory, like.account.time, 1 / like.account.forwards
        grown = replace(
            memory,
            **{term: getattr(memory, term) * lasting for term in LASTING},
            activations=memory.activations * tokens * now.in_flight / then.in_flight,
            gathered=memory.gathered * now.gathered / max(1.0, then.gathered),
            working=memory.working * tokens,
        )
        kernels = (time.matrices + time.elementwise + time.gathers) * each * (now.computed / then.computed)
        exchange = time.all_to_alls * each + now.exchange - then.exchange
        sharding = time.sharding * each + now.sharding - then.sharding
        # what is more to send is waited for, but for what more kernels hide
        hidden = max(0.0, kernels - time.kernels * each)
        as_much = min(1.0, sharding / (time.sharding * each)) if time.sharding else 1.0
        more = max(0.0, sharding - time.sharding * each)
        exposed = max(time.exposed * each * as_much + more - hidden, 0.1 * sharding)
        forwards = config.micro_batches(search.world_size)
        launching = time.launching * each * like.config.pp_size / config.pp_size
        busy = kernels + max(0.0, exchange) + max(0.0, exposed) + launching
        waited = time.total / (time.total - time.bubble) * now.bubble / then.bubble
        seconds = forwards * busy * waited + time.update * lasting
        # a step of one micro-batch has gradients of the layers alone whose activations are gone
        is_single = forwards == 1 and config.pp_size == 1
        never_at_once = min(grown.gradients, grown.activations) if is_single else 0.0
        return Estimate(config, grown.total - never_at_once, now.tokens * forwards / seconds / config.pp_size)


def _apart(one: TrainConfig, other: TrainConfig) -> set[str]:
    """The settings of the layout in which two differ."""
    return {name for name in _OF_LAYOUT if getattr(one, name) != getattr(other, name)}


def _distance(one: TrainConfig, other: TrainConfig) -> tuple[float, ...]:
    """How unlike two layouts are: what matters most comes first."""
    tokens = one.per_device_train_batch_size / other.per_device_train_batch_size
    return (
        one.gradient_checkpointing != other.gradient_checkpointing,
        one.tp_size != other.tp_size,
        (one.pp_size > 1) != (other.pp_size > 1),
        abs(log(tokens)),
        one.pp_size != other.pp_size,
        one.ep_size != other.ep_size,
        one.dense_shard != other.dense_shard,
        one.schedule_name != other.schedule_name,
        one.pipeline_chunks != other.pipeline_chunks,
    )


_OF_LAYOUT = (
    *("tp_size", "pp_size", "pipeline_chunks", "pipeline_schedule", "ep_size", "dense_shard"),
    *("gradient_checkpointing", "per_device_train_batch_size"),
)


_BY_TWO = {"ep_size", "per_device_train_batch_size"}
_OF_SCHEDULE = {"pipeline_chunks", "pipeline_schedule"}


class _Sizes:
    """What estimates take of a layout.

    tokens: of a rank's micro-batch. computed: the same, times its share of the model. lasting: bytes. in_flight: of
    micro-batches of all layers, on the first rank. gathered: bytes of two layers; of experts that are not gathered, of
    all that are in flight. exchange, sharding: seconds of a micro-batch's all-to-alls and of FSDP's collectives, alone.
    bubble: by how much a pipeline takes longer than its ranks compute.
    """

    def __init__(self, search: Search, config: TrainConfig):
        facts, cluster, layers = search.facts, search.cluster, len(search.facts.layers)
        topology, forwards = config.topology(search.world_size), config.micro_batches(search.world_size)
        stages, is_full = config.pp_size * config.pipeline_chunks, config.gradient_checkpointing == "full"
        sequences = config.per_device_train_batch_size * config.sequences_per_row
        self.tokens = sequences * config.max_seq_length / config.ranks_per_sequence
        self.computed = self.tokens / config.pp_size
        self.lasting = estimate_lasting(facts, config, search.world_size)
        dense, experts = facts.dense.computed / layers, facts.experts.computed / layers / config.ep_size
        self.in_flight = 1.0
        if config.pp_size > 1:
            few = min(forwards, STEADY * config.pp_size)
            most = _most_in_flight(config.schedule_name, config.pp_size, config.pipeline_chunks, few)
            self.in_flight = most / stages
        self.gathered = 2 * dense + experts * (2 if topology.dp_size > 1 else self.in_flight * layers)
        width, here = 2 if config.bf16 else 4, layers / config.pp_size

        def seconds(kind: str, size: float, ranks: range) -> float:
            if len(ranks) == 1:
                return 0.0
            return here * seconds_among(kind, size, ranks, cluster.hardware, cluster.gpus_per_node)

        ep, dense_group, dp = (topology.group(axis, 0, cluster.gpus_per_node) for axis in ("ep", "dense", "dp"))
        rows = self.tokens * facts.top_k * facts.width * width * (1 - 1 / config.ep_size)
        self.exchange = (6 if is_full else 4) * seconds("all-to-all", rows, ep)
        self.sharding = 0.0
        for size, trained, group in ((dense, facts.dense, dense_group), (experts, facts.experts, dp)):
            own = size * (1 - 1 / len(group))
            self.sharding += (3 if is_full else 2) * seconds("all-gather", own, group)
            if trained.gradient:
                self.sharding += seconds("reduce-scatter", 4 / width * own, group)
        split = 3 if config.schedule_name == "zero-bubble" else 1
        self.bubble = 1 + (config.pp_size - 1) / forwards / config.pipeline_chunks / split


@cache
def _most_in_flight(name: ScheduleName, pp_size: int, chunks: int, micro_batches: int) -> int:
    return max(peak_in_flight(make_schedule(name, pp_size, chunks, micro_batches)))


def best_first(plans: Iterable[Plan]) -> list[Plan]:
    """Those that fit first, by tokens per second, then the others by memory."""
    return sorted(plans, key=lambda p: (not p.fits, -p.tokens_per_second if p.fits else p.memory.total))
