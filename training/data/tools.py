"""Tools of a conversation: the columns that have them, and the forms in which data do."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from .data_files import RowError
from .messages import json_value

TOOLS = ("tools", "functions", "tool_defs", "tools_json", "available_tools")
"""Columns with the tools of a conversation: today's name, OpenAI's older one, verifiers', and others in use."""
_LIKE_TOOLS = re.compile(r"tool|func|(^|_)apis?(_|$)", re.IGNORECASE)
_SCHEMAS = ("parameters", "input_schema")
"""Keys of a tool that hold the schema of its arguments: OpenAI's, Anthropic's."""


def tools_in(row: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a record, as chat templates take them.

    Raises:
        RowError: they are none, or two columns have different ones.
    """
    found = {name: tools for name in TOOLS if (tools := read_tools(row.get(name), name))}
    for name, tools in found.items():
        first = next(iter(found))
        if tools != found[first]:
            raise RowError(f"has different {first} and {name}; leave one out")
    return next(iter(found.values()), None)


def read_tools(tools: Any, name: str) -> list[Any] | None:
    """A list of tools, or the JSON text of one, as tables have it; None: there are none.

    Raises:
        RowError: it is something else.
    """
    found = json_value(tools, name, list, "a list")
    if found is None:
        return None
    objects = [json_value(tool, f"{name} has an entry that", dict, "an object") for tool in found]
    if None in objects:
        raise RowError(f"{name} has an entry that is {found[objects.index(None)]!r:.80}, not an object")
    return [_as_templates_take_it(tool, name) for tool in objects]


def _as_templates_take_it(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """OpenAI's form: all within `function`, and the schema as `parameters`."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        if function is not None or "name" not in tool:
            return {**tool}
        # the flat forms of Anthropic and of OpenAI's newer API have their type beside the name
        function = {key: value for key, value in tool.items() if key != "type"}
    schemas = [key for key in _SCHEMAS if function.get(key) is not None]
    if len(schemas) > 1:
        raise RowError(f"{name} has a tool with {' and '.join(schemas)}; leave one out")
    changed = {key if key not in schemas else _SCHEMAS[0]: value for key, value in function.items()}
    if schemas:
        changed[_SCHEMAS[0]] = _schema(changed[_SCHEMAS[0]])
    return {**(tool if "function" in tool else {"type": "function"}), "function": changed}


def _schema(parameters: Any) -> Any:
    """The JSON schema of a tool's arguments. xlam has only what a schema calls properties, of which some templates
    would write nothing."""
    if not isinstance(parameters, Mapping) or not parameters:
        return parameters
    is_schema = any(key in parameters for key in ("properties", "$ref", "$defs", "additionalProperties"))
    if is_schema or not all(isinstance(value, Mapping) for value in parameters.values()):
        return parameters
    return {"type": "object", "properties": parameters}


def unread_tools(row: Mapping[str, Any], read: Sequence[str]) -> list[str]:
    """What is told of columns that are called like tools, hold a list or an object, and are not read."""
    return [
        f"have the column {name}, which looks like tools and is not read (those of a conversation are: {TOOLS[0]})"
        for name, value in row.items()
        if isinstance(name, str) and name not in read and _LIKE_TOOLS.search(name) and _is_structure(value)
    ]


def _is_structure(value: Any) -> bool:
    if isinstance(value, str) and value.strip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return isinstance(value, list | dict) and bool(value)
