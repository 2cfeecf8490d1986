"""Every way to run a model on a number of GPUs, best first."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any, get_args

from ....moe.util.errors import ExpertMeshError
from ....sharding.parallelize.choices import Checkpointing
from ....sharding.pipeline.schedule import schedule_without_queue
from ....sharding.topology import DenseShard, divisors
from ..memory import NEAR, Memory
from .clock import StepTime
from .cost import model_flops, step_time, step_times, tokens_per_second
from .hardware import Hardware
from .measured import Measure, ModelParameters
from .peak_memory import Peak, least_held
from .setting import Setting
from .stage_costs import balanced
from .step_order import PlannedRun, planned_run
from .traffic import Traffic, by_link, step_traffic
from .tried import Tried

CHUNKS = (1, 2, 4)
"""Stages of a pp index that are tried."""

MOST_PP_RANKS = 32
"""More are tried only when told."""


@dataclass(frozen=True)
class Cluster:
    """hardware: of each rank. gpus_per_node: ranks per node. memory: bytes that a rank may hold."""

    hardware: Hardware
    gpus_per_node: int
    memory: float


@dataclass(frozen=True)
class Plan:
    """A setting with its forecast. What it takes and sends is reckoned when it is asked for: of most layouts that do
    not fit nobody does (see `reckon`).

    Attributes:
        run: the setting, with its stages. peak: what the rank holds that holds the most.
    """

    run: PlannedRun
    peak: Peak
    cluster: Cluster

    @property
    def setting(self) -> Setting:
        return self.run.setting

    @property
    def memory(self) -> Memory:
        return self.peak.memory

    @property
    def when(self) -> str:
        """The moment at which `memory` is what a rank holds."""
        return self.peak.when

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.cluster.memory

    @cached_property
    def time(self) -> StepTime:
        return step_time(self.run, self.cluster.hardware, self.cluster.gpus_per_node)

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """What a middle rank sends in a step, which sends either way."""
        return tuple(step_traffic(self.run.by_pp_rank[self.setting.pp_size // 2]))

    @property
    def inside(self) -> float:
        """Bytes that a rank sends in a step inside its node."""
        return by_link(self.traffic, self.setting, self.cluster.gpus_per_node)[0]

    @property
    def between(self) -> float:
        """Bytes that it sends to other nodes."""
        return by_link(self.traffic, self.setting, self.cluster.gpus_per_node)[1]

    @property
    def tokens_per_second(self) -> float:
        """Of one rank."""
        return tokens_per_second(self.setting, self.time.total)

    @cached_property
    def flops(self) -> float:
        """That the model needs per step."""
        return self.setting.accumulation * model_flops(self.run)

    def share_of_peak(self, hardware: Hardware) -> float:
        """The model's FLOPs over those of the card in the time of the step: MFU."""
        return self.flops / (self.time.total * hardware.device.matrix)

    def as_json(self) -> dict[str, Any]:
        s = self.setting
        return {
            "pp": s.pp_size,
            "chunks": s.chunks,
            "schedule": s.schedule,
            "stage_layers": s.stage_layers,
            "dp": s.dp_size,
            "ep": s.ep_size,
            "cp": s.cp_size,
            "tp": s.tp_size,
            "dense_shard": s.dense_shard,
            "gradient_checkpointing": s.checkpointing,
            "micro_batch": s.micro_batch,
            "accumulation": s.accumulation,
            "fits": self.fits,
            "memory": {
                **{name: round(n) for name, n in self.memory.terms().items()},
                "total": round(self.memory.total),
            },
            "peak_at": self.when,
            "bytes_a_step": {
                f"{t.kind}, {t.what}, {t.group}": {"times": t.times, "bytes": round(t.total)} for t in self.traffic
            },
            "bytes_inside_node": round(self.inside),
            "bytes_between_nodes": round(self.between),
            "seconds": {**vars(self.time), "total": self.time.total},
            "model_flops": self.flops,
            "tokens_per_second_a_gpu": self.tokens_per_second,
        }


def forecast(measure: Measure, setting: Setting, cluster: Cluster) -> Plan:
    """What one setting takes."""
    run = planned_run(measure, setting)
    return Plan(*balanced(run, cluster.hardware, cluster.gpus_per_node, NEAR * cluster.memory), cluster)


def reckon(plans: Iterable[Plan]) -> None:
    """Reckon the time of several plans of a cluster, which takes less than one after another."""
    plans = [plan for plan in plans if "time" not in vars(plan)]
    if plans:
        cluster = plans[0].cluster
        times = step_times([plan.run for plan in plans], cluster.hardware, cluster.gpus_per_node)
        for plan, time in zip(plans, times, strict=True):
            vars(plan)["time"] = time


def forecasts(
    measure: Measure, settings: Iterable[Setting], cluster: Cluster, only_fitting: bool = False
) -> list[Plan]:
    """Forecasts of those settings that the model can compute. Where one does not fit, left out are micro-batches that
    are no smaller, also with queued weight gradients, which hold more; and where the first does not that recomputes
    all, what recomputes less. So is what cannot fit whatever is computed; of this, where nothing fits, no more is
    forecast than shows which layout holds the least.

    Args:
        only_fitting: whether not even that is.

    Raises:
        ExpertMeshError: it can compute none of them; says why not the first, of the smallest micro-batch.
    """
    plans: list[Plan] = []
    error = None
    too_large: dict[Setting, int] = {}
    fitting: set[Setting] = set()
    held = _least_held(measure.parameters, settings)
    hopeless = sorted((each for each in held if held[each] > cluster.memory), key=lambda each: held[each])
    possible = [each for each in held if held[each] <= cluster.memory]
    for setting in possible if only_fitting else [*possible, *hopeless]:
        if held[setting] > cluster.memory and (fitting or any(plan.memory.total <= held[setting] for plan in plans)):
            break
        layout = _layout(setting)
        recomputed = replace(layout, checkpointing="full", keep_expert_products=0)
        least = min(too_large.get(each, setting.micro_batch + 1) for each in (layout, _without_queue(layout)))
        if setting.micro_batch >= least or (recomputed in too_large and recomputed not in fitting):
            continue
        try:
            plans.append(forecast(measure, setting, cluster))
        except ExpertMeshError as raised:
            error = error or raised
            continue
        if plans[-1].fits:
            fitting.add(layout)
        else:
            too_large[layout] = setting.micro_batch
    if not plans and error is not None:
        raise error
    reckon(plan for plan in plans if plan.fits)
    return plans


def _least_held(model: ModelParameters, settings: Iterable[Setting]) -> dict[Setting, float]:
    """Bytes that each setting needs whatever is computed, by what these depend on reckoned once."""
    known: dict[Setting, float] = {}
    found = {}
    for setting in settings:
        layout = replace(_layout(setting), checkpointing="full", keep_expert_products=0, offload_activations=False)
        if layout not in known:
            known[layout] = least_held(model, setting)
        found[setting] = known[layout]
    return found


def _without_queue(setting: Setting) -> Setting:
    """The same pipeline without queued weight gradients."""
    return replace(setting, schedule=schedule_without_queue(setting.chunks))


def settings(model: ModelParameters, base: Setting, tried: Tried, gpus_per_node: int) -> Iterable[Setting]:
    """All parallel layouts of `base`'s ranks that this model can have. All-to-alls are cut into as many chunks as
    `base` says, or as a rank has experts."""
    # what holds the least comes first
    ways: Sequence[Checkpointing] = (
        ("full", "selective", "none") if tried.checkpointing is None else (tried.checkpointing,)
    )
    for pipeline in _pipelines(base, tried, len(model.layers)):
        for ep_size in divisors(model.num_experts) if tried.ep_size is None else [tried.ep_size]:
            ranks = pipeline.ranks_per_stage
            if ranks % ep_size or ranks % base.topology.ranks_per_sequence:
                continue
            is_open = tried.pp_size is None and tried.ep_size is None
            if is_open and pipeline.pp_size > 1 and gpus_per_node < ep_size < ranks:
                # a pipeline is what spares the links between nodes, or lets an ep group be all of its stage
                continue
            chunks = 1 if ep_size == 1 else base.overlap_chunks
            if tried.ep_size is None:
                chunks = min(chunks, model.num_experts // ep_size)
            for dense_shard in _dense_shards(pipeline, ep_size, tried):
                for checkpointing in ways:
                    for micro_batch in sorted(tried.micro_batches):
                        setting = replace(
                            pipeline,
                            ep_size=ep_size,
                            overlap_chunks=chunks,
                            dense_shard=dense_shard,
                            checkpointing=checkpointing,
                            keep_expert_products=base.keep_expert_products if checkpointing == "selective" else 0,
                            offload_activations=base.offload_activations and checkpointing != "none",
                            micro_batch=micro_batch,
                        )
                        yield from _with_accumulation(setting, tried)


def _dense_shards(pipeline: Setting, ep_size: int, tried: Tried) -> Iterable[DenseShard]:
    """The ways to shard non-expert parameters that are tried at an ep size."""
    can_be_hybrid = ep_size % pipeline.tp_size == 0
    if tried.dense_shard is not None:
        return [tried.dense_shard] if tried.dense_shard == "full" or can_be_hybrid else []
    # with one replica, or one rank a replica's shard, the two are the same or no sharding at all
    is_choice = 1 < ep_size < pipeline.ranks_per_stage
    return get_args(DenseShard) if is_choice and can_be_hybrid else ["full"]


def _pipelines(base: Setting, tried: Tried, num_layers: int) -> Iterable[Setting]:
    """The base setting with each pipeline that is tried."""
    told = tried.pp_size is not None
    for pp_size in [tried.pp_size] if tried.pp_size is not None else divisors(base.world_size):
        if pp_size == 1:
            yield base
            continue
        for chunks in CHUNKS if tried.chunks is None else [tried.chunks]:
            if not told and (pp_size > MOST_PP_RANKS or pp_size * chunks > num_layers):
                continue
            queued = replace(base, pp_size=pp_size, chunks=chunks, schedule="zero-bubble")
            for setting in (_without_queue(queued), queued):
                if tried.schedule in (None, setting.schedule):
                    yield setting


def _with_accumulation(setting: Setting, tried: Tried) -> Iterable[Setting]:
    """The setting with its number of micro-batches; none where a pipeline has fewer than ranks, unless it was told."""
    accumulation = setting.accumulation
    if tried.global_batch is not None:
        accumulation = ceil(tried.global_batch / (setting.topology.data_size * setting.micro_batch))
    if setting.pp_size <= accumulation or tried.pp_size is not None:
        yield replace(setting, accumulation=accumulation)


def search(measure: Measure, base: Setting, tried: Tried, cluster: Cluster) -> list[Plan]:
    """Forecasts of all settings: those that fit first, by tokens per second, then the others by memory. Left out are
    those whose micro-batches the global batch fills less than others'.

    Raises:
        ExpertMeshError: the model cannot be trained in any of them.
    """
    possible = list(settings(measure.parameters, base, tried, cluster.gpus_per_node))
    if tried.global_batch is not None:
        least = min(map(sequences_per_step, possible), default=0)
        possible = [each for each in possible if sequences_per_step(each) == least]
    return best_first(forecasts(measure, _ends_first(possible), cluster, tried.only_fitting))


def _ends_first(settings: Iterable[Setting]) -> Iterator[Setting]:
    """Of each layout the smallest micro-batch, the largest, and the others, which mostly follow from these two."""
    layouts: dict[Setting, list[Setting]] = {}
    for setting in settings:
        layouts.setdefault(_layout(setting), []).append(setting)
    for each in layouts.values():
        yield from (each[0], *each[:0:-1][:1], *each[1:-1])


def _layout(setting: Setting) -> Setting:
    """The setting whatever its micro-batches."""
    return replace(setting, micro_batch=0, accumulation=0)


def sequences_per_step(setting: Setting) -> int:
    """Sequences that complete micro-batches have in a step."""
    return setting.topology.data_size * setting.micro_batch * setting.accumulation


def best_first(plans: Iterable[Plan]) -> list[Plan]:
    """Those that fit first, by tokens per second, then the others by memory."""
    return sorted(plans, key=lambda p: (not p.fits, -p.tokens_per_second if p.fits else p.memory.total))
