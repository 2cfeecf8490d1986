"""What --init-adapter says holds where nothing else is given, by whichever way a run is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig, flags_of_config, make_config, parse_config
from expertmesh.training.planning import plan_flags

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.11.self_attn.q_proj", "model.layers.0.mlp.gate")
EXPERTS = ("model.layers.0.mlp.experts.3.w1", "model.layers.0.mlp.experts.base_layer", "model.layers.0.mlp.experts")
THEIRS = {"lora_rank": 4, "lora_alpha": 6.0, "use_rslora": True}
TARGETS = [r"\bmlp\.gate$", r"\bself_attn\.q_proj$"]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write(tmp_path, MODULES)


def write(path: Path, modules: tuple[str, ...], **config: Any) -> Path:
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_rslora": True, **config}
    (path / "adapter_config.json").write_text(json.dumps(said))
    names = (f"base_model.model.{name}.lora_{which}.weight" for name in modules for which in "AB")
    save_file({name: torch.zeros(1, 1) for name in names}, path / "adapter_model.safetensors")
    return path


def by_flags(directory: Path, given: dict[str, Any]) -> TrainConfig:
    return parse_config([word for name, value in given.items() for word in (f"--{name}", str(value))])


def by_file(directory: Path, given: dict[str, Any]) -> TrainConfig:
    (directory / "run.yaml").write_text(json.dumps(given))
    return parse_config(["--config", str(directory / "run.yaml")])


def of_a_plan(directory: Path, given: dict[str, Any]) -> TrainConfig:
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    arguments, rest = plan_flags.build_parser().parse_known_args(words)
    return plan_flags.asked_by(arguments, rest).config()


WAYS = {"flags": by_flags, "file": by_file, "load": lambda _, given: make_config(given), "plan": of_a_plan}


def settings_of(config: TrainConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in (*THEIRS, "lora_targets")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "given",
    [{}, {"lora_rank": 16}, {"lora_alpha": 32.0, "use_rslora": False}, {"lora_targets": "attention"}],
    ids=lambda given: ", ".join(given) or "nothing",
)
def test_what_nobody_gave_is_the_adapters(adapter: Path, way: str, given: dict[str, Any]) -> None:
    """What was given stays, even where it is the default: it is refused once the two are compared."""
    run = {"model": "m", "dataset": "d", "adapter": "lora", "init_adapter": str(adapter)}
    found = settings_of(WAYS[way](adapter, {**run, **given}))
    given = {name: ["attention"] if name == "lora_targets" else value for name, value in given.items()}
    assert found == {**THEIRS, "lora_targets": TARGETS, **given}


def test_a_run_that_says_all_is_read_no_adapter(tmp_path: Path) -> None:
    config = TrainConfig(model="m", dataset=["d"], adapter="lora", init_adapter=str(tmp_path))
    config.save(tmp_path / "config.yaml")
    assert parse_config(["--config", str(tmp_path / "config.yaml")]) == config
    assert parse_config(flags_of_config(config)) == config


def test_experts(tmp_path: Path) -> None:
    for name in EXPERTS:
        run = {"model": "m", "dataset": "d", "adapter": "lora", "init_adapter": write(tmp_path, (name,))}
        assert by_flags(tmp_path, run).lora_targets == ["experts"]


def test_an_adapter_that_is_not_there(tmp_path: Path) -> None:
    """Is no matter for a run that is resumed."""
    run = {"model": "m", "dataset": "d", "adapter": "lora", "init_adapter": str(tmp_path / "gone")}
    with pytest.raises(ExpertMeshError, match=r"--init-adapter .*gone: no such directory"):
        make_config(run)
    assert make_config({**run, "resume": "auto"}).lora_rank == 16
