"""A text's tokens, and what is kept of one that is longer than --max-seq-length."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from .pictures import Picture

Truncation = Literal["right", "left", "drop", "split", "error"]
WRAPPED: Final = "wrapped"
Packing = bool | Literal["wrapped"]
"""Whether sequences hold several samples; wrapped: texts go on in the next sequence where one is full."""
Range = tuple[int, int]
"""(begin, end) of tokens."""


class Calls(NamedTuple):
    """Tokens of an answer with tool calls that is trained on: where it begins, where its calls do, and where both
    end."""

    answer: int
    begin: int
    end: int


@dataclass(frozen=True)
class Tokenized:
    """A text's tokens, or those of a part of it that becomes a sample: what is known of it from rendering to the table.

    tokens: without `before` ones in front of them, of a text of `length` tokens. is_trained: of each. ends: tokens that
    end answers. weights: of each; none where all are 1. calls: of answers that are trained on, in tokens of the text.
    images: that are in it, in tokens of the text. image_records: what the cache has of all the text's images.
    is_empty: whether an answer that is trained on says nothing. is_unexplained, drops_reasoning: see `Rendered`. bad:
    why the record cannot be used; empty: it can.

    Of a part: is_first, is_last: of the text's. is_dropped: whether the text is left out. lost: tokens of the text that
    are in no part. loses_call: see `Truncated`.
    """

    tokens: Sequence[int]
    is_trained: Sequence[bool]
    ends: Iterable[int] = ()
    weights: Sequence[float] = ()
    calls: Sequence[Calls] = ()
    length: int = -1
    before: int = 0
    images: Sequence[Picture] = ()
    image_records: Sequence[str] = ()
    is_empty: bool = False
    is_unexplained: bool = False
    drops_reasoning: bool = False
    bad: str = ""
    is_first: bool = True
    is_last: bool = True
    is_dropped: bool = False
    lost: int = 0
    loses_call: bool = False

    def __post_init__(self) -> None:
        if self.length < 0:
            object.__setattr__(self, "length", len(self.tokens))

    def part(self, begin: int, end: int) -> "Tokenized":
        """The tokens of a part of the text, as lists."""
        inside = slice(begin - self.before, end - self.before)
        assert inside.start >= 0, (begin, self.before)
        return replace(
            self,
            tokens=list(self.tokens[inside]),
            is_trained=list(self.is_trained[inside]),
            weights=list(self.weights[inside]),
            before=begin,
        )


@dataclass(frozen=True)
class Truncated:
    """What is kept of a text. parts: one, none, or the pieces that it is split into. loses_call: whether more is left
    out than is too long, as a tool call would have been cut."""

    parts: list[Range] = field(default_factory=list)
    loses_call: bool = False


def truncate(text: Tokenized, policy: Truncation, max_length: int, limit: int | None = None) -> Truncated:
    """The parts of a text that become samples.

    Args:
        max_length: tokens of each at most.
        limit: where an image begins that does not end within them: all from there on is cut off.

    Raises:
        ValueError: the text is too long, which `policy` does not accept.
    """
    length = text.length
    if length <= max_length and limit is None:
        return Truncated([(0, length)])
    if policy == "error":
        raise ValueError(
            f"has {length:,} tokens, more than --max-seq-length {max_length}; raise that, mend the record, or give "
            "another --truncation than error"
        )
    if policy == "drop":
        return Truncated()
    if policy == "split":
        return Truncated(_pieces(length, max_length))
    if policy == "left":
        begin = length - max_length
        within = next((calls for calls in text.calls if calls.begin < begin < calls.end), None)
        return Truncated([(begin, length)]) if within is None else Truncated([(within.end, length)], loses_call=True)
    end = max_length if limit is None else limit
    within = next((calls for calls in text.calls if calls.begin < end < calls.end), None)
    return Truncated([(0, end)]) if within is None else Truncated([(0, within.answer)], loses_call=True)


def cut_to_length(text: Tokenized, policy: Truncation, max_length: int) -> list[Tokenized]:
    """The samples of a text: a part of it, or the pieces that it is split into. One without tokens stands for a text
    that is dropped.

    Raises:
        ValueError: the text is too long, which `policy` does not accept.
    """
    # an image that would be cut is left out, with what follows it
    limit = next((each.begin for each in text.images if each.begin < max_length < each.end), None)
    kept = truncate(text, policy, max_length, limit)
    parts = kept.parts or [(0, 0)]
    begins, ends = zip(*parts, strict=True)
    return [
        replace(
            text.part(begin, end),
            images=[each for each in text.images if each.end <= end],
            is_first=begin == begins[0],
            is_last=end == ends[-1],
            is_dropped=not kept.parts,
            lost=text.length - (ends[-1] - begins[0]),
            loses_call=kept.loses_call,
        )
        for begin, end in parts
    ]


def _pieces(length: int, max_length: int) -> list[Range]:
    """Pieces of a text, each of which begins with the last token of the one before it: that predicts the next one, so
    that each token of the text but the first is predicted once."""
    return [(begin, min(begin + max_length, length)) for begin in range(0, length - 1, max_length - 1)]


def shortened(text: Tokenized, policy: Truncation, max_length: int) -> Tokenized:
    """Without the tokens that no policy's `truncate` keeps, so that many texts need less memory."""
    if text.length <= max_length or policy == "split":
        return text
    begin = text.length - max_length if policy == "left" else 0
    return text.part(begin, begin + max_length)


def kept_tokens(lengths: Sequence[tuple[int, int]], policy: Truncation, max_length: int) -> int:
    """Tokens that a policy keeps.

    Args:
        lengths: of texts, in tokens, each with how many have it.
    """
    if policy in ("right", "left"):
        return sum(min(length, max_length) * number for length, number in lengths)
    return sum(length * number for length, number in lengths if policy == "split" or length <= max_length)


def length_that_keeps(lengths: Sequence[tuple[int, int]], share: float) -> int:
    """The least --max-seq-length that keeps so much of all tokens.

    Args:
        lengths: of texts, in tokens, each with how many have it, in order.
    """
    wanted = share * sum(length * number for length, number in lengths)
    longer, below = sum(number for _, number in lengths), 0
    for length, number in lengths:
        if below + length * longer >= wanted:
            return math.ceil((wanted - below) / longer)
        below, longer = below + length * number, longer - number
    return 0
