"""What train_ep.py and `expertmesh.load` do before a process joins the others.

What needs torch is imported where it is used: a model that is not there is told of before torch is loaded.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from ..moe.util.errors import ExpertMeshError
from ..moe.util.parser import flag_of
from .config.train_config import TrainConfig
from .data.data_files import check_places, places_read


def prepare_process(config: TrainConfig, reads_data: bool = False) -> None:
    """Settle what the settings ask of this process, before it joins a process group.

    Args:
        reads_data: whether it will read the data sets.

    Raises:
        ExpertMeshError: there is no such model, data set or training checkpoint, or a setting does not work here.
    """
    # these need numpy, which --help does without
    from ..checkpoints.hf.source import check_model
    from ..checkpoints.training_state.marker import check_resumable

    check_model(config.model)
    if config.resume not in ("", "auto"):
        check_resumable(Path(config.resume), "--resume ")
    if reads_data:
        check_places("--dataset", config.dataset)
        check_places("--eval-dataset", config.eval_dataset)
    from ..sharding.runtime.process import device_type
    from .model_setup.determinism import set_determinism
    from .model_setup.tf32 import set_tf32

    set_tf32(config.tf32, device_type(config.use_cpu))
    set_determinism(config.deterministic)


def check_apart(config: TrainConfig) -> None:
    """
    Raises:
        ExpertMeshError: --output-dir is a directory that the run reads, or lies in one: its files would be taken for a
            model's, an adapter's or data by whoever reads that directory next.
    """
    if config.ends_after_data:
        return
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
