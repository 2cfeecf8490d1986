"""What --init-adapter says of the adapters that a run is to train."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...moe.util.errors import ExpertMeshError

_FROM_CONFIG = {"lora_rank": ("r", int), "lora_alpha": ("lora_alpha", float), "use_rslora": ("use_rslora", bool)}
OF_ADAPTER = (*_FROM_CONFIG, "lora_targets")
"""Settings that are the adapter's where nobody gave them."""
_LORA_A = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)*\.lora_A\.weight")


def with_init_adapter(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given and, of rank, alpha, scale and targets, those of the adapter that the run begins
    with, where none were given. What was given is compared with the adapter once the model is built.

    Raises:
        ExpertMeshError: --init-adapter has no files of an adapter.
    """
    settings = dict(given)
    if not given.get("init_adapter") or given.get("adapter", "none") == "none" or set(OF_ADAPTER) <= set(given):
        return settings
    directory = Path(given["init_adapter"])
    if not directory.is_dir():
        if given.get("resume"):
            return settings  # a run that is resumed reads it no more
        raise ExpertMeshError(f"--init-adapter {directory}: no such directory")
    from ...checkpoints.hf.source import read_header, read_json  # needs numpy, which flags do without

    config = read_json(directory / "adapter_config.json")
    for name, (key, kind) in _FROM_CONFIG.items():
        # what is no number is refused by whoever reads the adapter
        if isinstance(value := config.get(key), int | float) and name not in given:
            settings[name] = kind(value)
    targets = _targets(read_header(directory / "adapter_model.safetensors"))
    if targets and "lora_targets" not in given:
        settings["lora_targets"] = targets
    return settings


def _targets(tensors: Iterable[str]) -> list[str]:
    """What --lora-targets would name: modules by what their names have in common in all layers."""
    adapted = [found[1] for name in tensors if (found := _LORA_A.fullmatch(name))]
    tails = {re.split(r"\.\d+\.", path)[-1] for path in adapted if "experts" not in path.split(".")}
    experts = ["experts"] if any("experts" in path.split(".") for path in adapted) else []
    return [*experts, *(rf"\b{re.escape(tail)}$" for tail in sorted(tails))]
