"""What is about to run, in a few lines."""

from typing import Any

from checkpoints import ModelSource
from moe import KernelChoice, ParameterCounts
from sharding import Topology
from training.attention import PACKED
from training.config import TrainConfig
from training.data import DataOrder, describe
from training.inputs import Inputs
from training.memory import Forecast


def first_lines(
    model: Any,
    source: ModelSource,
    counts: ParameterCounts,
    topology: Topology,
    kernel: KernelChoice,
    config: TrainConfig,
    inputs: Inputs,
    order: DataOrder,
    memory: Forecast,
) -> str:
    """Model, mesh, batch, memory, computation and data."""
    lines = [
        f"{source.path}: {source.family.model_type}, {counts.total / 1e6:,.1f} M parameters, "
        f"{counts.active / 1e6:,.1f} M active a token",
        _mesh(source, topology, config, order),
        *memory.lines(),
        f"{'bf16' if config.bf16 else 'fp32'}, expert kernel {kernel.name} ({kernel.why}), "
        f"attention {_attention(model, config)}, cross-entropy {model.lm_head.kind}"
        + (", compiled attention and norms" if config.compile else "")
        + ("" if config.gradient_checkpointing == "none" else f", {config.gradient_checkpointing} checkpointing"),
    ]
    if inputs.training is not None:
        lines += _data(inputs, order, config)
    return "\n".join(lines)


def _mesh(source: ModelSource, topology: Topology, config: TrainConfig, order: DataOrder) -> str:
    world = topology.world_size
    is_short = order.global_batch_size < world * config.per_device_train_batch_size * config.forwards(world)
    return (
        f"{world} ranks: dp {topology.dp_size} x ep {topology.ep_size}, "
        f"{source.shape.num_experts // topology.ep_size} experts a rank, dense shard {topology.dense_shard}; "
        f"global batch {order.global_batch_size} rows = {world} ranks x {config.per_device_train_batch_size} rows "
        f"x {config.forwards(world)} forwards" + (", the last not full" if is_short else "")
    )


def _attention(model: Any, config: TrainConfig) -> str:
    is_packed = model.config._attn_implementation == PACKED
    return config.attn_implementation + (" sample by sample" if is_packed else "")


def _data(inputs: Inputs, order: DataOrder, config: TrainConfig) -> list[str]:
    assert inputs.training is not None
    samples = inputs.training.samples
    lines = [f"{origin.name}: {describe(origin)}" for origin in samples.origins]
    packed = f" packed into {len(inputs.training):,} rows" if config.packing else ""
    tokens = int(samples.lengths.sum())
    cut = int(samples.is_cut.sum())
    a_step = tokens / len(inputs.training) * min(order.global_batch_size, len(inputs.training))
    lines.append(
        f"{len(samples):,} samples{packed}, {tokens:,} tokens, {int(samples.targets.sum()) / tokens:.0%} of them "
        f"trained on, about {a_step:,.0f} a step; {cut:,} samples cut at {config.max_seq_length} tokens; "
        f"chat template: {inputs.template}"
    )
    if inputs.evaluation is not None:
        lines.append(f"evaluation on {len(inputs.evaluation):,} samples")
    return lines
