"""The tiers: `make test` runs a case of everything, `make test-rest` others that repeat it, `make test-all` all there are.

Of families `make test` takes those that between them have all that is particular to one, of a table a diagonal, and of
a test with `@pytest.mark.quick(n)` n cases. What repeats others as a whole says so by `@pytest.mark.exhaustive`.

`make test-rest` takes of every other family a third of what is tested of it, of each another, and of a test with
`@pytest.mark.quick(n, rest=m)` m cases more. What is left is `complete`: for `make test-all` alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

REPRESENTATIVES = (
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "olmoe",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "qwen3_next",
)
"""Families that between them have shared experts and their gates, dense layers, groups and correction biases, biases,
interleaved and clamped experts, and layers that carry a state."""


def mark_tiers(items: Sequence[pytest.Item]) -> None:
    """Mark what is not for `make test`, and of that what is not for `make test-rest` either."""
    cases: dict[tuple[Any, str], list[pytest.Item]] = defaultdict(list)
    others: dict[tuple[Any, str], dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        test = item.path, getattr(item, "originalname", item.name)
        family = family_of(item)
        if family is not None and family not in REPRESENTATIVES:
            item.add_marker("exhaustive")
            others[test][family].append(item)
        elif item.get_closest_marker("quick") is not None:
            cases[test].append(item)
        if item.get_closest_marker("complete") is not None:
            item.add_marker("exhaustive")
    for same in cases.values():
        mark_evenly(same)
    for number, by_family in enumerate(others.values()):
        for place, same in enumerate(by_family.values()):
            if (number + place) % 3 and same[0].get_closest_marker("every_family") is None:
                for item in same:
                    item.add_marker("complete")


def mark_evenly(same: Sequence[pytest.Item]) -> None:
    """Of the cases of a test with `@pytest.mark.quick(n, rest=m)`, evenly spread."""
    marker = same[0].get_closest_marker("quick")
    assert marker is not None
    (number,) = marker.args
    quick = {index * len(same) // number for index in range(number)}
    left = [index for index in range(len(same)) if index not in quick]
    rest = min(marker.kwargs.get("rest", len(left)), len(left))
    exhaustive = {left[index * len(left) // rest] for index in range(rest)}
    for index in left:
        same[index].add_marker("exhaustive")
        if index not in exhaustive:
            same[index].add_marker("complete")


def family_of(item: pytest.Item) -> str | None:
    """Of a test that is the same one for every family."""
    callspec = getattr(item, "callspec", None)
    if "families" not in item.path.parts or callspec is None:
        return None
    family: str | None = callspec.params.get("family")
    return family


def diagonal(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Every pair, as cases of `parametrize`: in the quick tier each row and each column stands at least once."""
    rows, columns = list(rows), list(columns)
    quick = {(i % len(rows), i % len(columns)) for i in range(max(len(rows), len(columns)))}
    return [
        pytest.param(row, column, marks=() if (i, j) in quick else pytest.mark.exhaustive)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def two_diagonals(rows: Sequence[Any], columns: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pairs of what does not act on one another: each row and each column stands at least twice, beside another.

    The other pairs would go through the same code again. In this order, of which `quick(n)` takes every so many.
    """
    pairs = [
        (rows[number % len(rows)], columns[(number + shift) % len(columns)])
        for number in range(max(len(rows), len(columns)))
        for shift in (0, 1)
    ]
    return list(dict.fromkeys(pairs))
