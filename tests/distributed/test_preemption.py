"""SIGTERM and SIGUSR1 in every phase of a run: it ends with 75 in a moment, and goes on as if nothing had happened."""

import contextlib
import importlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from expertmesh.sharding.torchrun import STOPPED
from tests.distributed.whole_runs import Ended, Runs, Told, assert_same_bits, batch_of_12, tell
from tests.tiers import tiered

PLACES = {
    "loading": "checkpoints.load._all_finite",
    "tokenizing": "training.data.samples._table",
    "reference": "training.evaluate.token_loss_sum",
    "teacher": "training.evaluate.token_loss_sum",
    "forecast": "training.planning.rank_memory._planned",
    "evaluation": "training.evaluate.token_loss_sum",
    "generations": "training.generate.boundary",
    "export": "checkpoints.hf.export._brought",
}
"""What each phase calls for each of its parts."""


@contextlib.contextmanager
def watched(phase: str, seen: Callable[[int], object]) -> Iterator[None]:
    """Within it `seen` is called, with how often it was before, before each part of a phase."""
    module, _, name = PLACES[phase].rpartition(".")
    owner = importlib.import_module(f"expertmesh.{module}")
    real, calls = getattr(owner, name), [0]

    def part(*arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        seen(calls[0] - 1)
        return real(*arguments, **more)

    with mock.patch.object(owner, name, part):
        yield


def tell_stopped_in(argv: list[str], phase: str, part: int, number: int) -> tuple[int, str, str, int]:
    """train_ep.py on this rank, and how many parts of a phase it made; the last rank gets a signal in one of them."""
    made = 0

    def seen(before: int) -> None:
        nonlocal made
        made = before + 1
        if before == part and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), number)

    with watched(phase, seen):
        told = tell(argv)
    if dist.is_initialized():  # which the end of a process would have seen to
        dist.destroy_process_group()
    return *told, made


EVALUATING = (
    f"{batch_of_12(2)} --ep-size 2 --max-steps 6 --learning-rate 1e-2 --eval-ratio 0.3 --eval-steps 2 "
    "--per-device-eval-batch-size 2 --generate-steps 2 --generate-max-new-tokens 12 --lr-scheduler-type "
    'reduce_lr_on_plateau --lr-scheduler-kwargs \'{"patience": 0, "threshold": 10}\''
)
"""Each evaluation but the first halves the learning rate at once, or more: it decides what comes next."""


def tell_cut_in(argv: list[str], phase: str, part: int) -> Told:
    """`tell_stopped_in`, which must have stopped this rank behind that very part."""
    code, printed, errors, made = tell_stopped_in(argv, phase, part, signal.SIGTERM)
    assert made == part + 1, f"{made} parts, after a signal in part {part}"
    return code, printed, errors


@pytest.mark.parametrize(
    ("phase", "part", "owed"),
    tiered(
        [("evaluation", 1, ["eval_loss", "generations"])],
        slow=[("evaluation", 0, ["eval_loss", "generations"]), ("generations", 3, ["generations"])],
    ),
)
def test_what_is_cut_between_two_steps_is_made_up(phase: str, part: int, owed: list[str], runs: Runs) -> None:
    """By all ranks at once, nothing of it is told or counted; the run that resumes makes it first, and is to the last
    bit the run that was never cut."""
    whole = runs(2, EVALUATING, "whole")
    ended = runs(2, EVALUATING, code=STOPPED, call=tell_cut_in, given=[phase, part])
    assert ended.saved == [2]
    marker = json.loads((ended.checkpoint(2) / "checkpoint.json").read_text())
    assert marker["owed"] == owed
    assert marker["best"].get("step", 0) == (0 if "eval_loss" in owed else 2)
    assert [key for key in ("eval_loss", "generations") if ended.lines(key)] == [
        key for key in ("eval_loss", "generations") if key not in owed
    ]
    resumed = runs(2, f"{EVALUATING} --resume auto")
    for key in ("eval_loss", "learning_rate", "loss", "generations"):
        assert resumed.values(key) == whole.values(key), key
    assert len(set(resumed.values("learning_rate"))) > 2
    assert_same_bits(resumed.weights, whole.weights)
    assert [run.checkpoint("best").resolve().name for run in (resumed, whole)] == [f"step-{best_of(whole):08d}"] * 2


def best_of(ended: Ended) -> int:
    """The step of the lowest evaluation."""
    return int(min(ended.lines("eval_loss"), key=lambda line: line["eval_loss"])["step"])


def tell_stopped(argv: list[str], phase: str, number: int, cache: Path) -> Told:
    """`tell_stopped_in`, in the second part of a phase, with a cache of samples of its own."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        return tell_stopped_in(argv, phase, 1 if phase != "forecast" else 0, number)[:3]


BEFORE = {
    "tokenizing": "--task dpo",
    "forecast": "",
    "teacher": "--teacher {model} --per-device-eval-batch-size 4",
    "loading": "",
    "reference": "--task dpo --per-device-eval-batch-size 4",
}


@pytest.mark.parametrize("number", tiered([signal.SIGTERM], slow=[signal.SIGUSR1]))
@pytest.mark.parametrize("phase", BEFORE)
def test_before_the_first_step(phase: str, number: int, runs: Runs, tmp_path: Path) -> None:
    """Nothing is saved, nothing half-made is left to be taken for whole, and the same command then runs to its end."""
    cache = tmp_path / "cache"
    flags = f"{batch_of_12(1)} --max-steps 2 --resume auto {BEFORE[phase].format(model=runs.model)}"
    if phase in ("reference", "tokenizing"):
        pairs = tmp_path / "pairs.jsonl"
        rows = [{"prompt": f"say {i}", "chosen": " yes" * (i % 3 + 1), "rejected": " no"} for i in range(1200)]
        rows = rows if phase == "tokenizing" else rows[:12]
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs = replace(runs, data=pairs)
    stopped = runs(1, flags, code=STOPPED, call=tell_stopped, given=[phase, number, cache])
    names = [path.name for path in cache.rglob("*") if path.suffix != ".lock"]
    assert not [name for name in names if "incomplete" in name or name.startswith("tmp")]
    assert "nothing was saved, so it begins anew (exit code 75)" in stopped.printed
    assert not (stopped.out / "checkpoints").exists()
    assert not list(stopped.out.glob("*.safetensors"))
    assert runs(1, flags).codes == [0]


@pytest.mark.parametrize("saves", [True, False])
def test_in_the_export(saves: bool, runs: Runs) -> None:
    """What a checkpoint has too is exported by the next start; what it alone would have is finished."""
    flags = f"{batch_of_12(1)} --max-steps 2 --resume auto" + " --save-steps 0" * (not saves)
    cut = {"call": tell_stopped, "given": ["export", signal.SIGTERM, runs.directory / "cache"]}
    ended = runs(1, flags, code=STOPPED if saves else 0, **cut)
    if saves:
        assert "in step 2, the export; --resume auto resumes from step 2 (exit code 75)" in ended.printed
        assert not [path for path in ended.out.iterdir() if "hf" in path.name]
        ended = runs(1, flags)
    assert "already finished at step 2" in runs(1, flags).printed
    assert_same_bits(ended.weights, runs(1, flags, "whole").weights)
