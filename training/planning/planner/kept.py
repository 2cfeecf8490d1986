"""What was found out about models once, kept in the user's cache directory for later processes.

What a figure depends on is part of its file's name: the model's config, the settings, our sources and the packages that
compute. So nothing is ever out of date, and the directory may be deleted at any time; a file that nobody has read for a
month is. What is kept is read without importing torch or transformers, which takes longer than the rest of a plan.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from functools import cache
from typing import Any, TypeVar

from ....checkpoints.files.checksums import check_seal, seal
from ....moe.util.atomic_write import whole
from ....moe.util.errors import ExpertMeshError
from ....moe.util.plain import from_plain
from ....moe.util.sources import sources_digest
from ....moe.util.user_cache import cache_directory
from ....moe.util.versions import installed_version

PACKAGES = ("torch", "transformers", "triton")
SOURCES = ("moe", "sharding", "training")
"""Folders of our code that a figure may depend on."""
_UNREAD_SECONDS = 30 * 24 * 3600
_DIRECTORY = "forecasts"

T = TypeVar("T")


def key_of(*everything: Any) -> str:
    """What stands for these values, our sources and the packages that compute. Values are dataclasses, or what JSON
    has."""
    parts = [asdict(each) if is_dataclass(each) and not isinstance(each, type) else each for each in everything]
    parts.append(_code(PACKAGES, SOURCES))
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def _code(packages: tuple[str, ...], sources: tuple[str, ...]) -> list[str]:
    """What stands for all code that a figure may depend on."""
    return [*map(installed_version, packages), sources_digest(sources)]


def of_model(said: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's config says that figures may depend on."""
    return {name: value for name, value in said.items() if name not in ("_name_or_path", "transformers_version")}


def known(kind: type[T], key: str) -> T | ExpertMeshError | None:
    """What was kept by `keep`; None where there is nothing, or it is damaged, or another program's."""
    file = cache_directory(_DIRECTORY) / f"{key}.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        check_seal(content, file)
        os.utime(file)
        if "refused" in content:
            return ExpertMeshError(content["refused"])
        return from_plain(kind, content["found"])
    except (OSError, ValueError, AttributeError, KeyError, TypeError, ExpertMeshError):
        return None


def keep(found: Any, key: str) -> None:
    """Keep a dataclass, or a refusal; where the directory cannot be written, nothing is kept."""
    content = {"refused": str(found)} if isinstance(found, ExpertMeshError) else {"found": asdict(found)}
    directory = cache_directory(_DIRECTORY)
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        with whole(directory / f"{key}.json", writer=str(os.getpid())) as partial:
            partial.write_text(json.dumps(seal(content)), encoding="utf-8")
        for file in directory.glob("*.json"):
            if time.time() - file.stat().st_mtime > _UNREAD_SECONDS:
                file.unlink(missing_ok=True)
