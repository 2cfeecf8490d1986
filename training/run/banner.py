"""What is about to run, in a few lines."""

import json
from typing import Any

from ...checkpoints.hf.source import ModelSource
from ...moe.experts.model_layers import moe_layers, moe_shape
from ...moe.hf_model.rope import advised_scaling
from ...sharding.pipeline.pipeline import pipeline_of
from ...sharding.pipeline.timeline import bubble
from ...sharding.replicas import replicated_state
from ...sharding.topology import Topology
from ..attention.complete_sequences import complete_sequences_line
from ..attention.packed_attention import OWN, inner_attention
from ..config.train_config import TrainConfig
from ..data.image_files import samples_cache
from ..data.preview import describe_origin, lost_in_words, warnings_of
from ..data.samples import Origin
from ..data.sequences import DataOrder
from ..engine.engine import Engine
from ..environment import device_name, unseen_gpus
from ..loss.head import loss_head
from ..planning.rank_memory import Forecast
from ..start.inputs import Inputs

MOST_BUBBLE = 1 / 3
"""A longer one comes with a warning."""
_SAMPLES_READ, _MOST_UNKNOWN = 100, 0.05
"""Samples that are looked at for unknown tokens, and the share of these above which there is a warning."""


def first_lines(engine: Engine, inputs: Inputs, order: DataOrder, memory: Forecast) -> list[str]:
    """A line each for model, layout, data and memory."""
    num_experts = moe_shape(engine.model).num_experts
    return [
        f"model   {_model(engine)}",
        f"layout  {_layout(num_experts, engine, order)}",
        f"data    {data_line(inputs, order)}",
        f"memory  {memory.line()}",
    ]


def detail_lines(engine: Engine, inputs: Inputs, order: DataOrder, memory: Forecast) -> list[str]:
    """What `first_lines` leaves out: what computes, how it is trained, and each data set. Some are warnings."""
    config, source = engine.config, engine.source
    lines = [
        *_on_cpu(config),
        _batch(engine.topology, config, order),
        *memory.details(engine.topology.world_size, config),
        f"{'bf16' if config.bf16 else 'fp32'}, expert kernel {engine.kernel.name} ({engine.kernel.why}), "
        f"attention {_attention(engine.model)}, cross-entropy {loss_head(engine.model).kind}"
        + (", fp32 matmuls in TF32" if config.tf32 else "")
        + ("" if config.gradient_checkpointing == "none" else f", {config.gradient_checkpointing} checkpointing")
        + (", activation offloading" if config.offload_activations else "")
        + (", frozen experts in host memory" if config.offload_experts else ""),
        *([f"note: {engine.kernel.lost}"] if engine.kernel.lost else []),
        *([] if engine.flash_attention is None else [engine.flash_attention]),
        *_complete_sequences(engine),
        *_rope(config, source),
        engine.balance.line(),
        *engine.trained,
    ]
    if inputs.training is not None:
        lines += data_sets(inputs, config)
        lines += _too_long(inputs, source)
        lines += _unknown(inputs)
    return lines


def _on_cpu(config: TrainConfig) -> list[str]:
    """A warning where nobody asked for the CPU that the run is on."""
    unseen = "" if config.use_cpu else unseen_gpus()
    return [f"warning: this run is on the CPU: {unseen}; if that is meant, give --use-cpu"] if unseen else []


def _model(engine: Engine) -> str:
    source, counts, config = engine.source, engine.counts, engine.config
    trained = sum(parameter.numel() for parameter in engine.model.parameters() if parameter.requires_grad)
    parts = [source.model_type, f"{_count(counts.total)} parameters", f"{_count(counts.active)} active per token"]
    if config.adapter != "none":
        parts.append(f"LoRA of rank {config.lora_rank} ({_count(trained)} trained)")
    elif trained < counts.total:
        parts.append(f"{_count(trained)} trained")
    return f"{source.path}: {', '.join([*parts, 'bf16' if config.bf16 else 'fp32'])}"


def _count(parameters: int) -> str:
    """Such as 46.7 B or 0.9 M."""
    return f"{parameters / 1e9:,.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} M"


def _complete_sequences(engine: Engine) -> list[str]:
    config = engine.config
    line = complete_sequences_line(engine.model, config.ranks_per_sequence, config.per_device_train_batch_size)
    return [] if line is None else [line]


def pipeline_lines(engine: Engine) -> list[str]:
    """The stages of a model that is cut into some, and a warning where its ranks mostly wait; nothing of another."""
    pipeline, config = pipeline_of(engine.model), engine.config
    if pipeline is None:
        return []
    balance = "as asked" if config.pipeline_layers else "balanced by floating point operations"
    pp_size, micro_batches = pipeline.stages.pp_size, config.micro_batches(engine.topology.world_size)
    *counts, last = (str(len(layers)) for layers in pipeline.stages.layers)
    idle = bubble(pipeline.schedule, pp_size, pipeline.chunks, micro_batches)
    stages = f"{pipeline.stages.number} stages of {', '.join(counts)} and {last} layers ({balance})"
    lines = [f"pipeline: {stages}; {pipeline.schedule}, bubble {idle:.0%}"]
    if idle > MOST_BUBBLE:
        lines.append(
            f"warning: --pp-size {pp_size} with {micro_batches} micro-batch{'es' * (micro_batches > 1)}: "
            f"ranks wait for each other {idle:.0%} of the time (the bubble); raise "
            "--gradient-accumulation-steps"
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
        return [f"{given} has no effect on 1 rank, which has nothing to compare with"]
    if any(part.is_parameter for part in replicated_state(engine.model, topology).values()):
        return []
    return [
        f"{given}: no parameter is replicated with --dense-shard {topology.dense_shard} and dp "
        f"{topology.dp_size} (with hybrid and dp 2 or more, they are); only buffers, the learning "
        "rate and the number of steps are compared"
    ]


def _layout(num_experts: int, engine: Engine, order: DataOrder) -> str:
    topology, config = engine.topology, engine.config
    sizes = {"pp": topology.pp_size, "dp": topology.dp_size, "ep": topology.ep_size}
    axes = " x ".join(f"{name} {size}" for name, size in sizes.items() if name != "pp" or size > 1)
    within = "".join(f", {name} {size}" for name, size in (("cp", config.cp_size), ("tp", config.tp_size)) if size > 1)
    return (
        f"{_plural(topology.world_size, 'rank')} on {device_name(engine.ranks.device)} = {axes}{within}; "
        f"{_plural(num_experts // topology.ep_size, 'expert')} per rank; "
        f"{_plural(order.global_batch_size, _entry(config))} per step"
    )


def _batch(topology: Topology, config: TrainConfig, order: DataOrder) -> str:
    world = topology.world_size
    micro_batches = config.micro_batches(world)
    is_short = order.global_batch_size < config.sequences_per_micro_batch(world) * micro_batches
    return (
        f"batch: {_plural(order.global_batch_size, _entry(config))} = {_readers(topology)} x "
        f"{_plural(config.per_device_train_batch_size, _entry(config))} x {_plural(micro_batches, 'micro-batch', 'es')}"
        f"{', the last not full' if is_short else ''}; dense shard {topology.dense_shard}"
    )


def _entry(config: TrainConfig) -> str:
    """What a batch is counted in."""
    return "pair" if config.sequences_per_row > 1 and not config.packing else "sequence"


def _plural(number: int, noun: str, ending: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def _readers(topology: Topology) -> str:
    """Which each read sequences of their own."""
    if topology.ranks_per_sequence > 1:
        kinds = [name for name, size in (("CP", topology.cp_size), ("TP", topology.tp_size)) if size > 1]
        return _plural(topology.data_size, f"{' x '.join(kinds)} group")
    return _plural(topology.data_size, "rank" if topology.pp_size == 1 else "pipeline")


def _attention(model: Any) -> str:
    used = inner_attention(model)
    return "expertmesh's own (no masks)" if used == OWN else used


def _rope(config: TrainConfig, source: ModelSource) -> list[str]:
    if source.rope is None:
        return []
    adapted = (
        "an adapter has no config.json: merge and --init-adapter read rope_scaling.json next to "
        "it; other programs need this setting in the base model: "
        f"{json.dumps(source.rope.settings)}"
    )
    return [*source.rope.lines, *([] if config.adapter == "none" else [adapted])]


def data_line(inputs: Inputs, order: DataOrder) -> str:
    if inputs.training is None:
        return "none: without --dataset, nothing is trained"
    samples, held_out = inputs.training.samples, inputs.evaluation
    tokens, noun = int(samples.lengths.sum()), samples.kind.noun
    packed = f" packed into {_plural(len(inputs.training), 'sequence')}" if inputs.training.groups is not None else ""
    a_step = tokens / len(inputs.training) * min(order.global_batch_size, len(inputs.training))
    of_stream = f"{_plural(len(inputs.stream.files), 'file')}, read while training; first: " if inputs.stream else ""
    return (
        f"{of_stream}{_plural(len(samples), noun)}{packed}, "
        f"{tokens:,} tokens ({int(samples.targets.sum()) / tokens:.0%} "
        f"trained), about {a_step:,.0f} per step{lost_in_words(samples)}"
        + (f", {_plural(samples.num_images, 'image')}" if inputs.images is not None else "")
        + ("" if held_out is None else f"; evaluation on {_plural(len(held_out), noun)}")
        + ("" if inputs.questions is None else f"; {_plural(len(inputs.questions.prompts), 'prompt')} to answer")
    )


def data_sets(inputs: Inputs, config: TrainConfig) -> list[str]:
    assert inputs.training is not None
    samples, held_out = inputs.training.samples, inputs.evaluation
    lines = [f"{origin.name}: {describe_origin(origin)}" for origin in samples.origins]
    lines.append(f"chat template: {inputs.template}")
    if inputs.template_date:
        lines.append(
            f"note: the chat template reads the clock; all samples have the date {inputs.template_date} "
            "(--template-date sets it, and a resumed run keeps it)"
        )
    if inputs.stream is None:
        lines.append(f"tokenized samples are cached in {samples_cache()}")
    if inputs.questions is not None and inputs.questions.longest > config.generate_max_new_tokens:
        lines.append(
            f"warning: --eval-generate: an expected answer has {inputs.questions.longest:,} tokens, and "
            f"--generate-max-new-tokens {config.generate_max_new_tokens} cuts the model's off before"
        )
    origins = list(samples.origins)
    if held_out is not None:
        origins += [origin for origin in held_out.samples.origins if origin not in origins]
    for origin in origins:
        lines += warnings_of(origin, config.max_seq_length)
    return lines + [_endless(origin, inputs.tokenizer) for origin in samples.origins if origin.endless]


def _endless(origin: Origin, tokenizer: Any) -> str:
    """A warning of samples that do not teach the model to end an answer."""
    if tokenizer.eos_token is None:
        remedy = "the tokenizer has no EOS token"
    else:
        remedy = "the chat template writes none; try another --chat-template"
    return (
        f"warning: {origin.name}: in {origin.endless:,} samples, no special token ends the "
        f"trained text, so the model does not learn to end a response: {remedy}"
    )


def _unknown(inputs: Inputs) -> list[str]:
    """A warning of text that the tokenizer has no tokens for, as a chat template that is not its own may write."""
    assert inputs.training is not None
    unknown, samples = inputs.tokenizer.unk_token_id, inputs.training.samples
    others = {inputs.tokenizer.bos_token_id, inputs.tokenizer.eos_token_id, inputs.tokenizer.pad_token_id}
    if unknown is None or unknown in others:
        return []
    tokens = [token for number in range(min(len(samples), _SAMPLES_READ)) for token in samples[number].tokens]
    share = tokens.count(unknown) / max(len(tokens), 1)
    if share < _MOST_UNKNOWN:
        return []
    return [
        f"warning: {share:.0%} of the first samples' tokens are {inputs.tokenizer.unk_token}, text that the tokenizer "
        "does not know; look at them with --preview, and give another --chat-template or --prompt-template"
    ]


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
        (f"warning: the longest sample has {longest:,} tokens, but the model has {positions:,} positions; ")
        + ("" if scaling is None else f"--rope-scaling {scaling} extends them, ")
        + f"--max-seq-length {positions} truncates it"
    ]
