"""Tokens of texts of any length.

A token takes hundreds of bytes while a text is tokenized, so that long texts are tokenized in parts.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_PART, _OVERLAP = 2**18, 2**13
"""Characters that are tokenized at once, and how many of them twice."""
_ALIKE = 16
"""So many tokens in a row must be the same in two parts that are joined there."""


class Encoded(NamedTuple):
    """Tokens of a text, and where the characters of each begin and end."""

    tokens: Sequence[int]
    begins: Sequence[int]
    ends: Sequence[int]

    def part(self, first: int, last: int) -> "Encoded":
        """The tokens from `first` on, up to `last`."""
        return Encoded(self.tokens[first:last], self.begins[first:last], self.ends[first:last])


def encode_texts(tokenizer: Any, texts: Sequence[str], special: bool = False) -> Iterator[Encoded]:
    """The tokens of each text, one text after the other.

    Args:
        tokenizer: a fast one.
        special: with the special tokens that the tokenizer puts around a text.
    """
    short = [text for text in texts if len(text) <= _PART]
    found = tokenizer(short, add_special_tokens=special, return_offsets_mapping=True) if short else {}
    encoded = map(_encoded, found.get("input_ids", ()), found.get("offset_mapping", ()))
    for text in texts:
        yield next(encoded) if len(text) <= _PART else _joined(tokenizer, text, special)


def _encoded(tokens: list[int], places: list[tuple[int, int]]) -> Encoded:
    begins, ends = zip(*places, strict=True) if places else ((), ())
    return Encoded(tokens, begins, ends)


def _joined(tokenizer: Any, text: str, special: bool) -> Encoded:
    """As the text is tokenized as a whole: its parts overlap, and are joined amid tokens that both have. Where they
    have too few in common, as in words of thousands of characters, a part begins where a token of the other ends."""
    whole = Encoded(array("i"), array("q"), array("q"))
    part = _part(tokenizer, text, 0, special)
    stop = _PART
    while stop < len(text):
        begin = stop - _OVERLAP
        following = _part(tokenizer, text, begin, special)
        joint = _joint(part, following, begin)
        if joint is None:
            at = _first_from(part, begin + _OVERLAP // 2)
            begin = part.begins[at]
            following, joint = _part(tokenizer, text, begin, special), (at, 0)
        _append(whole, part.part(0, joint[0]))
        part, stop = following.part(joint[1], len(following.tokens)), begin + _PART
    _append(whole, part)
    return whole


def _append(whole: Encoded, part: Encoded) -> None:
    for values, more in zip(whole, part, strict=True):
        assert isinstance(values, array)
        values.extend(more)


def _part(tokenizer: Any, text: str, begin: int, special: bool) -> Encoded:
    """Tokens of the part that begins there; special ones where it is the first of the text, or the last."""
    found = tokenizer(text[begin : begin + _PART], add_special_tokens=special, return_offsets_mapping=True)
    tokens, places = found["input_ids"], found["offset_mapping"]
    own = [at for at, (one, other) in enumerate(places) if one < other] or [len(places), -1]
    first = own[0] if special and begin else 0
    last = own[-1] + 1 if special and begin + _PART < len(text) else len(places)
    places[own[0] : own[-1] + 1] = [(begin + one, begin + other) for one, other in places[own[0] : own[-1] + 1]]
    return _encoded(tokens[first:last], places[first:last])


def _first_from(part: Encoded, character: int) -> int:
    """The first token that begins there or later."""
    return next((at for at, begin in enumerate(part.begins) if begin >= character), len(part.begins) - 1)


def _joint(part: Encoded, following: Encoded, begin: int) -> tuple[int, int] | None:
    """How many tokens stay of a part, and the first that is taken of the one behind it; None: they have too few in
    common. The end of the one and the beginning of the other may be tokenized otherwise than within a text, so that the
    middle is looked at first."""
    where = {place: at for at, place in enumerate(zip(following.begins, following.ends, strict=True))}
    common = range(_first_from(part, begin), len(part.tokens) - _ALIKE)
    middle = (common.start + common.stop) // 2
    for at in sorted(common, key=lambda at: abs(at - middle)):
        first = where.get((part.begins[at], part.ends[at]))
        if first is None:
            continue
        ours, theirs = part.part(at, at + _ALIKE), following.part(first, first + _ALIKE)
        if all(list(one) == list(other) for one, other in zip(ours, theirs, strict=True)):
            return at, first
    return None
