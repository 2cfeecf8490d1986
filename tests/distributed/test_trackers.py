"""What trackers are told by runs that are resumed, overwritten, or whose trackers fail."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.preemption import Stopped
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.monitoring.log import RunLog
from expertmesh.training.monitoring.trackers import TRACKERS, Trackers
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Ended, Runs, Told, tell

FLAGS = "--per-device-train-batch-size 2 --save-steps 3 --no-export --report-to tensorboard --max-steps"


def shown(ended: Ended) -> list[tuple[int, float]]:
    """The loss by step, as TensorBoard shows it of the run's directory."""
    events = EventAccumulator(str(ended.out / TRACKERS / "expertmesh")).Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_each_step_is_shown_once(runs: Runs) -> None:
    """Of a resumed run; and of one that overwrites it nothing else."""
    runs(1, f"{FLAGS} 5")
    time.sleep(1.0)  # TensorBoard reads files in the order of their names, which have the second of their beginning
    resumed = runs(1, f"{FLAGS} 7 --resume {runs.directory}/run/checkpoints/step-00000003")
    assert [step for step, _ in shown(resumed)] == [1, 2, 3, 4, 5, 6, 7]
    assert shown(resumed) == [(line["step"], pytest.approx(line["loss"])) for line in resumed.lines()]
    assert [step for step, _ in shown(runs(1, f"{FLAGS} 2 --overwrite-output-dir"))] == [1, 2]


def with_wandb(argv: list[str]) -> Told:
    """A run with what stands in for wandb; it prints how that was started, and how many steps it was told."""
    told = mock.MagicMock(id="0a1b")
    wandb = SimpleNamespace(init=mock.Mock(return_value=told), config=mock.MagicMock())
    with (
        mock.patch.dict("sys.modules", wandb=wandb),
        mock.patch.dict("expertmesh.training.start.process.TRACKERS", wandb=("json",)),  # a package that is there
        mock.patch("accelerate.tracking.get_available_trackers", return_value=[LoggerType.WANDB]),
    ):
        code, _, errors = tell(argv)
    assert wandb.init.call_count == 1, errors
    return code, json.dumps([wandb.init.call_args.kwargs, len(told.log.call_args_list)], default=str), errors


def test_a_resumed_run_goes_on_in_wandb(runs: Runs) -> None:
    """Under the id of the run that it resumes; a run that overwrites it has another."""
    flags = ("--max-steps 3", "--max-steps 5 --resume auto", "--max-steps 3 --overwrite-output-dir")
    (first, steps), (second, more), (third, _) = (
        json.loads(runs(1, f"{FLAGS} 3 --report-to wandb {one}", call=with_wandb).printed) for one in flags
    )
    assert first == third == {"project": "expertmesh"}
    assert (steps, more, second) == (3, 2, first | {"id": "0a1b", "resume": "allow"})


def with_mlflow(argv: list[str]) -> Told:
    """A run with what stands in for MLflow, which gives each run that it starts an id, and knows the settings of one
    that is resumed; it prints which run was started, how often it was told of settings, how many steps, and how it
    ended."""
    run = SimpleNamespace(info=SimpleNamespace(run_id="0a1b"))
    mlflow = mock.MagicMock(start_run=mock.Mock(return_value=run), search_experiments=mock.Mock(return_value=[]))
    mlflow.get_run.return_value.data.params.__contains__ = lambda *_: mlflow.start_run.call_args.kwargs["run_id"]
    mlflow.utils.validation = SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
    with (
        mock.patch.dict("sys.modules", mlflow=mlflow),
        mock.patch.dict("expertmesh.training.start.process.TRACKERS", mlflow=("json",)),  # a package that is there
        mock.patch("accelerate.tracking.get_available_trackers", return_value=[LoggerType.MLFLOW]),
    ):
        code, _, errors = tell(argv)
    started = [call.kwargs["run_id"] for call in mlflow.start_run.call_args_list]
    ended = [call.args for call in mlflow.end_run.call_args_list][:1]
    told = [len(mlflow.log_params.call_args_list) > 0, len(mlflow.log_metrics.call_args_list)]
    return code, json.dumps([*started, *told, *ended]), errors


def test_a_resumed_run_goes_on_in_mlflow(runs: Runs) -> None:
    """In the run that it resumes, whose settings cannot change there; and one that fails does not count as finished."""
    flags = "--report-to mlflow --max-steps"
    diverges = "3 --overwrite-output-dir --learning-rate 1e30 --max-grad-norm 0"
    found = [
        json.loads(runs(1, f"{FLAGS} 3 {flags} {more}", code=code, call=with_mlflow).printed)
        for more, code in (("3", 0), ("5 --resume auto", 0), (diverges, None))
    ]
    assert found[:2] == [[None, True, 3, ["FINISHED"]], ["0a1b", False, 2, ["FINISHED"]]]
    assert (found[2][0], found[2][-1]) == (None, ["FAILED"])


def outcomes(out: Path) -> list[str]:
    """Of runs that come to their end, stop before it, are stopped by a signal or by Ctrl-C, and fail."""
    ranks, found = Ranks(0, 1, torch.device("cpu"), dist.HashStore()), list[str]()
    ends: list[tuple[Any, BaseException | None]] = [
        ("finished", None), ("running", None), ("running", Stopped()), ("running", KeyboardInterrupt()),
        ("running", ExpertMeshError("not finite")), ("finished", OSError(28, "full")),
    ]  # fmt: skip
    for state, error in ends:
        log = RunLog(TrainConfig(model="m", dataset=["d"], output_dir=str(out)), out, 2, ranks, None)
        with (
            mock.patch.object(Trackers, "finish", lambda _, outcome: found.append(outcome)),
            suppress(KeyboardInterrupt, ExpertMeshError, OSError),
            log,
        ):
            log.state = state
            if error is not None:
                raise error
    return found


def test_what_trackers_are_told_of_how_a_run_ends(ranks: RankPool, tmp_path: Path) -> None:
    """That a run was stopped, which may be resumed, is neither an end nor a failure."""
    (found,) = ranks.run(outcomes, 1, tmp_path)
    assert found == ["finished", *["stopped"] * 3, *["failed"] * 2]


def with_failing(argv: list[str], at: int) -> Told:
    """A run whose tracker fails when it is started (0), at the n-th line, or when it is ended (-1); it prints what it
    said of that."""
    said: list[str] = []
    init = Trackers.__init__

    def begin(trackers: Trackers, config: Any, directory: Path, ranks: Any, say: Any) -> None:
        init(trackers, config, directory, ranks, said.append)

    tracker = "accelerate.tracking.TensorBoardTracker"
    full = OSError(28, os.strerror(28))
    method, effects = {0: ("start", [full]), -1: ("finish", [full])}.get(at, ("log", [None] * (at - 1) + [full]))
    with mock.patch.object(Trackers, "__init__", begin), mock.patch(f"{tracker}.{method}", side_effect=effects):
        code, _, errors = tell(argv)
    return code, "\n".join(said), errors


@pytest.mark.parametrize("at", [0, 2, -1])
def test_a_tracker_that_fails(runs: Runs, at: int) -> None:
    """A run does not begin without it, and is not ended by it."""
    ended = runs(1, f"{FLAGS} 4", code=0 if at else 2, call=with_failing, given=[at])
    full = f"[Errno 28] {os.strerror(28)}"
    if at == 0:
        assert (ended.printed, ended.errors) == ("", f"train_ep.py: error: --report-to tensorboard: {full}\n")
    else:
        assert ended.errors == ""
        assert ended.printed.count("warning: ") == 1
        became = "was not ended" if at == -1 else "gets nothing more"
        assert ended.printed.startswith(f"warning: --report-to tensorboard {became}: {full}")
        assert ended.values("step") == [1, 2, 3, 4]
