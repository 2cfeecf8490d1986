"""Every way to run a model on a number of GPUs, best first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from moe import ExpertMeshError
from sharding.choices import Checkpointing
from sharding.planner.cost import StepTime, model_flops, step_time, tokens_per_second
from sharding.planner.hardware import Hardware
from sharding.planner.measured import Measure
from sharding.planner.memory import Memory, peak
from sharding.planner.order import Run
from sharding.planner.setting import Setting
from sharding.planner.traffic import Traffic, by_link, step_traffic
from sharding.topology import DenseShard, divisors

MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Cluster:
    """hardware: of each rank. gpus_per_node: ranks that share a node. memory: bytes that a rank may hold."""

    hardware: Hardware
    gpus_per_node: int
    memory: float


@dataclass(frozen=True)
class Plan:
    """A setting with its forecast. when: the moment at which `memory` is what a rank holds. inside, between: bytes that
    a rank sends in a step, by link. tokens_per_second: of one rank. flops: of a step, that
    the model needs."""

    setting: Setting
    when: str
    memory: Memory
    traffic: tuple[Traffic, ...]
    inside: float
    between: float
    time: StepTime
    tokens_per_second: float
    flops: float
    fits: bool

    def share_of_peak(self, hardware: Hardware) -> float:
        """The model's FLOPs over those of the card in the time of the step: MFU."""
        return self.flops / (self.time.total * hardware.device.matrix)

    def as_json(self) -> dict[str, Any]:
        s = self.setting
        return {
            "dp": s.dp_size,
            "ep": s.ep_size,
            "dense_shard": s.dense_shard,
            "gradient_checkpointing": s.checkpointing,
            "micro_batch": s.micro_batch,
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
    run = Run(measure.parameters, measure(setting.workload(measure.parameters)), setting)
    most = peak(run)
    traffic = tuple(step_traffic(run))
    time = step_time(run, cluster.hardware, cluster.gpus_per_node)
    return Plan(
        setting,
        most.when,
        most.memory,
        traffic,
        *by_link(traffic, setting, cluster.gpus_per_node),
        time,
        tokens_per_second(setting, time.total),
        setting.accumulation * model_flops(run),
        most.memory.total <= cluster.memory,
    )


def forecasts(measure: Measure, settings: Iterable[Setting], cluster: Cluster) -> list[Plan]:
    """Of those settings that the model can compute.

    Raises:
        ExpertMeshError: it can compute none of them; says why not the last.
    """
    plans, error = [], None
    for setting in settings:
        try:
            plans.append(forecast(measure, setting, cluster))
        except ExpertMeshError as raised:
            error = raised
    if not plans and error is not None:
        raise error
    return plans


def settings(num_experts: int, base: Setting, micro_batches: Sequence[int]) -> Iterable[Setting]:
    """All arrangements of `base`'s ranks that this model can have. Rows travel in as many parts as `base` says, or as a
    rank has experts."""
    ends = min(micro_batches), max(micro_batches)
    for ep_size in divisors(num_experts):
        if base.world_size % ep_size or base.world_size % base.cp_size:
            continue
        # with one replica, or one rank a replica's shard, the two are the same or no sharding at all
        is_choice = 1 < ep_size < base.world_size
        for dense_shard in get_args(DenseShard) if is_choice else ("full",):
            for checkpointing in get_args(Checkpointing):
                # what lies between the smallest and the largest mostly follows from these
                for micro_batch in sorted(micro_batches, key=lambda n: (n not in ends, n)):
                    yield replace(
                        base,
                        ep_size=ep_size,
                        overlap_chunks=1 if ep_size == 1 else min(base.overlap_chunks, num_experts // ep_size),
                        dense_shard=dense_shard,
                        checkpointing=checkpointing,
                        keep_expert_products=base.keep_expert_products if checkpointing == "selective" else 0,
                        offload_activations=base.offload_activations and checkpointing != "none",
                        micro_batch=micro_batch,
                    )


def search(measure: Measure, base: Setting, micro_batches: Sequence[int], cluster: Cluster) -> list[Plan]:
    """Forecasts of all settings: those that fit first, by tokens a second, then the others by memory.

    Raises:
        ExpertMeshError: a number is not positive.
    """
    for flag, value in (("--gpus", base.world_size), ("--seq-length", base.seq_length), *_named(micro_batches)):
        if value < 1:
            raise ExpertMeshError(f"{flag} {value}: must be 1 or more")
    possible = settings(measure.parameters.num_experts, base, micro_batches)
    plans = forecasts(measure, possible, cluster)
    return sorted(plans, key=lambda p: (not p.fits, -p.tokens_per_second if p.fits else p.memory.total))


def _named(micro_batches: Sequence[int]) -> list[tuple[str, int]]:
    return [("--micro-batch", n) for n in micro_batches]


VARIANTS = ("EP within a node", "EP across nodes", "FSDP only")
SWEPT = tuple(2**exponent for exponent in range(3, 13))
"""Numbers of GPUs."""


@dataclass(frozen=True)
class Point:
    """The best of a variant at a number of GPUs; `plan` is the smallest there is where none fits."""

    variant: str
    world_size: int
    plan: Plan


def sweep(measure: Measure, base: Setting, micro_batches: Sequence[int], cluster: Cluster) -> list[Point]:
    """From 8 to 4,096 GPUs: the best setting of each variant."""
    points = []
    for world_size in SWEPT:
        world = replace(base, world_size=world_size)
        for variant, across in zip(VARIANTS, (False, True, False), strict=True):
            possible = [
                replace(setting, ep_across_nodes=across)
                for setting in settings(measure.parameters.num_experts, world, micro_batches)
                if _belongs(setting, variant, cluster.gpus_per_node)
            ]
            plans = forecasts(measure, possible, cluster)
            if plans:
                best = min(plans, key=lambda p: (not p.fits, -p.tokens_per_second if p.fits else p.memory.total))
                points.append(Point(variant, world.world_size, best))
    return points


def _belongs(setting: Setting, variant: str, gpus_per_node: int) -> bool:
    if variant == "FSDP only":
        return setting.ep_size == 1
    if variant == "EP across nodes":
        # as many nodes as the ep group has ranks
        return setting.ep_size > 1 and setting.dp_size >= gpus_per_node
    return 1 < setting.ep_size <= gpus_per_node
