"""What is about to run, in a few lines."""

import json
from typing import Any

from ..checkpoints.hf.source import ModelSource
from ..moe.experts.model_layers import moe_layers, moe_shape
from ..moe.hf_model.rope import advised_scaling
from ..sharding.pipeline.pipeline import pipeline_of
from ..sharding.pipeline.timeline import bubble
from ..sharding.replicas import replicated_state
from ..sharding.topology import Topology
from .attention.complete_sequences import complete_sequences_line
from .attention.packed_attention import OWN, inner_attention
from .config.train_config import TrainConfig
from .data.preview import describe, warnings_of
from .data.samples import Origin, cache_directory
from .data.sequences import DataOrder
from .engine import Engine
from .inputs import Inputs
from .loss.head import loss_head
from .planning.rank_memory import Forecast, NoForecast

MOST_BUBBLE = 1 / 3
"""A longer one comes with a warning."""


def first_lines(engine: Engine, inputs: Inputs, order: DataOrder, memory: Forecast | NoForecast) -> str:
    """Model, mesh, batch, memory, computation, how it is trained, and data."""
    config, source, counts = engine.config, engine.source, engine.counts
    lines = [
        f"{source.path}: {source.model_type}, {counts.total / 1e6:,.1f} M parameters, "
        f"{counts.active / 1e6:,.1f} M active per token",
        _mesh(moe_shape(engine.model).num_experts, engine.topology, config, order),
        *memory.lines(),
        f"{'bf16' if config.bf16 else 'fp32'}, expert kernel {engine.kernel.name} ({engine.kernel.why}), "
        f"attention {_attention(engine.model)}, cross-entropy {loss_head(engine.model).kind}"
        + (", fp32 matmuls in TF32" if config.tf32 else "")
        + ("" if config.gradient_checkpointing == "none" else f", {config.gradient_checkpointing} checkpointing")
        + (", activation offloading" if config.offload_activations else ""),
        *([] if engine.flash_attention_3 is None else [engine.flash_attention_3]),
        *_complete_sequences(engine),
        *_rope(config, source),
        engine.balance.line(),
        *engine.trained,
    ]
    if inputs.training is not None:
        lines += _data(inputs, order, config)
        lines += _too_long(inputs, source)
    return "\n".join(lines)


def _complete_sequences(engine: Engine) -> list[str]:
    config = engine.config
    line = complete_sequences_line(engine.model, config.ranks_per_sequence, config.per_device_train_batch_size)
    return [] if line is None else [line]


def pipeline_lines(engine: Engine, memory: Forecast | NoForecast) -> list[str]:
    """The stages of a model that is cut into some, why it has its schedule, and a warning where its ranks mostly wait;
    nothing of another."""
    pipeline, config = pipeline_of(engine.model), engine.config
    if pipeline is None:
        return []
    chosen = memory.pipeline
    if chosen is None:
        balance = "as asked" if config.pipeline_layers else "balanced by floating point operations"
    else:
        balance = chosen.balance
    why = "without a forecast" if chosen is None else chosen.why
    pp_size, micro_batches = pipeline.stages.pp_size, config.micro_batches(engine.topology.world_size)
    *counts, last = (str(len(layers)) for layers in pipeline.stages.layers)
    idle = bubble(pipeline.schedule, pp_size, pipeline.chunks, micro_batches)
    stages = f"{pipeline.stages.number} stages of {', '.join(counts)} and {last} layers ({balance})"
    lines = [f"pipeline: {stages}; {pipeline.schedule} ({why}), bubble {idle:.0%}"]
    if idle > MOST_BUBBLE:
        lines.append(
            f"warning: --pp-size {pp_size} with {micro_batches} micro-batch{'es' * (micro_batches > 1)}: ranks wait "
            f"for one another {idle:.0%} of the time (the bubble); raise --gradient-accumulation-steps"
        )
    return lines


def dispatch_lines(engine: Engine) -> list[str]:
    """How tokens travel to their experts, where that is not with a row for each choice."""
    words = dict.fromkeys(layer.dispatcher.in_words for layer in moe_layers(engine.model))
    return [f"dispatch: {each}" for each in words if each]


def replica_lines(engine: Engine) -> list[str]:
    """What --check-replicas cannot compare in this layout."""
    config, topology = engine.config, engine.topology
    if not config.check_replicas:
        return []
    given = f"note: --check-replicas {config.check_replicas}"
    if topology.world_size == 1:
        return [f"{given} has no effect on 1 rank, which holds no copy of another's"]
    if any(part.is_parameter for part in replicated_state(engine.model, topology).values()):
        return []
    return [
        f"{given}: no parameter has a copy with --dense-shard {topology.dense_shard} and dp "
        f"{topology.dp_size} (with hybrid and dp 2 or more they have); buffers, the learning rate and the number of "
        "steps are compared"
    ]


def _mesh(num_experts: int, topology: Topology, config: TrainConfig, order: DataOrder) -> str:
    world = topology.world_size
    is_short = order.global_batch_size < config.sequences_per_micro_batch(world) * config.micro_batches(world)
    pipelines = f"pp {topology.pp_size} x " if topology.pp_size > 1 else ""
    return (
        f"{world} ranks: {pipelines}dp {topology.dp_size} x ep {topology.ep_size}, "
        f"{num_experts // topology.ep_size} experts per rank, dense shard {topology.dense_shard}; "
        + (f"context parallel over {config.cp_size} ranks; " if config.cp_size > 1 else "")
        + (f"tensor parallel over {config.tp_size} ranks; " if config.tp_size > 1 else "")
        + f"global batch {order.global_batch_size} sequences = {_readers(topology)} x "
        f"{config.per_device_train_batch_size} "
        "sequences "
        f"x {config.micro_batches(world)} micro-batches" + (", the last not full" if is_short else "")
    )


def _readers(topology: Topology) -> str:
    """Which each read sequences of their own."""
    if topology.ranks_per_sequence > 1:
        kinds = [name for name, size in (("CP", topology.cp_size), ("TP", topology.tp_size)) if size > 1]
        return f"{topology.data_size} {' x '.join(kinds)} groups"
    return f"{topology.data_size} {'ranks' if topology.pp_size == 1 else 'pipelines'}"


def _attention(model: Any) -> str:
    used = inner_attention(model)
    return "expertmesh's own, without masks" if used == OWN else used


def _rope(config: TrainConfig, source: ModelSource) -> list[str]:
    if source.rope is None:
        return []
    told = (
        "an adapter's files have no config: rope_scaling.json beside them tells merge and --init-adapter; who loads "
        f"them otherwise must give the base {json.dumps(source.rope.settings)}"
    )
    return [*source.rope.lines, *([] if config.adapter == "none" else [told])]


def _data(inputs: Inputs, order: DataOrder, config: TrainConfig) -> list[str]:
    assert inputs.training is not None
    samples = inputs.training.samples
    lines = [f"{origin.name}: {describe(origin)}" for origin in samples.origins]
    packed = f" packed into {len(inputs.training):,} sequences" if config.packing else ""
    tokens = int(samples.lengths.sum())
    cut = int(samples.is_cut.sum())
    a_step = tokens / len(inputs.training) * min(order.global_batch_size, len(inputs.training))
    lines.append(
        f"{len(samples):,} samples{packed}, {tokens:,} tokens, {int(samples.targets.sum()) / tokens:.0%} of them "
        f"trained on, about {a_step:,.0f} per step; {cut:,} samples truncated at {config.max_seq_length} tokens; "
        f"chat template: {inputs.template}"
    )
    if inputs.evaluation is not None:
        cut = int(inputs.evaluation.samples.is_cut.sum())
        truncated = f", {cut:,} of them truncated" if cut else ""
        lines.append(f"evaluation on {len(inputs.evaluation):,} samples{truncated}")
    lines.append(f"tokenized samples are kept in {cache_directory()}")
    origins = list(samples.origins)
    if inputs.evaluation is not None:
        origins += [origin for origin in inputs.evaluation.samples.origins if origin not in origins]
    for origin in origins:
        lines += warnings_of(origin, config.max_seq_length)
    return lines + [_endless(origin, inputs.tokenizer) for origin in samples.origins if origin.endless]


def _endless(origin: Origin, tokenizer: Any) -> str:
    """A warning of samples that do not teach the model to end an answer."""
    if tokenizer.eos_token is None:
        remedy = "the tokenizer has no EOS token"
    else:
        remedy = "the chat template writes none there; another --chat-template may"
    return (
        f"warning: {origin.name}: in {origin.endless:,} samples no special token ends what is trained on, so that the "
        f"model does not learn to end a response: {remedy}"
    )


def _too_long(inputs: Inputs, source: ModelSource) -> list[str]:
    """A warning of samples that are longer than the positions the model knows. With dynamic RoPE scaling these have no
    end."""
    assert inputs.training is not None
    longest = int(inputs.training.samples.lengths.max())
    parameters = getattr(source.text_config, "rope_parameters", None)
    positions = getattr(source.text_config, "max_position_embeddings", None)
    if not parameters or not positions or longest <= positions or '"dynamic"' in json.dumps(parameters):
        return []
    scaling = advised_scaling(source.config, longest)
    return [
        f"warning: the longest sample has {longest:,} tokens, and the model knows {positions:,} positions; "
        + ("" if scaling is None else f"--rope-scaling {scaling} extends them, ")
        + f"--max-seq-length {positions} truncates it"
    ]
