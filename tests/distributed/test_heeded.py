"""Every flag of a run is heeded, or it is told that it has no effect: what is read is recorded while runs go on."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

import expertmesh
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import NEEDS, SETTINGS, TrainConfig, make_config, parse_config, read_by
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Runs, tell
from tests.flags import last_of_each

NAMES = {setting.name for setting in fields(TrainConfig)}
CONFIG = "expertmesh.training.config."
ONLY_WHEN_IT_HAPPENS = {"on_nonfinite", "on_save_error", "router_warn_load"}
"""Read when something goes wrong; other tests see to that."""
BY_THE_REPORT = {"run_name"}
"""Read from the run's files."""
MODES: dict[str, tuple[int, str]] = {
    "everything": (1, ""),
    "adapters": (1, "--adapter lora"),
    "merged": (1, "--adapter lora --merge --save-steps 0"),
    "evaluation": (1, "--eval-ratio 0.2 --generate-steps 3 --eval-steps 3 --packing"),
    "answers": (1, "--eval-generate {data} --generate-max-new-tokens 2 --eval-steps 3"),
    "epochs": (1, "--max-steps -1 --num-train-epochs 0.2 --resume auto --optim shampoo"),
    "layout": (4, "--pp-size 2 --tp-size 2 --ep-size 2 --dispatch rank --no-export"),
    "context": (2, "--cp-size 2 --ep-size 2 --dense-shard hybrid --gradient-checkpointing"),
    # which leave out a part of a run
    "no export": (1, "--adapter lora --merge --no-export --eval-ratio 0.2 --eval-steps 3"),
    "no steps": (1, "--max-steps 0 --eval-ratio 0.2 --generate-steps 3"),
    "preview": (1, "--preview --eval-ratio 0.2 --generate-steps 3"),
    "prepare only": (1, "--prepare-only --eval-ratio 0.2"),
}


@contextmanager
def recording() -> Iterator[set[str]]:
    """The settings that code has read by their names: not along with all others, and outside of the checks of settings
    against one another."""
    read: set[str] = set()

    def get(config: TrainConfig, name: str) -> Any:
        frame: FrameType | None = sys._getframe(1)
        if name in NAMES and frame is not None and _names(frame, name):
            callers = []
            # properties are read by way of this function
            while frame is not None and frame.f_globals["__name__"].startswith((CONFIG, __name__)):
                callers.append(frame.f_code.co_name)
                frame = frame.f_back
            if not {"__post_init__", "_unmet"} & set(callers):
                read.add(name)
        return object.__getattribute__(config, name)

    with mock.patch.object(TrainConfig, "__getattribute__", get, create=True):
        yield read


def _names(frame: FrameType, name: str) -> bool:
    code = frame.f_code
    return name in code.co_names or any(
        name == text or (isinstance(text, tuple) and name in text) for text in code.co_consts
    )


def is_met(setting: Field[Any], config: TrainConfig) -> bool:
    """Whether a run has what a setting needs."""
    return all(needs.met(config) for needs in NEEDS[setting.name])


def tell_recorded(argv: list[str]) -> tuple[int, str, set[str]]:
    with recording() as read:
        code, _, errors = tell(argv)
    return code, errors, read


def test_the_first_line_tells_what_has_no_effect(runs: Runs) -> None:
    ended = runs(1, "--preview --lora-r 8 --pipeline-schedule interleaved")
    assert " ".join(ended.printed.split()).startswith(
        "note: --pipeline-schedule interleaved has no effect without --pp-size 2 or more; --lora-rank 8 has no effect "
        f"without --adapter lora; --output-dir {ended.out} has no effect because nothing is written (--preview or "
        f"--prepare-only) model {runs.model}: mixtral"
    )


def test_a_flag_that_wins_over_the_file_is_told(runs: Runs) -> None:
    (file := runs.directory / "run.yaml").write_text("warmup_ratio: 0.1\n")
    ended = runs(1, f"--preview --config {file} --warmup-steps 2")
    assert f"note: --warmup-steps 2 overrides warmup_ratio: 0.1 of {file}; " in " ".join(ended.printed.split())


def test_a_preview_needs_no_ranks(runs: Runs) -> None:
    ended = runs(1, "--preview --ep-size 8 --pp-size 2 --pipeline-layers 1,1 --tp-size 2 --async-tp")
    said = " ".join(ended.printed.split())
    assert "note: a preview in one process ignores --ep-size 8 --tp-size 2 --pp-size 2: figures" in said
    assert "layout 1 rank on CPU = dp 1 x ep 1; 8 experts per rank" in said
    assert "an epoch" in said


def use_recorded(model: str, path: Path, **settings: Any) -> tuple[set[str], list[str]]:
    """What `load` and the methods of its engine read, and what is warned of."""
    ids = torch.arange(3, 27).view(2, 12)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    with recording() as read, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = expertmesh.load(model, use_cpu=True, **settings)
        engine.step([batch, batch])
        engine.evaluate([batch])
        engine.generate(["hello"], max_new_tokens=2)
        engine.save(path / "checkpoints")
        engine.export(path / "export")
        expertmesh.load(model, use_cpu=True, **settings, resume="auto", output_dir=str(path))
    return read, [str(each.message) for each in caught if "has no effect" in str(each.message)]


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_settings_of_the_loop_are_warned_of_from_python(
    ranks: RankPool, tiny_model: Path, tmp_path: Path, adapter: str
) -> None:
    """And only they: what an engine heeds is read by it, or it is told what it lacks."""
    given: dict[str, Any] = {"adapter": adapter, "save_steps": 5, "max_steps": 4}
    ((read, told),) = ranks.run(use_recorded, 1, str(tiny_model), tmp_path, **given)
    assert told == ["save_steps: only train_ep.py reads this; it has no effect in your own loop or Trainer"] * 2
    of_loop = SETTINGS.keys() - read_by("load")
    assert sorted(read & of_loop) == []
    config = make_config({"model": str(tiny_model), **given})
    for setting in fields(TrainConfig):
        # of a pipeline; refused beside an adapter; refused without images
        others = ONLY_WHEN_IT_HAPPENS | {"pipeline_chunks", "pipeline_layers", "freeze", "train_vision"}
        if setting.name not in read | of_loop | others:
            assert not is_met(setting, config), setting.name


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", MODES)
def test_flags_are_heeded_or_told(runs: Runs, mode: str) -> None:
    """What a run has not read has no effect: it says so of it, or refuses it."""
    world_size, more = MODES[mode]
    argv = ["--model", str(runs.model), "--dataset", str(runs.data), "--output-dir", str(runs.directory / "run")]
    argv += ["--use-cpu", *["--max-steps", "3", "--save-steps", "2", "--router-warn-steps", "2"]]
    argv += more.format(data=runs.data).split()
    argv = last_of_each(argv)
    results = runs.ranks.run(tell_recorded, world_size, argv, join_group=False)
    assert [code for code, _, _ in results] == [0] * world_size, results[0][1]
    read = set().union(*(found for _, _, found in results))
    config = parse_config(argv)
    assert {"model", "seed"} <= read
    assert ("learning_rate" in read) == (mode != "prepare only")
    dropped = []
    for setting in fields(TrainConfig):
        if setting.name in read | ONLY_WHEN_IT_HAPPENS | BY_THE_REPORT or not is_met(setting, config):
            continue
        try:
            parse_config(last_of_each([*argv, f"--{setting.name}=other"]))
        except ExpertMeshError as error:
            if "invalid" not in str(error):
                continue
        dropped.append(setting.name)
    assert not dropped


IS_A_FILE = "the data are a file without a"


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        ("--dataset-split validation", 2, f"--dataset-split validation: {IS_A_FILE} split"),
        ("--dataset-config de", 2, f"--dataset-config de: {IS_A_FILE} config"),
        ("--eval-dataset {data} --eval-dataset-split dev", 2, f"--eval-dataset-split dev: {IS_A_FILE} split"),
        ("--sample-by document", 0, "note: --sample-by document has no effect without a .txt file"),
        (
            "--text-column response --train-on last",
            0,
            "note: --train-on last has no effect on plain text",
        ),
        ("--text-column response --prompt-template 'Q {{prompt}}'", 0, "note: --prompt-template has no effect"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_flags_of_other_data(runs: Runs, flags: str, code: int, told: str) -> None:
    ended = runs(1, f"--preview {flags.format(data=runs.data)}", code=code)
    assert told.format(data=runs.data) in ended.errors
