"""Messages of a conversation, in the forms in which data have them, as chat templates take them.

What a message says of its reasoning, its text and its calls stands in keys of its own, in parts of its content, or, in
several tools' data, in turns of its own.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .data_files import RowError
from .pictures import COLUMNS, IMAGE, PARTS, PLACES, Mark, mark_of

# sharegpt's names of roles, and those that other data sets use in their place
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "system": "system",
    "tool": "tool",
    "tool_response": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
# roles whose content is a tool call, or several, as JSON: LLaMA-Factory's and ms-swift's
_CALLERS = ("function_call", "tool_call")
# what a turn of calls and the answer that it belongs to both have
_JOINED = ("role", "content", "tool_calls")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold what it thinks before it speaks: DeepSeek's and Qwen's, GPT-OSS', OpenRouter's."""
# those that hold it in another form
_REASONING_PARTS = ("reasoning_details", "thinking_blocks")
# keys of a message that say whether it is trained on, or with which weight: ours, axolotl's, OpenAI's, LLaMA-Factory's,
# ms-swift's
_OVERRIDES = ("train", "training", "weight", "loss_weight", "loss", "loss_scale")
# keys of a tool call that hold what it hands over: OpenAI's, that of Llama's published chat template, Anthropic's
_ARGUMENTS = ("arguments", "parameters", "input")
_OF_CALLS = ("id", "index")
# its other keys
_ABOUT_A_CALL = ("type", "id", "index", "function", "name")
# types of parts of a content, each with what it says and the key that has it: OpenAI's and LLaMA-Factory's, Anthropic's
_KINDS = {"text": "text", "reasoning": "reasoning", "thinking": "reasoning", "tool_call": "calls", "tool_use": "calls"}
# the order in which chat templates write what an answer says
_ORDER = ("reasoning", "text", "calls")
_RESULT = "tool_result"
_MOST_WEIGHT = 1_000_000
OTHER_MEDIA = ("videos", "audios", "video", "audio")
MEDIA = (*COLUMNS, *OTHER_MEDIA)
IMAGES = "\ue002images"
"""Of a message that is being read: what it says of its own images."""


def read_messages(turns: Any, column: str) -> tuple[list[dict[str, Any]], list[bool | float | None]]:
    """Messages of a list of them, or of its JSON text, as tables have it; and for each whether it is trained on, or
    its weight (None: it does not say).

    Raises:
        RowError: they are none.
    """
    if isinstance(turns, str) and turns.strip():
        turns = json_value(turns, column, list, "a list of messages")
    if not isinstance(turns, list | tuple) or not turns:
        raise RowError(f"{column} is {turns!r:.80}, not a list of messages")
    messages: list[dict[str, Any]] = []
    is_trained: list[bool | float | None] = []
    placed = [
        (f"{column}, message {number}", part)
        for number, turn in enumerate(turns, start=1)
        for part in _apart(_decoded(turn, f"{column}, message {number}"), f"{column}, message {number}")
    ]
    turns = [turn for _, turn in placed]
    for at, (place, turn) in enumerate(placed):
        message, override = _read_message(turn, place), _override(turn, place)
        if continues_answer(turns, at) and not _is_next_step(messages[-1], message):
            if override != is_trained[-1]:
                raise RowError(
                    f"{place}: is one answer with the message before it, which says otherwise whether, or with which "
                    "weight, it is trained on; give both the same"
                )
            _add_calls(messages[-1], message, place)
            continue
        messages.append(message)
        is_trained.append(override)
    return messages, is_trained


def continues_answer(turns: Sequence[Any], index: int) -> bool:
    """Whether a turn is a call, or several, that belongs to the assistant's turn before it: ms-swift and sharegpt have
    each of parallel calls, and the text before them, in a turn of its own."""
    before, turn = (turns[at] if 0 <= at < len(turns) else None for at in (index - 1, index))
    if not isinstance(before, dict) or not isinstance(turn, dict) or _role(turn) not in _CALLERS:
        return False
    role = _role(before)
    return isinstance(role, str) and _ROLES.get(role) == "assistant"


def _is_next_step(answer: Mapping[str, Any], calls: Mapping[str, Any]) -> bool:
    """Whether a turn of calls is an answer of its own all the same: one that has a thought behind other calls, or text,
    which templates write before calls."""
    return bool(calls["content"] or (calls.get("reasoning_content") and answer.get("tool_calls")))


def _add_calls(answer: dict[str, Any], calls: dict[str, Any], place: str) -> None:
    """Make a turn of calls a part of the message before it."""
    differing = next((key for key in calls if key in answer and key not in _JOINED and calls[key] != answer[key]), None)
    if differing is not None:
        raise RowError(
            f"{place}: is one answer with the message before it, and both have {differing}; give it in one of them"
        )
    joined = [*answer.get("tool_calls", ()), *calls["tool_calls"]]
    answer.update({key: value for key, value in calls.items() if key not in _JOINED} | {"tool_calls": joined})


def _decoded(turn: Any, place: str) -> dict[str, Any]:
    """A message whose calls are no JSON text. Its content may well be, and stays as it is."""
    if not isinstance(turn, dict):
        raise RowError(f"{place} is {turn!r:.80}, not an object with role and content")
    kinds: tuple[tuple[str, type, str], ...] = (
        ("tool_calls", list, "a list of them"),
        ("function_call", dict, "an object with name and arguments"),
    )
    texts = [(key, kind, said) for key, kind, said in kinds if isinstance(turn.get(key), str)]
    return {**turn, **{key: json_value(turn[key], f"{place}: {key}", kind, said) for key, kind, said in texts}}


def _apart(turn: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """A turn; or, of one with Anthropic's parts `tool_result`, a message for each of them, and one for what the user
    says behind them."""
    content = turn.get("content")
    parts = content if isinstance(content, list | tuple) else []
    number = sum(isinstance(part, dict) and part.get("type") == _RESULT for part in parts)
    if not number:
        return [turn]
    results, behind = parts[:number], parts[number:]
    if any(not isinstance(part, dict) or part.get("type") != _RESULT for part in results):
        raise RowError(f"{place}: content has a part before a {_RESULT}; put results first")
    others = {key: value for key, value in turn.items() if key not in ("role", "from", "content")}
    messages = [{**_result_of(part, place), **others} for part in results]
    return [*messages, {**turn, "content": behind}] if behind else messages


def _result_of(part: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A part `tool_result` as a message. What it has beside content and id goes along."""
    known = ("type", "content", "tool_use_id", "cache_control")
    others = {key: value for key, value in part.items() if key not in known and value not in (None, False)}
    name = {} if part.get("tool_use_id") is None else {"tool_call_id": part["tool_use_id"]}
    return {"role": "tool", "content": part.get("content") or "", **name, **others}


def _role(turn: Mapping[str, Any]) -> Any:
    """As it is, but for capitals and spaces around one that is known."""
    role = turn.get("role", turn.get("from"))
    plain = role.strip().lower() if isinstance(role, str) else role
    return plain if isinstance(plain, str) and plain in _ROLES else role


def _refuse_two(turn: Mapping[str, Any], place: str) -> None:
    """Refuse what a message says in two ways, of which one would be dropped, and what no template would be given or
    write: results within a call's message, an answer elsewhere than in the content, media."""
    for one, other in (("role", "from"), ("content", "value"), ("tool_calls", "function_call")):
        if turn.get(one) and turn.get(other) and turn[one] != turn[other]:
            raise RowError(f"{place} has {one} and {other}; leave one of them out")
    if turn.get("tool_responses"):
        raise RowError(f"{place} has tool_responses; give each result as its own message with the role tool")
    if turn.get("refusal"):
        raise RowError(f"{place} has refusal; give its text as content")
    refuse_media(turn, MEDIA, f"{place} ")


def _read_message(turn: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = _role(turn)
    if not isinstance(role, str):
        raise RowError(f"{place} has no role (or from); found: {', '.join(map(str, turn)) or 'nothing'}")
    _refuse_two(turn, place)
    content = turn.get("content") or turn.get("value", turn.get("content"))
    calls = turn.get("tool_calls")
    if not calls and turn.get("function_call"):  # OpenAI's older form of a single call
        calls = [turn["function_call"]]
    said = _read_content(content, place)
    if role in _CALLERS and not calls and not said.calls:
        caller = _read_caller(said.text, f"{place}: {role}")
        if said.reasoning and caller.reasoning:
            raise RowError(f"{place} has reasoning inside and outside of its call; leave one out")
        said = replace(caller, reasoning=said.reasoning or caller.reasoning)
    if said.calls and calls:
        raise RowError(f"{place} has tool calls inside and outside of its content; leave one out")
    reasoning = _reasoning(turn, place)
    if said.reasoning and reasoning:
        raise RowError(f"{place} has reasoning inside and outside of its content; leave one out")
    if content is None and not calls:
        raise RowError(f"{place} has no content (or value); found: {', '.join(map(str, turn))}")
    taken = ("role", "from", "content", "value", "tool_calls", "function_call", *REASONING, *_OVERRIDES)
    # a column of a Parquet file holds None in every message that lacks the key
    others = {key: value for key, value in turn.items() if key not in taken and value is not None}
    return {
        **message_of(_ROLES.get(role, role), said.text),
        **others,
        **({"reasoning_content": said.reasoning or reasoning} if said.reasoning or reasoning else {}),
        **({"tool_calls": read_calls(calls or said.calls, place)} if calls or said.calls else {}),
        **({IMAGES: said.images} if said.images else {}),
    }


def _reasoning(turn: Mapping[str, Any], place: str) -> str:
    """What the message has beside its content, under one of the names in use."""
    found = {key: turn[key] for key in REASONING if turn.get(key)}
    for key, reasoning in found.items():
        if not isinstance(reasoning, str):
            raise RowError(f"{place}: {key} is {reasoning!r:.80}, not text")
    if len(set(found.values())) > 1:
        raise RowError(f"{place} has reasoning under {' and '.join(found)}, and they differ; leave one out")
    parts = next((key for key in _REASONING_PARTS if turn.get(key)), None)
    if parts is not None and not found:
        raise RowError(f"{place} has {parts}, which would be lost; give it as {REASONING[0]}")
    return next(iter(found.values()), "")


def read_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Tool calls as templates take them: a function's name and its arguments, an object even where the data have its
    JSON; without any, an empty one."""
    if not isinstance(calls, list | tuple):
        raise RowError(f"{place}: tool_calls is {calls!r:.80}, not a list of them")
    read = []
    for call in calls:
        if isinstance(call, str):  # verifiers' data
            call = json_value(call, f"{place}: a tool call", dict, "an object with name and arguments")
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, str):
            function = json_value(function, f"{place}: function", dict, "an object with name and arguments")
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise RowError(f"{place}: has the tool call {call!r:.80}; expected an object with name and arguments")
        arguments = _find_arguments(call, function, place)
        said = f"{place}: the arguments of its call to {function['name']} are {arguments!r:.80}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except ValueError as error:
                raise RowError(f"{said}, neither an object nor the JSON of one: {error}") from error
        if not isinstance(arguments, dict | None):
            raise RowError(f"{said}, not an object or the JSON of one")
        outer = _without_arguments(call)
        if "function" not in call:  # flat, as verifiers' and Anthropic's: what is said of the call is beside its name
            outer = {key: value for key, value in call.items() if key in _OF_CALLS} | {"type": "function"}
            function = {key: value for key, value in function.items() if key not in (*_OF_CALLS, "type")}
        read.append({**outer, "function": {**_without_arguments(function), "arguments": arguments or {}}})
    return read


def _without_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in call.items() if key not in _ARGUMENTS}


def _find_arguments(call: Mapping[str, Any], function: Mapping[str, Any], place: str) -> Any:
    """What a call hands to its function, within `function` or beside it, under OpenAI's name or Llama's.

    Under any other name it would be dropped, and the model would learn a call without arguments: refused.
    """
    given = [holder[key] for holder in (function, call) for key in _ARGUMENTS if holder.get(key) is not None]
    if any(one != given[0] for one in given[1:]):
        raise RowError(f"{place}: its call to {function['name']} has two different sets of arguments; leave one out")
    if given:
        return given[0]
    others = [key for key, value in {**call, **function}.items() if value and key not in _ABOUT_A_CALL]
    if others:
        raise RowError(
            f"{place}: its call to {function['name']} has {others[0]} but no arguments; name that "
            "field arguments, and give {} for nothing"
        )
    return None


@dataclass(frozen=True)
class _Content:
    """What a message's content says, as chat templates take it."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    images: tuple[Mark, ...] = ()


def _read_content(content: Any, place: str) -> _Content:
    """Content that is a string or a list of parts: texts, and as LLaMA-Factory has them reasoning and tool calls."""
    if content is None or isinstance(content, str):
        return _Content(content or "")
    if not isinstance(content, list | tuple):
        raise RowError(f"{place}: content is {content!r:.80}, not text")
    said: dict[str, list[Any]] = {kind: [] for kind in _ORDER}
    images: list[Mark] = []
    last = 0
    for part in content:
        if isinstance(part, dict) and part.get("type") in PARTS:
            images.append(mark_of(part, f"{place}: an image"))
            kind, value = "text", IMAGE
        else:
            kind, value = _read_part(part, place)
        if value and _ORDER.index(kind) < last:
            raise RowError(
                f"{place}: content has {kind} behind {_ORDER[last]}, but chat templates write {', '.join(_ORDER)}: put "
                "it before, or into a message of its own"
            )
        last = max(last, _ORDER.index(kind)) if value else last
        said[kind].append(value)
    return _Content("".join(said["text"]), "".join(said["reasoning"]), tuple(said["calls"]), tuple(images))


def _read_part(part: Any, place: str) -> tuple[str, Any]:
    """What a part of a content is, of _ORDER, and what it says."""
    name = part.get("type", "text") if isinstance(part, dict) else "text"
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is not None and name == "tool_use":
        return kind, {key: part[key] for key in ("type", "id", "name", "input") if part.get(key)} | {"type": "function"}
    value = part
    if isinstance(part, dict):
        # a column of a Parquet file holds None for the key that is lacking
        value = next((part[key] for key in ("text", "value", "thinking") if part.get(key) is not None), None)
    if kind is None or not isinstance(value, str):
        raise RowError(
            f"{place}: content has a part that is not one of {', '.join((*_KINDS, _RESULT, *PARTS))}, with text as its "
            f"value: {part!r:.80}"
        )
    return kind, _read_call(value, place) if kind == "calls" else value


def _read_caller(text: str, place: str) -> _Content:
    """The content of a turn that is a call: one or a list of them as JSON, perhaps behind a thought."""
    thought = re.match(r"\s*<think>(.*?)</think>", text, re.DOTALL)
    written = text[thought.end() :] if thought else text
    try:
        calls = json.loads(written)
    except ValueError as error:
        raise RowError(f"{place} is not JSON ({error}): {written!r:.80}") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not calls:
        raise RowError(f"{place} has no call; expected an object with name and arguments")
    return _Content("", thought[1].strip() if thought else "", tuple(calls))


def _read_call(text: str, place: str) -> dict[str, Any]:
    """A part with a tool call: JSON with the name of a function and its arguments."""
    try:
        call = json.loads(text)
    except ValueError as error:
        raise RowError(f"{place}: its tool_call is not JSON ({error}): {text!r:.80}") from error
    if not (isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call):
        raise RowError(f"{place}: its tool_call is {text!r:.80}; expected an object with name and arguments")
    return {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}


def _override(turn: Mapping[str, Any], place: str) -> bool | float | None:
    """Whether the message is trained on, or its weight; None where it does not say."""
    if turn.get("train_detail"):
        raise RowError(f"{place}: train_detail is not supported: a message is trained on completely or not at all")
    found = {key: turn[key] for key in _OVERRIDES if turn.get(key) is not None}
    weights = {key: weight_of(value, f"{place}: {key}") for key, value in found.items()}
    # true says nothing of how much
    numbers = {weights[key] for key, value in found.items() if value is not True}
    if len(numbers) > 1 or len({bool(weight) for weight in weights.values()}) > 1:
        raise RowError(f"{place} has {' and '.join(found)}, which contradict each other; leave one out")
    weight = next(iter(numbers), 1.0)
    return (bool(weight) if weight in (0, 1) else weight) if found else None


def weight_of(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= _MOST_WEIGHT:
        raise RowError(f"{name} is {value!r:.80}; expected a weight from 0 to {_MOST_WEIGHT:,}, or true or false")
    return float(value)


def refuse_media(said: Mapping[str, Any], keys: Sequence[str], place: str = "") -> None:
    """Refuse what is not read where it stands."""
    media = next((key for key in keys if said.get(key)), None)
    if media is not None:
        remedy = "it is not text or images: leave it out"
        if media in COLUMNS:
            remedy = PLACES
        raise RowError(f"{place}has {media}; {remedy}")


def message_of(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def content_in(row: Mapping[str, Any], column: str) -> str:
    """A column that has a text, or as Anthropic's `system` a list of text parts."""
    if isinstance(row[column], str):
        return text_in(row, column)
    said = _read_content(row[column], column)
    if said.reasoning or said.calls or said.images:
        raise RowError(f"{column} is {row[column]!r:.80}, not text")
    return said.text


def text_in(row: Mapping[str, Any], column: str) -> str:
    if not isinstance(row[column], str):
        raise RowError(f"{column} is {row[column]!r:.80}, not text")
    return row[column]


def json_value(value: Any, name: str, kind: type, described: str) -> Any:
    """A value of a kind, or its JSON text, as tables have it; None if there is none."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise RowError(f"{name} is {value!r:.80}, neither {described} nor the JSON of one: {error}") from error
    if found and not isinstance(found, kind):
        raise RowError(f"{name} is {value!r:.80}, not {described}")
    return found or None
