"""accelerate's trackers: TensorBoard, Weights & Biases, and others."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

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
_MLFLOW_STATUS: dict[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_TENSORBOARD_STATUS: dict[Outcome, str] = {
    "finished": "STATUS_SUCCESS",
    "stopped": "STATUS_UNKNOWN",
    "failed": "STATUS_FAILURE",
}
_EXIT_CODES: dict[Outcome, int] = {"finished": 0, "stopped": STOPPED, "failed": 1}
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""MLflow's own are 7 and 120 seconds: all ranks would wait a quarter of an hour for a server that is away."""
_SETTINGS = "settings"
"""TensorBoard's run, beside that of the figures, with the settings and how the run ended."""


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
        directory = [str(self.directory)] if kind.requires_logging_directory else []
        tracker = kind(self.config.run_name, *directory, **self._arguments(name, after))
        tracker.start()
        self.running.append(tracker)
        self._keep(tracker)
        settings = _suited(tracker, settings)
        if _has_hparams(tracker):
            _begin_hparams(tracker, settings)
        else:
            tracker.store_init_configuration(settings)

    def _arguments(self, name: str, after: int) -> dict[str, Any]:
        """Those of a tracker's making, by which a resumed run goes on in the same one."""
        file = self._kept(name)
        kept = file.read_text(encoding="utf-8").strip() if self.config.resume and file.exists() else ""
        match name:
            case "tensorboard" if self.config.resume:
                return {"purge_step": after + 1}
            case "wandb" if kept and "WANDB_RUN_ID" not in os.environ:
                return {"id": kept, "resume": "allow"}
            case "mlflow":
                for variable, value in _PATIENCE.items():
                    os.environ.setdefault(variable, value)
                return {"run_id": kept} if kept and "MLFLOW_RUN_ID" not in os.environ else {}
            case "trackio" if kept:
                return {"name": kept, "resume": "allow"}
        return {}

    def _kept(self, name: str) -> Path:
        """The file with what a tracker calls the run."""
        return self.directory / f"{name}-run"

    def _keep(self, tracker: Any) -> None:
        """Write down what a tracker, which gives each run a name of its own, calls this one."""
        match tracker.name:
            case "wandb":
                run = tracker.run.id
            case "mlflow":
                run = tracker.active_run.info.run_id
            case "trackio":
                run = tracker.run.name
            case _:
                return
        with write_errors(file := self._kept(tracker.name)):
            self.directory.mkdir(exist_ok=True)
            file.write_text(run, encoding="utf-8")

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
                _end(tracker, outcome)


def _end(tracker: Any, outcome: Outcome) -> None:
    """accelerate would say of each run that it has finished."""
    match tracker.name:
        case "mlflow":
            import mlflow

            mlflow.end_run(_MLFLOW_STATUS[outcome])
        case "wandb":
            if outcome == "stopped":
                tracker.run.mark_preempting()
            tracker.run.finish(exit_code=_EXIT_CODES[outcome])
            return
        case "trackio" if outcome != "finished":  # it knows of no other ends
            import trackio

            levels = trackio.AlertLevel
            tracker.run.alert(f"Run {outcome}", level=levels.ERROR if outcome == "failed" else levels.WARN)
    if _has_hparams(tracker):
        _end_hparams(tracker, outcome)
    tracker.finish()


def _suited(tracker: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that a tracker takes, as it takes them."""
    if tracker.name == "tensorboard":  # which takes no lists
        return {name: str(value) if isinstance(value, list) else value for name, value in settings.items()}
    if tracker.name == "mlflow":  # which refuses another value than it knows, such as --max-steps of a resumed run
        import mlflow

        known = mlflow.get_run(tracker.active_run.info.run_id).data.params
        return {name: value for name, value in settings.items() if name not in known}
    return settings


def _has_hparams(tracker: Any) -> bool:
    """Whether this is TensorBoard itself, which tensorboardX only writes the files of."""
    return tracker.name == "tensorboard" and type(tracker.writer).__module__.startswith("torch.")


def _begin_hparams(tracker: Any, settings: dict[str, Any]) -> None:
    """Write the settings where TensorBoard looks for them: anew in a resumed run, as of several it shows the first."""
    from torch.utils.tensorboard.summary import hparams

    shutil.rmtree(_hparams_directory(tracker), ignore_errors=True)
    experiment, begin, _ = hparams(settings, {})
    _write_hparams(tracker, experiment, begin)


def _end_hparams(tracker: Any, outcome: Outcome) -> None:
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    # their names are made at run time
    pb2, summary = cast(Any, plugin_data_pb2), cast(Any, summary_pb2).Summary
    ended = pb2.SessionEndInfo(status=_TENSORBOARD_STATUS[outcome], end_time_secs=time.time())
    content = metadata.create_summary_metadata(pb2.HParamsPluginData(session_end_info=ended))
    value = summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=content, tensor=metadata.NULL_TENSOR)
    _write_hparams(tracker, summary(value=[value]))


def _write_hparams(tracker: Any, *summaries: Any) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(_hparams_directory(tracker)) as writer:
        for summary in summaries:
            writer.file_writer.add_summary(summary)


def _hparams_directory(tracker: Any) -> str:
    return os.path.join(tracker.logging_dir, _SETTINGS)
