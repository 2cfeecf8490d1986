"""How long a step takes.

A layer's forward and its backward each are two things at once: on one side matrix products, elementwise work and the
all-to-alls, one after the other, since each waits for the one before; on the other the all-gathers and reduce-scatters
of FSDP2, on streams of their own. A layer takes as long as the longer side. Nothing hides what comes before the first
layer and after the last: the gathering of the root and of the first layer, the reduction of the root and of the first
layer's gradients, clipping, and the optimizer's step.

Left out: what the host needs to launch kernels (small layers on fast GPUs wait for it), stragglers, data loading.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe import training_flops
from sharding.planner.hardware import Hardware
from sharding.planner.memory import rows_received
from sharding.planner.setting import Setting, units_of
from sharding.planner.shapes import ModelShape
from sharding.planner.traffic import Traffic, group_ranks, ranks_a_node, share_away, step_traffic

TF32_SLOWDOWN = 2.0
"""TF32 products run at half the bf16 rate (the data sheets in `hardware`)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of one rank.

    Attributes:
        matrices: products, at the attained rate.
        elementwise: work that the memory's bandwidth bounds.
        all_to_alls: nothing overlaps with them.
        sharding: all-gathers, reduce-scatters and all-reduces in all.
        exposed: the part of `sharding` that does not hide behind the three above.
        update: clipping and the optimizer's step.
    """

    matrices: float
    elementwise: float
    all_to_alls: float
    sharding: float
    exposed: float
    update: float

    @property
    def total(self) -> float:
        return self.matrices + self.elementwise + self.all_to_alls + self.exposed + self.update


def collective_time(traffic: Traffic, setting: Setting, hardware: Hardware, gpus_per_node: int) -> float:
    """Seconds of one of `traffic`'s collectives."""
    return seconds_among(traffic.kind, traffic.sent, group_ranks(traffic.group, setting), hardware, gpus_per_node)


def seconds_among(kind: str, sent: float, ranks: Sequence[int], hardware: Hardware, gpus_per_node: int) -> float:
    """A collective in which each of `ranks` sends so many bytes: the slower of its links, and its messages' latencies:
    n - 1 in a ring inside a node; across nodes as many as there are nodes, less one, beside those inside; an all-to-all
    sends all at once."""
    away = share_away(kind, ranks, gpus_per_node)
    inside, between = hardware.inside, hardware.between
    transfer = max(
        sent * (1 - away) / (inside.bandwidth * hardware.link_share),
        sent * away / (between.bandwidth * hardware.link_share),
    )
    if kind == "all-to-all":
        return transfer + (between.latency if away > 0 else inside.latency)
    here = ranks_a_node(ranks, gpus_per_node)
    hops_between = -(-len(ranks) // here) - 1
    rounds = 2 if kind == "all-reduce" else 1
    return transfer + rounds * ((here - 1) * inside.latency + hops_between * between.latency)


def step_time(model: ModelShape, setting: Setting, hardware: Hardware, gpus_per_node: int) -> StepTime:
    """Seconds of a step, by what they are spent on."""
    matrices = _matrix_seconds(model, setting, hardware)
    elementwise = _elementwise_bytes(model, setting) / (hardware.device.memory_bandwidth * hardware.memory_share)
    traffic = step_traffic(model, setting)
    seconds = {t: t.times * collective_time(t, setting, hardware, gpus_per_node) for t in traffic}
    all_to_alls = sum(s for t, s in seconds.items() if t.kind == "all-to-all")
    sharding = sum(s for t, s in seconds.items() if t.kind != "all-to-all")

    # forward has a third of the products (a quarter, if backward computes it again) and the layers' first all-gathers
    of_forward = 1 / (3 if setting.checkpointing == "none" else 4)
    computing = matrices + elementwise + all_to_alls
    in_layers = [(t, s) for t, s in seconds.items() if t.what in ("layers", "experts") and t.kind != "all-to-all"]
    gathers = sum(s / (2 if setting.reshard_after_forward else 1) for t, s in in_layers if t.kind == "all-gather")
    in_backward = sum(s for _, s in in_layers) - gathers
    exposed = max(0.0, gathers - of_forward * computing) + max(0.0, in_backward - (1 - of_forward) * computing)
    # the first all-gather and the last reductions have nothing to hide behind, nor has the root's traffic
    ends = sum(s for _, s in in_layers) / model.num_layers / 2
    outside = sharding - sum(s for _, s in in_layers)
    exposed = min(sharding, exposed + ends + outside)
    return StepTime(matrices, elementwise, all_to_alls, sharding, exposed, _update_seconds(model, setting, hardware))


def tokens_per_second(setting: Setting, seconds: float) -> float:
    """Of one rank."""
    return setting.tokens * setting.accumulation / seconds


def model_flops(model: ModelShape, setting: Setting) -> float:
    """Operations of one rank's micro-step that the model needs (`moe.training_flops`): no recomputation."""
    S = setting.seq_length
    pairs = setting.micro_batch * S * (S + 1) // 2
    return training_flops(model.counts, model.config, setting.tokens, round(setting.tokens * setting.trained), pairs)


def _matrix_seconds(model: ModelShape, setting: Setting, hardware: Hardware) -> float:
    """The model's operations, a third more with recomputation, and as much more of the experts' as rows are uneven."""
    flops = model_flops(model, setting)
    imbalance = rows_received(setting, model) / (setting.tokens * model.moe.top_k) - 1
    flops += imbalance * 6 * setting.tokens * model.counts.experts * model.moe.top_k / model.moe.num_experts
    flops *= 1 if setting.checkpointing == "none" else 4 / 3
    rate = matrix_rate(setting, hardware)
    # a product reads its weights: with few tokens this takes longer than the operations
    units = units_of(model, setting)
    weights = model.num_layers * (units.layer.gathered + units.experts.gathered) + units.root.gathered
    passes = 3 if setting.checkpointing == "none" else 4
    reading = passes * weights * setting.compute_bytes / (hardware.device.memory_bandwidth * hardware.memory_share)
    return setting.accumulation * max(flops / rate, reading)


def matrix_rate(setting: Setting, hardware: Hardware) -> float:
    """Operations a second that matrix products attain in the dtype they run in."""
    device = hardware.device
    dense = device.matrix if setting.bf16 else device.matrix / TF32_SLOWDOWN if setting.tf32 else device.fp32
    return dense * hardware.matrix_share


def _elementwise_bytes(model: ModelShape, setting: Setting) -> float:
    """Read and written by what is no matrix product, forward and backward (which moves twice as much). Tensors of a
    token: of width D, 3 in each of 2 norms and 2 sums, and 6 for each of its K rows (permuted, weighted, summed); 4 of
    queries and keys in the rotary embedding; 3 of width F in the experts' activation."""
    moe, A = model.moe, model.head_width
    widths = 12 * moe.model_width + moe.top_k * (6 * moe.model_width + 3 * moe.expert_width)
    widths += 4 * (model.num_heads + model.num_kv_heads) * A
    passes = 3 if setting.checkpointing == "none" else 4
    casts = _cast_bytes(model, setting)
    return setting.accumulation * (passes * model.num_layers * setting.tokens * widths * setting.compute_bytes + casts)


def _cast_bytes(model: ModelShape, setting: Setting) -> float:
    """FSDP2's copies of each unit: out of the all-gather's buffer, and of gradients to fp32."""
    units = units_of(model, setting)
    gathered = model.num_layers * (units.layer.gathered + units.experts.gathered) + units.root.gathered
    times = 2 if setting.reshard_after_forward else 1
    c = setting.compute_bytes
    return times * gathered * 2 * c + gathered * (c + 4)


def _update_seconds(model: ModelShape, setting: Setting, hardware: Hardware) -> float:
    """Clipping reads gradients, then reads and writes them; the optimizer reads them, and reads and writes parameters
    and state."""
    units = units_of(model, setting)
    held = model.num_layers * (units.layer.shard + units.experts.shard) + units.root.shard
    each = setting.state_bytes
    moved = held * (4 * each.gradient + 2 * each.parameter + 2 * each.state)
    return moved / (hardware.device.memory_bandwidth * hardware.memory_share)
