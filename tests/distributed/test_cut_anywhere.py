"""A run that is stopped or killed in any of its phases resumes to the same bits, whatever it is trained on."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from expertmesh.sharding.torchrun import STOPPED
from tests.distributed.pool import RankFailure
from tests.distributed.test_preemption import tell_stopped_in
from tests.distributed.whole_runs import Runs, Told, assert_same_bits
from tests.pictures import save_seeing, written
from tests.tiers import tiered

FLAGS = (
    "--max-steps 4 --save-steps 2 --learning-rate 1e-2 --logging-steps 1 --per-device-train-batch-size 4 "
    "--per-device-eval-batch-size 2 --resume auto"
)
BETWEEN = (
    "--eval-dataset {data} --eval-steps 2 --generate-steps 2 --generate-prompts 'say hello' "
    "--generate-max-new-tokens 4 --eval-generate {questions} --eval-temperature 1"
)
DATA = {
    "cached": "",
    "streamed": "--streaming --shuffle-buffer 20",
    # at a higher rate its answers are over before there is anything to cut
    "images": "--images --train-vision projector --max-seq-length 64 --learning-rate 1e-3",
}
PHASES = {
    "evaluation": BETWEEN,
    "generations": BETWEEN,
    "save": "",
    "export": "",
    "reference": "--task dpo",
    "teacher": "--teacher {model}",
}
BEFORE_TRAINING = ("reference", "teacher")
"""What these compute is of a fixed set of texts; other data are refused beside them."""
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
CASES = [
    (phase, data, number)
    for phase in PHASES
    for data in DATA
    for number in SIGNALS
    if data == "cached" or phase not in BEFORE_TRAINING
]
QUICK = [
    ("evaluation", "streamed", signal.SIGTERM),
    ("generations", "streamed", signal.SIGTERM),
    ("save", "images", signal.SIGKILL),
]


def tell_cut(argv: list[str], phase: str, number: int) -> Told:
    """train_ep.py on this rank, which gets a signal in the second part of a phase; of generations, of which the scored
    ones come first, and which know when they end, in the first."""
    return tell_stopped_in(argv, phase, 0 if phase == "generations" else 1, number)[:3]


def runs_on(data: str, phase: str, runs: Runs, directory: Path) -> Runs:
    runs = replace(runs, directory=directory)
    if data == "images":
        save_seeing(directory / "model")
        return replace(runs, model=directory / "model", data=written(directory / "data")[0])
    if phase == "reference":
        pairs = [{"prompt": f"say {i}", "chosen": " yes" * (i % 3 + 1), "rejected": " no"} for i in range(12)]
        (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        return replace(runs, data=directory / "pairs.jsonl")
    return runs


@pytest.mark.parametrize(
    ("phase", "data", "number"),
    tiered(
        QUICK,
        slow=[case for case in CASES[::4] if case not in QUICK],
        release=[case for case in CASES if case not in (*CASES[::4], *QUICK)],
    ),
    ids=lambda value: signal.Signals(value).name if isinstance(value, int) else value,
)
def test_resumed_it_is_the_run_that_was_never_cut(
    phase: str, data: str, number: int, runs: Runs, tmp_path: Path
) -> None:
    runs = runs_on(data, phase, runs, tmp_path)
    questions = tmp_path / "questions.jsonl"
    asked = [{"prompt": f"say {i}", "response": f"x{i}"} for i in range(3)]  # two batches
    questions.write_text("".join(json.dumps(record) + "\n" for record in asked))
    more = PHASES[phase].format(data=runs.data, model=runs.model, questions=questions)
    flags = f"{FLAGS} {DATA[data]} {more}"
    whole = runs(1, flags, "whole")
    if number == signal.SIGKILL:
        with pytest.raises(RankFailure, match="exit code -9"):
            runs(1, flags, call=tell_cut, given=[phase, number])
    else:
        runs(1, flags, code=STOPPED, call=tell_cut, given=[phase, number])
    assert not (tmp_path / "run" / "hf").exists(), "it was cut"
    resumed = runs(1, flags)
    for key in ("step", "loss", "eval_loss", "answers", "generations"):
        assert resumed.values(key) == whole.values(key), key
    assert_same_bits(resumed.weights, whole.weights)
