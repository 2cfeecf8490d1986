"""What a rank holds when it holds the most, term by term, in bytes.

A step's memory rises and falls. `moments` lists the points at which it can be highest, each with all its terms, and
`peak` takes the highest of them. The formulas follow what autograd keeps for backward in transformers' Mixtral (norms,
rotary embedding, `scaled_dot_product_attention`) and in `moe`, and when FSDP2 allocates and frees
(`torch/distributed/fsdp/_fully_shard`: `_fsdp_param_group.py`, `_fsdp_collectives.py`).

Letters in formulas: T tokens on this rank, S positions of a row, N tokens with a loss, D model width, F expert width,
E experts, e experts on this rank, K experts a token, R rows received (T·K if balanced), H heads, G heads of
keys and values, A head width, V vocabulary, L layers, c bytes of a number in forward and backward (bf16 2, fp32 4),
P parameters on this rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import ceil, prod, sqrt

from moe.padding import padded_rows
from sharding.planner.setting import Setting, Unit, Units, units_of
from sharding.planner.shapes import ModelShape

LOGIT_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""What the fp32 logits of one chunk may take under `--cross-entropy chunked`."""

CUDA_CONTEXT = 2**30
"""Assumed: CUDA context, cuBLAS workspace and NCCL's buffers, about 0.4, 0.05 and 0.5 GiB on 8 to 64 GPUs."""

FRAGMENTATION = 0.1
"""Assumed: what torch's caching allocator cannot use again, as a share of what comes and goes within a step."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at one moment.

    Attributes:
        parameters, gradients, optimizer: of this rank's shards.
        activations: what autograd keeps for backward.
        gathered: parameters gathered for a layer, gradients not yet reduced, all-gather and reduce-scatter buffers.
        rows: what the all-to-alls and the experts' kernel need beside what is kept, while they run.
        logits: and what belongs to the loss.
        slack: what the allocator and the driver take on top.
    """

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    gathered: float = 0
    rows: float = 0
    logits: float = 0
    slack: float = 0

    @property
    def total(self) -> float:
        return sum(self.terms().values())

    @property
    def lasting(self) -> float:
        """What is there whatever the batch: parameters, gradients and the optimizer's state."""
        return self.parameters + self.gradients + self.optimizer

    def terms(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def parameters_held(units: Units, num_layers: int) -> int:
    """P: this rank's part of every unit, FSDP2's padding included."""
    return num_layers * (units.layer.shard + units.experts.shard) + units.root.shard


def norm_saved(setting: Setting, model: ModelShape) -> float:
    """Kept by one RMSNorm (`MixtralRMSNorm`): its input in fp32, 1/rms (T, 1) in fp32, the normalised input, and its
    output, which the matrix product after it keeps. In fp32 the first is the residual stream itself."""
    return setting.tokens * (model.moe.model_width * (4 + 2 * setting.compute_bytes) + 4)


def attention_saved(setting: Setting, model: ModelShape) -> float:
    """Kept by attention (`MixtralAttention` with sdpa's flash kernels): queries and output T·H·A, keys and values
    T·G·A, and the logarithms of the softmax's sums, T·H in fp32. The output projection's input is the output kept."""
    numbers = 2 * (model.num_heads + model.num_kv_heads) * model.head_width
    return setting.tokens * (numbers * setting.compute_bytes + 4 * model.num_heads)


def routing_saved(setting: Setting, model: ModelShape) -> float:
    """Kept by the router and the permutations: logits and probabilities (T, E), weights before and after they are
    normalised (T, K), their sums and logsumexps in fp32; chosen experts (T, K), `source_n` and `position_TK` in int64;
    and, where rows come from several ranks for several experts, two indices (R) in int64."""
    E, K = model.moe.num_experts, model.moe.top_k
    is_regrouped = setting.ep_size > 1 and setting.ep_size < E
    indices = 2 * 8 * rows_received(setting, model) if is_regrouped else 0
    return setting.tokens * (2 * 4 * E + 2 * 4 * K + 2 * 4 + 3 * 8 * K) + indices


def rows_sent(setting: Setting, model: ModelShape) -> float:
    """T·K: a row for each of a token's experts."""
    return setting.tokens * model.moe.top_k


def rows_received(setting: Setting, model: ModelShape) -> float:
    """R, on the busiest rank. As many as are sent where every expert is as busy as the mean. What one expert has above
    it evens out among the e experts of a rank, as of independent quantities: by √e; among all E it vanishes."""
    if setting.ep_size == 1:
        return rows_sent(setting, model)
    experts_here = model.moe.num_experts / setting.ep_size
    return rows_sent(setting, model) * (1 + (setting.imbalance - 1) / sqrt(experts_here))


def experts_saved(setting: Setting, model: ModelShape) -> float:
    """Kept by the experts' kernel: its input (R, D), gate and up (R, F); megablocks-sparse also their product. And by
    `RowsToTokens` the results that came back, (T·K, D)."""
    inner = 3 if setting.expert_kernel == "megablocks-sparse" else 2
    D, F = model.moe.model_width, model.moe.expert_width
    rows = rows_received(setting, model) * D + _rows_computed(setting, model) * inner * F
    return setting.compute_bytes * (rows + rows_sent(setting, model) * D)


def _rows_computed(setting: Setting, model: ModelShape) -> float:
    """R, and on a CPU what the loop pads each expert's rows with (`moe.matmul.pad_rows`)."""
    rows = rows_received(setting, model)
    if setting.device != "cpu" or setting.expert_kernel != "loop":
        return rows
    experts_here = model.moe.num_experts // setting.ep_size
    return float(experts_here * padded_rows(round(rows / experts_here)))


def layer_saved(setting: Setting, model: ModelShape) -> float:
    """Kept by one decoder layer without activation checkpointing."""
    return (
        2 * norm_saved(setting, model)
        + attention_saved(setting, model)
        + routing_saved(setting, model)
        + experts_saved(setting, model)
    )


def layer_input(setting: Setting, model: ModelShape) -> float:
    """T·D."""
    return setting.tokens * model.moe.model_width * setting.compute_bytes


def layer_kept(setting: Setting, model: ModelShape) -> float:
    """Kept from a layer's forward to its backward: all of it; under full checkpointing its input; under selective its
    input, attention's output (T, H·A) and logarithms (T, H), the chosen experts and their probabilities (T, K), and
    what the two all-to-alls brought, (R, D) and (T·K, D). The input may lie in host memory."""
    if setting.checkpointing == "none":
        return layer_saved(setting, model)
    own = 0.0 if setting.offload_activations else layer_input(setting, model)
    if setting.checkpointing == "full":
        return own
    c, H = setting.compute_bytes, model.num_heads
    kept: float = setting.tokens * (H * model.head_width * c + 4 * H + (4 + 8) * model.moe.top_k)
    if setting.ep_size > 1:
        rows = rows_received(setting, model) + rows_sent(setting, model)
        kept += rows * model.moe.model_width * c
    return own + kept


def _kept(setting: Setting, model: ModelShape, num_layers: int) -> float:
    """Of the first `num_layers` layers, between forward and backward; the last ones of the model may keep gate and up
    too (`--keep-expert-products`). Of inputs in host memory, one is on its way back."""
    with_products = max(0, num_layers - (model.num_layers - setting.keep_expert_products))
    products = setting.compute_bytes * 2 * _rows_computed(setting, model) * model.moe.expert_width
    coming = layer_input(setting, model) if setting.offload_activations and num_layers else 0.0
    return num_layers * layer_kept(setting, model) + with_products * products + coming


def outside_layers_saved(setting: Setting, model: ModelShape) -> float:
    """Kept outside of the decoder layers: by the final norm all but its output, which the loss picks rows from; cosines
    and sines (S, A); tokens, targets and the targets' places in int64."""
    norm = norm_saved(setting, model) - layer_input(setting, model)
    rotary = 2 * setting.seq_length * model.head_width * setting.compute_bytes
    return norm + rotary + 3 * 8 * setting.tokens


def logits_peak(setting: Setting, model: ModelShape) -> float:
    """While `--cross-entropy chunked` takes the loss: the rows with a target and their gradients (N, D); the weight's
    gradient in fp32 (V, D); and of a chunk of C rows the logits: once in fp32 or on a GPU, where they become the
    gradient in place, or as bf16, in fp32, and as the gradient in bf16; or then its product with the rows (V, D). The
    chunk before leaves its gradient until this one's is there."""
    c, V, D = setting.compute_bytes, model.vocabulary, model.moe.model_width
    N = setting.tokens * setting.trained
    num_chunks = max(1, ceil(N * V * 4 / LOGIT_CHUNK_BYTES[setting.device]))
    CV = N / num_chunks * V
    # on a GPU one kernel puts the gradient in the place of the logits, whatever their dtype
    chunk = CV * (c if setting.device == "cuda" or c == 4 else 4 + 2 * c) + (CV * c if num_chunks > 1 else 0)
    # for oneDNN, on a CPU in fp32, the gradient is transposed by a copy
    product = CV * c * (2 if setting.device == "cpu" and c == 4 else 1) + V * D * c
    # a single product in bf16 is the gradient already
    summed = V * D * 4 if num_chunks > 1 or c == 4 else 0
    return 2 * N * D * c + summed + max(chunk, product)


def kernel_backward(setting: Setting, model: ModelShape) -> float:
    """The experts' backward holds the gradients of its result and of its input (R, D), and of all experts
    silu(gate)·up and the gradients of it, of gate and of up (R, F). With the loop it is those of one expert, of r rows:
    three (r, F), or five while the next expert begins; its rows, their gradients and its result's (r, D), on a CPU
    copied where they are padded; and there, for oneDNN, a transposed copy (r, F) and a product (F, D) before it is
    written to its place. The gradient of the residual stream (T, D) waits beside. Products in fp8 have operands with a
    byte a number: one (R, F), and the rows (R, D) or a weight of all experts."""
    R, D, F = rows_received(setting, model), model.moe.model_width, model.moe.expert_width
    outside = 2 * R * D + float(setting.tokens * D)
    if setting.expert_kernel == "fp8":
        weight = model.moe.num_experts / setting.ep_size * F * D
        return setting.compute_bytes * (outside + 4 * R * F) + R * F + max(R * D, weight)
    if setting.expert_kernel != "loop":
        return setting.compute_bytes * (outside + 4 * R * F)
    experts_here = model.moe.num_experts // setting.ep_size
    r = _rows_computed(setting, model) / experts_here
    is_padded = r != round(R / experts_here)
    copies, product = (2 * r * D * is_padded, r * F + F * D) if setting.device == "cpu" else (0, 0)
    if experts_here > 1:
        return setting.compute_bytes * (outside + 5 * r * F + r * D + copies + product)
    return setting.compute_bytes * (outside + 3 * r * F + copies + max(2 * r * D, product))


def optimizer_temporaries(setting: Setting, model: ModelShape) -> float:
    """While it updates: torch's fused AdamW nothing, nor AdamW with 8-bit or bf16 state on a GPU; on a CPU that takes
    about 8 tensors in fp32 of the largest parameter on a rank; Muon about 5 of the largest matrix, whole, in the dtype
    of the iteration."""
    if setting.optimizer == "adamw_torch_fused" or (setting.optimizer != "muon" and setting.device == "cuda"):
        return 0
    if setting.optimizer == "muon":
        matrices = [(rows // model.moe.num_experts, *rest) for rows, *rest in model.experts]
        matrices += [shape for shape in model.layer if len(shape) == 2]
        return 5 * max(map(prod, matrices)) * setting.compute_bytes
    parts = [prod(shape) / setting.world_size for shape in model.experts]
    parts += [prod(shape) / setting.dense_ranks for shape in model.root]
    return 8 * 4 * max(parts)


def reduce_peak(unit: Unit, setting: Setting) -> float:
    """While a unit's gradients are summed over its ranks (`foreach_reduce`): first the gradients and an fp32 copy, the
    reduce-scatter's input; then this copy and its fp32 result. A lone rank divides its copy by 1 into another. On a CPU
    the input lies in `shared_memory`."""
    sent = 0 if setting.device == "cpu" else unit.gathered
    divided = unit.gathered if unit.ranks == 1 else 0
    return max(unit.gathered * setting.compute_bytes + 4 * sent, 4 * (sent + divided + unit.shard))


def shared_memory(setting: Setting, units: Units) -> float:
    """On a CPU, from the first step on, the pieces of `sharding.gloo.SharedMemory`: the largest unit's, gathered or to
    be reduced; what one rank has received of it for its part; and two of a layer without its experts: its gradients
    wait to be let go while the layer before it is gathered."""
    if setting.device != "cpu":
        return 0
    reduced = [units.layer, units.root] + ([units.experts] if setting.experts_are_gathered else [])
    sent = [unit for unit in reduced if unit.ranks > 1]
    layers = 2 * 4 * units.layer.gathered if units.layer.ranks > 1 else 0
    return max(4 * unit.gathered for unit in reduced) + max((4 * unit.shard for unit in sent), default=0) + layers


def moments(model: ModelShape, setting: Setting) -> Iterator[tuple[str, Memory]]:
    """(when, what a rank holds then) for each moment at which that can be the most.

    A layer's forward is none of them: its backward holds the same and the gradients. Of the layers, the last and the
    first suffice, since backward gives up activations and gains gradients at a constant rate.
    """
    units = units_of(model, setting)
    first, last = 0, model.num_layers - 1
    yield "loss", _with_slack(_at_loss(model, setting, units), setting, units)
    for layer in dict.fromkeys((last, first)):
        for when, at in (
            ("backward of experts", _at_experts),
            ("reduction of experts' gradients", _at_reduction),
            ("backward of attention", _at_attention),
        ):
            yield f"{when}, layer {layer}", _with_slack(at(model, setting, units, layer), setting, units)
    yield "reduction of embedding and head", _with_slack(_at_root(model, setting, units), setting, units)
    yield "optimizer step", _with_slack(_at_update(model, setting, units), setting, units)


def peak(model: ModelShape, setting: Setting) -> tuple[str, Memory]:
    """When a rank holds the most, and what."""
    return max(moments(model, setting), key=lambda moment: moment[1].total)


def _lasting(setting: Setting, units: Units, num_layers: int, gradients: float) -> dict[str, float]:
    """Parameters and optimizer state, and as many gradients as there are: all of them from an earlier micro-step on."""
    if setting.offload:
        return {}
    held = parameters_held(units, num_layers)
    gradients = held if setting.accumulation > 1 else gradients
    each = setting.state_bytes
    return {"parameters": held * each.parameter, "gradients": gradients * each.gradient, "optimizer": held * each.state}


def _always_gathered(model: ModelShape, setting: Setting, units: Units) -> float:
    """From forward to the end of backward: the root, which FSDP2 does not reshard; and all layers, if so asked."""
    c = setting.compute_bytes
    kept = 0 if setting.reshard_after_forward else model.num_layers
    experts = units.experts.gathered if setting.experts_are_gathered else 0
    cast = model.num_layers * units.experts.gathered if _casts_are_kept(setting) else 0
    return c * (units.root.gathered + kept * (units.layer.gathered + experts) + cast)


def _casts_are_kept(setting: Setting) -> bool:
    """Whether experts that are no FSDP2 unit keep their weights in the dtype of the rows from forward to backward."""
    return setting.experts_are_cast and (not setting.reshard_after_forward or setting.checkpointing == "none")


def _at_loss(model: ModelShape, setting: Setting, units: Units) -> Memory:
    """Activations of all layers and the logits. The last all-gather's buffer is still there (FSDP2 frees it when the
    next unit is gathered in forward)."""
    if setting.device == "cpu":
        buffer = 0  # part of `shared_memory`
    elif not setting.experts_are_gathered:
        buffer = units.layer.gathered if units.layer.ranks > 1 else 0
    else:
        buffer = units.experts.gathered if units.experts.ranks > 1 else 0
    return Memory(
        **_lasting(setting, units, model.num_layers, 0),
        activations=_kept(setting, model, model.num_layers) + outside_layers_saved(setting, model),
        gathered=_always_gathered(model, setting, units) + setting.compute_bytes * buffer,
        logits=logits_peak(setting, model),
    )


def _head_gradient(model: ModelShape, setting: Setting) -> float:
    """V·D: the head's weight gradient waits for the end of backward to be reduced with the embedding's."""
    return model.vocabulary * model.moe.model_width * setting.compute_bytes


def _in_backward(model: ModelShape, setting: Setting, units: Units, layer: int) -> float:
    """Gathered throughout a layer's backward: the layer, and the buffer into which the one before it is gathered."""
    c = setting.compute_bytes
    own = c * units.layer.gathered if setting.reshard_after_forward else 0
    is_prefetched = layer > 0 and units.layer.ranks > 1 and setting.reshard_after_forward
    before = c * units.layer.gathered if is_prefetched and setting.device != "cpu" else 0
    # on a GPU `sharding.parallelize` asks for the whole layer before, experts included
    if setting.device == "cuda" and is_prefetched and setting.experts_are_gathered and units.experts.ranks > 1:
        before += c * units.experts.gathered
    return _always_gathered(model, setting, units) + own + before


def _recomputed(setting: Setting, model: ModelShape) -> float:
    """A layer in its own backward: all that autograd would have kept. What checkpointing kept is part of that, but for
    the layer's input in bf16, of which the norm keeps an fp32 copy."""
    is_extra = setting.checkpointing != "none" and setting.bf16
    return layer_saved(setting, model) + (layer_input(setting, model) if is_extra else 0)


def _at_experts(model: ModelShape, setting: Setting, units: Units, layer: int) -> Memory:
    """Parameters and gradients of the layer's experts; the reduce-scatter's input of the layer after it, which FSDP2
    keeps until the next one. The rows that came back to this rank's tokens are no longer needed."""
    c, experts = setting.compute_bytes, units.experts
    gathered = _in_backward(model, setting, units, layer)
    gradients = (model.num_layers - 1 - layer) * (units.layer.shard + experts.shard)
    if layer < model.num_layers - 1 and setting.device != "cpu":
        gathered += 4 * units.layer.gathered
    if setting.experts_are_gathered:
        gathered += c * experts.gathered * (2 if setting.reshard_after_forward else 1)
    elif setting.experts_are_cast:
        # gradients in the dtype of the rows, and weights, unless all are kept
        gathered += c * experts.gathered * (1 if _casts_are_kept(setting) else 2)
    else:
        gradients += experts.shard
    returned = setting.compute_bytes * rows_sent(setting, model) * model.moe.model_width
    return Memory(
        **_lasting(setting, units, model.num_layers, gradients),
        activations=_kept(setting, model, layer) + _recomputed(setting, model) - returned,
        gathered=gathered,
        rows=kernel_backward(setting, model),
        logits=_head_gradient(model, setting),
    )


def _at_reduction(model: ModelShape, setting: Setting, units: Units, layer: int) -> Memory:
    """The kernel has run: what it kept is free, and its gradients are reduced over dp."""
    gradients = (model.num_layers - 1 - layer) * (units.layer.shard + units.experts.shard)
    gathered = _in_backward(model, setting, units, layer)
    if setting.experts_are_gathered:
        gathered += reduce_peak(units.experts, setting)
    else:
        gradients += units.experts.shard
        if setting.experts_are_cast:
            # one matrix's gradient before it is added to the one in fp32
            gathered += setting.compute_bytes * units.experts.gathered / len(model.experts)
    rows = (rows_received(setting, model) + setting.tokens) * model.moe.model_width * setting.compute_bytes
    return Memory(
        **_lasting(setting, units, model.num_layers, gradients),
        activations=_kept(setting, model, layer) + _recomputed(setting, model) - experts_saved(setting, model),
        gathered=gathered,
        rows=rows,
        logits=_head_gradient(model, setting),
    )


def _at_attention(model: ModelShape, setting: Setting, units: Units, layer: int) -> Memory:
    """The layer's other gradients, and the experts' reduce-scatter's input, which stays until the next; gradients of
    queries, keys, values and of the attention's output; the residual stream's and the layer's input's."""
    c = setting.compute_bytes
    gradients = (model.num_layers - 1 - layer) * (units.layer.shard + units.experts.shard) + units.experts.shard
    gathered = _in_backward(model, setting, units, layer) + c * units.layer.gathered
    if setting.experts_are_gathered and setting.device != "cpu":
        gathered += 4 * units.experts.gathered
    widths = 2 * (model.num_heads + model.num_kv_heads) * model.head_width + 2 * model.moe.model_width
    activations = _recomputed(setting, model) - experts_saved(setting, model) - norm_saved(setting, model)
    return Memory(
        **_lasting(setting, units, model.num_layers, gradients),
        activations=_kept(setting, model, layer) + activations - routing_saved(setting, model),
        gathered=gathered,
        rows=setting.tokens * widths * c,
        logits=_head_gradient(model, setting),
    )


def _at_root(model: ModelShape, setting: Setting, units: Units) -> Memory:
    """The end of backward: all gradients but the root's, which are being reduced."""
    gradients = model.num_layers * (units.layer.shard + units.experts.shard)
    return Memory(
        **_lasting(setting, units, model.num_layers, gradients),
        gathered=reduce_peak(units.root, setting),
    )


def _at_update(model: ModelShape, setting: Setting, units: Units) -> Memory:
    gradients = parameters_held(units, model.num_layers)
    return Memory(
        **_lasting(setting, units, model.num_layers, gradients),
        gathered=0 if setting.offload else optimizer_temporaries(setting, model),
    )


def _with_slack(memory: Memory, setting: Setting, units: Units) -> Memory:
    """What is there at every moment besides."""
    if setting.device == "cpu":
        return replace(memory, gathered=memory.gathered + shared_memory(setting, units))
    return replace(memory, slack=CUDA_CONTEXT + FRAGMENTATION * (memory.total - memory.lasting))
