"""Losses that Trainers' classes compute themselves have, on engines, the gradients of the same class under
DistributedDataParallel with transformers' own model."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import assert_same_bits
from tests.families.configs import tiny_model
from tests.rounding import AFTER_ADAMW
from tests.tiers import tiered
from tests.tiny import save_tokenizer

pytest.importorskip("trl")
from tests.distributed.own_losses import CASES, difference, export, grpo_run, run

MOST = 5e-6
"""Of a gradient's norm."""
BY_EXPERTS, TWICE = {"ep_size": 2}, {"gradient_accumulation_steps": 2}
CORE = ["dpo sigmoid+sft", "grpo reference", "training_step"]
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], list[str]]] = {
    # ranks, settings of expertmesh.load, training arguments, cases
    "core": (2, BY_EXPERTS, TWICE, CORE),
    "ep 2": (2, BY_EXPERTS, {}, list(CASES)),
    "dp 2 x ep 2": (4, BY_EXPERTS, TWICE, CORE),
    "dp 2 x ep 2, all": (4, BY_EXPERTS, TWICE, list(CASES)),
    "recomputed": (
        2,
        {**BY_EXPERTS, "gradient_checkpointing": "full"},
        {"gradient_checkpointing": True},
        [*CORE, "distillation"],
    ),
}
Found = dict[str, tuple[list[dict[str, Tensor]], list[dict[str, float]]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, seed in (("model", 1), ("teacher", 2)):
        tiny_model("mixtral", seed=seed).save_pretrained(path / name)
        save_tokenizer(path / name)
    return path / "model"


@pytest.fixture(scope="module")
def under_ddp(ranks: RankPool, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    @cache
    def found(number: int, steps: int, cases: tuple[str, ...], dtype: str = "float32") -> Found:
        out = tmp_path_factory.mktemp("ddp")
        changes = {"gradient_accumulation_steps": steps}
        gave: Found = ranks.run(run, number, list(cases), model, out, None, changes, dtype)[0]
        return gave

    return found


@pytest.mark.parametrize(
    "layout", tiered(["core"], slow=["dp 2 x ep 2", "recomputed"], release=["ep 2", "dp 2 x ep 2, all"])
)
def test_gradients(layout: str, ranks: RankPool, model: Path, under_ddp: Callable[..., Found], tmp_path: Path) -> None:
    number, loaded, changes, cases = LAYOUTS[layout]
    theirs, ours = Found(), Found()
    for part in (cases[begin : begin + 8] for begin in range(0, len(cases), 8)):  # a job has ten minutes
        theirs |= under_ddp(number, changes.get("gradient_accumulation_steps", 1), tuple(part))
        ours |= ranks.run(run, number, part, model, tmp_path, loaded, changes)[0]
    print(f"\n{layout}: the norm of the difference by that of the gradient, of each update")
    too_much = []
    for case in cases:
        (gradients, logs), (expected, their_logs) = ours[case], theirs[case]
        off = [difference(one, other) for one, other in zip(gradients, expected, strict=True)]
        print(f"{case:24}", *(f"{each:.1e}" for each in off))
        # the gradients of RLOO's samples nearly cancel, and later ones are of what AdamW made of that
        too_much += [case] * (max(off) > (AFTER_ADAMW if case == "rloo" else MOST))
        of_trl = ("entropy",) * (case != "sft nll")  # which the engine computes without logits
        for name in ("loss", "reward", "rewards/margins", "kl", *of_trl):
            one, other = ([line[name] for line in told if name in line] for told in (logs, their_logs))
            assert one == pytest.approx(other, rel=1e-4, abs=2e-6), (case, name)
    assert not too_much


@pytest.mark.slow
def test_adapters_against_peft(ranks: RankPool, model: Path, tmp_path: Path) -> None:
    """Whose reference is the model without them; trl gives the reference's place to the same."""
    loaded = {**BY_EXPERTS, "adapter": "lora", "lora_rank": 4, "base_dtype": "float32", "lora_targets": ["attention"]}
    cases = ["dpo sigmoid", "kto kto", "grpo reference", "rloo", "compute_loss"]
    ranks.run(export, 2, model, tmp_path / "adapter", loaded)
    theirs: Found = ranks.run(run, 2, cases, model, tmp_path / "peft", None, {}, adapter=tmp_path / "adapter")[0]
    ours: Found = ranks.run(run, 2, cases, model, tmp_path / "ours", loaded, {})[0]
    for case in cases:
        off = [difference(*both) for both in zip(ours[case][0], theirs[case][0], strict=True)]
        print(f"{case:24}", *(f"{each:.1e}" for each in off))
        assert max(off) <= MOST, case


@pytest.mark.slow
def test_bf16_is_within_its_rounding(
    ranks: RankPool, model: Path, under_ddp: Callable[..., Found], tmp_path: Path
) -> None:
    """No farther from fp32 than transformers' model in bf16 is, or hardly."""
    cases = ["dpo sigmoid", "sft dft", "compute_loss"]
    exact, rounded = under_ddp(2, 1, tuple(cases)), under_ddp(2, 1, tuple(cases), dtype="bfloat16")
    ours: Found = ranks.run(run, 2, cases, model, tmp_path, {**BY_EXPERTS, "bf16": True}, {"bf16": True})[0]
    for case in cases:
        mine, theirs = (difference(found[case][0][0], exact[case][0][0]) for found in (ours, rounded))
        print(f"{case:24} {mine:.1e}, transformers {theirs:.1e}")
        assert mine < 1.5 * theirs, case


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [{}, {"adapter": "lora", "lora_rank": 4}], ids=["all", "lora"])
def test_a_resumed_grpo_has_the_same_bits(loaded: dict[str, Any], ranks: RankPool, model: Path, tmp_path: Path) -> None:
    """Killed in the midst of the steps for which completions were generated at once."""
    whole = ranks.run(grpo_run, 2, model, tmp_path / "whole", **loaded)[0]
    first = ranks.run(grpo_run, 2, model, tmp_path / "killed", kill=4, **loaded)[0]
    checkpoint = str(tmp_path / "killed" / "checkpoint-3")
    rest = ranks.run(grpo_run, 2, model, tmp_path / "killed", resume=checkpoint, **loaded)[0]
    assert [line["step"] for line in first if "loss" in line] == [1, 2, 3]
    found, expected = ([line for line in logs if "loss" in line] for logs in (rest, whole))
    assert [line["step"] for line in expected if "reward" in line] == [1, 5], "when completions are generated"
    for one, other in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm", "reward", "kl"):
            assert one.get(name) == other.get(name), (one["step"], name)
    (one,), (other,) = ((tmp_path / part / "model").glob("*.safetensors") for part in ("whole", "killed"))
    assert_same_bits(load_file(one), load_file(other))
