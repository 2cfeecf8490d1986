"""What a record says: a conversation, or plain text, found out from the columns it has: see FORMATS.

A format of your own is one call of `register_format`, before data are read.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from ...moe.util.entry_checks import check_fields, check_value
from .calls_in_text import read_texts
from .data_files import RowError
from .image_files import Source
from .messages import (
    IMAGES,
    MEDIA,
    OTHER_MEDIA,
    REASONING,
    content_in,
    json_value,
    message_of,
    read_calls,
    read_messages,
    refuse_media,
    text_in,
    weight_of,
)
from .pictures import COLUMNS, column_of_images, placed, sources_in
from .tool_results import in_order_of_calls
from .tools import TOOLS, tools_in, unread_tools

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
_OBJECTS = ("<ref-object>", "<bbox>")
# columns with a part of a question or an answer, which some formats read
_PARTS = ("history", "input", "context", *REASONING)


@dataclass(frozen=True)
class Columns:
    """Names of columns where they are not the usual ones; empty means: find out. images: those in which images are
    looked for. system_message: what stands in for a system prompt in conversations without one."""

    prompt: str = ""
    response: str = ""
    messages: str = ""
    text: str = ""
    system: str = ""
    weight: str = ""
    images: tuple[str, ...] = COLUMNS
    system_message: str = ""


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
Part = Callable[[Mapping[str, Any]], list[dict[str, Any]]]
"""A part of a record's conversation, as messages: its prompt, or its answer. Formats are made of one of each."""


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
            refuse_media(row, MEDIA)
        said = replace(said, told=unread_tools(row, data_format.columns))
    return replace(said, weight=_weight_in(row, columns.weight)) if columns.weight else said


def _weight_in(row: Mapping[str, Any], column: str) -> float:
    """A record's weight; a table may have it as text."""
    if column not in row:
        raise RowError(f"has no column {column!r}; found: {', '.join(map(str, row))}; --weight-column names it")
    value = row[column]
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    return weight_of(value, column)


def _messages_in(column: str) -> _Read:
    """OpenAI's keys or sharegpt's, message by message."""

    def read(row: Mapping[str, Any], columns: Columns) -> Conversation:
        return conversation(row, columns, *read_messages(row[column], column))

    return read


def _plain(column: str) -> _Read:
    return lambda row, columns: _plain_text(text_in(row, column), columns)


def _plain_text(text: str, columns: Columns, prompt: str | None = None) -> PlainText:
    if columns.system:
        raise RowError("is plain text, which has no system prompt; leave out --system-column")
    if columns.system_message:
        raise RowError("is plain text, which has no system prompt; leave out the data set's system")
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
    if not holds_messages(row["prompt"], row["completion"]):
        return _prompt_and_text(row, columns)
    before, _ = read_messages(row["prompt"], "prompt")
    after, overrides = read_messages(row["completion"], "completion")
    if any(type(own) is float for own in overrides):
        raise RowError("has a message with a weight, but preference data are not weighted; leave it out")
    said = conversation(row, columns, before + after, [False] * len(before) + overrides)
    # a system prompt may have come in front
    return replace(said, is_trained=[False, *said.is_trained[1:]])


def _prompt_and_text(row: Mapping[str, Any], columns: Columns) -> Conversation | PlainText:
    """trl's two forms of prompt and completion."""
    if holds_messages(row["prompt"], row["completion"]):
        return _prompt_and_completion(row, columns, "prompt", "completion")
    named = (columns.system or "system", *TOOLS, *MEDIA)
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
    before, given = read_messages(row[prompt], prompt)
    after, overrides = read_messages(row[response], response)
    # an answer in the prompt is an example, unless it says otherwise
    context = [
        False if said is None and message["role"] == "assistant" else said
        for message, said in zip(before, given, strict=True)
    ]
    return conversation(row, columns, before + after, context + overrides)


def asked(question: str, further: str = "") -> Part:
    """A prompt that is a question, perhaps with more of it in a column of its own, perhaps behind earlier turns."""

    def read(row: Mapping[str, Any]) -> list[dict[str, Any]]:
        more = text_in(row, further) if further and row.get(further) else ""
        return [*_history_in(row), message_of("user", "\n".join(filter(None, (text_in(row, question), more))))]

    return read


def _history_in(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Earlier turns as LLaMA-Factory has them: pairs of question and answer."""
    messages: list[dict[str, Any]] = []
    for turn in json_value(row.get("history"), "history", list, "a list") or []:
        if not (isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise RowError(f"history has {turn!r:.80}, not a pair of question and answer")
        messages += [message_of("user", turn[0]), message_of("assistant", turn[1])]
    return messages


def answered(column: str) -> Part:
    """An answer that is a text."""
    return lambda row: [message_of("assistant", text_in(row, column))]


def called(column: str) -> Part:
    """An answer that is calls of tools, and nothing else."""

    def read(row: Mapping[str, Any]) -> list[dict[str, Any]]:
        calls = json_value(row[column], column, list, "a list of tool calls")
        if not calls:
            raise RowError(f"{column} has no tool call")
        return [{**message_of("assistant", ""), "tool_calls": read_calls(calls, column)}]

    return read


def _of(prompt: Part, answer: Part) -> _Read:
    def read(row: Mapping[str, Any], columns: Columns) -> Conversation:
        messages = [*prompt(row), *answer(row)]
        return conversation(row, columns, messages, [None] * len(messages))

    return read


FORMATS = [
    Format(
        "messages",
        ("messages",),
        _messages_in("messages"),
        unread=(),
        written="`messages`: `role`, `content` (a text or a list of text parts), optionally "
        "`tool_calls`; optional column `tools` (or `functions`)",
        known_from="OpenAI, Anthropic, trl, axolotl, ms-swift",
    ),
    Format(
        "sharegpt",
        ("conversations",),
        _messages_in("conversations"),
        unread=(),
        written="`conversations`: `from`, `value`",
        known_from="sharegpt, Hermes, LLaMA-Factory",
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
        _of(asked("query"), answered("response")),
        unread=("input", "context", *REASONING),
        written="`query`, `response`, perhaps `system`, `history`",
        known_from="ms-swift",
    ),
    Format(
        "query/answers",
        ("query", "answers"),
        _of(asked("query"), called("answers")),
        unread=("input", "context", *REASONING),
        written="`query`, `answers`: calls, `tools`",
        known_from="xlam",
    ),
    Format(
        "alpaca",
        ("instruction", "output"),
        _of(asked("instruction", "input"), answered("output")),
        unread=("context", *REASONING),
        written="`instruction`, `output`, perhaps `input`, `system`, `history`",
        known_from="alpaca",
    ),
    Format(
        "dolly",
        ("instruction", "response"),
        _of(asked("instruction", "context"), answered("response")),
        unread=("input", *REASONING),
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
    system = content_in(row, name) if row.get(name) else ""
    if not system and messages[0]["role"] not in ("system", "developer"):
        system = columns.system_message
    if system and messages[0]["role"] != "system":
        messages = [message_of("system", system), *messages]
        is_trained = [None, *is_trained]
    elif system and messages[0]["content"].strip() != system.strip():
        raise RowError(f"has a system prompt in {name} and another in its first message; leave one out")
    read = read_texts(messages, is_trained, tools_in(row))
    messages = read.messages
    refuse_media(row, OTHER_MEDIA)
    own = [source for message in messages for source in message.pop(IMAGES, ())]
    has_column = column_of_images(row, columns.images) is not None
    images = placed(messages, own, sources_in(row, columns.images)) if own or has_column else []
    _refuse_objects(row, messages)
    arguments = json_value(row.get("chat_template_kwargs"), "chat_template_kwargs", dict, "an object")
    told += [*read.told, *unread_tools(row, (*TOOLS, *vars(columns).values()))]
    return Conversation(messages, read.is_trained, read.tools, arguments, images=images, told=told)


def _refuse_objects(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ms-swift's marks of objects, whose names and boxes it writes in a form that depends on the model."""
    tags = [tag for tag in _OBJECTS if any(tag in message["content"] for message in messages)]
    if tags and row.get("objects"):
        raise RowError(
            f"has objects and {' and '.join(tags)} in its text, which would be learned as it stands; write the names "
            "and boxes into the text as the model is to write them"
        )
