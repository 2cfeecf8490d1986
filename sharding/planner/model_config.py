"""The config.json that `--model` names."""

from pathlib import Path
from typing import Any

from moe import ExpertMeshError


def read_config(model: str) -> tuple[Any, str]:
    """The config that `--model` names, and where it lies: a directory, a config.json, or a hub id (of which only
    config.json is fetched, from the cache where there is no network).

    Raises:
        ExpertMeshError: there is none, or it cannot be read.
    """
    path = Path(model).expanduser()
    if not path.exists() and (model.count("/") != 1 or model.startswith((".", "/", "~")) or path.suffix == ".json"):
        raise ExpertMeshError(f"--model {model}: no such file or directory; give one, a config.json, or a hub id")
    if path.is_dir() and not (path / "config.json").exists():
        raise ExpertMeshError(f"--model {model}: the directory has no config.json")
    if path.exists() and not (path / "config.json" if path.is_dir() else path).is_file():
        raise ExpertMeshError(f"--model {model}: config.json is no file")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path) if path.exists() else model, trust_remote_code=False), model
    except Exception as error:
        where = "cannot be read" if path.exists() else "is no directory, and the hub gives no config.json"
        reason = str(error).strip().splitlines()
        raise ExpertMeshError(f"--model {model} {where}: {reason[0] if reason else type(error).__name__}") from error
