"""The table of parity: what is compared with what, of Mixtral, and of another family where only that has what is meant.

Each way to train, and each axis, has a row in `make test` or `make test-rest`. Settings that do not act on one another
are not combined; a layout stands beside those that it has to do with.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from tests.families.configs import TEXT_IDS
from tests.interpreter import interpreted, with_liger
from tests.parity import within
from tests.parity.case import SAMPLES, random_samples, split_texts, wrapped_texts
from tests.parity.compare import Bits, Tolerance
from tests.parity.rows import EXACT, OF_FAMILIES, Row, rows

AUX: dict[str, Any] = {"balance": 0.05, "z": 0.01}
GROUPED: dict[str, Any] = {"kernel": "torch-grouped"}
FULL: dict[str, Any] = {"gradient_checkpointing": "full"}
SELECTIVE: dict[str, Any] = {"gradient_checkpointing": "selective"}
KEPT = SELECTIVE | {"keep_expert_products": 1}
WEIGHED = GROUPED | SELECTIVE | {"within": within.weighed}
BF16: dict[str, Any] = {"compute_dtype": torch.bfloat16}
LORA: dict[str, Any] = {"adapter": "lora", "lora_rank": 4}
MUON: dict[str, Any] = {"optim": "muon"}
SHAMPOO: dict[str, Any] = {
    "optim": "shampoo", "shampoo_frequency": 7, "shampoo_start": 5, "shampoo_block_size": 24, "steps": 20
}  # fmt: skip
"""Roots are taken three times, in blocks of which some are smaller."""
HALF = SAMPLES[:16]
"""Of one to four ranges' length, and some that leave a rank of several that share a sequence with padding alone."""

# ---- against transformers in one process ----

MAIN: list[Row] = [
    *rows(
        "auxiliary losses",
        "1 | 4 ep 2 | 4 ep 4, release | 2, release | 8 ep 4, release | 8 ep 8, release",
        samples=SAMPLES,
        **AUX,
    ),
    *rows("2 micro-batches", "4 ep 2 hybrid | 2 hybrid, slow", samples=SAMPLES, z=0.01, accumulation=2),
    *rows("4 micro-batches", "4, slow | 8 ep 4 hybrid, release", samples=SAMPLES, z=0.01, accumulation=4, **GROUPED),
    *rows("grouped", "4 ep 2 hybrid, slow", samples=SAMPLES, **AUX, **GROUPED),
    *rows("recomputed in full", "2 ep 2 | 4 ep 2 hybrid, release", samples=SAMPLES, balance=0.05, **FULL),
    *rows("recomputed in part", "1 | 4 ep 2, release | 4 ep 4", samples=SAMPLES, **AUX, **SELECTIVE, **GROUPED),
    *rows("weighed", "1 | 2", samples=SAMPLES, **AUX, **WEIGHED),
    *rows("weighed, sent once", "4 ep 2", samples=SAMPLES, **AUX, **WEIGHED, dispatch="rank"),
    *rows("not resharded", "4 ep 2", samples=SAMPLES, z=0.01, accumulation=2, reshard_after_forward=False),
    *rows("balanced per layer", "4 ep 2", samples=SAMPLES, balance=0.05, router_aux_loss_per_layer=True),
    *rows("compiled", "2 ep 2, slow", samples=SAMPLES, z=0.01, compile=True, within=within.eager, **SELECTIVE),
    *rows("by inductor", "1, release", samples=SAMPLES, z=0.01, compile=True, within=within.inductor, **SELECTIVE),
]

HEADS: dict[str, Any] = {"samples": HALF, "changes": {"num_key_value_heads": 4}}
DIVIDED: list[Row] = [
    *rows("tp", "2 tp 2", **HEADS, **AUX, **GROUPED),
    *rows(
        "tp, 2 micro-batches",
        "4 ep 2 tp 2 hybrid | 4 ep 4 tp 4, slow | 4 ep 4 cp 2 tp 2, release | 4 ep 2 pp 2 tp 2, release",
        **(HEADS | FULL),
        z=0.01,
        accumulation=2,
    ),
    *rows(
        "tp, recomputed in part",
        "4 ep 4 cp 2 tp 2, slow | 4 ep 2 tp 2, release | 8 ep 2 pp 2 tp 2, release | 4 ep 4 tp 4, release",
        **(HEADS | AUX | SELECTIVE),
    ),
    *rows("tp, compiled", "4 ep 4 cp 2 tp 2, slow", **HEADS, z=0.01, compile=True, within=within.aot_eager),
    *rows("tp, complete logits", "2 tp 2, slow", **HEADS, z=0.01, loss_parallel=False),
    *rows("tp, muon", "4 ep 2 tp 2 hybrid, slow", **HEADS, z=0.01, **MUON),
    *rows("tp, shampoo", "4 ep 4 cp 2 tp 2, slow", **HEADS, z=0.01, **SHAMPOO),
    *rows("cp", "2 ep 2 cp 2", samples=HALF, **AUX, **GROUPED),
    *rows("cp, 2 micro-batches", "4 ep 2 cp 2 | 4 ep 4 cp 4, slow", samples=HALF, z=0.01, accumulation=2, **FULL),
    *rows(
        "cp, in part", "4 ep 2 cp 2 hybrid, slow | 4 ep 4 cp 2, release", samples=HALF, **AUX, **SELECTIVE, **GROUPED
    ),
    *rows(
        "pp",
        "4 ep 2 pp 2 | 2 pp 2, slow | 4 pp 2, release | 4 pp 4, release | 8 ep 2 pp 2, release",
        samples=SAMPLES,
        z=0.01,
        accumulation=4,
        changes={"num_hidden_layers": 4},
    ),
]

# an expert's rows, and a block's, lie on two ranks
TWO_EXPERTS: dict[str, Any] = {"num_local_experts": 2}
OPTIMIZERS: list[Row] = [
    *rows("muon", "2 ep 2 | 4 ep 2 hybrid, release", samples=HALF, z=0.01, **MUON),
    *rows("muon, 2 experts", "4, slow", samples=HALF, z=0.01, changes=TWO_EXPERTS, **MUON),
    *rows("shampoo", "1, slow | 4 ep 2 hybrid, release | 4 ep 4, release", samples=HALF, z=0.01, **SHAMPOO),
    *rows("shampoo, 2 experts", "4, slow", samples=HALF, z=0.01, changes=TWO_EXPERTS, **SHAMPOO),
]

TIED: dict[str, Any] = {"num_key_value_heads": 1, "tie_word_embeddings": True}
SMALL = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 16}
# Of two tokens, query and key gradients all but cancel, to 1e-4 to 6e-4 of the global norm; of one, they are all noise,
# of which AdamW makes whole steps.
FEW: dict[str, Any] = AUX | {"steps": 1, "allowed": replace(EXACT, weights=torch.inf)}
WINDOW = {"sliding_window": 4, "num_hidden_layers": 3}
ONE_EXPERT: dict[str, Any] = {
    "zeroed": r"gate\.weight",
    "changes": {"num_experts_per_tok": 1},
    "balance": 0.05,
    "steps": 1,
}
NEAR_FP32 = Tolerance(5e-3, norms=5e-2, grads=torch.inf, weights=torch.inf)
EDGES: list[Row] = [
    # ranks without a row, and so without a token, take part with a position of padding
    *rows("one row", "4 ep 2, slow", samples=random_samples([9]), **FEW),
    *rows("one target", "4 ep 4, slow", samples=random_samples([2]), **FEW),
    *rows("no target", "2 ep 2 | 4 ep 4, release", samples=random_samples([1]), **FEW),
    *rows("two rows", "4 ep 2, slow", samples=random_samples([2, 11]), **FEW),
    *rows("uneven rows", "4 ep 4", samples=random_samples([1, 1, 30]), **FEW),
    # a router of zeros ties all experts, and top-1 then takes the same one for every token
    *rows("one expert", "4 ep 4", samples=SAMPLES[:8], **ONE_EXPERT, **GROUPED),
    *rows("one expert, loop", "4 ep 2, slow", samples=SAMPLES[:8], **ONE_EXPERT),
    *rows("near fp32", "1 | 4 ep 2, release", samples=HALF, steps=1, allowed=NEAR_FP32, **BF16),
    *rows("2 experts", "4 ep 2, slow | 8 ep 2 hybrid, release", samples=SAMPLES, balance=0.05, changes=TWO_EXPERTS),
    *rows("4 experts", "4 ep 4, slow", samples=SAMPLES, balance=0.05, changes={"num_local_experts": 4}),
    *rows("6 experts, top 3", "4 ep 2 hybrid", samples=SAMPLES, balance=0.05, changes=SMALL),
    *rows("tied", "4 ep 2 hybrid, slow | 4 ep 4, release", samples=SAMPLES, balance=0.05, changes=TIED),
    *rows("window", "4 ep 2, slow", samples=SAMPLES, balance=0.05, changes=WINDOW),
    # DeepSeek-V4's compressors make one of 4 and of 8 tokens: sequences that reach both, one, and none
    *(
        row
        for name, lengths, where in (
            ("reached on one rank", (20, 3), "2, slow | 4 ep 2 hybrid, release"),
            ("each reached on another", (5, 20), "2 ep 2, slow"),
            ("reached on no rank", (3, 3), "2, slow"),
            ("reached by turns", (3, 20, 20, 3), "4 ep 2 pp 2, slow"),
        )
        for row in rows(
            name,
            where,
            samples=random_samples(lengths * 2),
            family="deepseek_v4",
            accumulation=2,
            # gradients of the scalars of hyper-connections are sums that cancel, of as few as three tokens here
            allowed=replace(OF_FAMILIES, noisy=r"_hc\."),
        )
    ),
]

PACKED: dict[str, Any] = {
    "samples": random_samples([31, 17, 16, 12, 11, 9, 8, 5, 3, 2, 2, 1, 40]),
    "packing": True,
    "z": 0.01,
    "steps": 2,
}
WRAPPED = {name: value for name, value in PACKED.items() if name != "z"} | {
    "samples": wrapped_texts([61, 5, 40, 17, 2, 30], 48)
}
SHORT_WINDOW = {"sliding_window": 6}
PACKING: list[Row] = [
    *rows("packed", "2 ep 2 | 1, release | 4 ep 2, release", **PACKED, attention="sdpa", **SELECTIVE),
    *rows("packed, eager", "1", **PACKED, attention="eager"),
    *rows("packed, split texts", "2 ep 2", **(PACKED | {"samples": split_texts([61, 5, 40, 17, 2], 16)})),
    # where a token beyond the sequence is routed and balanced by transformers alone
    *rows("packed, wrapped texts", "2 ep 2 cp 2 | 2 pp 2", **WRAPPED, accumulation=2),
    # what the log tells of routing, too
    *rows("packed or not", "1", **PACKED, against={"packing": None}),
    *rows("packed, all heads", "2 ep 2, slow", **PACKED, changes={"num_key_value_heads": 4}),
    *rows("packed, window", "1 | 4 ep 4, release", **PACKED, changes=SHORT_WINDOW),
    *rows("packed, window, masked", "2 ep 2", **PACKED, attention="sdpa", changes=SHORT_WINDOW),
]

# ---- of ours against ours ----

NEAR_8BIT, NEAR_BF16 = (replace(EXACT, after=share, weights=share, moved=torch.inf) for share in (3e-5, 3e-4))
"""Of states in few bits a value here and there is rounded to the other side; a rank with random numbers of its own
would be 3e-3 off."""
WIDE = {"hidden_size": 256}
LOW_BIT: dict[str, Any] = {"samples": HALF, "changes": WIDE, "against": {"layout": "1"}}
AS_BF16 = Tolerance(1e-3, after=1e-3, norms=torch.inf, grads=1e-2, weights=torch.inf, moved=torch.inf)
AS_FP8 = Tolerance(2e-5, after=1e-2, norms=2e-3, grads=5e-3, as_one=True, weights=torch.inf, moved=torch.inf)
"""Rows and weights are rounded by themselves, and of what is summed over rows, each number as it would be among other
rows: scales are powers of two. What differs is where partial sums are rounded to bf16: a part in 2^8 of a gradient,
2.3e-3 of them all here, of bf16's own experts as well; steps that follow see weights
rounded to bf16 the other way, a part in 2^8 each (3.7e-3 of a norm, seen where all libraries were held to AVX2)."""
IN_FP8: dict[str, Any] = {"samples": SAMPLES, "kernel": "fp8", "allowed": AS_FP8, "against": {"layout": "1"}} | BF16
DENSE_IN_FP8: dict[str, Any] = IN_FP8 | {
    "kernel": "loop", "dense_precision": "fp8", "allowed": replace(AS_FP8, norms=torch.inf)
}  # fmt: skip
AS_ON_GPU: dict[str, Any] = {
    "samples": random_samples([11, 6, 9, 5, 7, 12, 10, 8]), "steps": 2, "allowed": AS_BF16, "within": within.joined,
    **BF16, **GROUPED,
}  # fmt: skip
LAYOUTS: list[Row] = [
    *rows("8 bit", "4 ep 2, slow | 4 ep 4, release", **LOW_BIT, optim="adamw_torch_8bit", allowed=NEAR_8BIT),
    *rows(
        "AdamW in bf16", "4 ep 2 hybrid, slow", **LOW_BIT, optim="adamw_bf16", allowed=replace(NEAR_BF16, grads=3e-4)
    ),
    *rows("fp8", "2 ep 2 | 4 ep 2, release", **IN_FP8),
    *rows("fp8, 2 micro-batches", "4 ep 2 hybrid, slow", **IN_FP8, accumulation=2),
    *rows("dense fp8", "2 ep 2", **DENSE_IN_FP8, **SELECTIVE),
    *rows("dense fp8, adapters", "4 ep 2 hybrid, slow", **DENSE_IN_FP8, **LORA, **FULL),
    *rows("joined", "2 ep 2", **AS_ON_GPU, **FULL, reshard_after_forward=False, against={"within": nullcontext}),
    # both apply a token's weights early: elsewhere is other rounding
    *rows(
        "joined, alone",
        "2 ep 2, slow",
        **AS_ON_GPU,
        **KEPT,
        dispatch="rank",
        dispatch_sums="float32",
        against={"layout": "1", "dispatch": None, "dispatch_sums": None},
    ),
    *rows(
        "gathered",
        "2, slow",
        **(AS_ON_GPU | KEPT | {"within": within.gathered}),
        against={"layout": "1", "within": within.joined},
    ),
]

IN_THREE: dict[str, Any] = {
    "samples": random_samples([25, 19, 27, 33, 28, 24, 26, 31]), "steps": 2, "bits": "all",
    # a CPU rounds the last few numbers of a tensor otherwise where their number is no multiple of its registers'
    "changes": {"num_local_experts": 6, "intermediate_size": 64},
    "overlap_chunks": 3,
    "against": {"overlap_chunks": None, "gradient_checkpointing": None, "keep_expert_products": None},
}  # fmt: skip
AGAIN: dict[str, Any] = {
    "samples": HALF, "steps": 2, "bits": "all",
    "against": {"gradient_checkpointing": None, "offload_activations": None},
}  # fmt: skip
INTERLEAVED: dict[str, Any] = {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}
ZERO_BUBBLE: dict[str, Any] = {"pipeline_schedule": "zero-bubble"}
ZERO_BUBBLE_2 = ZERO_BUBBLE | {"pipeline_chunks": 2}
AWAY = FULL | {"offload_activations": True}
NOISE = {"router_jitter_noise": 0.2, "attention_dropout": 0.1}
DROPOUT = LORA | {"lora_dropout": 0.2}
OFFLOAD: dict[str, Any] = {
    "samples": HALF, "steps": 2, "bits": "all", "accumulation": 2, "offload": True, "against": {"offload": None}
}  # fmt: skip
AS_PUBLISHED: dict[str, Any] = {
    "samples": HALF, "steps": 2, "bits": "all", "family": "gpt_oss", "mxfp4": True, "base_dtype": "mxfp4",
    "changes": {"intermediate_size": 64}, "against": {"base_dtype": "bfloat16"},
} | LORA  # fmt: skip
IN_PARTS: dict[str, Any] = LORA | {
    "samples": HALF, "steps": 2, "bits": "all", "within": within.few_at_a_time, "against": {"within": nullcontext}
}  # fmt: skip
COPIES: dict[str, Any] = {
    "samples": HALF, "steps": 2, "bits": "all", "accumulation": 2, "keep_expert_copies": True,
    "against": {"keep_expert_copies": None},
}  # fmt: skip
FROM_HOST: dict[str, Any] = LORA | {
    "samples": HALF, "steps": 2, "bits": "all", "accumulation": 4, "offload_experts": True,
    "against": {"offload_experts": None},
}  # fmt: skip
MEGABLOCKS: dict[str, Any] = {
    "kernel": "megablocks-sparse", "within": within.megablocks, "marks": (interpreted,),
    "changes": {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_local_experts": 4},
}  # fmt: skip
BITS: list[Row] = [
    *rows("in chunks", "2 ep 2", **IN_THREE, **KEPT),
    *rows("in chunks, grouped", "4 ep 2 hybrid, slow", **IN_THREE, **KEPT, **GROUPED),
    *rows("in chunks, biases", "2 ep 2, slow", **IN_THREE, **FULL, **GROUPED, family="gpt_oss"),
    *rows("in chunks, adapters", "2 ep 2, slow", **IN_THREE, **KEPT, **GROUPED, **LORA, base_dtype="fp8"),
    *rows("in chunks, frozen", "2 ep 2, slow", **IN_THREE, **FULL, freeze=["experts"]),
    *rows("in chunks, copies", "4 ep 2 hybrid, slow", **IN_THREE, **SELECTIVE, **BF16, reshard_after_forward=False),
    *rows("again", "2 ep 2", **(AGAIN | {"against": {}}), **AUX, **BF16, changes=NOISE),
    *rows("in full, noise", "2, slow | 4 ep 2, release", **AGAIN, **AUX, **BF16, **FULL, changes=NOISE),
    *rows("in part, noise", "1 | 4 ep 4, release", **AGAIN, **AUX, **SELECTIVE, changes=NOISE),
    *rows("in part, an expert a rank", "2 ep 2", **AGAIN, **SELECTIVE, **GROUPED, changes=TWO_EXPERTS),
    *rows("in part, biases", "2 ep 2, slow", **AGAIN, **SELECTIVE, **GROUPED, family="gpt_oss"),
    *rows("in part, fp8", "2 ep 2, slow", **AGAIN, **SELECTIVE, **BF16, kernel="fp8"),
    *rows("in part, weighed", "2 ep 2, slow", **AGAIN, **WEIGHED, **BF16, dispatch="rank", overlap_chunks=2),
    *rows("in part, weighed, adapters", "1, slow", **AGAIN, **WEIGHED, **DROPOUT),
    *rows("in part, MegaBlocks", "2 ep 2, slow", **AGAIN, **SELECTIVE, **MEGABLOCKS),
    *rows("in part, adapters", "2 ep 2, slow", **AGAIN, **SELECTIVE, **DROPOUT, family="gpt_oss"),
    *rows("in part, adapters and fp8", "2 ep 2, slow", **AGAIN, **SELECTIVE, **LORA, base_dtype="fp8"),
    *rows("copies kept", "2 ep 2 | 4 ep 2 pp 2, release", **COPIES, **FULL, **BF16),
    *rows("activations offloaded", "2 ep 2", **AGAIN, **AWAY, accumulation=2),
    *rows("activations offloaded, adapters", "2, slow", **AGAIN, **(AWAY | SELECTIVE), **DROPOUT),
    *rows("activations offloaded, biases", "2 ep 2, slow", **AGAIN, **AWAY, **BF16, family="gpt_oss"),
    *rows("MXFP4 as published", "1 | 2 ep 2, release | 4 ep 2 hybrid, release | 4, release", **AS_PUBLISHED, **FULL),
    *rows("MXFP4 as published, bf16", "2, slow | 4 ep 2, release", **AS_PUBLISHED, **SELECTIVE, **BF16, **GROUPED),
    *rows("MXFP4 as published, tp", "4 ep 2 tp 2, slow", **(AS_PUBLISHED | {"family": "mixtral"}), **BF16),
    *rows("MXFP4 as published, stages", "4 ep 2 pp 2, slow", **AS_PUBLISHED, **KEPT, accumulation=4, overlap_chunks=2),
    *rows("a few experts at a time, nf4", "2 ep 2", **IN_PARTS, **SELECTIVE, base_dtype="nf4"),
    *rows("a few experts at a time, fp8", "2 ep 2, slow", **IN_PARTS, **FULL, **GROUPED, base_dtype="fp8"),
    *rows("a few experts at a time, MXFP4", "2 ep 2, slow", **(AS_PUBLISHED | IN_PARTS)),
    *rows("experts offloaded", "1 | 2 ep 2, release | 2, release", **FROM_HOST, **FULL, **GROUPED, base_dtype="nf4"),
    *rows("experts offloaded, not recomputed", "1, slow | 4 ep 2 tp 2, release", **FROM_HOST, **BF16),
    *rows("experts offloaded, frozen", "4 ep 2, slow", **(FROM_HOST | {"adapter": "none"}), freeze=["experts"]),
    *rows("experts offloaded, attention", "2 ep 2, slow", **FROM_HOST, **SELECTIVE, lora_targets=["attention"]),
    *rows("experts offloaded, stages", "4 ep 2 pp 2, slow", **FROM_HOST, **FULL, **BF16, **ZERO_BUBBLE),
    *rows("experts offloaded, MXFP4", "2 ep 2, slow", **(AS_PUBLISHED | FROM_HOST), **FULL, overlap_chunks=2),
    *rows("offloaded", "2", **OFFLOAD),
    *rows("offloaded, muon", "2, slow", **OFFLOAD, **MUON),
    *rows("offloaded, shampoo", "2, slow", **OFFLOAD, optim="shampoo", shampoo_start=1),
]


def stages(
    name: str, layout: str, pipeline: dict[str, Any] | None = None, bits: Bits = "gradients", **what: Any
) -> list[Row]:
    """A row of a run against one without a pipeline, with the same other ranks and micro-batches.

    Args:
        pipeline: flags of the run with a pipeline.
        bits: of tied embeddings each copy's gradients are summed up over micro-batches before the sums are added.
    """
    pipeline = pipeline or {}
    flat = layout.partition(", ")[0].split()
    place = flat.index("pp")
    pp_size = int(flat[place + 1])
    flat[place : place + 2] = []
    flat[0] = str(int(flat[0]) // pp_size)
    defaults: dict[str, Any] = {"samples": SAMPLES, "accumulation": 4, "steps": 2, **AUX}
    settings = defaults | pipeline | what | {"changes": {"num_hidden_layers": 4} | what.get("changes", {})}
    against = {"layout": " ".join(flat), **dict.fromkeys(pipeline)}
    return rows(f"stages, {name}", layout, against=against, bits=bits, **settings)


ONLY_HEAD: dict[str, Any] = {"freeze": [r"^(?!lm_head)"], "balance": 0.0, "z": 0.0}
ONLY_FIRST: dict[str, Any] = {"freeze": [r"^(?!model\.layers\.0\.)"]}
TIED_STAGES: dict[str, Any] = {"changes": {"tie_word_embeddings": True}, "bits": ""}
IN_FEW_BITS: dict[str, Any] = {"base_dtype": "nf4", "changes": {"intermediate_size": 80}, **LORA}
BIAS: dict[str, Any] = {"router_bias_update_rate": 0.01, "family": "glm4_moe", "balance": 0.0, "z": 0.0}
NEAR_BF16_TIED = Tolerance(1e-2, after=1e-2, grads=1e-2, weights=1e-2, moved=0.02)
"""Gradients are summed up in bf16 too."""
STAGES: list[Row] = [
    *stages("interleaved", "2 pp 2", INTERLEAVED, **FULL),
    *stages("interleaved", "4 ep 2 pp 2, slow", INTERLEAVED, **FULL),
    *stages("interleaved, 8 layers", "4 pp 4, release", INTERLEAVED, changes={"num_hidden_layers": 8}),
    *stages(
        "interleaved, 3 micro-batches", "2 pp 2, slow", INTERLEAVED, accumulation=3, router_aux_loss_per_layer=True
    ),
    *stages("zero-bubble", "2 pp 2", ZERO_BUBBLE, **SELECTIVE),
    *stages("zero-bubble, chunks", "4 pp 2, slow", ZERO_BUBBLE_2, **SELECTIVE, **GROUPED),
    *stages("zero-bubble, uneven", "4 ep 2 pp 2, slow", ZERO_BUBBLE | {"pipeline_layers": "1,3"}, **KEPT),
    *stages("uneven, in full", "8 ep 2 pp 2 hybrid, release", {"pipeline_layers": "3,1"}, **FULL),
    *stages("one micro-batch", "4 pp 4, slow", ZERO_BUBBLE, accumulation=1),
    *stages("a rank without a sequence", "4 ep 2 pp 2, slow", samples=SAMPLES[:5], accumulation=3),
    *stages("packed", "4 ep 2 pp 2, slow", packing=True),
    *stages("cp", "4 ep 2 cp 2 pp 2, slow", ZERO_BUBBLE_2, **SELECTIVE),
    *stages("tp, packed", "4 ep 2 pp 2 tp 2, release", packing=True),
    *stages("tp, adapters in nf4", "4 ep 2 pp 2 tp 2, release", **IN_FEW_BITS, **SELECTIVE),
    *stages("adapters in nf4", "4 ep 2 pp 2, slow", {"pipeline_layers": "1,3"}, **IN_FEW_BITS, **SELECTIVE),
    *stages(
        "adapters everywhere", "4 ep 2 pp 2, slow", ZERO_BUBBLE, lora_targets=["attention", "experts", "router"], **LORA
    ),
    *stages(
        "adapters of two layers", "4 ep 2 pp 2, release", lora_targets=[r"layers\.[01]\..*(q_proj|v_proj)"], **LORA
    ),
    *stages("offloaded", "4 pp 2, slow", ZERO_BUBBLE, offload=True),
    *stages("offloaded, muon", "4 ep 2 pp 2, release", offload=True, **MUON),
    *stages("all offloaded", "2 pp 2, slow", ZERO_BUBBLE_2, offload=True, **AWAY),
    *stages("activations offloaded", "4 pp 4, release", **(AWAY | SELECTIVE)),
    *stages("muon", "8 ep 2 pp 2 hybrid, release", ZERO_BUBBLE, **MUON),
    *stages("shampoo", "4 ep 2 pp 2, release", optim="shampoo", shampoo_start=2, shampoo_block_size=24),
    *stages(
        "8 bit",
        "4 ep 2 pp 2, release",
        INTERLEAVED,
        optim="adamw_torch_8bit",
        changes=WIDE,
        allowed=replace(EXACT, after=3e-5, weights=3e-5),
    ),
    *stages("AdamW in bf16", "4 ep 2 pp 2, release", optim="adamw_bf16", changes=WIDE, allowed=NEAR_BF16),
    *stages(
        "AdamW in bf16, tied",
        "2 pp 2, release",
        optim="adamw_bf16",
        changes=WIDE | {"tie_word_embeddings": True},
        allowed=NEAR_BF16_TIED,
        bits="",
    ),
    *stages("tied", "4 ep 2 pp 2, slow", ZERO_BUBBLE, **TIED_STAGES),
    *stages("tied, hybrid", "8 ep 2 pp 2 hybrid, release", **TIED_STAGES, **MUON),
    *stages("tied, offloaded", "4 pp 2, release", **TIED_STAGES, offload=True),
    *stages("tied, frozen", "2 pp 2, release", changes={"tie_word_embeddings": True}, freeze=["embeddings"]),
    *stages("tied, adapters", "2 pp 2, slow", changes={"tie_word_embeddings": True}, **LORA),
    *stages("first layers frozen", "4 ep 2 pp 2, release", freeze=["embeddings", r"layers\.[01]\."]),
    *stages("head alone", "2 pp 2, slow", INTERLEAVED, **ONLY_HEAD, **FULL),
    *stages("head alone, muon", "2 pp 2, release", **ONLY_HEAD, **MUON),
    *stages("first layer alone", "4 pp 4, release", ZERO_BUBBLE, **ONLY_FIRST),
    *stages("first layer alone, in full", "4 ep 2 pp 2, slow", INTERLEAVED, **ONLY_FIRST, **FULL),
    *stages("experts frozen", "4 ep 2 pp 2, slow", ZERO_BUBBLE, freeze=["experts"]),
    *stages("experts alone", "4 pp 2, release", freeze=["router", "embeddings", "norms", "attention"]),
    *stages("not resharded, bf16", "4 pp 2, slow", ZERO_BUBBLE, reshard_after_forward=False, **BF16),
    *stages("in chunks", "4 ep 2 pp 2, release", ZERO_BUBBLE, overlap_chunks=2),
    *stages("bias update", "2 pp 2, slow", ZERO_BUBBLE, **BIAS),
    *stages("bias update, dp", "4 pp 2, release", **BIAS),
    *stages("compiled", "2 pp 2, release", INTERLEAVED, compile=True, within=within.eager, **SELECTIVE),
]

FUSED = rows(
    "liger's norms", "4 ep 2, release", family="qwen3_moe", within=within.liger, steps=2, marks=(with_liger,),
    samples=random_samples([9 + (5 * i) % 12 for i in range(8)], vocabulary=TEXT_IDS), **SELECTIVE,
)  # fmt: skip

ROWS = [*MAIN, *DIVIDED, *OPTIMIZERS, *EDGES, *PACKING, *LAYOUTS, *BITS, *STAGES, *FUSED]
