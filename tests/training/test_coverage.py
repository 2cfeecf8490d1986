"""What forecasts say of each setting of a run: all of them are read, told, refused, or without effect for a reason."""

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertmesh.moe.experts.model_layers import decoder_layers
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.transformers_private import looping_functions
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.parser import flag_of
from expertmesh.training.cluster.commands import main
from expertmesh.training.config.train_config import TrainConfig, flags_of_config, parse_config
from expertmesh.training.engine import engine
from expertmesh.training.planning import plan_command, tables
from expertmesh.training.planning.coverage import NO_EFFECT, check_covered, not_modelled
from expertmesh.training.planning.planner.forecasts import LAYOUT, alike
from expertmesh.training.planning.tables import launch_line
from tests.families.configs import tiny_config
from tests.flags import last_of_each
from tests.sharding.planned import by_formula, launched
from tests.training.other_values import BESIDE, other

SETTINGS = {setting.name: setting for setting in fields(TrainConfig)}
WITHOUT = sorted(NO_EFFECT)


def changed(name: str) -> tuple[TrainConfig, TrainConfig]:
    """A run, and the same but for this setting."""
    base = TrainConfig(model="m", **{"dataset": ["d"], **BESIDE.get(name, {})})
    return base, replace(base, **{name: other(SETTINGS[name], base)})


def read_of(config: TrainConfig) -> Any:
    """All that figures of plans depend on."""
    return config.model, config.micro_batches(4), alike(config)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_read_told_refused_or_without_effect(name: str) -> None:
    base, config = changed(name)
    flag = flag_of(name)
    refused = ""
    try:
        check_covered(config)
    except ExpertMeshError as error:
        refused = str(error)
    assert refused.startswith(flag if refused else "")
    told = set(not_modelled(config)) - set(not_modelled(base))
    assert all(line.startswith(flag) for line in told)
    is_read = read_of(config) != read_of(base)
    if name in WITHOUT:
        assert not refused
        assert not told
        assert not is_read
    else:
        assert refused or told or is_read, f"{flag} changes nothing of a plan, and nothing says so"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_forecast_is_asked_for_with_each_setting(name: str) -> None:
    """Whatever is left out of a key, and whatever the layout is taken to be of which a model's facts are."""
    _, config = changed(name)
    assert alike(config) == alike(alike(config))
    assert replace(alike(config), **LAYOUT).ep_size == 1


# what excludes data sets is for batches made in Python
@pytest.mark.parametrize(
    "name", sorted(name for name in SETTINGS.keys() - {"model", "dataset"} if "dataset" not in BESIDE.get(name, {}))
)
def test_a_launch_line_that_starts_another_run_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Whether it is a flag that says the setting, or a YAML file."""
    _, config = changed(name)
    value = getattr(config, name)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({name: value}))
    assert flag_of(name) in launch_line(config, 8, 8)
    assert launch_line(config, 8, 8, {name: value}, str(file))

    monkeypatch.setattr(tables, "flags_of_config", partial(flags_of_config, never=(name,)))
    # without some settings others are refused, or the file's stand
    with pytest.raises((AssertionError, ExpertMeshError), match=rf"differs in .*'{name}'|{flag_of(name)}"):
        launch_line(config, 8, 8)


def groups() -> Iterator[TrainConfig]:
    """Runs with all settings that have no effect at other values than their defaults, as few as go together."""
    left = [name for name in WITHOUT if name != "verbose"]  # `plan` has one of its own
    evaluated: dict[str, Any] = {"eval_ratio": 0.25}
    while left:
        config, taken = TrainConfig(model="m", dataset=["d"], adapter="lora", **evaluated), []
        for name in left:
            try:
                config = replace(config, **{name: other(SETTINGS[name], config)})
                taken.append(name)
            except ExpertMeshError:
                continue
        assert taken
        left, evaluated = [name for name in left if name not in taken], {"eval_dataset": ["e"]}
        yield config


def figures(command: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main([command, *last_of_each(["--gpus", "2", "--json", *flags])]) == 0
    return list(json.loads(capsys.readouterr().out))


@pytest.mark.slow
def test_what_has_no_effect_changes_no_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither of a plan, whose launch line keeps it, nor of a dry run."""
    tiny_config("mixtral").save_pretrained(tmp_path)
    common = ["--tp-size", "1", "--ep-size", "2", "--max-seq-length", "32", "--per-device-train-batch-size", "1"]
    common += ["--model", str(tmp_path), "--gradient-checkpointing", "full", "--bf16"]
    plain = ["--adapter", "lora", "--eval-ratio", "0.25", "--dataset", "d"]
    base = {command: figures(command, [*common, *plain], capsys) for command in ("plan", "rehearse")}
    for config in groups():
        flags = flags_of_config(replace(config, model=str(tmp_path)))
        plans = figures("plan", [*flags, *common], capsys)
        for plan in plans:
            run = parse_config(launched(plan.pop("launch")))
            if config.output_dir == TrainConfig.output_dir:  # as where nobody has said any
                run = replace(run, output_dir=config.output_dir)
            assert [name for name in WITHOUT if getattr(run, name) != getattr(config, name)] == []
        assert plans == [{name: plan[name] for name in plan if name != "launch"} for plan in base["plan"]]
        assert figures("rehearse", [*flags, *common], capsys) == base["rehearse"]


def test_what_is_not_modelled_is_told_beside_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_command, "_forecasts", by_formula)
    tiny_config("mixtral").save_pretrained(tmp_path)
    common = ["--gpus", "1", "--tp-size", "1", "--max-seq-length", "32", "--per-device-train-batch-size", "1"]
    common += ["--gradient-checkpointing", "none"]
    for command in ("plan", "rehearse"):
        assert main([command, *common, "--model", str(tmp_path), "--json", "--eval-ratio", "0.1", "--compile"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)
        told = " ".join(captured.err.split())
        assert "note: --eval-ratio: not modelled; the forecast is of training steps" in told
        assert "note: --compile: not modelled; the forecast is without it" in told


@pytest.mark.parametrize(
    ("family", "device", "is_warned"),
    [("qwen3_next", "cuda", True), ("qwen3_next", "cpu", False), ("mixtral", "cuda", False)],
)
def test_a_run_on_a_gpu_without_kernels_is_warned(
    monkeypatch: pytest.MonkeyPatch, family: str, device: str, is_warned: bool
) -> None:
    """At its start, of the functions that a forecast assumes to be transformers' Python code."""
    told: list[str] = []
    config, model = TrainConfig(model="-"), build_model(tiny_config(family))
    started = SimpleNamespace(model=model, config=config, changes=[], tell=told.append)
    for name, value in (
        ("raise_together", lambda patient: nullcontext()),
        ("open_model", lambda config: SimpleNamespace(path=Path())),
        ("side_files", lambda path: []),
        ("Engine", lambda *arguments: started),
    ):
        monkeypatch.setattr(engine, name, value)
    ranks: Any = SimpleNamespace(device=torch.device(device))
    engine.start_engine(config, ranks, told.append)
    assert len(told) == is_warned
    in_layers = (module for layer in decoder_layers(model) for module in layer.modules())
    looped = {name for names in looping_functions(in_layers).values() for name in names}
    assert (looped == set()) == (family == "mixtral")
    for line in told:
        assert re.findall(r"computes ([\w, ]+), token by token", line) == [", ".join(sorted(looped))]
        assert "warning: flash-linear-attention is not installed" in line
        assert line.endswith("about ten times as long on a GPU; pip install flash-linear-attention")
