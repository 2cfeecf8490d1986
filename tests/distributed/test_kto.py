"""`--task kto`: equal to trl's KTOTrainer in one process, the same with every parallel layout, and when resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed.pool import RankPool
from tests.distributed.test_dpo import STEPS, added_up, by_trl, models, stop_after_two  # noqa: F401
from tests.distributed.whole_runs import Runs, assert_equal_weights, assert_same_bits
from tests.rounding import OTHER_ORDER, near

ANSWERS = 8
FAMILIES = ("mixtral", "granitemoe", "qwen3_moe", "olmoe")
COMMON = (
    f"--task kto --max-steps {STEPS} --learning-rate 1e-3 --lr-scheduler-type constant --weight-decay 0 "
    f"--global-batch-size {ANSWERS} --per-device-train-batch-size 2 --logging-steps 1 --save-steps 0 "
    "--preference-beta 0.5 --adam-epsilon 1e-4 --desirable-weight 1.5 --undesirable-weight 0.7"
)
FIGURES = (
    *("loss", "grad_norm", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen"),
    "logps/rejected",
)


def rows() -> list[dict[str, Any]]:
    return [
        {"prompt": f"say {i}:", "completion": " hello" * (1 + i % 3) + " world" * (i % 4) + f" {i}", "label": i % 3 > 0}
        for i in range(ANSWERS)
    ]


@pytest.fixture
def runs(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> Runs:  # noqa: F811
    data = tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return Runs(ranks, models["mixtral"], data, tmp_path)


@pytest.mark.parametrize(
    ("family", "loss"),
    [
        ("mixtral", "kto"),
        *(pytest.param(f, "kto", marks=pytest.mark.slow) for f in FAMILIES[1:]),
        pytest.param("granitemoe", "apo_zero_unpaired", marks=pytest.mark.slow),
    ],
)
def test_as_trl(family: str, loss: str, runs: Runs, models: dict[str, Path], tmp_path: Path) -> None:  # noqa: F811
    """One batch has all answers, so that trl's mismatched answers and the samples of its estimate are ours."""
    theirs, weights = by_trl(
        *(models[family], tmp_path / "trl"), kind="KTO", data=rows(), loss_type=loss, desirable_weight=1.5,
        undesirable_weight=0.7,
    )  # fmt: skip
    runs = Runs(runs.ranks, models[family], runs.data, runs.directory)
    flags = "" if loss == "kto" else f"--preference-loss {loss}"
    ours = runs(2, f"{COMMON} --ep-size 2 {flags}").lines("loss")
    for one, other in zip(ours, theirs, strict=True):
        for name in FIGURES:
            assert one[name] == near(other[name], added_up(other), 2 * OTHER_ORDER), (one["step"], name)
    assert (ours[-1]["kl"] > 1e-3) is (loss == "kto")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf").state_dict()
    assert_equal_weights({name: found[name] for name in weights}, weights)


LAYOUTS = {
    "pp 2": (2, "--pp-size 2"),
    "cp 2 ep 2": (4, "--cp-size 2 --ep-size 2"),
    "tp 2": (2, "--tp-size 2 --ep-size 2"),
    "packed": (2, "--packing --ep-size 2 --max-seq-length 40"),
    "hybrid": (4, "--ep-size 2 --dense-shard hybrid"),
    "packed cp 2": (4, "--packing --cp-size 2 --ep-size 2 --max-seq-length 40"),
    "pp 2 cp 2": (4, "--pp-size 2 --cp-size 2"),
    "grouped by length": (2, "--ep-size 2 --group-by-length"),
    "batches of one": (2, "--ep-size 2 --per-device-train-batch-size 1 --per-device-eval-batch-size 1"),
}


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_any_layout(layout: str, runs: Runs) -> None:
    """With steps of a part of the data, of which the last one is short."""
    number, flags = LAYOUTS[layout]
    few = COMMON.replace(f"--global-batch-size {ANSWERS}", "--global-batch-size 5")
    held_out = f"--eval-dataset {runs.data} --eval-steps 2"
    # entries are in another order then, of which all are in a step
    is_in_one = "packed" in layout or "length" in layout
    few = COMMON if is_in_one else few
    wanted = runs(1, f"{few} {held_out}", "one")
    found = runs(number, f"{few} {held_out} {flags}", "other")
    for key in ("loss", "eval_loss"):
        for one, other in zip(found.lines(key), wanted.lines(key), strict=True):
            for name in [key, *(name for name in other if name.removeprefix("eval_") in FIGURES[2:])]:
                close = near(other[name], added_up(other)) if other[name] is not None else None
                assert one[name] == close, (key, one["step"], name)
    assert_equal_weights(found.weights, wanted.weights)
    # before a step the model is its own reference
    first = wanted.lines("loss")[0]
    assert first["kl"] == near(0.0, added_up(first))
    # nor has a short step rejected answers
    assert is_in_one or None in [line["rewards/rejected"] for line in wanted.lines("loss")]
    assert wanted.lines("eval_kl")[-1]["eval_kl"] > 1e-3


@pytest.mark.slow
def test_a_resumed_run_finds_its_reference(runs: Runs) -> None:
    flags = COMMON.replace("--save-steps 0", "--save-steps 2") + " --ep-size 2"
    whole = runs(2, flags, "whole")
    assert load_file(whole.out / "reference.safetensors")["training"].shape == (ANSWERS, 2)
    stopped = stop_after_two(whole, runs.directory / "stopped")
    resumed = runs(2, f"{flags} --resume auto", stopped)
    assert "read from reference.safetensors" in resumed.printed
    assert_same_bits(resumed.weights, whole.weights)
    labels = [{**row, "label": not row["label"]} for row in rows()]
    runs.data.write_text("".join(json.dumps(row) + "\n" for row in labels))
    (stopped / "finished.json").unlink()
    runs.refuses(2, f"{flags} --max-steps 4 --resume auto", "labels", out=stopped)


@pytest.mark.parametrize(
    ("row", "flags", "said"),
    [
        ({"prompt": "a", "completion": "b"}, "", "but --task kto needs label or kto_tag, and beside it one of these"),
        ({"prompt": "a", "response": "b", "label": True}, "", "has the columns prompt, response, label"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "", "label is 'good'; expected true"),
        (rows()[0], "", "all 1 samples to train on have one; add others"),
        (rows()[0], "--train-on all", "--train-on all: is not for labelled answers (column label or kto_tag)"),
        (rows()[0], "--preference-loss ipo", "--preference-loss ipo: is a loss of --task dpo"),
        (rows()[0], "--prompt-column p", "is not for labelled answers (column label or kto_tag), which"),
        (rows()[0], "--undesirable-weight -1", "--undesirable-weight -1"),
    ],
)
def test_what_is_refused(row: dict[str, Any], flags: str, said: str, runs: Runs) -> None:
    runs.data.write_text(json.dumps(row) + "\n")
    runs.refuses(1, f"{COMMON} {flags}", said)
