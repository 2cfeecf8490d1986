"""Broken and hostile settings: the YAML file of --config, and what `python -m expertmesh.sharding plan` reads."""

import contextlib
import functools
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from expertmesh.checkpoints.hf.source import resolve_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig, parse_config
from expertmesh.training.planning.cluster_commands import main as plan_main
from expertmesh.training.planning.planner.hardware import preset, save_measured
from tests.hostile.harness import Refused, Watch, fuzz
from tests.hostile.mutations import BROKEN_TEXTS, changed_bytes, changed_document, dumped
from tests.hostile.test_model_directory import small

__all__ = ["small"]

LAUGHS = "a: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
YAML_TEXTS: dict[str, bytes] = {
    "billion laughs": LAUGHS.encode(),
    "billion laughs in a known key": LAUGHS.replace("a9:", "dataset:").encode(),
    "laughs in a table": b"lr_scheduler_kwargs: {a: &a [1, 1], b: &b [*a, *a], c: [*b, *b]}",
    "list of itself": b"dataset: &a [*a]",
    "table of itself": b"lr_scheduler_kwargs: &a {a: *a}",
    "a Python object": b"model: !!python/object/apply:os.system ['touch canary']",
    "a Python name": b"model: !!python/name:os.system",
    "bytes": b"model: !!binary aGVsbG8=",
    "a set": b"dataset: !!set {a, b}",
    "a date": b"run_name: 2024-01-01",
    "a date that is none": b"run_name: 2024-99-99",
    "base 60": b"max_steps: 1:30",
    "octal": b"max_steps: 017",
    "huge number": b"max_steps: 1" + b"0" * 5000,
    "not a number": b"learning_rate: .nan",
    "infinite": b"learning_rate: .inf",
    "a key twice": b"max_steps: 1\nmax_steps: 2",
    "merged keys": b"<<: {max_steps: 3}\nmodel: m\ndataset: d",
    "a list as key": b"? [a, b]\n: c",
    "a table as key": b"? {a: b}\n: c",
    "no key": b"? \n: c",
    "tabs": b"\tmodel: m",
    "several documents": b"model: m\n---\nmodel: n",
    "unknown alias": b"model: *x",
    "flag in a value": b"model: --overwrite_output_dir",
    "flag in a list": b"dataset: [--model, x]",
    "NUL": b'model: "a\\0b"',
    "surrogate": b'model: "\\ud800"',
    "deep flow": b"model: " + b"[" * 5000,
    "deep blocks": b"".join(b" " * n + b"a:\n" for n in range(3000)),
}


def yaml_files(watch: Watch, num_cases: int) -> None:
    file = watch.directory / "config.yaml"
    original = asdict(TrainConfig(model="m", dataset=["d"]))
    text = yaml.safe_dump(original, sort_keys=False).encode()

    def attempt(case: str, content: bytes) -> None:
        file.write_bytes(content)
        config = watch.attempt(case, lambda: parse_config(["--config", str(file)]), str(file), "--")
        if not isinstance(config, Refused) and not _like_flags(config):
            again = watch.directory / "again.yaml"
            config.save(again)
            assert parse_config(["--config", str(again)]) == config, f"{case}: does not survive config.yaml"

    attempt("as it was", text)
    for name, broken in {**BROKEN_TEXTS, **YAML_TEXTS}.items():
        attempt(name, broken)
    assert not (watch.directory / "canary").exists()
    values: list[Any] = [None, -1, 2**64, 10**400, float("nan"), "", "\ud800", [], ["a", "--b"], {"a": {}}]
    for number, field in enumerate(fields(TrainConfig)):
        for value in values[number % 3 :: 3]:
            attempt(f"{field.name} = {value!r:.60}", dumped({**original, field.name: value}))
    lines = st.lists(st.sampled_from(text.splitlines(keepends=True)), max_size=8).map(b"".join)
    syntax = lines.flatmap(lambda part: changed_bytes(part or b"a: b\n", b" \t\n:-?[]{},&*!|>'\"%@`#0\0\xff"))
    documents = changed_document(original).map(dumped)
    fuzz(num_cases, st.one_of(syntax, documents), lambda content: attempt(f"{content!r:.2000}", content))


def _like_flags(config: TrainConfig) -> bool:
    """Whether it has an entry of a list that only the command line can give, as --dataset=-1."""
    return any(
        str(item).startswith("-") for value in asdict(config).values() if isinstance(value, list) for item in value
    )


def model_names(watch: Watch, _: int) -> None:
    for name in [
        "",
        ".",
        "..",
        "x" * 300,
        "x/" * 3000,
        "\0",
        "a\0b",
        "\ud800",
        "/dev/zero",
        "/proc/self/mem",
        "~",
        "a/b/c",
    ]:
        watch.attempt(f"--model {name!r:.60}", functools.partial(resolve_model, name), "--model")


def plans(watch: Watch, num_cases: int, small: Path) -> None:
    """Plans of hostile configs, and with hostile rates of a machine."""
    directory = watch.directory / "model"
    directory.mkdir()
    file, rates = directory / "config.json", watch.directory / "rates.json"
    shutil.copy(small / "config.json", file)
    save_measured(preset("H100", "infiniband-ndr"), rates)

    def attempt(case: str, changed: Path, content: bytes) -> None:
        original = changed.read_bytes()
        changed.write_bytes(content)
        try:
            watch.attempt(case, plan, str(directory), str(changed), "config.json")
        finally:  # a case that fails is tried again, smaller
            changed.write_bytes(original)

    def plan() -> int:
        argv = ["plan", "--model", str(directory), "--gpus", "2", "--micro-batch", "1", "--calibrate", str(rates)]
        argv += ["--no-cache"]  # which lies outside of what a campaign may write to
        errors, output = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
            code = plan_main([*argv, "--json"])
        if code == 2:
            raise ExpertMeshError(errors.getvalue())
        found = json.loads(output.getvalue())
        assert found
        assert "NaN" not in output.getvalue()
        return code

    for name, text in BROKEN_TEXTS.items():
        attempt(f"config: {name}", file, text)
        attempt(f"rates: {name}", rates, text)
    config, measured = json.loads(file.read_text()), json.loads(rates.read_text())
    values: list[Any] = [None, -1, 0, 2**63, 10**400, 1e308, float("nan"), "x", [], {"a": None}]
    for number, key in enumerate(config):
        for value in values[number % 5 :: 5]:
            attempt(f"{key} = {value!r:.60}", file, dumped({**config, key: value}))
    changed_config = changed_document(config).map(lambda document: (file, dumped(document)))
    changed_rates = changed_document(measured).map(lambda document: (rates, dumped(document)))
    fuzz(num_cases, st.one_of(changed_config, changed_rates), lambda case: attempt(f"{case!r:.2000}", *case))


@pytest.mark.release
def test_yaml_files(campaign: Callable[..., None]) -> None:
    campaign(yaml_files)


def test_model_names(campaign: Callable[..., None]) -> None:
    campaign(model_names)


@pytest.mark.release
def test_plans(campaign: Callable[..., None], small: Path) -> None:
    campaign(plans, small)
