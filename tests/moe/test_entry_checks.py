"""What a user's own code registers is checked against the types of its fields."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import pytest

from expertmesh.moe.util.entry_checks import check_fields, check_value, hints_of


class Step(Protocol):
    def __call__(self, x: int, y: int, *, scale: float) -> int: ...


HALF: Any = 0.5
GOOD: list[tuple[Any, Any]] = [
    (str, "a"),
    (float, 2),
    (int, 2),
    (bool, True),
    (int | None, None),
    (Literal["a", 1], 1),
    (tuple[int, ...], (1, 2, 3)),
    (tuple[int, str], (1, "a")),
    (Mapping[str, int], {"a": 1}),
    (Callable[[int, int], int], max),
    (Callable[[int, int], int], lambda x, *rest: x),
    (Callable[..., int], lambda: 1),
    (Step, lambda x, y, scale, more=0: x),
    (Any, object()),
]
BAD: list[tuple[Any, Any, str]] = [
    (str, 1, "1, not a text"),
    (float, True, "True, not a number"),
    (int, True, "True, not a whole number"),
    (int, HALF, "0.5, not a whole number"),
    (bool, 1, "1, not True or False"),
    (int | None, "a", "'a', not a whole number or None"),
    (Literal["a", 1], True, "True, not one of a, 1"),
    (tuple[int, ...], (1, "a"), "(1, 'a'), not a tuple, each a whole number"),
    (tuple[int, str], (1,), "(1,), not a tuple, a whole number"),
    (Mapping[str, int], [1], "[1], not a dictionary"),
    (Callable[[int, int], int], 3, "3, not a function of 2 arguments"),
]


@pytest.mark.parametrize(("hint", "value"), GOOD)
def test_what_fits(hint: Any, value: Any) -> None:
    check_value("the metric", "unit", value, hint)


@pytest.mark.parametrize(("hint", "value", "said"), BAD)
def test_what_does_not_fit_is_named(hint: Any, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'the metric: unit is {said}')}$"):
        check_value("the metric", "unit", value, hint)


@pytest.mark.parametrize(
    ("hint", "function", "said"),
    [
        (Callable[[int, int], int], lambda x: x, "a function of 2 arguments"),
        (Callable[[int], int], lambda x, y: x, "a function of 1 argument"),
        (Step, lambda x, y: x, "a function of 2 arguments and scale="),
        (Step, lambda x, *, scale: x, "a function of 2 arguments and scale="),
    ],
)
def test_functions_take_what_they_are_called_with(hint: Any, function: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"not {said}$"):
        check_value("the metric", "value", function, hint)


@dataclass
class Base:
    size: int


@dataclass
class Entry(Base):
    name: str = ""


def test_all_fields_are_checked_those_of_bases_too() -> None:
    assert hints_of(Entry) == {"size": int, "name": str}
    check_fields("it", Entry(1, "a"))
    wrong: Any = "1"
    with pytest.raises(ValueError, match=r"^it: size is '1', not a whole number$"):
        check_fields("it", Entry(wrong, "a"))
