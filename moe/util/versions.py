"""Versions of installed packages, and what is done without some."""

from collections.abc import Iterable
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


def without_kernels(names: Iterable[str]) -> str:
    """What a GPU does without a package that has kernels for these functions."""
    return (
        f"transformers' Python code computes {', '.join(sorted(names))}, token by token or in chunks, and steps take "
        "about ten times as long on a GPU"
    )
