"""What a record says: a conversation, or plain text, found out from the columns it has: see FORMATS.

A format of your own is one call of `register_format`, before data are read.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from ...moe.util.entry_checks import check_fields, check_value
from .data_files import RowError
from .image_files import Source
from .pictures import COLUMNS, IMAGE, PARTS, PLACES, Mark, column_of_images, mark_of, placed, sources_in
from .tool_results import in_order_of_calls

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
# keys of a message that hold what it thinks before it speaks: DeepSeek's and Qwen's, GPT-OSS', OpenRouter's
_REASONING = ("reasoning_content", "thinking", "reasoning")
# those that hold it in another form
_REASONING_PARTS = ("reasoning_details", "thinking_blocks")
# keys of a message that say whether it is trained on, or with which weight: ours, axolotl's, OpenAI's, LLaMA-Factory's,
# ms-swift's
_OVERRIDES = ("train", "training", "weight", "loss_weight", "loss", "loss_scale")
# columns of preference data: trl's and LLaMA-Factory's, ms-swift's, OpenAI's
_PREFERENCES = ("rejected", "rejected_response", "rejected_messages", "non_preferred_output", "kto_tag")
LABELS = ("label", "kto_tag")
"""Columns that say whether an answer is desirable."""
LABELLED = (("prompt", "completion"), ("messages",), ("conversations",), ("instruction", "output"))
"""Columns that each format of labelled answers has beside that (see `labels`)."""
_IS_PREFERENCE = (
    "has the column {}: preference data, but this is supervised fine-tuning; give --task dpo for pairs of a chosen and "
    "a rejected answer or --task kto for labelled answers, leave the column out, or name those to train on with "
    "--prompt-column and --response-column, or --messages-column"
)
# keys of a tool call that hold what it hands over: OpenAI's, and that of Llama's published chat template
_ARGUMENTS = ("arguments", "parameters")
# its other keys
_ABOUT_A_CALL = ("type", "id", "index", "function", "name")
TOOLS = ("tools", "functions", "tool_defs", "tools_json", "available_tools")
"""Columns with the tools of a conversation: today's name, OpenAI's older one, verifiers', and others in use."""
_LIKE_TOOLS = re.compile(r"tool|func|(^|_)apis?(_|$)", re.IGNORECASE)
_MOST_WEIGHT = 1_000_000
_OTHER_MEDIA = ("videos", "audios", "video", "audio")
_MEDIA = (*COLUMNS, *_OTHER_MEDIA)
_OBJECTS = ("<ref-object>", "<bbox>")
_IMAGES = "\ue002images"
"""Of a message that is being read: what it says of its own images."""
# columns with a part of a question or an answer, which some formats read
_PARTS = ("history", "input", "context", *_REASONING)


@dataclass(frozen=True)
class Columns:
    """Names of columns where they are not the usual ones; empty means: find out. images: those in which images are
    looked for."""

    prompt: str = ""
    response: str = ""
    messages: str = ""
    text: str = ""
    system: str = ""
    weight: str = ""
    images: tuple[str, ...] = COLUMNS


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template takes them, and for each whether it is trained on (None: as --train-on says), or the
    weight of its loss, where that is another than 1.

    tools: what the template is told of them, if anything. arguments: what else it is told, by name. weight: of the
    record, by which those of its messages are multiplied. images: in the order in which messages have IMAGE. told: what
    a run says of such records, in words that follow their number.
    """

    messages: list[dict[str, Any]]
    is_trained: list[bool | float | None]
    tools: list[Any] | None = None
    arguments: dict[str, Any] | None = None
    weight: float = 1.0
    images: Sequence[Source] = ()
    told: Sequence[str] = ()

    @property
    def as_prompt_and_response(self) -> tuple[str, str] | None:
        """The texts of one question and its answer, if that is all there is."""
        if [message["role"] for message in self.messages] != ["user", "assistant"] or self.tools or self.arguments:
            return None
        if self.images:
            return None
        if any(message.get(key) for message in self.messages for key in ("reasoning_content", "tool_calls")):
            return None
        return self.messages[0]["content"], self.messages[1]["content"]


@dataclass(frozen=True)
class PlainText:
    """Text without a chat template. prompt: what comes before it and has no loss; None where it is no answer. weight:
    of its loss. told: as a conversation's."""

    text: str
    prompt: str | None = None
    weight: float = 1.0
    told: Sequence[str] = ()


_Read = Callable[[Mapping[str, Any], Columns], Conversation | PlainText]


@dataclass(frozen=True)
class Format:
    """A way to write instruction data.

    Attributes:
        name: in the first lines of a run.
        columns: that give it away. A data set is in the first of FORMATS whose columns its first record has.
        read: one record, given with the columns that the user has named; raises RowError. What it makes of messages is
            put together by `conversation`, which reads the columns that all conversations may have.
        unread: columns with a part of a question or an answer, which other formats read and this one would drop: a
            record that has one is refused.
        written, known_from: its row of the table in docs/reference/data-formats.md.
        is_renamed: whether the user has named its columns, and so means no others.
    """

    name: str
    columns: tuple[str, ...]
    read: _Read
    unread: tuple[str, ...]
    written: str
    known_from: str
    is_renamed: bool = False


def find_format(row: Any, columns: Columns) -> Format:
    """The format of a data set, from its first record and the columns that the user has named.

    Raises:
        RowError: none fits; the message lists the columns found and the flags that name others.
    """
    if not isinstance(row, dict):
        raise RowError(f"is no JSON object: {row!r:.80}")
    wanted = _named(columns) or FORMATS
    if wanted is FORMATS:
        _refuse_preferences(row)
    for candidate in wanted:
        if all(column in row for column in candidate.columns):
            return candidate
    known = "; ".join(" + ".join(f.columns) for f in wanted)
    raise RowError(
        f"has the columns {', '.join(map(str, row)) or '(none)'}; it needs one of: {known}; name other "
        "columns with --messages-column, --prompt-column and --response-column, or --text-column"
    )


def _refuse_preferences(row: Mapping[str, Any]) -> None:
    """Refuse preference data: an answer that a model is to avoid is none to learn."""
    found = [column for column in _PREFERENCES if column in row]
    if found:
        raise RowError(_IS_PREFERENCE.format(found[0]))


def _refuse_labelled(row: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Likewise an answer with a label, whatever it says.

    Args:
        columns: that are read, of which the label is none.
    """
    if not any(name in row and name not in columns for name in LABELS) or label_in(row) is None:
        return
    if any(all(column in row for column in known) for known in LABELLED):
        raise RowError(_IS_PREFERENCE.format(next(name for name in LABELS if name in row)))


def label_in(row: Mapping[str, Any]) -> bool | None:
    """Whether a record's answer is desirable; None where its label does not say. A table has true as text, or as a
    number, which beside records without one is a float."""
    name = next((name for name in LABELS if name in row), "label")
    return {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}.get(
        str(row.get(name)).strip().lower()
    )


def _named(columns: Columns) -> list[Format]:
    """The format that the user's own column names ask for."""
    if columns.messages:
        return [_renamed("messages", (columns.messages,), _messages_in(columns.messages))]
    if columns.text:
        return [_renamed("text", (columns.text,), _plain(columns.text))]
    if columns.prompt or columns.response:
        prompt, response = columns.prompt or "prompt", columns.response or "response"
        return [_renamed("prompt/response", (prompt, response), _pair(prompt, response))]
    return []


def _renamed(name: str, columns: tuple[str, ...], read: _Read) -> Format:
    """A format with the user's own columns, beside which they want no other to be read."""
    known = next(known for known in FORMATS if known.name == name)
    return replace(known, columns=columns, read=read, unread=(), is_renamed=True)


def check_columns(row: Any, columns: Sequence[str]) -> None:
    """
    Raises:
        RowError: a record is no object, or lacks a column that gave the data set's format away.
    """
    if not isinstance(row, dict):
        raise RowError(f"is no JSON object: {row!r:.80}")
    missing = [column for column in columns if column not in row]
    if missing:
        found = ", ".join(map(str, row)) or "(none)"
        raise RowError(f"has no column {missing[0]!r}, unlike the records before it; found: {found}")


def read_row(row: Any, data_format: Format, columns: Columns) -> "Conversation | PlainText":
    """One record of a data set whose format is known, with its weight.

    Raises:
        RowError: a column is missing or holds something else.
    """
    check_columns(row, data_format.columns)
    if not data_format.is_renamed:
        _refuse_labelled(row, data_format.columns)
    dropped = next((column for column in data_format.unread if row.get(column)), None)
    if dropped is not None:
        raise RowError(
            f"has {dropped} beside {' and '.join(data_format.columns)}, where it is ignored; merge it "
            "into them, or name the columns to read with --prompt-column and --response-column"
        )
    said = data_format.read(row, columns)
    if isinstance(said, PlainText):
        if not data_format.is_renamed:
            _refuse_media(row, _MEDIA)
        said = replace(said, told=_unread_tools(row, data_format.columns))
    return replace(said, weight=_weight_in(row, columns.weight)) if columns.weight else said


def _weight_in(row: Mapping[str, Any], column: str) -> float:
    """A record's weight; a table may have it as text."""
    if column not in row:
        raise RowError(f"has no column {column!r}; found: {', '.join(map(str, row))}; --weight-column names it")
    value = row[column]
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    return _weight(value, column)


def _weight(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= _MOST_WEIGHT:
        raise RowError(f"{name} is {value!r:.80}; expected a weight from 0 to {_MOST_WEIGHT:,}, or true or false")
    return float(value)


def _messages_in(column: str) -> _Read:
    """OpenAI's keys or sharegpt's, message by message."""

    def read(row: Mapping[str, Any], columns: Columns) -> Conversation:
        return conversation(row, columns, *_messages(row[column], column))

    return read


def _plain(column: str) -> _Read:
    return lambda row, columns: _plain_text(text_in(row, column), columns)


def _plain_text(text: str, columns: Columns, prompt: str | None = None) -> PlainText:
    if columns.system:
        raise RowError("is plain text, which has no system prompt; leave out --system-column")
    return PlainText(text, prompt)


def _pair(prompt: str, response: str) -> _Read:
    def read(row: Mapping[str, Any], columns: Columns) -> Conversation:
        if holds_messages(row[prompt], row[response]):
            return _prompt_and_completion(row, columns, prompt, response)
        messages = [message_of("user", text_in(row, prompt)), message_of("assistant", text_in(row, response))]
        return conversation(row, columns, messages, [None, None])

    return read


def read_answer(row: Mapping[str, Any], columns: Columns) -> Conversation | PlainText:
    """A `prompt`, in which nothing is trained on, and its answer, the `completion`: of a preference pair.

    Raises:
        RowError: they are neither texts nor lists of messages, or what is beside them has no place.
    """
    said = _prompt_and_text(row, columns)
    if isinstance(said, PlainText):
        return said
    before = len(_messages(row["prompt"], "prompt")[0])
    # a system prompt may have come in front
    before += len(said.messages) - before - len(_messages(row["completion"], "completion")[0])
    context: list[bool | float | None] = [False] * before
    if any(type(own) is float for own in said.is_trained[before:]):
        raise RowError("has a message with a weight, but preference data are not weighted; leave it out")
    return replace(said, is_trained=context + said.is_trained[before:])


def _prompt_and_text(row: Mapping[str, Any], columns: Columns) -> Conversation | PlainText:
    """trl's two forms of prompt and completion."""
    if holds_messages(row["prompt"], row["completion"]):
        return _prompt_and_completion(row, columns, "prompt", "completion")
    named = (columns.system or "system", *TOOLS, *_MEDIA)
    beside = next((key for key in named if row.get(key)), None)
    if beside is not None:
        raise RowError(
            f"has {beside}, which a plain-text prompt and completion cannot use; to read these as "
            "question and answer, give --prompt-column prompt --response-column completion"
        )
    return _plain_text(text_in(row, "completion"), columns, text_in(row, "prompt"))


def holds_messages(*values: Any) -> bool:
    """Whether a question and its answer are lists of messages, or their JSON, as tables have it. One text alone may
    quote messages."""
    return any(isinstance(value, list) for value in values) or all(
        isinstance(value, str) and re.match(r"""\s*\[\s*{\s*['"](role|from|content|value)['"]\s*:""", value)
        for value in values
    )


def _prompt_and_completion(row: Mapping[str, Any], columns: Columns, prompt: str, response: str) -> Conversation:
    """trl's conversational form: two lists of messages, of which the second alone is trained on."""
    before, given = _messages(row[prompt], prompt)
    after, overrides = _messages(row[response], response)
    # an answer in the prompt is an example, unless it says otherwise
    context = [
        False if said is None and message["role"] == "assistant" else said
        for message, said in zip(before, given, strict=True)
    ]
    return conversation(row, columns, before + after, context + overrides)


def _question(question: str, answer: str, further: str = "") -> _Read:
    """A question, perhaps with more of it in a column of its own, and its answer; perhaps behind earlier turns."""

    def read(row: Mapping[str, Any], columns: Columns) -> Conversation:
        asked = text_in(row, question)
        if further and row.get(further):
            asked += "\n" + text_in(row, further)
        messages = [*history_in(row), message_of("user", asked), message_of("assistant", text_in(row, answer))]
        return conversation(row, columns, messages, [None] * len(messages))

    return read


def history_in(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Earlier turns as LLaMA-Factory has them: pairs of question and answer."""
    messages: list[dict[str, Any]] = []
    for turn in json_value(row.get("history"), "history", list, "a list") or []:
        if not (isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise RowError(f"history has {turn!r:.80}, not a pair of question and answer")
        messages += [message_of("user", turn[0]), message_of("assistant", turn[1])]
    return messages


FORMATS = [
    Format(
        "messages",
        ("messages",),
        _messages_in("messages"),
        unread=(),
        written="`messages`: `role`, `content` (a text or a list of text parts), optionally "
        "`tool_calls`; optional column `tools` (or `functions`)",
        known_from="OpenAI, trl, axolotl, ms-swift",
    ),
    Format(
        "sharegpt",
        ("conversations",),
        _messages_in("conversations"),
        unread=(),
        written="`conversations`: `from`, `value`",
        known_from="sharegpt, LLaMA-Factory",
    ),
    Format(
        "prompt/completion",
        ("prompt", "completion"),
        _prompt_and_text,
        unread=_PARTS,
        written="`prompt`, `completion`: lists of messages, or plain texts, which no chat template wraps",
        known_from="trl",
    ),
    Format(
        "prompt/response",
        ("prompt", "response"),
        _pair("prompt", "response"),
        unread=_PARTS,
        written="`prompt`, `response`",
        known_from="ms-swift",
    ),
    Format(
        "query/response",
        ("query", "response"),
        _question("query", "response"),
        unread=("input", "context", *_REASONING),
        written="`query`, `response`, perhaps `system`, `history`",
        known_from="ms-swift",
    ),
    Format(
        "alpaca",
        ("instruction", "output"),
        _question("instruction", "output", "input"),
        unread=("context", *_REASONING),
        written="`instruction`, `output`, perhaps `input`, `system`, `history`",
        known_from="alpaca",
    ),
    Format(
        "dolly",
        ("instruction", "response"),
        _question("instruction", "response", "context"),
        unread=("input", *_REASONING),
        written="`instruction`, `response`, perhaps `context`, `system`, `history`",
        known_from="dolly",
    ),
    Format(
        "question/answer",
        ("question", "answer"),
        _pair("question", "answer"),
        unread=_PARTS,
        written="`question`, `answer`, perhaps `system`",
        known_from="GSM8K",
    ),
    Format(
        "text",
        ("text",),
        _plain("text"),
        unread=(),
        written="`text`: plain text, all of it trained on",
        known_from="any corpus",
    ),
]
"""In the order in which they are tried."""
_added: dict[str, int] = {}
"""Versions of those that were registered, by name."""


def register_format(added: Format, *, before: str, version: int) -> None:
    """Let `--dataset` read one more format; docs/how-to/extend.md has an example.

    Args:
        before: name of the format before which it is tried: of those that have columns in common, the one that asks
            for more comes first.
        version: raise it when `added.read` makes something else of a record, so that what is cached is not taken.

    Raises:
        ValueError: its name or its columns are those of another format, it lacks something, or there is no `before`.
    """
    what = f"register_format: the format {added.name!r}"
    for name, value, hint in (("before", before, str), ("version", version, int)):
        check_value(what, name, value, hint)
    lacking = [
        field.name
        for field in fields(added)
        if field.name not in ("unread", "is_renamed") and not getattr(added, field.name)
    ]
    if lacking:
        raise ValueError(f"{what} has no {lacking[0]}")
    check_fields(what, added)
    names = [known.name for known in FORMATS]
    if before not in names:
        raise ValueError(f"register_format: there is no format {before!r} to come before; known: {', '.join(names)}")
    for known in FORMATS:
        if known.name == added.name or set(known.columns) == set(added.columns):
            what = f"is called {known.name!r}" if known.name == added.name else f"has the columns {known.columns}"
            raise ValueError(f"register_format: another format {what}")
    earlier = next((k.name for k in FORMATS[: names.index(before)] if set(k.columns) <= set(added.columns)), None)
    if earlier is not None:
        raise ValueError(
            f"register_format: {added.name!r} would never be found after {earlier!r}, as it has all "
            "of its columns; register it before that one"
        )
    FORMATS.insert(names.index(before), added)
    _added[added.name] = version


def registered_formats() -> list[list[Any]]:
    """What records may have been read by beside our own formats: place, name, columns and version of each."""
    return [
        [place, known.name, known.columns, known.unread, _added[known.name]]
        for place, known in enumerate(FORMATS)
        if known.name in _added
    ]


def conversation(
    row: Mapping[str, Any], columns: Columns, messages: list[dict[str, Any]], is_trained: list[bool | float | None]
) -> Conversation:
    """Messages as they were read, with the record's own system prompt in front, if it has one, and its tools.

    Raises:
        RowError: it has two system prompts, media, or tools that are none.
    """
    if columns.system and columns.system not in row:
        raise RowError(f"has no column {columns.system!r}; found: {', '.join(row)}; --system-column names it")
    order, told = in_order_of_calls(messages)
    messages, is_trained = [messages[at] for at in order], [is_trained[at] for at in order]
    name = columns.system or "system"
    system = text_in(row, name) if row.get(name) else ""
    if system and messages[0]["role"] != "system":
        messages = [message_of("system", system), *messages]
        is_trained = [None, *is_trained]
    elif system and messages[0]["content"].strip() != system.strip():
        raise RowError(f"has a system prompt in {name} and another in its first message; leave one out")
    _refuse_media(row, _OTHER_MEDIA)
    own = [source for message in messages for source in message.pop(_IMAGES, ())]
    has_column = column_of_images(row, columns.images) is not None
    images = placed(messages, own, sources_in(row, columns.images)) if own or has_column else []
    _refuse_objects(row, messages)
    arguments = json_value(row.get("chat_template_kwargs"), "chat_template_kwargs", dict, "an object")
    told += _unread_tools(row, (*TOOLS, *vars(columns).values()))
    return Conversation(messages, is_trained, _tools_in(row), arguments, images=images, told=told)


def _tools_in(row: Mapping[str, Any]) -> list[Any] | None:
    found = {name: tools for name in TOOLS if (tools := _tools(row.get(name), name))}
    for name, tools in found.items():
        first = next(iter(found))
        if tools != found[first]:
            raise RowError(f"has different {first} and {name}; leave one out")
    return next(iter(found.values()), None)


def _unread_tools(row: Mapping[str, Any], read: Sequence[str]) -> list[str]:
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


def _refuse_objects(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ms-swift's marks of objects, whose names and boxes it writes in a form that depends on the model."""
    tags = [tag for tag in _OBJECTS if any(tag in message["content"] for message in messages)]
    if tags and row.get("objects"):
        raise RowError(
            f"has objects and {' and '.join(tags)} in its text, which would be learned as it stands; write the names "
            "and boxes into the text as the model is to write them"
        )


def _refuse_media(said: Mapping[str, Any], keys: Sequence[str], place: str = "") -> None:
    """Refuse what is not read where it stands."""
    media = next((key for key in keys if said.get(key)), None)
    if media is not None:
        remedy = "it is not text or images: leave it out"
        if media in COLUMNS:
            remedy = PLACES
        raise RowError(f"{place}has {media}; {remedy}")


def _tools(tools: Any, name: str) -> list[Any] | None:
    """A list of them, or the JSON text of one, as tables have it: each as templates take it, within `function`."""
    found = json_value(tools, name, list, "a list")
    if found is None:
        return None
    objects = [json_value(tool, f"{name} has an entry that", dict, "an object") for tool in found]
    if None in objects:
        raise RowError(f"{name} has an entry that is {found[objects.index(None)]!r:.80}, not an object")
    return [
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool
        for tool in objects
    ]


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


def _messages(turns: Any, column: str) -> tuple[list[dict[str, Any]], list[bool | float | None]]:
    """Messages of a list of them, or of its JSON text, as tables have it."""
    if isinstance(turns, str) and turns.strip():
        turns = json_value(turns, column, list, "a list of messages")
    if not isinstance(turns, list | tuple) or not turns:
        raise RowError(f"{column} is {turns!r:.80}, not a list of messages")
    messages: list[dict[str, Any]] = []
    is_trained: list[bool | float | None] = []
    turns = [_decoded(turn, f"{column}, message {number}") for number, turn in enumerate(turns, start=1)]
    for number, turn in enumerate(turns, start=1):
        place = f"{column}, message {number}"
        message, override = _read_message(turn, place), _override(turn, place)
        if continues_answer(turns, number - 1) and not _is_next_step(messages[-1], message):
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
    _refuse_media(turn, _MEDIA, f"{place} ")


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
    taken = ("role", "from", "content", "value", "tool_calls", "function_call", *_REASONING, *_OVERRIDES)
    # a column of a Parquet file holds None in every message that lacks the key
    others = {key: value for key, value in turn.items() if key not in taken and value is not None}
    return {
        **message_of(_ROLES.get(role, role), said.text),
        **others,
        **({"reasoning_content": said.reasoning or reasoning} if said.reasoning or reasoning else {}),
        **({"tool_calls": _read_calls(calls or said.calls, place)} if calls or said.calls else {}),
        **({_IMAGES: said.images} if said.images else {}),
    }


def _reasoning(turn: Mapping[str, Any], place: str) -> str:
    """What the message has beside its content, under one of the names in use."""
    found = {key: turn[key] for key in _REASONING if turn.get(key)}
    for key, reasoning in found.items():
        if not isinstance(reasoning, str):
            raise RowError(f"{place}: {key} is {reasoning!r:.80}, not text")
    if len(set(found.values())) > 1:
        raise RowError(f"{place} has reasoning under {' and '.join(found)}, and they differ; leave one out")
    parts = next((key for key in _REASONING_PARTS if turn.get(key)), None)
    if parts is not None and not found:
        raise RowError(f"{place} has {parts}, which would be lost; give it as {_REASONING[0]}")
    return next(iter(found.values()), "")


def _read_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Tool calls as templates take them: a function's name and its arguments, an object even where the data have its
    JSON; without any, an empty one."""
    if not isinstance(calls, list | tuple):
        raise RowError(f"{place}: tool_calls is {calls!r:.80}, not a list of them")
    read = []
    for call in calls:
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
        function = {**_without_arguments(function), "arguments": arguments or {}}
        outer = _without_arguments(call) if "function" in call else {"type": "function"}
        read.append({**outer, "function": function})
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
    said: dict[str, list[str]] = {"text": [], "reasoning": [], "tool_call": []}
    images: list[Mark] = []
    for part in content:
        kind, value = "text", part
        if isinstance(part, dict):
            kind = part.get("type", "text")
            if kind in PARTS:
                images.append(mark_of(part, f"{place}: an image"))
                said["text"].append(IMAGE)
                continue
            # OpenAI's key and LLaMA-Factory's; a column of a Parquet file holds None for the one that is lacking
            value = next((part[key] for key in ("text", "value") if part.get(key) is not None), None)
        if not (isinstance(kind, str) and kind in said and isinstance(value, str)):
            raise RowError(
                f"{place}: content has a part that is not one of {', '.join((*said, *PARTS))}, with text as its "
                f"value: {part!r:.80}"
            )
        said[kind].append(value)
    calls = tuple(_read_call(call, place) for call in said["tool_call"])
    return _Content("".join(said["text"]), "".join(said["reasoning"]), calls, tuple(images))


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
    weights = {key: _weight(value, f"{place}: {key}") for key, value in found.items()}
    # true says nothing of how much
    numbers = {weights[key] for key, value in found.items() if value is not True}
    if len(numbers) > 1 or len({bool(weight) for weight in weights.values()}) > 1:
        raise RowError(f"{place} has {' and '.join(found)}, which contradict each other; leave one out")
    weight = next(iter(numbers), 1.0)
    return (bool(weight) if weight in (0, 1) else weight) if found else None


def message_of(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def text_in(row: Mapping[str, Any], column: str) -> str:
    if not isinstance(row[column], str):
        raise RowError(f"{column} is {row[column]!r:.80}, not text")
    return row[column]
