"""The tiers: `make test` runs a case of everything, `make test-rest` others that repeat it, `make test-all` all.

Of families `make test` takes those that between them have all that is particular to one, of a table a diagonal, and of
a test with `@pytest.mark.quick(n)` n cases. What repeats others as a whole says so by `@pytest.mark.exhaustive`.

`make test-rest` takes of the cases of a test that are left one in thirty, of every family another, and one in n of a
test with `@pytest.mark.one_in(n)`. The others are `complete`: for `make test-all` alone.
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

OF_LEFT = 30
"""Of so many cases of a test that are not in the quick tier one is in `make test-rest`, if it does not say itself."""


def mark_tiers(items: Sequence[pytest.Item]) -> None:
    """Mark what is not for `make test`, and of that what is not for `make test-rest` either."""
    cases: dict[tuple[Any, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.path, getattr(item, "originalname", item.name)].append(item)
    for number, same in enumerate(cases.values()):
        for item in without_quick(same):
            item.add_marker("exhaustive")
        left = [item for item in same if item.get_closest_marker("exhaustive") is not None]
        if len(left) > 1:
            marker = left[0].get_closest_marker("one_in")
            step = OF_LEFT if marker is None else marker.args[0]
            for place, item in enumerate(left):
                # each test begins one further, so that another family is left out
                if (number + place) % len(left) % step:
                    item.add_marker("complete")


def without_quick(same: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Which of the cases of a test are not in the quick tier for what `quick(n)` says, their family, or `complete`."""
    marker = same[0].get_closest_marker("quick")
    representative = [item for item in same if family_of(item) in (None, *REPRESENTATIVES)]
    number = len(representative) if marker is None else marker.args[0]
    quick = {id(representative[index * len(representative) // number]) for index in range(number) if representative}
    return [item for item in same if id(item) not in quick or item.get_closest_marker("complete") is not None]


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
