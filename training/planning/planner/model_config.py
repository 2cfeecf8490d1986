"""The config.json that `--model` names."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....checkpoints.hf.json_files import found_instead
from ....moe.hf_model.config import check_config, load_config
from ....moe.util.errors import ExpertMeshError


@dataclass(frozen=True)
class ConfigFile:
    """A config.json.

    Attributes:
        path: of the file. model: as `--model` names it. content: what is written in it, whose numbers have been
            checked.
    """

    path: Path
    model: str
    content: dict[str, Any]

    def load(self) -> Any:
        """transformers' own config object, of this file alone: to import transformers takes seconds.

        Raises:
            ExpertMeshError: transformers cannot read it.
        """
        return load_config(self.path, self.content, f"--model {self.model}")


def find_config(model: str) -> ConfigFile:
    """The config.json that `--model` names, read without transformers: of a directory, a file itself, or a hub id's (of
    which only config.json is fetched, from the cache where there is no network).

    Raises:
        ExpertMeshError: there is none, it is no JSON, or it has impossible sizes.
    """
    path = Path(model).expanduser()
    if not path.exists() and (model.count("/") != 1 or model.startswith((".", "/", "~")) or path.suffix == ".json"):
        raise ExpertMeshError(f"--model {model}: no such file or directory; give one, a config.json, or a hub id")
    if path.is_dir() and not (path / "config.json").exists():
        found = found_instead(path / "config.json")
        raise ExpertMeshError(f"--model {model}: the directory has no config.json" + (f"; {found}" if found else ""))
    if path.exists() and not (path / "config.json" if path.is_dir() else path).is_file():
        raise ExpertMeshError(f"--model {model}: config.json is not a file")
    file = _fetched(model) if not path.exists() else path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ExpertMeshError(f"--model {model} cannot be read: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise ExpertMeshError(f"--model {model} cannot be read: contains a {type(content).__name__}, not a table")
    check_config(content, model)
    return ConfigFile(file, model, content)


def _fetched(model: str) -> Path:
    """config.json of a hub id."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:
        raise ExpertMeshError(
            f"--model {model} is not a directory, and the hub has no config.json: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
