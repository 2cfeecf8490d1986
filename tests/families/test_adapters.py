"""LoRA on attention and on every expert: the same for every parallel layout."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool
from tests.distributed.reference import ours
from tests.families.configs import TEXT_IDS
from tests.families.lora import reference
from tests.parity.case import Case, hf_model, random_samples
from tests.parity.within import few_at_a_time
from tests.rounding import AFTER_ADAMW, OTHER_ORDER, gradient_errors
from tests.tiny import relative_error

SAMPLES = random_samples([9 + (5 * i) % 12 for i in range(16)], vocabulary=TEXT_IDS)
TOLERANCE = OTHER_ORDER
WEIGHT_TOLERANCE = AFTER_ADAMW
"""Of all adapters together. AdamW's first steps follow the signs of gradients, also of single numbers that cancel but
for noise, and what starts from zero is the sum of a few such steps: a single one may be off by ten times as much."""

EVERYTHING = ["attention", "experts", "router", "shared-experts", "dense-mlp"]
IN_PARTS = ("mixtral in nf4", "deepseek_v3")
"""Whose experts are dequantized a few at a time."""
RUNS: dict[str, tuple[Topology, dict[str, Any], dict[str, Any]]] = {
    "mixtral": (Topology(4, 2, "hybrid"), {"accumulation": 2}, {"lora_rank": 4}),
    "mixtral, F < D, 6 experts": (
        Topology(4, 2),
        {"gradient_checkpointing": "full", "changes": {"intermediate_size": 16, "num_local_experts": 6}},
        {"lora_rank": 3, "use_rslora": True},
    ),
    "mixtral in nf4": (
        *(Topology(4, 2), {"kernel": "torch-grouped", "changes": {"intermediate_size": 80}}),
        {"lora_rank": 3, "lora_targets": ["experts", "router"], "base_dtype": "nf4"},
    ),
    "qwen2_moe": (Topology(2, 2), {}, {"lora_rank": 4, "lora_targets": EVERYTHING}),
    "qwen3_moe": (Topology(4, 4), {"gradient_checkpointing": "selective"}, {"lora_rank": 2, "lora_alpha": 5.0}),
    "deepseek_v3": (Topology(4, 2, "hybrid"), {}, {"lora_rank": 4, "base_dtype": "fp8", "lora_targets": EVERYTHING}),
    "gpt_oss": (
        *(Topology(4, 4), {"gradient_checkpointing": "selective"}),
        {"lora_rank": 4, "base_dtype": "nf4", "lora_targets": ["attention", "experts", "router"]},
    ),
    "qwen3_next": (Topology(4, 4), {}, {"lora_rank": 4, "lora_targets": ["q_proj|in_proj", "experts"]}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", RUNS)
def test_equals_one_process(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Losses, gradients, norms and, after three clipped updates by AdamW, adapters; all else stays as it was."""
    topology, more, settings = RUNS[name]
    case = Case(SAMPLES, family=name.split(",")[0].split()[0], settings={"adapter": "lora"} | settings, **more)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    within = few_at_a_time if name in IN_PARTS else nullcontext
    found, want = ranks.run(ours, topology.world_size, tmp_path, topology, case, within)[0], reference(case)
    assert found.losses == pytest.approx(want.losses, rel=TOLERANCE)
    assert found.losses[0] != found.losses[-1]
    assert found.grad_norms == pytest.approx(want.grad_norms, rel=TOLERANCE)
    assert found.grads.keys() == want.grads.keys() == want.weights.keys(), "adapters alone"
    errors = gradient_errors(found.grads, want.grads)
    assert max(errors.values()) <= TOLERANCE, errors
    errors = {name: relative_error(found.weights[name], weight) for name, weight in want.weights.items()}
    wrong = {name: error for name, error in errors.items() if error > 10 * WEIGHT_TOLERANCE}
    assert not wrong, wrong
    together, wanted = (
        torch.cat([weights[name].flatten() for name in errors]) for weights in (found.weights, want.weights)
    )
    assert relative_error(together, wanted) <= WEIGHT_TOLERANCE
    assert any("w2_lora_B" in name and weight.any() for name, weight in want.weights.items())


@pytest.mark.slow
def test_dropout_is_the_same_in_two_runs(ranks: RankPool, tmp_path: Path) -> None:
    topology = Topology(4, 2)
    dropping: dict[str, Any] = {"adapter": "lora", "lora_rank": 4, "lora_dropout": 0.5}
    case = Case(samples=SAMPLES, settings=dropping, gradient_checkpointing="full")
    hf_model(case, seed=1).save_pretrained(tmp_path)
    one, other = (ranks.run(ours, topology.world_size, tmp_path, topology, case)[0] for _ in range(2))
    assert one.losses == other.losses
    assert all(torch.equal(one.weights[name], weight) for name, weight in other.weights.items())
    dropping["lora_dropout"] = 0.0
    assert ranks.run(ours, topology.world_size, tmp_path, topology, case)[0].losses != one.losses
