"""Logged speeds, against a clock of the test's own that only stands still or is moved on: no test here takes time."""

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import expertmesh.training.run.loop
from expertmesh.sharding.runtime.preemption import StopRequest
from expertmesh.training.engine import engine
from expertmesh.training.monitoring.meter import Meter
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import run_main

STEP, COLLECTIVE = 1.0, 0.25
PAUSES = {"evaluate": 7.0, "generate": 5.0, "check_replicas": 3.0, "_save": 11.0}
"""Functions of the training loop, and the seconds that each takes."""


class Clock:
    """In place of `time.perf_counter`: moved on by what a run does, with its pauses booked apart."""

    def __init__(self) -> None:
        self.now = self.paused = 1000.0
        self.pausing = False
        self.trained: list[float] = []

    def read(self) -> float:
        return self.now

    def wrap(self, work: Callable[..., Any], seconds: float, is_pause: bool = False) -> Callable[..., Any]:
        """`work`, which takes so many seconds more; in a pause, so does all that it calls."""

        def slow(*args: Any, **kwargs: Any) -> Any:
            before, self.pausing = self.pausing, self.pausing or is_pause
            try:
                self._move(seconds)
                return work(*args, **kwargs)
            finally:
                self.pausing = before

        return slow

    def read_before(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, before which the time trained so far is noted."""

        def read(*args: Any) -> Any:
            self.trained.append(self.now - self.paused)
            return work(*args)

        return read

    def _move(self, seconds: float) -> None:
        self.now += seconds
        self.paused += seconds if self.pausing else 0.0


def run_by_clock(argv: list[str]) -> tuple[tuple[int, str], list[float]]:
    """train_ep.py on this rank, with slow steps, collectives and pauses; and the time trained, without pauses, at the
    start of training and at the end of each logging interval."""
    clock = Clock()
    pauses = {
        name: clock.wrap(getattr(expertmesh.training.run.loop, name), more, True) for name, more in PAUSES.items()
    }
    with (
        mock.patch.object(time, "perf_counter", clock.read),
        mock.patch.object(dist, "all_reduce", clock.wrap(dist.all_reduce, COLLECTIVE)),
        mock.patch.object(dist, "all_gather_object", clock.wrap(dist.all_gather_object, COLLECTIVE)),
        mock.patch.object(engine, "train_step", clock.wrap(engine.train_step, STEP)),
        mock.patch.dict(vars(expertmesh.training.run.loop), pauses),
        # whether a signal has come meanwhile belongs to the pause; steps ask it with their own figures
        mock.patch.object(StopRequest, "on_any_rank", clock.wrap(StopRequest.on_any_rank, 0.0, is_pause=True)),
        mock.patch.object(Meter, "__init__", clock.read_before(Meter.__init__)),
        mock.patch.object(Meter, "metrics", clock.read_before(Meter.metrics)),
    ):
        return run_main(argv), clock.trained


@pytest.mark.release
@pytest.mark.parametrize("logging_steps", [1, 3])
def test_speed_is_of_the_time_between_logged_steps(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, logging_steps: int
) -> None:
    """Collectives, those of logging too, count as training; evaluating, answering, comparing and saving do not."""
    argv = [
        "--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path), "--use-cpu",
        "--ep-size", "2", "--max-steps", "8", "--per-device-train-batch-size", "2", "--no-export",
        "--logging-steps", str(logging_steps), "--eval-ratio", "0.1", "--eval-steps", "4", "--save-steps", "5",
        "--generate-steps", "6", "--generate-max-new-tokens", "2", "--no-async-save", "--check-replicas", "2",
    ]  # fmt: skip
    ((code, errors), trained), _ = ranks.run(run_by_clock, 2, argv, join_group=False)
    assert code == 0, errors
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in logged if "tokens_per_second" in line]
    seconds = [end - begin for begin, end in pairwise(trained)]
    expected = [line["tokens"] / took for line, took in zip(logged, seconds, strict=True)]
    assert [line["tokens_per_second"] for line in logged] == pytest.approx(expected, rel=0.03)
