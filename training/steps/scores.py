"""How right generated answers are: each beside the expected one. Nothing of this imports torch."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Score = Callable[[str, str, str], float]
"""Of a prompt, the answer, and the expected answer, without special tokens: a finite number, the more the better."""
SHOWN = 3
"""So many answers are logged with their score."""
_DECODER = json.JSONDecoder(
    parse_float=lambda text: int(number) if (number := float(text)).is_integer() else number,
    parse_constant=str,
)


@dataclass(frozen=True)
class Scored:
    """What all answers got.

    score: their mean; NaN where one could not be scored. number: of answers. unended: those that were cut off at
    --generate-max-new-tokens. seconds: that it took. shown: the first of them, as sample generations are logged.
    """

    score: float
    number: int
    unended: int
    seconds: float
    shown: Sequence[Mapping[str, str]] = ()

    def __str__(self) -> str:
        cut = f", {self.unended:,} cut off at --generate-max-new-tokens" if self.unended else ""
        return f"eval score {self.score:.4f} of {self.number:,} answers{cut}, in {self.seconds:.1f} s"


def exact(prompt: str, answer: str, expected: str) -> float:
    """1 where the answer is the expected one, but for white space around it; else 0."""
    return float(answer.strip() == expected.strip())


@dataclass(frozen=True)
class Extracted:
    """1 where a regular expression finds the same in the answer as in the expected one; else 0."""

    pattern: str

    def __call__(self, prompt: str, answer: str, expected: str) -> float:
        found = self.find(answer)
        return float(found is not None and found == self.find(expected))

    def find(self, text: str) -> str | None:
        """The last match: its first group or, where the expression has none, all of it; None: there is no match."""
        matches = list(re.finditer(self.pattern, text))
        if not matches:
            return None
        found: str | None = matches[-1][1 if matches[-1].re.groups else 0]
        return found


def same_calls(prompt: str, answer: str, expected: str) -> float:
    """1 where the answer makes the same tool calls as the expected one, in any order; else 0. See `calls_in`."""
    found = (sorted(json.dumps(call, sort_keys=True) for call in calls_in(text)) for text in (answer, expected))
    return float(next(found) == next(found))


def calls_in(text: str) -> list[Any]:
    """The JSON objects in a text, one after the other, whatever stands between them: so most chat templates write
    calls. Arguments written as JSON within a string are taken for what that says; 1.0 is 1."""
    return [_with_arguments(call) for call in _objects(text)]


def _objects(text: str) -> Iterator[Any]:
    at = text.find("{")
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
            yield value
        except (ValueError, RecursionError):  # no JSON, or nested deeper than Python can read
            end = at + 1
        at = text.find("{", end)


def _with_arguments(call: Any) -> Any:
    """The same with its arguments, and those of a "function" in it, as values."""
    if not isinstance(call, dict):
        return call
    call = {name: _with_arguments(value) if name == "function" else value for name, value in call.items()}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            call["arguments"] = _DECODER.decode(arguments)
    return call


def checked(score: Any) -> float:
    """
    Raises:
        ValueError: a function of one's own gave no finite number.
    """
    if not isinstance(score, int | float) or not math.isfinite(score):
        raise ValueError(f"gave {score!r:.80}, not a finite number")
    return float(score)
