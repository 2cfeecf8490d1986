"""Versions of installed packages, what their functions take, and what is done without some."""

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed_version(package: str) -> str:
    """Such as "2.13.0"; empty where the package is not installed. To look one up takes a millisecond: each is looked up
    once."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def takes(function: Callable[..., object], by_place: tuple[str, ...], by_name: Iterable[str]) -> bool:
    """Whether a function's first arguments have these names, and it has all of the others."""
    taken = tuple(inspect.signature(function).parameters)
    return taken[: len(by_place)] == by_place and set(by_name).issubset(taken)


def without_kernels(names: Iterable[str]) -> str:
    """What a GPU does without a package that has kernels for these functions."""
    return (
        f"transformers' Python code computes {', '.join(sorted(names))}, token by token or in chunks, and steps take "
        "about ten times as long on a GPU"
    )
