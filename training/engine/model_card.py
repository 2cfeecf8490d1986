"""What a run's model card says of it. Of this machine's paths it has the last part alone."""

import os
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoints.hf.hub import check_model
from ...checkpoints.model_card import Training
from ...moe.util.process_place import process_place
from ...moe.util.versions import installed_version
from ..config.train_config import DEFAULTS, TrainConfig, flags_of_config
from ..data.data_files import is_hub_id, parse_datasets
from ..environment import PACKAGES

if TYPE_CHECKING:
    from .engine import Engine


def training_of(engine: "Engine", data_sets: list[str]) -> Training:
    """How an engine's weights were trained so far; on which data sets, if it is a run of train_ep.py."""
    config, topology = engine.config, engine.topology
    sizes = {name: getattr(topology, f"{name}_size") for name in ("pp", "dp", "ep", "cp", "tp")}
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    data = [spec.name for spec in parse_datasets("--dataset", data_sets)]
    adapted = "" if config.adapter == "none" else f"LoRA of rank {config.lora_rank}, alpha {config.lora_alpha:g}"
    rows = {
        "method": ", ".join(filter(None, [config.task.upper() if data else "", adapted])),
        "data": ", ".join(map(_public, data)),
        "steps": f"{engine.step_number:,} ({engine.tokens:,} tokens)",
        **engine.results,
        "precision": "bf16" if config.bf16 else "fp32",
        "layout": f"{topology.world_size} rank{'s' * (topology.world_size > 1)}{layout and f': {layout}'}",
    }
    return Training(
        base=_public(config.model),
        is_on_hub=check_model(config.model),
        tags=[config.task] if data else [],
        datasets=[name for name in data if not os.path.exists(name) and is_hub_id(name)],
        rows={name: value for name, value in rows.items() if value},
        code=_command(config, topology.world_size) if data else _call(config),
        language="sh" if data else "python",
        versions={name: version for name in PACKAGES if (version := installed_version(name))},
    )


def tell_loss(engine: "Engine", name: str, loss: float) -> None:
    """Have the card tell a loss, or score, of the weights as they are."""
    engine.results[name] = f"{loss:.4f} at step {engine.step_number:,}"


def tell_left_out(engine: "Engine", number: int) -> None:
    """Have the card tell of records that were left out, as they could not be used."""
    if number:
        engine.results["left out"] = f"{number:,} record{'s' * (number > 1)} of the data that could not be used"


def _command(config: TrainConfig, world_size: int) -> str:
    here = process_place().ranks_here
    nodes = f"--nnodes {world_size // here} " if world_size > here else ""
    flags = shlex.join(flags_of_config(_without_places(config), ("model", "dataset")))
    return f"torchrun {nodes}--nproc-per-node {here} -m expertmesh.train_ep {flags}"


def _call(config: TrainConfig) -> str:
    public = _without_places(config)
    given = {setting.name: getattr(public, setting.name) for setting in fields(public) if setting.name != "model"}
    said = [f"{name}={value!r}" for name, value in given.items() if value != DEFAULTS[name]]
    return f"expertmesh.load({', '.join([repr(public.model), *said])})"


def _without_places(config: TrainConfig) -> TrainConfig:
    changed: dict[str, Any] = {}
    for setting in fields(config):
        value = getattr(config, setting.name)
        if isinstance(value, str):
            changed[setting.name] = _public(value)
        elif isinstance(value, list):
            changed[setting.name] = [_public(each) if isinstance(each, str) else each for each in value]
    return replace(config, **changed)


def _public(value: str) -> str:
    return Path(value).name if os.path.isabs(value) or value.startswith("~") else value
