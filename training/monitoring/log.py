"""What a run tells: a progress bar, config.yaml, environment.json, metrics.jsonl and report.html, and accelerate's
trackers.

Only the main process writes.
"""

import json
import math
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

from tqdm import tqdm

from ...checkpoints.files.directories import write_errors
from ...moe.util.atomic_write import whole
from ...moe.util.errors import ExpertMeshError
from ...moe.util.telling import EndsRun, telling
from ...moe.util.terminal import folded
from ...sharding.runtime.process import Ranks, raise_together
from ..config.train_config import TrainConfig
from ..environment import environment, write_environment
from ..report.history import History, read_record
from ..report.page import REFRESH_SECONDS, State, sweep_reports, write_report
from .console import StepTable
from .trackers import TRACKERS, Trackers

NOTABLE = ("warning: ", "note: ")
"""How lines begin that are printed without --verbose too."""


class RunLog:
    """Use as a context manager; on processes other than the main one every method does nothing.

    state: for the report; whoever brings the run to its end sets it to "finished", else it ends as "stopped".
    """

    def __init__(
        self, config: TrainConfig, output_dir: Path, num_steps: int, ranks: Ranks, flash_attention: str | None
    ):
        self.trackers = Trackers(config, output_dir / TRACKERS, ranks, self.warn)
        self.is_main = ranks.rank == 0
        self.config = config
        self.ranks = ranks
        self.flash_attention = flash_attention
        self.output_dir = output_dir
        self.path = output_dir / "metrics.jsonl"
        self.num_steps = num_steps
        self.first_step = 0
        self.state: State = "running"
        self.file: TextIO | None = None
        self.opened: os.stat_result | None = None
        self.bar: Any = None
        self.reported = -math.inf
        self.table = StepTable(num_steps, config.verbose)
        self.warned: set[str] = set()
        # what has been logged, on the main process; of a resumed run, known once `begin_after` has read it
        self.history = None if config.resume else History()

    def __enter__(self) -> "RunLog":
        batch = self.config.sequences_per_step(self.ranks.world_size)
        facts = environment(self.ranks, batch, self.flash_attention)
        facts |= {"num_steps": self.num_steps, "started": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
        with raise_together(), write_errors(self.output_dir):
            if self.is_main:
                sweep_reports(self.output_dir)
                self.config.save(self.output_dir / "config.yaml")
                write_environment(self.output_dir, facts)
                # a resumed run keeps what the one before it has logged: see begin_after
                self._open("a" if self.config.resume else "w")
        return self

    def _open(self, mode: Literal["a", "w"]) -> None:
        self.file = self.path.open(mode, encoding="utf-8")
        self.opened = os.fstat(self.file.fileno())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.state == "running":
            self.state = "stopped"
        is_failed = error is not None and not isinstance(error, KeyboardInterrupt)
        self.trackers.finish("failed" if is_failed else "finished" if self.state == "finished" else "stopped")
        if self.is_main:
            assert self.file is not None
            try:
                self.file.close()
            except OSError as closing:  # what could not be written has been told
                if error is None:
                    raise ExpertMeshError(f"{self.path}: cannot be written: {closing.strerror}") from closing
            try:
                self._write_report()
            except EndsRun as gone:  # which has been told, or the run has nothing more to write
                self.line(f"warning: report.html was not written: {gone}")

    def line(self, text: str) -> None:
        """A line on the console, clear of the progress bar."""
        if self.is_main:
            tqdm.write(folded(text))

    def warn(self, text: str) -> None:
        """A warning of what only tells of the run and has failed: once, as it may fail at every step."""
        if text not in self.warned:
            self.warned.add(text)
            self.line(text)

    def detail(self, text: str) -> None:
        """A line on the console with --verbose; a warning or a note always."""
        if self.config.verbose or text.startswith(NOTABLE):
            self.line(text)

    def step(self, metrics: dict[str, Any]) -> None:
        """A logged step of training: to the file, the trackers, and the console."""
        self._record(metrics)
        if self.is_main:
            with telling("logged steps are not printed", self.warn):
                for text in self.table.lines(metrics, self._seconds_left(metrics)):
                    self.line(text)
            if time.monotonic() >= self.reported + REFRESH_SECONDS:
                self._write_report()

    def _seconds_left(self, metrics: dict[str, Any]) -> float:
        """Until the last step, if steps go on to take as long as the mean of this start's, evaluations and checkpoints
        counted."""
        done = metrics["step"] - self.first_step
        return float(metrics["seconds"] / done * (self.num_steps - metrics["step"]))

    def event(self, metrics: dict[str, Any], console: str) -> None:
        """What else happened at a step, an evaluation say: to the file, the trackers, the console and the report."""
        self._record(metrics)
        self.line(console)
        self._write_report()

    def note(self, metrics: dict[str, Any]) -> None:
        """What happened at a step and is for the report alone: to the file."""
        self._write({k: _without_nan(v) for k, v in metrics.items()})

    def _record(self, metrics: dict[str, Any]) -> None:
        """A line of metrics.jsonl; scalars also go to the trackers."""
        metrics = {k: _without_nan(v) for k, v in metrics.items()}
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float) and k != "step"}
        if numbers:
            self.trackers.log(numbers, metrics["step"])
        self._write(metrics)

    def _write(self, metrics: dict[str, Any]) -> None:
        if self.is_main:
            self.check_directory()
            assert self.file is not None
            with write_errors(self.path):
                self.file.write(json.dumps(metrics, allow_nan=False) + "\n")
                self.file.flush()
            assert self.history is not None
            with telling("the report lacks figures", self.warn):
                self.history.add(metrics)

    def check_directory(self) -> None:
        """Whether what is written still goes to where --output-dir is: a file that was deleted takes all silently.

        Raises:
            EndsRun: on the main process, when it does not.
        """
        if self.is_main:
            assert self.opened is not None
            try:
                is_there = os.path.samestat(self.opened, self.path.stat())
            except OSError:
                is_there = False
            if not is_there:
                raise EndsRun(
                    f"--output-dir {self.output_dir} was deleted, moved or replaced during the run: "
                    f"{self.path.name} is no longer the file of this run"
                )

    def _write_report(self) -> None:
        """report.html of all that has been logged so far. That it cannot be written stops no training; that the output
        directory is another one does, before anything else is written there."""
        if self.is_main:
            self.reported = time.monotonic()
            self.check_directory()
            with telling("report.html was not written", self.warn):
                write_report(self.output_dir, self.state, self.history)

    def begin_after(self, step: int, again: Collection[str] = ()) -> None:
        """Start the trackers; in a resumed run, forget what an earlier attempt has logged after `step`, as those
        steps are about to be made again. To be called before anything is logged.

        Args:
            again: keys of what is made again at `step` itself.

        Raises:
            ExpertMeshError: on all ranks, when metrics.jsonl cannot be rewritten, or a tracker cannot start.
        """
        if self.config.resume:
            self._keep_until(step, again)
        self.trackers.start(step, {k: v for k, v in asdict(self.config).items() if v is not None})

    def _keep_until(self, step: int, again: Collection[str]) -> None:
        """Keep metrics.jsonl up to a step, without the line that the earlier attempt was killed in."""
        with raise_together(), write_errors(self.path):
            if self.is_main:
                self.check_directory()
                assert self.file is not None
                history = History()
                with whole(self.path, durable=True) as partial, self.path.open("rb") as old, partial.open("wb") as new:
                    for line in old:
                        record = read_record(line)
                        if record is None or (record["step"] == step and not record.keys().isdisjoint(again)):
                            continue
                        if record["step"] <= step:
                            new.write(line.rstrip(b"\n") + b"\n")
                            history.add(record)
                self.history = history
                # what was opened has lost its name to the new one
                self.file.close()
                self._open("a")

    def steps(self, start: int) -> Iterator[int]:
        """The steps from `start` on, counted off on a progress bar, where there is a terminal."""
        self.first_step = start
        disable = None if self.is_main else True
        steps = range(start, self.num_steps)
        self.bar = tqdm(steps, initial=start, total=self.num_steps, unit="step", dynamic_ncols=True, disable=disable)
        yield from self.bar


def _without_nan(value: Any) -> Any:
    """With None for every number that is not finite, which JSON does not have."""
    if isinstance(value, list):
        return [_without_nan(element) for element in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
