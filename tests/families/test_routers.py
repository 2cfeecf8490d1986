"""What Muon leaves frozen, balancing losses where a bias decides, and biases that move, on any ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import collate
from tests.distributed.pool import RankPool
from tests.distributed.reference import attention_mask, in_our_layout, ours, unshifted_labels
from tests.distributed.whole_runs import read, run_main
from tests.families.configs import TEXT_IDS, tiny_model
from tests.parity.case import Case, hf_model, random_samples
from tests.parity.reference import loss_of
from tests.rounding import AFTER_ADAMW, OTHER_ORDER
from tests.tiny import relative_error, save_tokenizer

SAMPLES = random_samples([9 + (5 * i) % 12 for i in range(16)], vocabulary=TEXT_IDS)
TOLERANCE = OTHER_ORDER


@pytest.mark.slow
def test_muon_leaves_frozen_matrices_alone(ranks: RankPool, tmp_path: Path) -> None:
    freeze: dict[str, Any] = {"freeze": ["router", r"w2$", "q_proj"], "optim": "muon"}
    case, topology = Case(SAMPLES, settings=freeze, steps=2), Topology(4, 2)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    found = ranks.run(ours, 4, tmp_path, topology, case)[0]
    alone = ranks.run(ours, 1, tmp_path, Topology(1, 1), case)[0]
    before = in_our_layout(hf_model(case, seed=1), "data")
    assert found.weights.keys() == before.keys()
    frozen = {name for name in before if name.endswith(("w2", "q_proj.weight", "gate.weight"))}
    assert all(torch.equal(found.weights[name], before[name]) == (name in frozen) for name in before)
    errors = {name: relative_error(found.weights[name], weight) for name, weight in alone.weights.items()}
    assert max(errors.values()) <= AFTER_ADAMW, errors


def reference_over_choices(model: Any, coefficient: float) -> tuple[float, float, float]:
    """By transformers' class in one process: (the balancing loss over the experts that were chosen, the gradient norm
    with it, transformers' own balancing loss)."""
    batch = collate([[sample] for sample in SAMPLES])
    mask = attention_mask(batch)
    chosen: list[torch.Tensor] = []
    for module in model.modules():
        if hasattr(module, "is_concatenated"):
            module.register_forward_pre_hook(lambda module, args: chosen.append(args[1]))
    out = model.train()(input_ids=batch.tokens_BS, attention_mask=mask, use_cache=False, output_router_logits=True)
    is_token = mask.bool().flatten()
    logits_NE = torch.cat([logits.reshape(len(is_token), -1)[is_token].float() for logits in out.router_logits])
    chosen_NK = torch.cat([choices.reshape(len(is_token), -1)[is_token] for choices in chosen])
    num_experts = logits_NE.shape[1]
    counts_E = chosen_NK.flatten().bincount(minlength=num_experts)
    share_E, probability_E = counts_E / len(chosen_NK), logits_NE.softmax(dim=-1).mean(dim=0)
    balance = num_experts * (share_E * probability_E).sum()
    (loss_of(model, out.logits, unshifted_labels(SAMPLES, batch)) + coefficient * balance).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float(balance.detach()), float(norm), float(out.aux_loss.detach())


@pytest.mark.parametrize(
    "family", ["ernie4_5_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("minimax_m2", "laguna"))]
)
def test_balancing_loss_is_over_what_was_chosen(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """Where a correction bias decides who is chosen: transformers counts those of the largest logits instead."""
    case = Case(samples=SAMPLES, family=family, balance=0.5, steps=1)
    model = hf_model(case, seed=1)
    generator, biases = torch.Generator().manual_seed(2), 0
    for name, buffer in [*model.named_buffers(), *model.named_parameters()]:
        if BIAS in name:
            # above the spread of the scores
            buffer.data.copy_(torch.randn(buffer.shape, generator=generator))
            biases += 1
    assert biases > 0
    model.save_pretrained(tmp_path)
    balance, norm, of_transformers = reference_over_choices(model, case.balance)
    assert abs(of_transformers - balance) > 0.01 * balance, "the biases are to matter"
    found = ranks.run(ours, 2, tmp_path, Topology(2, 2), case)[0]
    assert found.balance_loss == pytest.approx(balance, rel=TOLERANCE)
    assert found.grad_norms[0] == pytest.approx(norm, rel=TOLERANCE)


STEPS, RATE = 6, 0.001
BIAS = "e_score_correction_bias"


@pytest.mark.release
def test_bias_moves_alike_on_any_ranks(ranks: RankPool, tiny_data: Path, tmp_path: Path) -> None:
    """After 6 steps every bit is the same: at (1,1), (4,2), (4,4), in one forward a step or several, with layers
    recomputed in backward, and in a run that was resumed. It is exported in fp32 from a model in bf16."""
    model: Any = tiny_model("deepseek_v3", seed=1)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")

    def run(world_size: int, ep_size: int, name: str, *more: str) -> dict[str, torch.Tensor]:
        out = tmp_path / name
        argv = ["--model", str(tmp_path / "model"), "--dataset", str(tiny_data), "--output-dir", str(out), "--use-cpu"]
        argv += ["--max-steps", str(STEPS), "--ep-size", str(ep_size), "--learning-rate", "1e-4", "--save-steps", "3"]
        argv += ["--global-batch-size", "16", "--router-bias-update-rate", str(RATE), *more]
        results = ranks.run(run_main, world_size, argv, join_group=False)
        assert [code for code, _ in results] == [0] * world_size, results
        return {name: tensor for name, tensor in read(out / "hf").items() if name.endswith(BIAS)}

    alone = run(1, 1, "alone", "--per-device-train-batch-size", "16")
    before = {name: tensor for name, tensor in read(tmp_path / "model").items() if name.endswith(BIAS)}
    for name, bias_E in alone.items():
        assert bias_E.dtype == torch.float32
        moved = (bias_E - before[name].float()) / RATE
        assert moved.abs().max() > 1
        assert torch.allclose(moved, moved.round(), atol=2e-3), "steps of the rate"
    some = {
        "(4, 2)": run(4, 2, "4-2", "--per-device-train-batch-size", "2", "--gradient-checkpointing", "selective"),
        "(4, 4)": run(4, 4, "4-4", "--per-device-train-batch-size", "4", "--gradient-checkpointing", "full"),
    }
    shutil.copytree(
        tmp_path / "4-4" / "checkpoints" / "step-00000003", tmp_path / "three" / "checkpoints" / "step-00000003"
    )
    some["resumed"] = run(2, 1, "three", "--per-device-train-batch-size", "8", "--resume", "auto")
    for how, biases in some.items():
        assert biases.keys() == alone.keys()
        assert all(torch.equal(biases[name], bias_E) for name, bias_E in alone.items()), how
