"""Forecasts of a tiny model; forecasts by a formula, where no model is run; what torch's
allocator gave out."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from torch.profiler import ProfilerActivity, profile

from expertmesh.moe.hf_model.counts import ParameterCounts
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.imbalance import GivenRouting
from expertmesh.training.planning.memory import Communicator, Memory
from expertmesh.training.planning.planner import kept
from expertmesh.training.planning.planner.account import (
    Account,
    LayerCosts,
    PartCost,
    PeakMemory,
    SentBytes,
    action_name,
)
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.clock import StepTime
from expertmesh.training.planning.planner.costs import Cluster, seconds_among, share_away
from expertmesh.training.planning.planner.facts import Cuts, Held, LayerFacts, ModelFacts
from expertmesh.training.planning.planner.forecasts import Forecasts, alike
from expertmesh.training.planning.planner.hardware import preset
from expertmesh.training.planning.planner.model_config import find_config
from expertmesh.training.planning.planner.pipelines import PlannedPipeline, one_stage
from tests.tiny import tiny_config

ODD_SIZES = {"hidden_size": 40, "intermediate_size": 24, "vocab_size": 331, "num_attention_heads": 4, "head_dim": 16}
"""None of which the ranks divide: FSDP pads."""
H100 = preset("H100", "infiniband-ndr")


def flags_of(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = dict(per_device_train_batch_size=2, max_seq_length=32, learning_rate=1e-5)
    return TrainConfig(model="-", dataset=["-"], **{**settings, **changes})


def cluster_of(memory: float = H100.device.memory, gpus_per_node: int = 8) -> Cluster:
    return Cluster(H100, gpus_per_node, memory)


@cache
def _forecasts(sizes: tuple[tuple[str, Any], ...], device: Literal["cuda", "cpu"]) -> Forecasts:
    model_config = tiny_config(**dict(sizes))
    return Forecasts(model_config.to_dict(), lambda: model_config, device, is_kept=False)


def tiny_forecasts(sizes: Mapping[str, Any] | None = None, device: Literal["cuda", "cpu"] = "cpu") -> Forecasts:
    """Of a tiny Mixtral of these sizes."""
    return _forecasts(tuple((sizes or {}).items()), device)


def tiny_account(
    world_size: int,
    flags: dict[str, Any],
    sizes: Mapping[str, Any] | None = None,
    device: Literal["cuda", "cpu"] = "cpu",
    rank: int = 0,
    trained: float | None = None,
) -> Account:
    """The step of a rank of it with these flags, of which all tokens but each row's first have a loss."""
    asked = Asked(flags_of(**flags), world_size, cluster_of(), rank, GivenRouting(trained=trained))
    return tiny_forecasts(sizes, device).account(asked)


def allocated(work: Callable[[], Any]) -> tuple[Any, int, int]:
    """(what `work` returned, bytes it left allocated, the most it had allocated), of this thread."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = work()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return result, held, most


def launched(line: str) -> list[str]:
    """The flags of a plan's launch line."""
    return shlex.split(line.split("expertmesh.train_ep ")[1])


STATE = {"adamw_torch_fused": (4, 8.0), "adamw_torch_8bit": (4, 2.0), "adamw_bf16": (2, 4.0)}
"""Bytes of a parameter, and of its moments."""


def mixtral_facts(said: Mapping[str, Any], config: TrainConfig) -> ModelFacts:
    """Of a Mixtral of which this is said, by arithmetic."""
    width, inner, experts = said["hidden_size"], said["intermediate_size"], said["num_local_experts"]
    layers, top_k, heads = said["num_hidden_layers"], said["num_experts_per_tok"], said["num_attention_heads"]
    dense = 2 * width * width * (1 + said["num_key_value_heads"] / heads)
    each, vocabulary = 3 * width * inner, width * said["vocab_size"]
    stored, moments = STATE[config.optim]
    is_lora, bits = config.adapter == "lora", 0.5 if config.base_dtype == "nf4" else 2

    def held(number: float) -> Held:
        if is_lora:
            return Held(int(bits * number), int(2 * number), int(0.01 * stored * number), 0.01 * moments * number)
        return Held(int(stored * number), int(2 * number), int(stored * number), moments * number)

    layer = LayerFacts(held(dense), held(experts * each))
    total, active = layers * (dense + experts * each), layers * (dense + top_k * each)
    counts = ParameterCounts(
        int(total + 2 * vocabulary),
        int(layers * experts * each),
        int(vocabulary),
        int(vocabulary),
        int(active + 2 * vocabulary),
        (),
    )
    ends = held(vocabulary), held(vocabulary)
    return ModelFacts((layer,), (0,) * layers, *ends, False, width, experts, top_k, counts, "torch", (), False)


class ByFormula(Forecasts):
    """Forecasts of a Mixtral in which nothing is run: a few sums that answer at once.

    Attributes:
        said: of the model. questions: the settings that were asked for, in order.
        refuse: why a question has no answer, if it has none.
        is_marked: whether each question has a few bytes of its own.
    """

    def __init__(
        self,
        said: Mapping[str, Any],
        refuse: Callable[[Asked], str | None] = lambda asked: None,
        is_marked: bool = False,
    ):
        super().__init__(said, lambda: None, is_kept=False)
        self.refuse, self.is_marked = refuse, is_marked
        self.questions: list[Asked] = []

    def facts(self, config: TrainConfig) -> ModelFacts:
        return mixtral_facts(self.said, config)

    def cuts(self, config: TrainConfig) -> Cuts:
        return Cuts("Mixtral", (1.0,) * self.said["num_hidden_layers"] + (0.5,), ())

    def known(self, asked: Asked) -> Account | None:
        return None

    def account(self, asked: Asked) -> Account:
        self.questions.append(asked)
        if (why := self.refuse(asked)) is not None:
            raise ExpertMeshError(why)
        return account_by_formula(self.facts(asked.config), asked, self.is_marked)

    def accounts(self, several: Sequence[Asked]) -> list[Account | ExpertMeshError]:
        found: list[Account | ExpertMeshError] = []
        for asked in several:
            try:
                found.append(self.account(asked))
            except ExpertMeshError as error:
                found.append(error)
        return found


def by_formula(asked: Any, config: TrainConfig, progress: Any) -> ByFormula:
    """In place of `plan_command._forecasts`: each layout has figures of its own."""
    return ByFormula(find_config(config.model).content, is_marked=True)


KEPT = {"none": 1.0, "selective": 0.5, "full": 0.1}
AGAIN = {"none": 1.0, "selective": 1.1, "full": 4 / 3}
"""By how to recompute: what is kept, and what is computed."""


def _mark(*asked: Any) -> int:
    return int(kept.key_of(*asked)[:3], 16)


SLOWER, FULLER = 1.1, 1.02
"""By how much a pipeline's ranks take longer, and hold more, than by estimate."""


def _rank_by_formula(facts: ModelFacts, asked: Asked, is_marked: bool) -> Account:
    whole = account_by_formula(facts, one_stage(asked), is_marked)
    step = PlannedPipeline(asked, facts, Cuts("Mixtral", (1.0,) * (len(facts.layers) + 1), ()), whole)
    stages = step.stages
    held = step.held(stages)[asked.rank // asked.topology.ranks_per_stage]
    held = replace(held, working=held.working + (FULLER - 1) * held.total)
    costs = step._costs(stages)
    assert asked.own_stages is not None
    actions = {
        action_name(kind, stage): SLOWER * getattr(costs, kind)[stage]
        for kind in ("forward", "backward", "weights")
        for stage in asked.own_stages
    }
    memory = replace(whole.memory, peak=round(held.total), kinds=held)
    account = step.account()
    time = StepTime(matrices=account.forwards * sum(actions.values()), update=account.time.update)
    return replace(account, rank=asked.rank, memory=memory, time=time, actions=actions)


def account_by_formula(facts: ModelFacts, asked: Asked, is_marked: bool = False) -> Account:
    """A step that overlaps half of FSDP's collectives; of few tokens launches take longer than products."""
    config, cluster, topology = asked.config, asked.cluster, asked.topology
    if config.pp_size > 1:
        return _rank_by_formula(facts, asked, is_marked)
    forwards, mode, layers = config.micro_batches(asked.world_size), config.gradient_checkpointing, len(facts.layers)
    sequences = config.per_device_train_batch_size * config.sequences_per_row
    tokens = sequences * config.max_seq_length / config.ranks_per_sequence
    groups = {axis: topology.group(axis, 0, cluster.gpus_per_node) for axis in ("dense", "dp", "ep")}
    dense, experts = facts.dense, facts.experts
    mark = _mark(alike(config), asked.routing) if is_marked else 0

    def share(name: str) -> float:
        return getattr(dense, name) / len(groups["dense"]) + getattr(experts, name) / topology.ranks_per_stage

    a_layer = tokens * facts.width * 2
    kept_of_layer = 20 * a_layer * KEPT[mode]
    of_layers = (dense.computed / layers, experts.computed / layers / config.ep_size)
    memory = Memory(
        parameters=share("stored"),
        gradients=share("gradient"),
        optimizer=share("state"),
        activations=layers * kept_of_layer + config.keep_expert_products * 4 * a_layer,
        gathered=2 * sum(of_layers),
        working=30 * a_layer + mark,
    )
    if forwards == 1:
        # where there are all gradients there are no activations, and the other way round
        is_later = memory.gradients > memory.activations
        memory = replace(memory, activations=0.0) if is_later else replace(memory, gradients=0.0)
    flops = 6 * tokens * facts.counts.active
    busiest = 1.0 if asked.routing.busiest == 1 else 1.2
    again = AGAIN[mode] - 0.05 * config.keep_expert_products / layers
    matrices = again * flops * busiest / (0.5 * cluster.hardware.device.matrix) + layers * 1e-4
    sent: list[SentBytes] = []

    def seconds(kind: str, axis: str, size: float, times: int) -> float:
        ranks = groups[axis]
        if len(ranks) == 1:
            return 0.0
        away = share_away(kind, ranks, cluster.gpus_per_node)
        total = times * forwards * size
        sent.append(SentBytes(axis, len(ranks), kind, times * forwards, total, away * total))
        return times * seconds_among(kind, size, ranks, cluster.hardware, cluster.gpus_per_node)

    exchange = seconds("all-to-all", "ep", a_layer * facts.top_k * (1 - 1 / config.ep_size), 4 * layers)
    sharding = sum(
        seconds("all-gather", axis, size * (1 - 1 / len(groups[axis])), 3 * layers)
        for axis, size in zip(("dense", "dp"), of_layers, strict=True)
    )
    gathers = 0.0 if config.tp_size == 1 else 8 * layers * a_layer / cluster.hardware.inside.bandwidth
    step = StepTime(matrices, 0.1 * matrices, exchange, sharding, 0.5 * sharding, 0.0, 0.0, 0.0, gathers=gathers)
    time = step * forwards
    time = StepTime(**{**vars(time), "update": memory.lasting / cluster.hardware.device.memory_bandwidth})
    forward = (step.total - gathers) / 3 / (layers + 0.5)
    each = LayerCosts(forward, 2 * forward, forward / 2, kept_of_layer, 10 * a_layer)
    return Account(
        asked.rank,
        forwards,
        (layers, layers),
        min(3, layers),
        "",
        facts.counts.total,
        PeakMemory(round(memory.total), "backward of layer 0, experts", memory, 0, 0, round(memory.optimizer)),
        sum(getattr(memory, term) for term in ("parameters", "gradients", "optimizer")) if config.offload else 0.0,
        [Communicator.of(axis, len(ranks), {"all-gather"}) for axis, ranks in groups.items() if len(ranks) > 1],
        (),
        (),
        tuple(sorted(sent, key=lambda each: -each.total)),
        {"experts": PartCost(flops=flops, seconds=matrices)},
        time,
        {},
        flops * forwards,
        0,
        0,
        {
            "0": each,
            "before": LayerCosts(0.1 * forward, 0.2 * forward),
            "after": LayerCosts(0.4 * forward, 0.8 * forward),
        },
    )
