"""Where the messages of a long conversation stand in its text, in a number of renderings that does not grow with it.

What a template writes around a message depends on what kind of message it is and which kinds stand beside it, so it is
found out once for each kind (see `Written`), at the first and at the last such message, and taken for the others where
the same text stands there. Where the words beside them are is found by rendering the conversation with others.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from .turns import Written, with_reasoning

Span = tuple[int, int]

_MARK = "\ue001{}\ue001"
_MARKS = re.compile("\ue001([0-9]+)\ue001")
# so many messages of a kind are looked at one by one
_FEW = 3


class _Words(NamedTuple):
    """Where a message's content, or an assistant's reasoning, stands."""

    message: int
    begin: int
    end: int


def find_spans(written: Written, indices: Sequence[int], final: bool) -> dict[int, list[Span]]:
    """(begin, end) of each message in the text, as `Written.span`; of assistants', if `final`, as `Written.final_span`,
    and in parts where results of tools stand between (see `Written.without_results`).

    Raises:
        ValueError: as these do.
    """
    messages, kinds = written.messages, defaultdict(list)
    last_question = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for index in indices:
        if messages[index]["role"] == "assistant":
            kinds[index > last_question, *_kind(messages, index)].append(index)
    many = [alike for alike in kinds.values() if len(alike) > _FEW]
    words = _find_words(written, _words_of) if many else []
    texts = {one.message: (one.begin, one.end) for one in (_find_words(written, _text_of) if many else [])}
    found: dict[int, list[Span]] = {}
    for alike in many:
        gaps = {index: gap for index in alike if (gap := _gap(words, index, final))}
        if len(gaps) > _FEW:
            found.update(_take_over(written, gaps, texts, final))
    return {index: found[index] if index in found else _spans(written, index, final) for index in indices}


def _spans(written: Written, index: int, final: bool) -> list[Span]:
    if written.messages[index]["role"] != "assistant":
        return [written.span(index)]
    return written.without_results(index, written.final_span(index) if final else written.span(index))


def _take_over(written: Written, gaps: dict[int, Span], texts: dict[int, Span], final: bool) -> dict[int, list[Span]]:
    """Spans of messages of one kind, from the gaps they stand in: those that the first and the last one tell.

    Args:
        texts: where the text beside tool calls stands, which may be behind their results.
    """
    spans = {index: _spans(written, index, final) for index in (min(gaps), max(gaps))}
    around = {_around(written.text, gaps[index], texts.get(index), of_one) for index, of_one in spans.items()}
    told = next(iter(around))
    if len(around) > 1 or told is None:
        by_name: dict[tuple[str, ...], dict[int, Span]] = defaultdict(dict)
        for index, gap in gaps.items():  # what stands around a call may have its name
            by_name[tuple(_names(written.messages[index]))][index] = gap
        for alike in by_name.values():
            if len(by_name) > 1 and len(alike) > _FEW:
                spans.update(_take_over(written, alike, texts, final))
        return spans
    before, after, behind = told
    for index, (start, stop) in gaps.items():
        begin, end = start + len(before), stop - len(after)
        is_there = written.text.startswith(before, start, stop) and written.text.endswith(after, start, stop)
        if not (is_there and begin <= end):
            continue
        if behind is None:
            if _holds(written.text[begin:end], written.messages[index]):
                spans.setdefault(index, [(begin, end)])
        elif (
            index in texts
            and stop <= texts[index][0]
            and written.text.startswith(behind, texts[index][1])
            and all(name in written.text[begin:end] for name in _names(written.messages[index]))
        ):
            spans.setdefault(index, [(begin, end), (texts[index][0], texts[index][1] + len(behind))])
    return spans


def _around(text: str, gap: Span, own_text: Span | None, spans: list[Span]) -> tuple[str, str, str | None] | None:
    """What stands in a gap before the message and behind it and, where it is in two parts, the second of which is its
    own text, behind that; None if it stands otherwise."""
    if not 1 <= len(spans) <= 2 or not gap[0] <= spans[0][0] <= spans[0][1] <= gap[1]:
        return None
    behind = None
    if len(spans) == 2:
        if own_text is None or own_text[0] != spans[1][0] or own_text[1] > spans[1][1]:
            return None
        behind = text[own_text[1] : spans[1][1]]
    return text[gap[0] : spans[0][0]], text[spans[0][1] : gap[1]], behind


def _holds(text: str, message: dict[str, Any]) -> bool:
    """Whether the message's words are in the text, as far as that is easily told."""
    content = message["content"].strip()
    return all(name in text for name in _names(message)) and ("think>" in content or content in text)


def _names(message: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls") or []]


def _kind(messages: list[dict[str, Any]], index: int) -> tuple[Hashable, ...]:
    """What a template may go by when it writes a message, but for where the last question stands."""
    content = messages[index]["content"]
    thinks = "<think>" in content, content.startswith("<think>"), "</think>" in content
    edges = content[:1].isspace(), content[-1:].isspace(), *thinks
    following = next((message["role"] for message in messages[index + 1 :] if message["role"] != "tool"), None)
    return (
        *edges,
        following,
        *(_shape(messages[i]) if 0 <= i < len(messages) else None for i in (index - 1, index, index + 1)),
    )


def _shape(message: dict[str, Any]) -> Hashable:
    calls = message.get("tool_calls") or []
    kinds = tuple(type(call["function"]["arguments"]) for call in calls[:1])
    keys = frozenset(key for key, value in message.items() if value)
    return message["role"], keys, bool(message["content"].strip()), min(len(calls), 2), kinds


def _gap(words: list[_Words], index: int, final: bool) -> Span | None:
    """From the end of the words before an assistant's message (or, if `final`, of its own reasoning) to the beginning
    of those behind it; None if these are not those of the messages beside it."""
    behind = next((at for at, one in enumerate(words) if one.message == index + 1), 0)
    before = [one for one in words[max(behind - 2, 0) : behind] if final or one.message != index]
    if not before or before[-1].message not in (index - 1, index):
        return None
    return before[-1].end, words[behind].begin


def _find_words(written: Written, words_of: Callable[[dict[str, Any]], str]) -> list[_Words]:
    """The words that messages have of a kind (see `_words_of`, `_text_of`), in the order of the text; none if they
    cannot be told.

    With marks in place of all of them, the text shows what stands between; with marks in place of every second one, the
    others' words stand between what is known by then. All must add up to the text.
    """
    marked = [i for i, message in enumerate(written.messages) if words_of(message).strip()]
    if not marked or _MARKS.search(written.text):
        return []
    try:
        frame = _MARKS.split(_write_marked(written, words_of, set(marked)))
        order = [int(index) for index in frame[1::2]]
        texts = [_MARKS.split(_write_marked(written, words_of, set(marked) - set(order[kept::2]))) for kept in (0, 1)]
    except Exception:  # it refuses other words, and is asked message by message
        return []
    found, at = [], 0
    for place, index in enumerate(order):
        before, after = frame[2 * place], frame[2 * place + 2]
        parts = texts[place % 2][::2]
        # the marks before and behind these words are those of the other half
        part = parts[(place + 1) // 2] if (place + 1) // 2 < len(parts) else ""
        if not (part.startswith(before) and part.endswith(after) and len(before) + len(after) <= len(part)):
            return []
        begin = at + len(before)
        end = begin + len(part) - len(before) - len(after)
        if written.text[at:end] != part[: len(part) - len(after)]:
            return []
        found.append(_Words(index, begin, end))
        at = end
    is_whole = len(set(order)) == len(order) and written.text[at:] == frame[-1]
    return found if is_whole else []


def _words_of(message: dict[str, Any]) -> str:
    """Questions, results, system prompts and reasoning."""
    if message["role"] != "assistant":
        return message["content"]
    reasoning = message.get("reasoning_content")
    return reasoning if isinstance(reasoning, str) else ""


def _text_of(message: dict[str, Any]) -> str:
    """The text beside tool calls."""
    return message["content"] if message.get("tool_calls") else ""


def _write_marked(written: Written, words_of: Callable[[dict[str, Any]], str], indices: set[int]) -> str:
    """The text with marks in place of messages' words."""
    messages = []
    for index, message in enumerate(written.messages):
        mark = _MARK.format(index)
        if index not in indices:
            messages.append(message)
        elif words_of is _words_of and message["role"] == "assistant":
            messages.append(with_reasoning(message, mark))
        else:
            messages.append({**message, "content": mark})
    return written.write(messages)
