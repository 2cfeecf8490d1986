"""Whole steps of training, for families that between them have all that is particular to one: shared experts and their
gates, dense layers, groups and correction biases, biases, interleaved and clamped experts, latent attention, layers
that carry a state. tests/parity has Mixtral's; test_families.py every family's gradients.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.families.configs import TEXT_IDS, has_auxiliary_loss, tiny_config
from tests.parity.case import random_samples
from tests.parity.rows import OF_FAMILIES, Row, rows
from tests.parity.runner import Runner

SAMPLES = random_samples([9 + (5 * i) % 12 for i in range(16)], vocabulary=TEXT_IDS)
ODD: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 1}
FULL: dict[str, Any] = {"gradient_checkpointing": "full"}
SELECTIVE: dict[str, Any] = {"gradient_checkpointing": "selective"}
GROUPED: dict[str, Any] = {"kernel": "torch-grouped"}
PACKED: dict[str, Any] = {"packing": True, "attention": "auto"}
ROOTS: dict[str, Any] = {"optim": "shampoo", "shampoo_start": 2, "shampoo_block_size": 24}
EXPERTS_ALONE = ["attention", "router", "embeddings", "norms", "lm_head"]

TABLE: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("full", "4 ep 2 hybrid", FULL | {"accumulation": 2}, ["qwen3_moe", "gpt_oss"]),
    ("losses", "4 ep 4", {"balance": 0.05, "z": 0.01} | SELECTIVE | GROUPED, ["qwen2_moe", "qwen3_next"]),
    ("6 experts, top 3", "4 ep 2", {"changes": ODD} | GROUPED, ["olmoe", "deepseek_v3"]),
    ("a rank without a row", "4 ep 4", {"samples": SAMPLES[:3]}, ["glm4_moe", "gpt_oss"]),
    ("shared rows", "4 ep 4 cp 2", SELECTIVE | {"accumulation": 2}, ["deepseek_v3", "qwen3_next"]),
    ("shared by replicas", "4 ep 2 cp 2 hybrid", SELECTIVE, ["qwen3_5_moe", "gpt_oss"]),
    ("shared by all", "4 ep 4 cp 4", FULL, ["qwen3_next", "glm4_moe"]),
    # with a stage of one layer, the first, which has no experts in families with dense layers
    ("stages", "2 pp 2", {"accumulation": 4, "pipeline_layers": "1,3"}, ["deepseek_v3", "gpt_oss"]),
    (
        *("chunks", "4 ep 2 pp 2"),
        {"accumulation": 4, "pipeline_schedule": "interleaved", "pipeline_chunks": 2, "z": 0.01} | SELECTIVE,
        ["qwen2_moe", "glm4_moe"],
    ),
    # the pooled balancing loss depends on how a batch is cut into micro-batches: of one it is the family's own
    ("a layer a stage", "4 pp 4", {"balance": 0.05} | GROUPED, ["qwen3_moe", "qwen3_next"]),
    ("stages of shared rows", "8 ep 2 cp 2 pp 2 hybrid", {"accumulation": 4}, ["qwen3_next", "olmoe"]),
    ("divided", "2 ep 2 tp 2", {"balance": 0.05} | SELECTIVE | GROUPED, ["qwen3_moe", "olmoe"]),
    ("divided by 4", "4 ep 4 tp 4", FULL, ["qwen2_moe", "deepseek_v2"]),
    ("divided replicas", "4 ep 2 tp 2 hybrid", {"accumulation": 2}, ["minimax_m2", "qwen3_next"]),
    ("divided and shared", "4 ep 4 cp 2 tp 2", FULL, ["glm4_moe", "minimax_m2"]),
    ("divided stages", "8 ep 2 pp 2 tp 2", {"accumulation": 2}, ["qwen3_next", "deepseek_v2"]),
    # layers that run sample by sample, with what else has to do with a layer's forward
    ("packed, full", "4 ep 2 hybrid", PACKED | FULL, ["qwen3_next"]),
    ("packed, selective", "4 ep 4", PACKED | SELECTIVE, ["qwen3_5_moe", "gpt_oss"]),
    ("packed stages", "4 ep 2 pp 2", PACKED | SELECTIVE, ["qwen3_next", "deepseek_v3"]),
    ("packed, shared rows", "4 ep 4 cp 2", PACKED | SELECTIVE, ["qwen3_next", "qwen3_5_moe"]),
    ("packed stages of shared rows", "4 ep 2 cp 2 pp 2", PACKED | FULL, ["qwen3_next"]),
    ("packed stages of shared rows", "8 ep 2 cp 2 pp 2 hybrid, slow", PACKED | FULL, ["qwen3_next", "qwen3_5_moe"]),
    ("muon", "2 ep 2", {"optim": "muon"}, ["qwen2_moe", "deepseek_v3", "gpt_oss"]),
    ("shampoo", "2 ep 2", ROOTS, ["qwen3_moe", "glm4_moe", "qwen3_next"]),
    (
        *("frozen experts and norms", "4 ep 2"),
        {"freeze": ["experts", "norms"], "frozen": r"mlp\.experts\.|norm"},
        ["deepseek_v3"],
    ),
    (
        *("all but experts frozen", "4 ep 4"),
        FULL | {"freeze": EXPERTS_ALONE, "frozen": r"self_attn|mlp\.gate\.|embed|norm|lm_head"},
        ["mixtral"],
    ),
    (
        *("frozen router, shared experts and their gates", "4 ep 4"),
        SELECTIVE | {"freeze": ["router", "shared-experts"], "frozen": r"mlp\.gate\.|shared_expert", "accumulation": 2},
        ["qwen2_moe"],
    ),
    (
        *("frozen embeddings and first layer", "4 ep 2"),
        FULL | {"freeze": ["embeddings", r"layers\.0\."], "frozen": r"embed_tokens|layers\.0\."},
        ["gpt_oss"],
    ),
    (
        *("frozen by one of a tied parameter's names", "4 ep 2"),
        {"freeze": ["lm_head"], "frozen": "embed_tokens", "changes": {"tie_word_embeddings": True}},
        ["mixtral"],
    ),
]
"""Several things a row, where none hides another: each alone is in tests/parity, of Mixtral."""


def four_layers(family: str) -> dict[str, Any]:
    """The family's tiny model with another layer, of the kind of its last one."""
    kinds = getattr(tiny_config(family).get_text_config(), "layer_types", None)
    return {"num_hidden_layers": 4} | ({} if kinds is None else {"layer_types": [*kinds, kinds[-1]]})


def row_of(name: str, layout: str, settings: dict[str, Any], family: str) -> Row:
    what = {"samples": SAMPLES, "steps": 2, **settings}
    changes = dict(settings.get("changes", {}))
    if "pp" in layout:
        changes |= four_layers(family)
    if "tp" in layout:
        changes |= {"num_key_value_heads": 4}  # which four ranks can divide
    if hasattr(tiny_config(family), "kv_lora_rank"):
        changes.pop("num_key_value_heads", None)  # its heads share a compressed key
    if not has_auxiliary_loss(tiny_config(family)):
        what |= {"balance": 0.0, "z": 0.0}
    # micro-batches are summed up one after the other
    allowed = replace(OF_FAMILIES, grads=2e-5 if "pp" in layout else OF_FAMILIES.grads)
    marks = (pytest.mark.sample(6),)
    (row,) = rows(
        f"{family}, {name}", layout, family=family, **what | {"changes": changes}, allowed=allowed, marks=marks
    )
    return row


ROWS = [row_of(name, layout, what, family) for name, layout, what, families in TABLE for family in families]


@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_row(runner: Runner, row: Row) -> None:
    runner.compare(row)
