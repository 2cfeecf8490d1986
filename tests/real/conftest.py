"""A real model, upcycled (benchmarks/real_model.py), and what transformers makes of it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from benchmarks.arms import GIVEN_BACK
from benchmarks.real import RECORDS, Batch, Ran, made_up, memory_of
from benchmarks.real_model import lock, make, moe_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.user_cache import cache_directory

KEPT = cache_directory("real")
"""The user's own cache, which tests have another of."""


def kept_packages(name: str, *install: str) -> Path:
    """Packages of PyPI, in the user's cache; a test is skipped where they cannot be had.

    Args:
        install: arguments of `pip install`.
    """
    try:
        with lock(KEPT):
            if not (packages := KEPT / name).exists():
                make(packages, [sys.executable, "-m", "pip", "install", "--quiet", *install, "--target"])
    except ExpertMeshError as error:
        pytest.skip(f"no {name}: {error}")
    return packages


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Two experts, both of which each token takes: 214 M parameters."""
    try:
        return moe_model(KEPT, 2)
    except ExpertMeshError as error:
        pytest.skip(f"no real model: {error}")


@pytest.fixture(scope="session")
def batch(real_model: Path) -> Batch:
    return Batch(real_model, made_up(RECORDS))


@pytest.fixture(scope="session")
def shared(in_common: Path) -> Path:
    (path := in_common / "real").mkdir(exist_ok=True)
    return path


@pytest.fixture(autouse=True)
def _one_at_a_time(shared: Path) -> Iterator[None]:
    """Each takes some 8 GB of memory."""
    with FileLock(shared / "one"):
        yield


@pytest.fixture
def freed_memory_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the runs that a test starts, for who looks at how much they take; they are slower for it."""
    for variable, value in GIVEN_BACK.items():
        monkeypatch.setenv(variable, value)


def assert_memory_as_forecast(ran: Ran) -> None:
    measured, forecast = memory_of(ran)
    assert forecast == pytest.approx(measured, rel=0.05)
