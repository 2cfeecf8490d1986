"""The tiers: `make test` runs a case of everything, `make test-rest` what repeats that at some cost, `make test-all`
all.

A test is in `make test` unless it says otherwise, by two marks and a number:

- `slow`: it is in `make test-rest`;
- `release`: it is in `make test-all` alone;
- `sample(n)`: of its cases one in n is in the tier that the test is for. Of those left one in n is in the next tier,
  and the others are in the last.

Which cases are in a sample is decided by the hash of a case's own id, so that a tier holds the same of a file that is
collected alone as of the whole tree. Of the tests that are the same for every family, `make test` has the families that
between them have all that is particular to one.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

REPRESENTATIVES = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next")
"""Families that between them have shared experts and their gates, dense layers, groups and correction biases, biases,
interleaved and clamped experts, and layers that carry a state."""

OTHER_FAMILIES = 12
"""Of the other families one in so many is in `make test-rest`, if a test does not say itself."""

TIERS = ("", "slow", "release")
"""By the mark of what is in them."""


def mark_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark what is not for `make test` by the tier that it is for."""
    for item in items:
        if tier := tier_of(item):
            item.add_marker(tier)


def tier_of(item: pytest.Item) -> str:
    """One of TIERS, by the marks and the id of the item alone."""
    if item.get_closest_marker("release") is not None:
        return "release"
    is_other_family = family_of(item) not in (None, *REPRESENTATIVES)
    first = 1 if is_other_family or item.get_closest_marker("slow") is not None else 0
    sample = item.get_closest_marker("sample")
    one_in = sample.args[0] if sample is not None else OTHER_FAMILIES if is_other_family else 1
    drawn = int.from_bytes(hashlib.blake2b(item.nodeid.encode(), digest_size=8).digest(), "big")
    for tier in TIERS[first:-1]:
        if drawn % one_in == 0:
            return tier
        drawn //= one_in
    return TIERS[-1]


def family_of(item: pytest.Item) -> str | None:
    """Of a test that is the same one for every family."""
    callspec = getattr(item, "callspec", None)
    if "families" not in item.path.parts or callspec is None:
        return None
    family: str | None = callspec.params.get("family")
    return family


def two_diagonals(rows: Sequence[Any], columns: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pairs of what does not act on one another: each row and each column stands at least twice, beside another.

    The other pairs would go through the same code again.
    """
    pairs = [
        (rows[number % len(rows)], columns[(number + shift) % len(columns)])
        for number in range(max(len(rows), len(columns)))
        for shift in (0, 1)
    ]
    return list(dict.fromkeys(pairs))


def tiered(quick: Sequence[Any] = (), slow: Sequence[Any] = (), release: Sequence[Any] = ()) -> list[Any]:
    """Rows of a table, each a tuple or one value, with the marks of the tiers that they are for."""
    marked: list[tuple[Any, Sequence[Any]]] = [((), quick), (pytest.mark.slow, slow), (pytest.mark.release, release)]
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=mark) for mark, rows in marked for row in rows
    ]
