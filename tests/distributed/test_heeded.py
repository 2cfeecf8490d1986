"""Every flag of a run is heeded, or it is told that it has no effect: what is read is recorded while runs go on."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from expertmesh.moe import ExpertMeshError
from expertmesh.training import parse_config
from expertmesh.training.config.train_config import TrainConfig
from tests.distributed.pool import RankPool
from tests.distributed.test_train_ep import run_main

NAMES = {setting.name for setting in fields(TrainConfig)}
CONFIG = "expertmesh.training.config."
ONLY_WHEN_IT_HAPPENS = {"on_nonfinite", "on_save_error", "router_warn_load"}
"""Read when something goes wrong; other tests see to that."""
MODES: dict[str, tuple[int, list[str]]] = {
    "everything": (1, []),
    "adapters": (1, ["--adapter", "lora"]),
    "merged": (1, ["--adapter", "lora", "--merge", "--save-steps", "0"]),
    "evaluation": (1, ["--eval-ratio", "0.2", "--generate-steps", "3", "--eval-steps", "3", "--packing"]),
    "epochs": (1, ["--max-steps", "-1", "--num-train-epochs", "0.2", "--resume", "auto", "--optim", "shampoo"]),
    "layout": (4, ["--pp-size", "2", "--tp-size", "2", "--ep-size", "2", "--dispatch", "rank", "--no-export"]),
    "context": (2, ["--cp-size", "2", "--ep-size", "2", "--dense-shard", "hybrid", "--gradient-checkpointing"]),
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
            while frame is not None and frame.f_globals["__name__"].startswith(CONFIG):
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


def run_recorded(argv: list[str]) -> tuple[int, str, set[str]]:
    with recording() as read:
        code, errors = run_main(argv)
    return code, errors, read


@pytest.mark.quick(3)
@pytest.mark.parametrize("mode", MODES)
def test_flags_are_heeded_or_told(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, mode: str
) -> None:
    """What a run has not read has no effect: it says so of it, or refuses it."""
    world_size, more = MODES[mode]
    argv = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path / "run"), "--use-cpu"]
    argv += ["--max-steps", "3", "--save-steps", "2", "--router-warn-steps", "2", *more]
    results = ranks.run(run_recorded, world_size, argv, join_group=False)
    assert [code for code, _, _ in results] == [0] * world_size, results[0][1]
    read = set().union(*(found for _, _, found in results))
    config = parse_config(argv)
    assert {"model", "learning_rate", "seed"} <= read
    dropped = []
    for setting in fields(TrainConfig):
        if setting.name in read | ONLY_WHEN_IT_HAPPENS:
            continue
        needs = setting.metadata.get("needs")
        if needs is not None and not needs.met(config):
            continue
        try:
            parse_config([*argv, f"--{setting.name}=other"])
        except ExpertMeshError as error:
            if "invalid" not in str(error):
                continue
        dropped.append(setting.name)
    assert not dropped


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        (["--dataset-split", "validation"], 2, "--dataset-split validation: is for directories and hub datasets"),
        (["--dataset-config", "de"], 2, "--dataset-config de: is for directories and hub datasets, and FILE is a file"),
        (["--eval-dataset", "FILE", "--eval-dataset-split", "dev"], 2, "--eval-dataset-split dev: is for directories"),
        (["--sample-by", "document"], 0, "note: --sample-by document has no effect without a .txt file"),
        (
            ["--text-column", "response", "--train-on", "last"],
            0,
            "note: --train-on last has no effect: the data are plain text, all of which is trained on",
        ),
        (["--text-column", "response", "--prompt-template", "Q {prompt}"], 0, "note: --prompt-template has no effect"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_flags_of_other_data(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, flags: list[str], code: int, told: str
) -> None:
    argv = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--use-cpu", "--preview", *flags]
    argv = [str(tiny_data) if word == "FILE" else word for word in argv]
    ((found, errors),) = ranks.run(run_main, 1, argv, join_group=False)
    assert (found, told in errors.replace(str(tiny_data), "FILE")) == (code, True), errors
