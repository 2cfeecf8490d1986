"""What train_ep.py and `expertmesh.load` do before a process joins the others.

What needs torch is imported where it is used: a model that is not there is told of before torch is loaded.
"""

from __future__ import annotations

import os
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from ...moe.util.errors import ExpertMeshError
from ...moe.util.parser import flag_of
from ..config.train_config import TrainConfig
from ..data.chat import read_template
from ..data.data_files import check_places, places_read


def prepare_process(config: TrainConfig, reads_data: bool = False) -> None:
    """Settle what the settings ask of this process, before it joins a process group.

    Args:
        reads_data: whether it is a run of train_ep.py, which will read the data sets and have trackers.

    Raises:
        ExpertMeshError: there is no such model, tokenizer, data set, training checkpoint, chat template or tracker, or
            a setting does not work here.
    """
    # these need numpy, which --help does without
    from ...checkpoints.hf.hub import resolve_model
    from ...checkpoints.hf.source import open_source
    from ...checkpoints.hf.tokenizer_files import has_tokenizer
    from ...checkpoints.training_state.marker import check_resumable

    if config.resume not in ("", "auto"):
        check_resumable(Path(config.resume), "--resume ")
    model = resolve_model(config.model, "--model", weights=False)
    open_source(model)
    if config.teacher:
        open_source(resolve_model(config.teacher, "--teacher", weights=False))
    flag, place, directory = "--model", config.model, model
    if config.tokenizer:
        flag, place = "--tokenizer", config.tokenizer
        directory = resolve_model(place, flag, weights=False)
    if (config.tokenizer or reads_data) and not has_tokenizer(directory):
        raise ExpertMeshError(f"{flag} {place}: has no tokenizer; give one with --tokenizer")
    if reads_data:
        check_places("--dataset", config.dataset)
        check_places("--eval-dataset", config.eval_dataset)
        check_trackers(config)
        if config.chat_template:
            read_template(config.chat_template)
    from ...sharding.runtime.process import device_type
    from ..model_setup.determinism import set_determinism
    from ..model_setup.tf32 import set_tf32

    set_tf32(config.tf32, device_type(config.use_cpu))
    set_determinism(config.deterministic)


def check_output_dir(config: TrainConfig) -> None:
    """
    Raises:
        ExpertMeshError: --output-dir is a directory that the run reads, or lies in one: its files would be taken for a
            model's, an adapter's or data by whoever reads that directory next.
    """
    if config.ends_after_data:
        return
    check_directory(Path(config.output_dir))
    output_dir = Path(config.output_dir).resolve()
    for setting in fields(config):
        if setting.metadata.get("scope") != "input" or setting.name == "resume":  # a run's checkpoints are in its own
            continue
        flag = flag_of(setting.name)
        for name in places_read(flag, getattr(config, setting.name)):
            # a hub id is one too: the next run would take the directory for the model
            is_place = "/" in name or Path(name).is_dir()
            if is_place and output_dir.is_relative_to(Path(name).resolve()):
                raise ExpertMeshError(
                    f"--output-dir {config.output_dir}: "
                    f"{'is' if output_dir == Path(name).resolve() else 'lies in'} {flag} {name}, which this "
                    "run reads; choose a directory outside"
                )


def check_directory(output_dir: Path) -> None:
    """
    Raises:
        ExpertMeshError: --output-dir is there and is none.
    """
    if os.path.lexists(output_dir) and not output_dir.is_dir():
        raise ExpertMeshError(f"--output-dir {output_dir}: is not a directory; give another name")


TRACKERS = {
    **{name: (name,) for name in ("aim", "wandb", "trackio", "comet_ml", "mlflow", "clearml", "dvclive", "swanlab")},
    "tensorboard": ("tensorboard", "tensorboardX"),
}
"""Those that accelerate knows, each with the packages of which one is to be installed: accelerate itself imports torch
before it tells."""


def check_trackers(config: TrainConfig) -> None:
    """
    Raises:
        ExpertMeshError: --report-to names a tracker that accelerate does not know, or that is not installed, or
            --run-name leads out of the directory that trackers write to.
    """
    asked_for = [name for name in config.report_to if name != "none"]
    for name in asked_for:
        if name not in ("all", *TRACKERS):
            known = ", ".join(("all", *TRACKERS))
            raise ExpertMeshError(f"--report-to {name}: unknown tracker; use one of {known}, or none")
        if name != "all" and not any(map(find_spec, TRACKERS[name])):
            raise ExpertMeshError(f"--report-to {name}: not installed; pip install it first")
    if asked_for and (Path(config.run_name).is_absolute() or ".." in Path(config.run_name).parts):
        raise ExpertMeshError(
            f"--run-name {config.run_name}: must be a relative path, because trackers make a directory of that name"
        )
