"""The two tiers: `make test` runs a case of everything, `make test-rest` those that repeat it.

Of families the quick tier takes those that between them have all that is particular to one, of a table a diagonal, and
of a test with `@pytest.mark.quick(n)` n cases. What repeats others as a whole says so by `@pytest.mark.exhaustive`.
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


def mark_exhaustive(items: Sequence[pytest.Item]) -> None:
    """Mark what is not in the quick tier."""
    cases: dict[tuple[Any, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if is_of_another_family(item):
            item.add_marker("exhaustive")
        elif item.get_closest_marker("quick") is not None:
            cases[item.path, getattr(item, "originalname", item.name)].append(item)
    for same in cases.values():
        marker = same[0].get_closest_marker("quick")
        assert marker is not None
        (number,) = marker.args
        quick = {index * len(same) // number for index in range(number)}
        for index, item in enumerate(same):
            if index not in quick:
                item.add_marker("exhaustive")


def is_of_another_family(item: pytest.Item) -> bool:
    """Whether a test is the same one for a family beside `REPRESENTATIVES`."""
    callspec = getattr(item, "callspec", None)
    if "families" not in item.path.parts or callspec is None:
        return False
    return callspec.params.get("family", REPRESENTATIVES[0]) not in REPRESENTATIVES


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
