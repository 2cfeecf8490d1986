"""Tools, calls and results that a record has as text between tags, as Hermes' data have them.

They are read as what they are, so that the chat template writes them in its model's own form, if the record says which
tools there are: in a column, or in Hermes' system prompt, in whose place the template then describes them. Without
tools, texts stay as they are: they teach a form of the record's own.
"""

import ast
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .data_files import RowError
from .messages import message_of, read_calls
from .tools import read_tools

_PROMPT = "You are a function calling AI model"
"""How Hermes' system prompts begin."""
_TOOLS = re.compile(r"<tools>\s*([\[{].*?)\s*</tools>", re.DOTALL)
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_THOUGHT = re.compile(r"\s*<think>\s*(\S.*?)\s*</think>\s*", re.DOTALL)
_REPLACED = "have Hermes' system prompt, in whose place the chat template describes the tools"
_TOOLS_TWICE = "have <tools> in a system prompt, which stays beside what the chat template writes of the tools"
_NO_CALL = "have <tool_call> in an answer that does not end with the JSON of calls; it is trained on as text"


@dataclass(frozen=True)
class Read:
    """Messages, for each whether it is trained on, the tools, and what is told of the record."""

    messages: list[dict[str, Any]]
    is_trained: list[bool | float | None]
    tools: list[Any] | None
    told: Sequence[str] = field(default_factory=list)


def read_texts(messages: list[dict[str, Any]], is_trained: list[bool | float | None], tools: list[Any] | None) -> Read:
    """What a record says, with the calls in its texts as such.

    Raises:
        RowError: its system prompt has other tools than its column.
    """
    told: list[str] = []
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    if system.lstrip().startswith(_PROMPT) and (own := _tools_in(system)) and len(messages) > 1:
        if tools and _names(tools) != _names(own):
            raise RowError("has other tools in its system prompt than in its column of tools; leave one out")
        messages, is_trained, tools = messages[1:], is_trained[1:], tools or own
        told.append(_REPLACED)
    elif tools and _TOOLS.search(system):
        told.append(_TOOLS_TWICE)
    if not tools:
        return Read(messages, is_trained, tools, told)
    read: list[dict[str, Any]] = []
    trained: list[bool | float | None] = []
    for number, (message, own_trained) in enumerate(zip(messages, is_trained, strict=True), start=1):
        parts = _apart(message, f"message {number}")
        if parts is None:
            told.append(_NO_CALL)
        read += parts or [message]
        trained += [own_trained] * len(parts or [message])
    if sum(bool(message.get("tool_calls")) for message in read) > sum(bool(m.get("tool_calls")) for m in messages):
        read = list(map(_with_thought_apart, read))
    return Read(read, trained, tools, list(dict.fromkeys(told)))


def _tools_in(system: str) -> list[Any] | None:
    """Those that a system prompt has between tags: a list, or objects one after the other."""
    found = _TOOLS.search(system)
    if found is None:
        return None
    listed = _value(found[1])
    lines = [_value(line) for line in found[1].splitlines() if line.strip()]
    with suppress(RowError):
        return read_tools(listed if isinstance(listed, list) else [listed] if listed else lines, "the system prompt")
    return None


def _names(tools: Sequence[Any]) -> list[Any]:
    return sorted(str(tool.get("function", {}).get("name")) for tool in tools)


def _apart(message: dict[str, Any], place: str) -> list[dict[str, Any]] | None:
    """A message with its calls, or one for each of the results in it; None where what looks like a call is none."""
    content = message["content"]
    if message["role"] == "tool" and "<tool_response>" in content:
        results = _RESULT.findall(content)
        is_all = results and not _RESULT.sub("", content).strip()
        return [{**message, "content": result} for result in results] if is_all else [message]
    if message["role"] != "assistant" or "<tool_call>" not in content or message.get("tool_calls"):
        return [message]
    begin = content.rfind("</think>") + 1
    first = content.find("<tool_call>", begin)
    calls = [_value(body) for body in _CALL.findall(content, begin)]
    is_end = first >= 0 and not _CALL.sub("", content[first:]).strip()
    if not is_end or not all(isinstance(call, dict | list) for call in calls):
        return None
    listed = [one for call in calls for one in (call if isinstance(call, list) else [call])]
    try:
        read = read_calls(listed, place)
    except RowError:
        return None
    return [{**message, **message_of("assistant", content[:first].rstrip()), "tool_calls": read}]


def _with_thought_apart(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning at the beginning of an answer's text, as a key of its own."""
    thought = _THOUGHT.match(message["content"])
    if message["role"] != "assistant" or thought is None or message.get("reasoning_content"):
        return message
    return {**message, "content": message["content"][thought.end() :], "reasoning_content": thought[1]}


def _value(text: str) -> Any:
    """Of JSON, or of Python's own form, in which some data have it; None: it is neither."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return ast.literal_eval(text)
    return None
