"""accelerate's trackers: TensorBoard, Weights & Biases, and others."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator

from ...checkpoints.files.directories import write_errors
from ...moe.util.errors import ExpertMeshError
from ...moe.util.telling import telling
from ...sharding.runtime.process import Ranks, raise_together
from ..config.train_config import TrainConfig

TRACKERS = "trackers"
"""Subdirectory of the output directory that trackers write to."""

_WANDB_RUN, _MLFLOW_RUN = "wandb-run", "mlflow-run"
"""The files there with the id of the run that Weights & Biases or MLflow knows."""
Outcome = Literal["finished", "stopped", "failed"]
_MLFLOW_STATUS: dict[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Trackers:
    """Those that --report-to names. One that fails is warned of and told nothing more; training continues.

    Args:
        directory: that they may write to.
        say: takes a warning.
    """

    def __init__(self, config: TrainConfig, directory: Path, ranks: Ranks, say: Callable[[str], None]):
        self.config = config
        self.directory = directory
        self.is_main = ranks.rank == 0
        self.say = say
        names: list[Any] = [name for name in config.report_to if name != "none"]
        self.accelerator = Accelerator(
            cpu=ranks.device.type == "cpu", log_with=names or None, project_dir=str(directory)
        )

    def start(self, after: int, settings: dict[str, Any]) -> None:
        """Start them all. All ranks call it together.

        Args:
            after: the last step of which they know, if the run is resumed; they forget what they know of later ones.
            settings: of the run.

        Raises:
            ExpertMeshError: on all ranks, when one cannot start.
        """
        with raise_together():
            arguments = self._arguments(after) if self.is_main else {}
            try:
                self.accelerator.init_trackers(self.config.run_name, None, arguments)
                for tracker in self.accelerator.trackers:
                    # which refuses a setting that has another value than it knows, such as --max-steps
                    if not arguments.get("mlflow", {}).get("run_id") or tracker.name != "mlflow":
                        tracker.store_init_configuration(settings)
                self._keep_mlflow_run()
            except Exception as error:  # each has its own
                self.accelerator.trackers.clear()
                raise ExpertMeshError(f"--report-to {' '.join(self.config.report_to)}: {error}") from error

    def _arguments(self, after: int) -> dict[str, dict[str, Any]]:
        """By tracker, those of its making."""
        arguments: dict[str, dict[str, Any]] = {}
        if self.config.resume:
            arguments["tensorboard"] = {"purge_step": after + 1}
        if "wandb" in map(str, self.accelerator.log_with) and "WANDB_RUN_ID" not in os.environ:
            arguments["wandb"] = {"id": self._wandb_run(), "resume": "allow"}
        if self.config.resume and (self.directory / _MLFLOW_RUN).exists() and "MLFLOW_RUN_ID" not in os.environ:
            arguments["mlflow"] = {"run_id": (self.directory / _MLFLOW_RUN).read_text(encoding="utf-8").strip()}
        return arguments

    def _wandb_run(self) -> str:
        """The id of the run that is resumed, or of a new one, which is written down."""
        file = self.directory / _WANDB_RUN
        if not file.exists():
            with write_errors(file):
                self.directory.mkdir(exist_ok=True)
                file.write_text(secrets.token_hex(4), encoding="utf-8")
        return file.read_text(encoding="utf-8").strip()

    def _keep_mlflow_run(self) -> None:
        """Write down the id of the run, which MLflow itself gives it."""
        for tracker in self.accelerator.trackers:
            if tracker.name == "mlflow" and self.is_main:
                self.directory.mkdir(exist_ok=True)
                (self.directory / _MLFLOW_RUN).write_text(tracker.active_run.info.run_id, encoding="utf-8")

    def log(self, values: dict[str, Any], step: int) -> None:
        """Tell them of scalars."""
        for tracker in list(self.accelerator.trackers):
            with telling(f"--report-to {tracker.name} gets nothing more", self.say) as failed:
                tracker.log(values, step=step)
            if failed:
                self.accelerator.trackers.remove(tracker)

    def finish(self, outcome: Outcome) -> None:
        """End them; not by accelerator.end_training(), which would also end the process group."""
        for tracker in self.accelerator.trackers:
            with telling(f"--report-to {tracker.name} was not ended", self.say):
                if tracker.name == "mlflow" and self.is_main:
                    import mlflow

                    mlflow.end_run(_MLFLOW_STATUS[outcome])  # accelerate would say that it has finished
                tracker.finish()
