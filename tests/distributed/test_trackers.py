"""What trackers are told by runs that are resumed, overwritten, or whose trackers fail."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from expertmesh.training.monitoring.trackers import TRACKERS, Trackers
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import run_main


@pytest.fixture
def argv(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> list[str]:
    return [
        "--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path / "out"), "--use-cpu",
        "--per-device-train-batch-size", "2", "--save-steps", "3", "--no-export", "--report-to", "tensorboard",
        "--max-steps",
    ]  # fmt: skip


def run(ranks: RankPool, argv: list[str]) -> None:
    assert ranks.run(run_main, 1, argv, join_group=False) == [(0, "")]


def losses(out: Path) -> list[tuple[int, float]]:
    """The loss by step, as TensorBoard shows it of the run's directory."""
    events = EventAccumulator(str(out / TRACKERS / "expertmesh")).Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def logged_losses(out: Path) -> list[tuple[int, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], pytest.approx(line["loss"])) for line in lines]


def test_a_resumed_run_shows_each_step_once(ranks: RankPool, argv: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(ranks, [*argv, "5"])
    run(ranks, [*argv, "7", "--resume", str(out / "checkpoints" / "step-00000003")])
    assert [step for step, _ in losses(out)] == [1, 2, 3, 4, 5, 6, 7]
    assert losses(out) == logged_losses(out)


def test_an_overwritten_run_is_shown_no_more(ranks: RankPool, argv: list[str], tmp_path: Path) -> None:
    run(ranks, [*argv, "5"])
    run(ranks, [*argv, "2", "--overwrite-output-dir"])
    assert [step for step, _ in losses(tmp_path / "out")] == [1, 2]


def run_with_wandb(argv: list[str]) -> tuple[int, str, dict[str, Any], int]:
    """train_ep.py with what stands in for wandb: what it was started with, and the number of steps that it was told."""
    told = mock.MagicMock()
    wandb = SimpleNamespace(init=mock.Mock(return_value=told), config=mock.MagicMock())
    with (
        mock.patch.dict("sys.modules", wandb=wandb),
        mock.patch("expertmesh.training.monitoring.trackers.get_available_trackers", return_value=[LoggerType.WANDB]),
        mock.patch("accelerate.tracking.get_available_trackers", return_value=[LoggerType.WANDB]),
    ):
        code, errors = run_main(argv)
    assert wandb.init.call_count == 1, errors
    arguments = wandb.init.call_args.kwargs
    return code, errors, arguments, len(told.log.call_args_list)


def test_a_resumed_run_goes_on_in_wandb(ranks: RankPool, argv: list[str], tmp_path: Path) -> None:
    """Under the id of the run that it resumes; a run that overwrites it has another."""
    argv = [*argv[:-2], "wandb", argv[-1]]
    ((*ended, first, steps),) = ranks.run(run_with_wandb, 1, [*argv, "3"], join_group=False)
    assert (ended, steps) == ([0, ""], 3)
    assert first["project"] == "expertmesh"
    assert len(first["id"]) == 8
    ((*ended, second, steps),) = ranks.run(run_with_wandb, 1, [*argv, "5", "--resume", "auto"], join_group=False)
    assert (ended, second, steps) == ([0, ""], first | {"resume": "allow"}, 2)
    ((_, _, third, _),) = ranks.run(run_with_wandb, 1, [*argv, "3", "--overwrite-output-dir"], join_group=False)
    assert third["id"] != first["id"]


def run_failing(argv: list[str], at: int) -> tuple[int, str, list[str]]:
    """train_ep.py, whose tracker fails when it is started (0), at the n-th line, or when it is ended (-1); what the run
    said of it."""
    said: list[str] = []
    init = Trackers.__init__

    def begin(trackers: Trackers, config: Any, directory: Path, ranks: Any, say: Any) -> None:
        init(trackers, config, directory, ranks, said.append)

    tracker = "accelerate.tracking.TensorBoardTracker"
    full = OSError(28, os.strerror(28))
    method, effects = {0: ("start", [full]), -1: ("finish", [full])}.get(at, ("log", [None] * (at - 1) + [full]))
    with mock.patch.object(Trackers, "__init__", begin), mock.patch(f"{tracker}.{method}", side_effect=effects):
        return (*run_main(argv), said)


@pytest.mark.parametrize("at", [0, 2, -1])
def test_a_tracker_that_fails(ranks: RankPool, argv: list[str], tmp_path: Path, at: int) -> None:
    """A run does not begin without it, and is not ended by it."""
    for code, errors, said in ranks.run(run_failing, 1, [*argv, "4"], at, join_group=False):
        if at == 0:
            assert (code, said) == (2, [])
            assert errors == f"train_ep.py: error: --report-to tensorboard: [Errno 28] {os.strerror(28)}\n"
        else:
            assert (code, errors) == (0, "")
            assert len(said) == 1
            assert said[0].startswith(f"warning: --report-to tensorboard: [Errno 28] {os.strerror(28)}")
            assert len(logged_losses(tmp_path / "out")) == 4
