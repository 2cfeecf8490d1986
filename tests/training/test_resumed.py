"""What a run keeps of the one that it resumes, however `--resume` names the checkpoint."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from expertmesh.checkpoints.files.checksums import seal
from expertmesh.checkpoints.training_state.marker import FORMAT, MARKER, VERSION
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.run.finished import recorded_date
from expertmesh.training.start.elastic import recorded_sequences_per_step
from expertmesh.training.start.resume import read_resumed


def save(path: Path, global_batch: int | None) -> None:
    """A checkpoint of a run on four ranks, as far as its marker goes."""
    saved = TrainConfig(
        model="m", dataset=["d"], template_date=f"2026-01-{global_batch or 1:02}", router_aux_loss_coef=0.25
    )
    order = {} if global_batch is None else {"global_batch_size": global_batch}
    marker = {"format": FORMAT, "version": VERSION, "world_size": 4, "step": 1, "tokens": 1, "scheduler": {}}
    marker |= {"order": order, "settings": asdict(saved), "best": {}, "exported": [], "transposed": [], "facts": {}}
    path.mkdir(parents=True)
    (path / MARKER).write_text(json.dumps(seal({**marker, "files": {"state/.metadata": {}}})))


@pytest.mark.parametrize("named", ["auto", "checkpoints", "checkpoints/step-00000012", "moved/a"])
def test_each_fact_is_the_same_by_every_name(tmp_path: Path, named: str) -> None:
    """Of "auto", of a directory ("the newest there"), and of a checkpoint. One whose marker is damaged is passed by, as
    it is when the run resumes."""
    for batch in (8, 12):
        save(tmp_path / "checkpoints" / f"step-{batch:08}", batch)
    save(tmp_path / "moved" / "a", 12)
    damaged = tmp_path / "checkpoints" / "step-00000016"
    save(damaged, 16)
    (damaged / MARKER).write_text((damaged / MARKER).read_text().replace("16", "17"))
    resume = named if named == "auto" else str(tmp_path / named)
    config = TrainConfig(model="m", dataset=["d"], resume=resume, output_dir=str(tmp_path))
    resumed = read_resumed(config)
    assert resumed is not None
    assert recorded_date(config, resumed) == "2026-01-12"
    assert recorded_sequences_per_step(resumed, tmp_path) == 12
    assert resumed.balance == 0.25


def test_nothing_is_known_where_nothing_is_resumed(tmp_path: Path) -> None:
    for resume in ("", "auto", str(tmp_path / "none")):
        config = TrainConfig(model="m", dataset=["d"], resume=resume, output_dir=str(tmp_path))
        assert read_resumed(config) is None
        assert recorded_date(config, None) == ""
    save(tmp_path / "step-00000001", None)
    made_in_a_loop = read_resumed(TrainConfig(model="m", dataset=["d"], resume=str(tmp_path)))
    assert made_in_a_loop is not None
    assert made_in_a_loop.sequences_per_step is None
