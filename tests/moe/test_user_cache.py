"""The user's cache directory, as the XDG Base Directory Specification has it."""

from pathlib import Path

import pytest

from expertmesh.moe.util.user_cache import cache_directory


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("/var/caches", "/var/caches/expertmesh/facts"), (None, "/home/a/.cache/expertmesh/facts"),
     ("", "/home/a/.cache/expertmesh/facts")],
)  # fmt: skip
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: str) -> None:
    """An empty variable is as one that is not set."""
    monkeypatch.setenv("HOME", "/home/a")
    if variable is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert cache_directory("facts") == Path(expected)
