"""Packages that the project needs by pyproject.toml, and those of them that a machine lacks."""

import importlib
import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("gpu", "images", "test")
"""What a machine with a GPU takes beside the project's own dependencies: it runs the tests, too."""
WITH_THE_DRIVER = ("torch", "triton")
"""What a machine has of its own kind, with all that these need."""


def asked(extras: Collection[str] = EXTRAS, file: Path = PYPROJECT) -> list[Requirement]:
    """The project's dependencies, and those of its extras."""
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(each) for one in lists for each in one]


def fault_of(requirement: Requirement) -> str:
    """Why a requirement is not met here, in words: missing, of another version, or without what it needs itself; empty
    where it is met."""
    if requirement.marker is not None and not requirement.marker.evaluate():
        return ""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return requirement.name
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement} (here is {version})"
    for module in _modules(requirement.name):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"{requirement.name} ({error})"
    return ""


def _modules(name: str) -> list[str]:
    """What a package is imported by."""
    return [
        module
        for module, packages in _packages_of_modules().items()
        if canonicalize_name(name) in map(canonicalize_name, packages) and module[0] != "_" and module.isidentifier()
    ]


@cache
def _packages_of_modules() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def carried(requirements: Collection[Requirement], has: Mapping[str, str], python_version: str) -> dict[str, str]:
    """By name, in the versions that are installed here, all that a Linux machine with this Python lacks to meet the
    requirements.

    Args:
        has: packages of that machine and their versions; "" where these are not known, which then count as met.

    Raises:
        ValueError: what it lacks is not installed here.
    """
    place = {"python_version": python_version, "python_full_version": f"{python_version}.0"}
    place |= {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64", "os_name": "posix"}
    found: dict[str, str] = {}
    waiting = [(requirement, "") for requirement in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate(place | {"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        key, there = (name, frozenset(requirement.extras)), has.get(name)
        is_met = there is not None and (not there or requirement.specifier.contains(there, prereleases=True))
        if key in seen or name in WITH_THE_DRIVER or is_met:
            continue
        seen.add(key)
        try:
            found[name] = metadata.version(name).partition("+")[0]
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            raise ValueError(f"{requirement} is not installed here, from which wheels take their versions") from None
        waiting += [(Requirement(each), extra) for each in needs for extra in ("", *requirement.extras)]
    return found


def listed(file: Path) -> dict[str, str]:
    """The packages and versions in what `pip list` or `pip freeze` has printed."""
    lines = (line.replace("==", " ").split() for line in file.read_text(encoding="utf-8").splitlines())
    return {canonicalize_name(words[0]): words[1] if len(words) > 1 else "" for words in lines if words}
