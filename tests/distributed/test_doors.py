"""Every way to resume, from the command line and from Python, refuses and warns of the same, with the same words."""

import contextlib
import io
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

import expertmesh
from expertmesh import train_ep
from expertmesh.training.start import consistency as alike
from tests.distributed.pool import RankPool
from tests.flags import last_of_each
from tests.tiny import save_model, save_tokenizer

SETTINGS: dict[str, Any] = dict(use_cpu=True, adapter="lora", lora_rank=2, learning_rate=1e-2)
IDS = torch.arange(3, 15)
ROWS = [{"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}] * 8


def trainer_of(engine: expertmesh.Engine, out: Path, steps: int) -> expertmesh.Trainer:
    arguments = transformers.TrainingArguments(
        str(out), use_cpu=True, max_steps=steps, save_steps=1, report_to=[], remove_unused_columns=False,
        disable_tqdm=True, dataloader_pin_memory=False, per_device_train_batch_size=1,
    )  # fmt: skip
    return expertmesh.Trainer(
        model=engine, args=arguments, train_dataset=ROWS, data_collator=transformers.default_data_collator
    )


def by_command(model: Path, data: Path, saved: Path, out: Path, more: dict[str, Any]) -> int:
    argv = ["--model", str(model), "--dataset", str(data), "--output-dir", str(out), "--no-export", "--save-steps=0"]
    for name, value in {**SETTINGS, **more}.items():
        values = [] if value is True else value if isinstance(value, list) else [str(value)]
        argv += [f"--{name}", *values]
    # the newest in its directory, where the command looks for it
    shutil.copytree(saved, out / "checkpoints")
    if train_ep.main(last_of_each([*argv, "--max-steps=3", "--logging-steps=9", "--resume", "auto"])):
        raise expertmesh.ExpertMeshError
    return 2


def by_load(model: Path, data: Path, saved: Path, out: Path, more: dict[str, Any]) -> int:
    shutil.copytree(saved, out / "checkpoints")
    return expertmesh.load(str(model), **SETTINGS, **more, output_dir=str(out), resume="auto").step_number


def by_engine(model: Path, data: Path, saved: Path, out: Path, more: dict[str, Any]) -> int:
    engine = expertmesh.load(str(model), **SETTINGS, **more)
    engine.resume(saved)
    return engine.step_number


def by_trainer(model: Path, data: Path, saved: Path, out: Path, more: dict[str, Any]) -> int:
    trainer = trainer_of(expertmesh.load(str(model), **SETTINGS, **more), out, 3)
    trainer.train(resume_from_checkpoint=str(saved.parent))
    return trainer.engine.step_number - 1


DOORS: dict[str, Callable[[Path, Path, Path, Path, dict[str, Any]], int]] = {
    "command": by_command, "load": by_load, "engine": by_engine, "trainer": by_trainer
}  # fmt: skip


def through(door: str, *arguments: Any) -> tuple[int | None, str]:
    """(the step that was resumed from, None if it was refused; all that was said)."""
    told = io.StringIO()
    catching = warnings.catch_warnings(record=True)
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()), catching as caught:
        warnings.simplefilter("always")
        try:
            step = DOORS[door](*arguments)
        except expertmesh.ExpertMeshError as error:
            return None, f"{error}{told.getvalue()}"
    return step, " ".join([told.getvalue(), *(str(each.message) for each in caught)])


def save_with_trainer(model: Path, out: Path) -> None:
    trainer_of(expertmesh.load(str(model), **SETTINGS), out, 2).train()


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the config and shapes of `tiny_model`, and other weights."""
    path = tmp_path_factory.mktemp("other")
    save_model(path, seed=1)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an adapter: a Trainer's checkpoint, and in it the directory of ours, with steps 1 and 2."""
    out = tmp_path_factory.mktemp("saved")
    ranks.run(save_with_trainer, 1, tiny_model, out)
    found = out / "checkpoint-2" / "expertmesh"
    shutil.copytree(out / "checkpoint-1" / "expertmesh" / "step-00000001", found / "step-00000001")
    return found


@pytest.mark.parametrize("door", DOORS)
def test_an_adapter_stays_beside_its_base(
    ranks: RankPool, other_model: Path, tiny_data: Path, saved: Path, tmp_path: Path, door: str
) -> None:
    def attempt(name: str, **more: Any) -> tuple[int | None, str]:
        arguments = (door, other_model, tiny_data, saved, tmp_path / name, more)
        ((step, said),) = ranks.run(through, 1, *arguments, join_group=door != "command")
        return step, re.sub(r"\S*step-", "step-", said)

    step, said = attempt("other")
    assert step is None, said
    assert "--resume step-00000002: is of another model (it began with" in said
    assert "model.safetensors" in said
    assert "or resume anyway with --allow-changed model" in said
    step, said = attempt("allowed", allow_changed=["model"])
    assert step == 2, said
    assert "resuming with a different model (--allow-changed)" in said


@pytest.mark.parametrize("door", [door for door in DOORS if door != "trainer"])
def test_a_skipped_checkpoint_is_told(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, saved: Path, tmp_path: Path, door: str
) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(saved, spoilt)
    metadata = spoilt / "step-00000002" / "state" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-1])
    arguments: Any = (door, tiny_model, tiny_data, spoilt, tmp_path / "run", {})
    ((step, said),) = ranks.run(through, 1, *arguments, join_group=door != "command")
    assert step is not None, said
    assert "step-00000002/state/.metadata: has" in said
    assert "it is skipped, and the one before it used" in said


def test_trainers_take_no_earlier_step(ranks: RankPool, tiny_model: Path, saved: Path, tmp_path: Path) -> None:
    """The rest of a Trainer's checkpoint is of one step."""
    spoilt = tmp_path / "checkpoint-2" / "expertmesh"
    shutil.copytree(saved.parent, spoilt.parent)
    (spoilt / "step-00000002" / "state" / ".metadata").unlink()
    ((step, said),) = ranks.run(through, 1, "trainer", tiny_model, tiny_model, spoilt, tmp_path / "run", {})
    assert step is None
    assert "step-00000002" in said


def load_unlike(model: Path, what: str) -> str:
    """Two ranks with another learning rate, another release of torch, or other code of ours."""
    rank = torch.distributed.get_rank()
    rate = 1e-3 * (1 + rank) if what == "rate" else 1e-3
    torch_is = mock.patch.object(alike, "version", lambda name: f"{name} {rank if what == name else 0}")
    code = mock.patch.object(alike, "_CODE", f"code {rank if what == 'code' else 0}")
    try:
        with torch_is, code:
            expertmesh.load(str(model), use_cpu=True, learning_rate=rate)
    except expertmesh.ExpertMeshError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("rate", "--learning-rate 0.001", "--learning-rate 0.002"),
        ("torch", "torch torch 0", "torch torch 1"),
        ("transformers", "transformers transformers 0", "transformers transformers 1"),
        ("code", "expertmesh's code code 0", "expertmesh's code code 1"),
    ],
)
def test_load_compares_settings_and_software_of_ranks(
    ranks: RankPool, tiny_model: Path, what: str, first: str, second: str
) -> None:
    for said in ranks.run(load_unlike, 2, tiny_model, what):
        assert "settings or software differ between nodes: on " in said
        assert f"rank 0: {first}; " in said
        assert f"rank 1: {second}; " in said
