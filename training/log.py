"""What a run tells: a progress bar, config.yaml and metrics.jsonl, and accelerate's trackers.

Only the main process writes.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from accelerate import Accelerator
from tqdm import tqdm

from checkpoints import write_errors
from moe import ExpertMeshError
from sharding import raise_together
from training.config import TrainConfig


class RunLog:
    """Use as a context manager; on processes other than the main one every method does nothing."""

    def __init__(self, config: TrainConfig, output_dir: Path, num_steps: int, use_cpu: bool):
        trackers: list[Any] = [name for name in config.report_to if name != "none"]
        try:
            self.accelerator = Accelerator(cpu=use_cpu, log_with=trackers or None, project_dir=str(output_dir))
        except ValueError as error:
            raise ExpertMeshError(f"--report-to {' '.join(config.report_to)}: {error}") from error
        # accelerate leaves out without a word what is not installed
        missing = {str(name) for name in trackers} - {str(name) for name in self.accelerator.log_with} - {"all"}
        if missing:
            raise ExpertMeshError(f"--report-to {' '.join(sorted(missing))}: not installed; pip install it first")
        self.is_main = self.accelerator.is_main_process
        self.config = config
        self.output_dir = output_dir
        self.num_steps = num_steps
        self.file: TextIO | None = None
        self.bar: Any = None

    def __enter__(self) -> "RunLog":
        with raise_together(), write_errors(self.output_dir):
            if self.is_main:
                self.config.save(self.output_dir / "config.yaml")
                # a resumed run keeps what the one before it has logged: see keep_until
                path = self.output_dir / "metrics.jsonl"
                self.file = path.open("a" if self.config.resume else "w", encoding="utf-8")
        settings = {k: v for k, v in asdict(self.config).items() if isinstance(v, int | float | str)}
        self.accelerator.init_trackers(self.config.run_name, config=settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # not accelerator.end_training(), which would also end the process group
        for tracker in self.accelerator.trackers:
            tracker.finish()
        if self.is_main:
            assert self.file is not None
            self.file.close()

    def line(self, text: str) -> None:
        """A line on the console, clear of the progress bar."""
        if self.is_main:
            tqdm.write(text)

    def step(self, metrics: dict[str, Any], console: str) -> None:
        """One logged step: metrics to the file and, where they are single numbers, to the trackers."""
        self.accelerator.log({k: v for k, v in metrics.items() if isinstance(v, int | float)}, step=metrics["step"])
        if self.is_main:
            assert self.file is not None
            self.file.write(json.dumps(metrics) + "\n")
            self.file.flush()
            self.bar.set_postfix_str(console, refresh=False)
            if self.bar.disable:
                tqdm.write(f"step {metrics['step']}/{self.num_steps}  {console}")

    def keep_until(self, step: int) -> None:
        """Forget what an earlier attempt has logged after `step`: those steps are about to be made again."""
        path = self.output_dir / "metrics.jsonl"
        if self.is_main and path.stat().st_size > 0:
            kept = []
            for line in path.read_text(encoding="utf-8").splitlines():
                # the last line of a killed run may be cut off
                if line.endswith("}") and json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            path.write_text("".join(kept), encoding="utf-8")

    def steps(self, start: int) -> Iterator[int]:
        """The steps from `start` on, counted off on the progress bar; off a terminal, a line a logged step instead."""
        disable = None if self.is_main else True
        steps = range(start, self.num_steps)
        self.bar = tqdm(steps, initial=start, total=self.num_steps, unit="step", dynamic_ncols=True, disable=disable)
        yield from self.bar
