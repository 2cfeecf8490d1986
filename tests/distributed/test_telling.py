"""What only tells of a run never ends it: one in which all of it fails ends with the bits of one in which all works."""

import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.util.telling import EndsRun, telling
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.monitoring.log import RunLog
from expertmesh.training.monitoring.profiling import _Recording
from expertmesh.training.report import page
from expertmesh.training.run.finished import complete_report
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Runs, Told, assert_same_bits, tell_with_forecast

PRODUCT = "expertmesh.training."
FAILS = {
    "monitoring.log.write_report": "warning: report.html was not written: ",
    "monitoring.console.StepTable.lines": "warning: logged steps are not printed: ",
    "monitoring.alarms.LossAlarm.check": "warning: no warnings of the loss: ",
    "monitoring.alarms.RouterAlarm.check": "warning: no warnings of routers: ",
    "monitoring.profiling.costs_of": "warning: rank 0 has no profile of step 1: ",
    "monitoring.profiling._Recording.step": "warning: rank 0 has no profile of step 3: ",
    "planning.rank_memory._forecast": "no forecast: ",
    "run.run.beside": "warning: the memory is not compared with its forecast: ",
    "run.run.detail_lines": "warning: lines about the run are missing: ",
    "run.run.dispatch_lines": "warning: lines about the run are missing: ",
    "run.run.held_line": "warning: nothing says whose weights are exported: ",
    "run.run.Finished.write": "warning: finished.json was not written: ",
    "run.run.Finished.announce": "",
    "run.loop.free_on_host": "warning: the host memory for copies of a checkpoint is not known: ",
    "run.loop._short": "warning: sample generations are missing: ",
    "engine.engine.training_of": "warning: no model card is written: ",
    "environment.platform.freedesktop_os_release": "",
    "steps.interval.Interval.total": "warning: the metric 'tokens' is missing: ",
}
"""What tells of a run, by the place where it is called, and the one line that says that it failed; an empty one: only a
fact of environment.json is left out, or what is lost is lost by a kill alone."""
OF_EACH_MODEL = ("engine.engine.training_of",)
"""Told of the plan of exports, of two checkpoints and of the export."""
FLAGS = (
    "--per-device-train-batch-size 2 --max-steps 4 --save-steps 2 --eval-ratio 0.1 --eval-steps 2 --generate-steps 2 "
    "--generate-max-new-tokens 2 --router-warn-steps 2"
)


def with_all_failing(argv: list[str]) -> Told:
    """A run in which each of FAILS raises its own name."""
    failing = {place: mock.Mock(side_effect=RuntimeError(place)) for place in FAILS}
    # a profile of the first step fails when it is written, one of the third when it begins
    begin, raises = _Recording.step, failing["monitoring.profiling._Recording.step"]
    second_time = mock.Mock(side_effect=[begin, raises])
    with ExitStack() as planted:
        for place, raises in failing.items():
            planted.enter_context(mock.patch(PRODUCT + place, raises))
        planted.enter_context(mock.patch.object(_Recording, "step", lambda *given: second_time()(*given)))
        planted.enter_context(mock.patch("accelerate.tracking.TensorBoardTracker.log", side_effect=KeyError("full")))
        code, printed, errors = tell_with_forecast(argv)
    never = [place for place, raises in failing.items() if not raises.called]
    return code, printed, errors + "".join(f"never called: {place}\n" for place in never)


def test_a_run_in_which_all_that_tells_of_it_fails(runs: Runs) -> None:
    """It trains and exports what it would have, and says each time once what failed."""
    expected = runs(1, FLAGS, out="sound")
    ended = runs(1, f"{FLAGS} --profile 1,3 --report-to tensorboard", out="telling", call=with_all_failing)
    assert "never called" not in ended.errors
    assert_same_bits(ended.weights, expected.weights)
    assert ended.saved == expected.saved
    assert ended.values("step") == expected.values("step")
    assert [line["loss"] for line in ended.lines("loss")] == [line["loss"] for line in expected.lines("loss")]
    said = " ".join((ended.printed + ended.errors).split())
    for place, line in FAILS.items():
        times = 4 if place in OF_EACH_MODEL else int(line != "")
        assert said.count(f"{line}RuntimeError: {place}") == times, place
    assert said.count("warning: --report-to tensorboard gets nothing more: KeyError: 'full'") == 1
    assert not (ended.out / "report.html").exists()
    assert (expected.out / "report.html").exists()


def without_plotly(out: Path) -> list[str]:
    """What a run of two logged events says where plotly is not installed, and one that is started again."""
    said: list[str] = []
    ranks = Ranks(0, 1, torch.device("cpu"), dist.HashStore())
    log = RunLog(TrainConfig(model="m", dataset=["d"], output_dir=str(out)), out, 2, ranks, None)
    page._script.cache_clear()
    with (
        mock.patch.dict(sys.modules, {"plotly": None, "plotly.offline": None}),
        mock.patch("expertmesh.training.monitoring.log.tqdm.write", said.append),
        log,
    ):
        log.begin_after(0)
        for step in (1, 2):
            log.event({"step": step, "warning": "w"}, f"event {step}")
        (out / "finished.json").write_text("{}")
        complete_report(out, said.append)
    return said


def test_without_plotly(ranks: RankPool, tmp_path: Path) -> None:
    """A run goes on, and says once that there is no report."""
    (said,) = ranks.run(without_plotly, 1, tmp_path)
    missing = "warning: report.html was not written: ModuleNotFoundError: "
    assert [line for line in said if not line.startswith(missing)] == ["event 1", "event 2"]
    assert len(said) == 4, "once by the run, and once by the one that was started again"
    assert "plotly" in said[0] + said[1]


def test_what_ends_a_run_does() -> None:
    """Also where it is met by what only tells; and so does Ctrl-C."""
    said: list[str] = []
    for ends in (EndsRun("replaced"), KeyboardInterrupt()):
        with pytest.raises(type(ends)), telling("a report was not written", said.append):
            raise ends
    assert said == []


def test_a_warning_that_cannot_be_printed() -> None:
    """As standard output may be a file on a disk that is full."""
    with telling("a report was not written", mock.Mock(side_effect=OSError(28, "full"))) as failed:
        raise KeyError("step")
    assert failed == ["KeyError: 'step'"]
