"""`--task dpo`: equal to trl's DPOTrainer in one process, the same with every parallel layout, and when resumed."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Ended, Runs, assert_equal_weights, assert_same_bits, flip_a_bit
from tests.families.configs import tiny_model
from tests.rounding import OTHER_ORDER, near
from tests.tiny import save_tokenizer

PAIRS, STEPS = 8, 3
FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "granitemoe")
COMMON = (
    f"--task dpo --max-steps {STEPS} --learning-rate 1e-3 --lr-scheduler-type constant --weight-decay 0 "
    f"--global-batch-size {PAIRS} --per-device-train-batch-size 2 --logging-steps 1 --save-steps 0 "
    "--preference-beta 0.5 --adam-epsilon 1e-4"
)
FIGURES = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen")


def rows() -> list[dict[str, str]]:
    return [
        {"prompt": f"say {i}:", "chosen": " hello" * (1 + i % 3) + f" {i}", "rejected": " world" * (1 + i % 4)}
        for i in range(PAIRS)
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for family in FAMILIES:
        paths[family] = tmp_path_factory.mktemp(family)
        tiny_model(family, seed=1, num_key_value_heads=4).save_pretrained(paths[family])
        save_tokenizer(paths[family])
    return paths


@pytest.fixture
def runs(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> Runs:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return Runs(ranks, models["mixtral"], data, tmp_path)


def added_up(line: dict[str, Any]) -> float:
    """The log-probabilities that its figures are differences of."""
    return max(abs(value or 0.0) for name, value in line.items() if "logps/" in name)


def by_trl(
    path: Path, out: Path, held: Any = None, kind: str = "DPO", data: Sequence[Any] = (), **settings: Any
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What trl's trainer of a kind logs in steps of all data, and the weights it leaves."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    data = data or rows()
    arguments = getattr(trl, f"{kind}Config")(
        str(out), use_cpu=True, bf16=False, max_steps=STEPS, per_device_train_batch_size=len(data), learning_rate=1e-3,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, adam_epsilon=1e-4, beta=0.5,
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, router_aux_loss_coef=0.0,
        gradient_checkpointing=False, **settings,
    )  # fmt: skip
    trainer = getattr(trl, f"{kind}Trainer")(
        AutoModelForCausalLM.from_pretrained(path), args=arguments,
        processing_class=AutoTokenizer.from_pretrained(path), ref_model=AutoModelForCausalLM.from_pretrained(path),
        train_dataset=datasets.Dataset.from_list(list(data)), eval_dataset=held,
    )  # fmt: skip
    trainer.train()
    return [line for line in trainer.state.log_history if {"loss", "eval_loss"} & {*line}], dict(
        trainer.model.state_dict()
    )


LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "sigmoid": ("", {}),
    "ipo": ("--preference-loss ipo", dict(loss_type=["ipo"])),
    "with sft": ("--preference-sft-weight 0.3", dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.3])),
}


@pytest.mark.parametrize(
    ("family", "loss"),
    [
        ("mixtral", "sigmoid"),
        pytest.param("granitemoe", "ipo", marks=pytest.mark.slow),
        *(pytest.param(f, "with sft", marks=pytest.mark.slow) for f in ("qwen3_moe", "olmoe")),
    ],
)
def test_as_trl(family: str, loss: str, runs: Runs, models: dict[str, Path], tmp_path: Path) -> None:
    flags, settings = LOSSES[loss]
    theirs, weights = by_trl(models[family], tmp_path / "trl", **settings)
    runs = Runs(runs.ranks, models[family], runs.data, runs.directory)
    ours = runs(2, f"{COMMON} --ep-size 2 {flags}").lines("loss")
    for one, other in zip(ours, theirs, strict=True):
        for name in FIGURES:
            if (one["step"], name) != (1, "rewards/accuracies"):
                assert one[name] == near(other[name], added_up(other), 2 * OTHER_ORDER), (one["step"], name)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf").state_dict()
    assert_equal_weights({name: found[name] for name in weights}, weights)


LAYOUTS = {
    "packed": (2, "--packing --ep-size 2"),
}
FURTHER = {
    "pp 2 ep 2": (4, "--pp-size 2 --ep-size 2"),
    "cp 2": (2, "--cp-size 2"),
    "tp 2": (2, "--tp-size 2 --ep-size 2"),
    "hybrid": (4, "--ep-size 2 --dense-shard hybrid"),
    "packed cp 2": (4, "--packing --cp-size 2 --ep-size 2"),
    "pp 2 cp 2": (4, "--pp-size 2 --cp-size 2"),
    "grouped by length": (2, "--ep-size 2 --group-by-length"),
}


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.sample(2)]) for name in FURTHER)]
)
def test_with_any_layout(layout: str, runs: Runs) -> None:
    number, flags = (LAYOUTS | FURTHER)[layout]
    held_out = f"--eval-dataset {runs.data} --eval-steps 2"
    wanted = runs(1, f"{COMMON} {held_out}", "one")
    found = runs(number, f"{COMMON} {held_out} {flags}", "other")
    for key in ("loss", "eval_loss"):
        for one, other in zip(found.lines(key), wanted.lines(key), strict=True):
            # before a step, margins are what rounding leaves
            compared = [name for name in other if re.search("logps/|rewards/[cmr]", name)]
            for name in [key, *compared, *["rewards/accuracies"] * (key == "loss" and one["step"] > 1)]:
                assert one[name] == near(other[name], added_up(other)), (key, one["step"], name)
    assert_equal_weights(found.weights, wanted.weights)
    # before a step the model is its own reference
    first = wanted.lines("loss")[0]
    assert first["loss"] == near(math.log(2), added_up(first))
    assert wanted.lines("loss")[-1]["rewards/accuracies"] > 0.7


@pytest.mark.slow
def test_lora_against_its_base(runs: Runs) -> None:
    """A fresh adapter is the base; a resumed one computes what it lacks of it with the adapter as it began."""
    lora = COMMON.replace("--save-steps 0", "--save-steps 2") + " --adapter lora --lora-rank 4 --ep-size 2"
    whole = runs(2, lora, "whole")
    first = whole.lines("loss")[0]
    assert first["rewards/margins"] == near(0.0, added_up(first))
    stopped = stop_after_two(whole, runs.directory / "stopped")
    flip_a_bit(stopped / "reference.safetensors")
    resumed = runs(2, f"{lora} --resume auto", stopped)
    assert (
        "reference.safetensors: is damaged: its checksum is not the one in reference.json; the reference"
        in resumed.printed
    )
    assert_same_bits(resumed.weights, whole.weights)
    # killed before its first checkpoint, and started again from another adapter, which is its own reference too
    begun = runs.directory / "begun"
    begun.mkdir()
    for name in ("reference.safetensors", "reference.json"):
        shutil.copy(whole.out / name, begun)
    other = runs(2, f"{lora} --max-steps 1 --resume auto --init-adapter {whole.out}/adapter", begun).lines("loss")[0]
    assert other["loss"] == near(math.log(2), added_up(other))


def test_a_resumed_run_finds_its_reference(runs: Runs) -> None:
    flags = COMMON.replace("--save-steps 0", "--save-steps 2") + " --ep-size 2"
    whole = runs(2, flags, "whole")
    reference = load_file(whole.out / "reference.safetensors")["training"]
    assert reference.shape == (PAIRS, 2)
    stopped = stop_after_two(whole, runs.directory / "stopped")
    kept = (stopped / "reference.safetensors").read_bytes()
    flip_a_bit(stopped / "reference.safetensors")
    runs.refuses(2, f"{flags} --resume auto", "reference.safetensors: is damaged", "begin anew", out=stopped)
    (stopped / "reference.safetensors").write_bytes(kept)
    resumed = runs(2, f"{flags} --resume auto", stopped)
    assert "read from reference.safetensors" in resumed.printed
    assert_same_bits(resumed.weights, whole.weights)


def stop_after_two(whole: Ended, out: Path) -> Path:
    """What a run that was killed after its second step leaves behind."""
    shutil.copytree(whole.out, out)
    for name in ("hf", "adapter"):
        shutil.rmtree(out / name, ignore_errors=True)
    shutil.rmtree(out / "checkpoints" / f"step-{STEPS:08d}")
    (out / "finished.json").unlink()
    return out


@pytest.mark.parametrize(
    ("row", "flags", "said"),
    [
        ({"prompt": "a", "response": "b"}, "", "but --task dpo needs one of these: prompt + chosen + rejected"),
        ({"prompt": "a", "chosen": "b"}, "", "has the columns prompt, chosen"),
        ({"chosen": "ab", "rejected": "cd"}, "", "do not begin alike, and no prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]}, "", "(rejected, which"),
        (rows()[0], "--train-on all", "--train-on all: is not for pairs of answers"),
        (rows()[0], "--preference-beta 0", "--preference-beta 0.0: must be more than 0"),
        (
            rows()[0],
            "--prompt-column p",
            "is not for pairs of answers (columns chosen and rejected), which",
        ),
    ],
)
def test_what_is_refused(row: dict[str, Any], flags: str, said: str, runs: Runs) -> None:
    runs.data.write_text(json.dumps(row) + "\n")
    runs.refuses(1, f"{COMMON} {flags}", said)
