"""accelerate's trackers: TensorBoard, Weights & Biases, and others."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from ...checkpoints.files.directories import write_errors
from ...moe.util.errors import ExpertMeshError
from ...moe.util.telling import telling
from ...sharding.runtime.process import Ranks, raise_together
from ...sharding.torchrun import STOPPED
from ..config.train_config import TrainConfig

TRACKERS = "trackers"
"""Subdirectory of the output directory that trackers write to."""

Outcome = Literal["finished", "stopped", "failed"]


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
        accelerator = Accelerator(cpu=ranks.device.type == "cpu", log_with=names or None, project_dir=str(directory))
        self.available = [str(name) for name in accelerator.log_with]
        """By accelerate, which leaves out silently what it does not find."""
        self.names = dict.fromkeys([name for name in names if name != "all"] + self.available)
        self.running: list[Any] = []
        """On the main rank alone."""

    def start(self, after: int, settings: dict[str, Any]) -> None:
        """Start them all. All ranks call it together. One that cannot go on in a resumed run is only warned of.

        Args:
            after: the last step of which they know, if the run is resumed; they forget what they know of later ones.
            settings: of the run.

        Raises:
            ExpertMeshError: on all ranks, when one cannot start with a new run.
        """
        with raise_together():
            for name in self.names if self.is_main else ():
                with telling(f"--report-to {name} gets nothing", self.say if after else None) as failed:
                    self._start(name, after, settings)
                if failed and not after:
                    self.finish("failed")
                    raise ExpertMeshError(f"--report-to {name}: {failed[0]}")
                if failed:
                    self.running = [tracker for tracker in self.running if tracker.name != name]

    def _start(self, name: str, after: int, settings: dict[str, Any]) -> None:
        if name not in self.available:
            raise ExpertMeshError("accelerate finds no such package; pip install it again")
        kind: Any = LOGGER_TYPE_TO_CLASS[name]
        known, file = _of(name), self.directory / f"{name}-run"
        kept = file.read_text(encoding="utf-8").strip() if self.config.resume and file.exists() else ""
        directory = [str(self.directory)] if kind.requires_logging_directory else []
        arguments = known.arguments(kept, after if self.config.resume else None)
        tracker = kind(self.config.run_name, *directory, **arguments)
        tracker.start()
        self.running.append(tracker)
        if run := known.run(tracker):
            with write_errors(file):
                self.directory.mkdir(exist_ok=True)
                file.write_text(run, encoding="utf-8")
        known.begin(tracker, settings)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Tell them of scalars."""
        for tracker in list(self.running):
            with telling(f"--report-to {tracker.name} gets nothing more", self.say) as failed:
                tracker.log(values, step=step)
            if failed:
                self.running.remove(tracker)

    def finish(self, outcome: Outcome) -> None:
        """End them, each in its own words."""
        while self.running:
            tracker = self.running.pop()
            with telling(f"--report-to {tracker.name} was not ended", self.say):
                _of(tracker.name).end(tracker, outcome)


class _Tracker:
    """What a tracker is told beside figures: by accelerate alone each start would be a run of its own, and each end one
    of a run that has finished."""

    def arguments(self, kept: str, after: int | None) -> dict[str, Any]:
        """Those of its making.

        Args:
            kept: what it called the run that is resumed; empty where this is not known.
            after: the last step of it; None: a new run.
        """
        return {}

    def run(self, tracker: Any) -> str:
        """What it calls the run; empty where it has no such name."""
        return ""

    def begin(self, tracker: Any, settings: dict[str, Any]) -> None:
        """Tell it of the settings."""
        tracker.store_init_configuration(settings)

    def end(self, tracker: Any, outcome: Outcome) -> None:
        tracker.finish()


class _TensorBoard(_Tracker):
    """Its own writer, not tensorboardX, has a run beside that of the figures: of the settings, and of how it ended."""

    STATUS: ClassVar = {"finished": "STATUS_SUCCESS", "stopped": "STATUS_UNKNOWN", "failed": "STATUS_FAILURE"}

    def arguments(self, kept: str, after: int | None) -> dict[str, Any]:
        return {} if after is None else {"purge_step": after + 1}

    def begin(self, tracker: Any, settings: dict[str, Any]) -> None:
        # it takes no lists
        settings = {name: str(value) if isinstance(value, list) else value for name, value in settings.items()}
        if not self._has_hparams(tracker):
            return super().begin(tracker, settings)
        from torch.utils.tensorboard.summary import hparams

        # anew in a resumed run, as of several it shows the first
        shutil.rmtree(self._directory(tracker), ignore_errors=True)
        experiment, begin, _ = hparams(settings, {})
        self._write(tracker, experiment, begin)

    def end(self, tracker: Any, outcome: Outcome) -> None:
        if self._has_hparams(tracker):
            from tensorboard.compat.proto import summary_pb2
            from tensorboard.plugins.hparams import metadata, plugin_data_pb2

            # their names are made at run time
            pb2, summary = cast(Any, plugin_data_pb2), cast(Any, summary_pb2).Summary
            ended = pb2.SessionEndInfo(status=self.STATUS[outcome], end_time_secs=time.time())
            content = metadata.create_summary_metadata(pb2.HParamsPluginData(session_end_info=ended))
            value = summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=content, tensor=metadata.NULL_TENSOR)
            self._write(tracker, summary(value=[value]))
        tracker.finish()

    def _has_hparams(self, tracker: Any) -> bool:
        return type(tracker.writer).__module__.startswith("torch.")

    def _directory(self, tracker: Any) -> str:
        return os.path.join(tracker.logging_dir, "settings")

    def _write(self, tracker: Any, *summaries: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(self._directory(tracker)) as writer:
            for summary in summaries:
                writer.file_writer.add_summary(summary)


class _Wandb(_Tracker):
    EXIT_CODES: ClassVar = {"finished": 0, "stopped": STOPPED, "failed": 1}

    def arguments(self, kept: str, after: int | None) -> dict[str, Any]:
        return {"id": kept, "resume": "allow"} if kept and "WANDB_RUN_ID" not in os.environ else {}

    def run(self, tracker: Any) -> str:
        return str(tracker.run.id)

    def end(self, tracker: Any, outcome: Outcome) -> None:
        if outcome == "stopped":
            tracker.run.mark_preempting()
        tracker.run.finish(exit_code=self.EXIT_CODES[outcome])


class _MLflow(_Tracker):
    STATUS: ClassVar = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
    PATIENCE: ClassVar = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
    """Its own are 7 and 120 seconds: all ranks would wait a quarter of an hour for a server that is away."""

    def arguments(self, kept: str, after: int | None) -> dict[str, Any]:
        for variable, value in self.PATIENCE.items():
            os.environ.setdefault(variable, value)
        return {"run_id": kept} if kept and "MLFLOW_RUN_ID" not in os.environ else {}

    def run(self, tracker: Any) -> str:
        return str(tracker.active_run.info.run_id)

    def begin(self, tracker: Any, settings: dict[str, Any]) -> None:
        import mlflow

        # it refuses another value than it knows, such as --max-steps of a resumed run
        known = mlflow.get_run(self.run(tracker)).data.params
        super().begin(tracker, {name: value for name, value in settings.items() if name not in known})

    def end(self, tracker: Any, outcome: Outcome) -> None:
        import mlflow

        mlflow.end_run(self.STATUS[outcome])
        tracker.finish()


class _Trackio(_Tracker):
    def arguments(self, kept: str, after: int | None) -> dict[str, Any]:
        return {"name": kept, "resume": "allow"} if kept else {}

    def run(self, tracker: Any) -> str:
        return str(tracker.run.name)

    def end(self, tracker: Any, outcome: Outcome) -> None:
        if outcome != "finished":  # it knows of no other ends
            import trackio

            levels = trackio.AlertLevel
            tracker.run.alert(f"Run {outcome}", level=levels.ERROR if outcome == "failed" else levels.WARN)
        tracker.finish()


def _of(name: str) -> _Tracker:
    known = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _MLflow, "trackio": _Trackio}
    return known.get(name, _Tracker)()
