"""Results of tool calls: which call each belongs to.

Many chat templates write no ids, and tie results to calls by their order alone.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from .data_files import RowError

Message = Mapping[str, Any]
_OTHER_ID = "have a result whose tool_call_id is not that of the only call before it; it is read as its result"
_UNTIED = "have parallel calls whose ids, or those of their results, are incomplete or repeat; the file's order is kept"
_UNANSWERED = "have parallel calls of which the last ones have no result"
_UNMADE = "have a result whose tool_call_id is that of no call before it"
_REPEATED = "have several results of one call"


def in_order_of_calls(messages: Sequence[Message]) -> tuple[list[int], list[str]]:
    """Put the results of parallel calls into the order of the calls, where both have ids.

    Returns:
        The numbers of the messages in their order, and what is to be told of the record, in words.

    Raises:
        RowError: a template that ties results to calls by their order would show one as that of another call.
    """
    order, told = list(range(len(messages))), list[str]()
    made = set[str]()
    at = 0
    while at < len(messages):
        results = list(takewhile(lambda message: message["role"] == "tool", messages[at + 1 :]))
        calls = messages[at].get("tool_calls") or []
        made |= {found for call in calls if (found := _id(call.get("id")))}
        if calls and results:
            places, note = _places(calls, results, at + 2)
            order[at + 1 : at + 1 + len(results)] = [at + 1 + place for place in places]
            told += filter(None, [note])
        elif {_id(result.get("tool_call_id")) for result in results} - made - {None}:
            told.append(_UNMADE)
        at += 1 + len(results)
    return order, told


def _id(value: Any) -> str | None:
    return None if value in (None, "") else str(value)


def _places(calls: Sequence[Message], results: Sequence[Message], number: int) -> tuple[list[int], str]:
    """The results of a message's calls in their order, and what is to be told.

    Args:
        number: of the message that the first result is, counted from 1.
    """
    of_calls = [_id(call.get("id")) for call in calls]
    of_results = [_id(result.get("tool_call_id")) for result in results]
    known, named = list(filter(None, of_calls)), list(filter(None, of_results))
    as_they_are = list(range(len(results)))
    if not known or not named:
        return as_they_are, _UNTIED if len(calls) > 1 and (known or named) else ""
    if len({*known}) < len(known):
        return as_they_are, _UNTIED
    if len(calls) == len(results) == 1:
        return as_they_are, "" if known == named else _OTHER_ID
    is_complete = len(known) == len(calls)
    for place, found in enumerate(of_results):
        if found is not None and found not in known and is_complete:
            raise RowError(
                f"message {number + place} is the result of a call {found!r}, but the calls before it are "
                f"{', '.join(map(repr, known))}; mend its tool_call_id, or leave it out"
            )
    if len({*named}) < len(named):
        if len(calls) == 1:
            return as_they_are, _REPEATED
        found = next(found for found in named if named.count(found) > 1)
        raise RowError(
            f"message {number + of_results.index(found)} is one of {named.count(found)} results of the call {found!r} "
            "among those of parallel calls; give one result for each call"
        )
    if not is_complete or len(named) < len(results):
        for place, found in enumerate(of_results):
            if found in known and of_calls.index(found) != place:
                raise RowError(
                    f"message {number + place} is the result of the call {found!r}, in another order than the calls, "
                    "and not all of them have ids; give each call an id, and each result its tool_call_id"
                )
        return as_they_are, _UNTIED
    places = sorted(as_they_are, key=lambda place: of_calls.index(of_results[place]))
    lacking = next((found for found in known if found not in named), None)
    if lacking is None:
        return places, ""
    behind = next((found for found in known[known.index(lacking) :] if found in named), None)
    if behind is not None:
        raise RowError(
            f"message {number} and those behind it have no result of the call {lacking!r}, but one of {behind!r}, made "
            "after it; give the results of all calls"
        )
    return places, _UNANSWERED
