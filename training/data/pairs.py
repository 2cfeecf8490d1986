"""Preference pairs: what a record says of a prompt, an answer that is preferred, and one that is not.

The prompt has no loss. Answers are lists of messages, or texts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .chat import TrainOn
from .data_files import RowError
from .formats import Columns, Part, answered, asked, check_columns, holds_messages, read_answer
from .messages import continues_answer, json_value, message_of
from .record_kinds import ReadEntry, RecordKind, Said, TokenTable

Row = Mapping[str, Any]
_OF_EITHER = ("is_cut", "is_dropped", "is_endless", "is_unexplained", "loses_call", "drops_reasoning")
"""Columns that are true of a pair where they are of one of its sides."""
FIRST, FIRST_TARGETS = "first", "first_targets"
"""Columns: the tokens of a pair's chosen one, or the prompt's before a labelled answer; its targets."""


@dataclass(frozen=True)
class PairFormat:
    """A way to write preference pairs, or labelled answers (see `labels`).

    Attributes:
        name: in the first lines of a run. columns: that give it away, of which the first that fits a data set's first
            record is taken.
        split: of a record, the prompt and its answers, (prompt, chosen, rejected): each a text, a list of messages, or
            its JSON.
        written, known_from: its row of the table of formats.
        within: a column that holds more of the record than messages, such as its tools; empty: there is none.
    """

    name: str
    columns: tuple[str, ...]
    split: Callable[[Row], tuple[Any, ...]]
    written: str
    known_from: str
    within: str = ""


def _with_prompt(row: Row) -> tuple[Any, Any, Any]:
    """trl's. Some data sets repeat the prompt in both answers, or have it as text in front of lists of messages."""
    prompt, chosen, rejected = (_parsed(row[name], name) for name in ("prompt", "chosen", "rejected"))
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        return row["prompt"], row["chosen"], row["rejected"]
    if isinstance(prompt, str):
        if chosen[:1] == rejected[:1] and not _is_answer(chosen):
            return _without_prompt(row)
        prompt = [message_of("user", prompt)]
    number = len(prompt) if isinstance(prompt, list) else 0
    if chosen[:number] == prompt == rejected[:number]:
        chosen, rejected = chosen[number:], rejected[number:]
    return prompt, chosen, rejected


def of_parts(*parts: Part) -> Callable[[Row], tuple[Any, ...]]:
    """Of a record a prompt and its answers, each as messages."""
    return lambda row: tuple(part(row) for part in parts)


_BOTH = answered("chosen"), answered("rejected")


def _with_conversation(row: Row) -> tuple[Any, Any, Any]:
    """LLaMA-Factory's sharegpt form: earlier turns, and one message for each answer."""
    return row["conversations"], [_message(row, "chosen")], [_message(row, "rejected")]


def _with_rejected_response(row: Row) -> tuple[Any, Any, Any]:
    """ms-swift's: a conversation that ends with the preferred answer, and the text of the other one."""
    return *ending_in_answer(row, "messages"), answered("rejected_response")(row)


def ending_in_answer(row: Row, column: str) -> tuple[list[Any], list[Any]]:
    """(the messages before the last answer of a conversation, that answer: a message, or a text and its calls)."""
    messages = json_value(row[column], column, list, "a list of messages") or []
    begin = _begin_of_answer(messages, len(messages) - 1)
    if begin < 1:
        raise RowError(f"{column} has no answer behind a prompt")
    return messages[:begin], messages[begin:]


def _begin_of_answer(messages: list[Any], index: int) -> int:
    """Where the answer begins that a message is part of."""
    while continues_answer(messages, index):
        index -= 1
    return index


def _of_openai(row: Row) -> tuple[Any, Any, Any]:
    return _object(row, "input").get("messages"), row["preferred_output"], row["non_preferred_output"]


def _without_prompt(row: Row) -> tuple[Any, Any, Any]:
    """trl's implicit prompt: what both begin with."""
    chosen, rejected = (_parsed(row[name], name) for name in ("chosen", "rejected"))
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise RowError("has chosen and rejected that are not both texts, or both lists of messages")
    number = next((i for i, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), None)
    if number is None:
        number = min(len(chosen), len(rejected))
        if isinstance(chosen, list):
            # an answer remains where one conversation is the beginning of the other
            number -= 1
    if isinstance(chosen, list):
        number = min(_begin_of_answer(messages, number) for messages in (chosen, rejected))
    asked = next((name for name in _QUESTIONS if row.get(name)), None)
    if isinstance(chosen, str) and asked is not None:
        raise RowError(f"has {asked} beside chosen and rejected, which are texts; if it is the prompt, call it prompt")
    if isinstance(chosen, str) and number and chosen[number - 1] == " ":
        # a space belongs to the word behind it
        number -= 1
    if number <= 0:
        raise RowError("has chosen and rejected that do not begin alike, and no prompt")
    return chosen[:number], chosen[number:], rejected[number:]


PAIR_FORMATS = [
    PairFormat(
        "prompt/chosen/rejected",
        ("prompt", "chosen", "rejected"),
        _with_prompt,
        written="`prompt`, `chosen`, `rejected`: lists of messages, or plain texts, which no chat template wraps",
        known_from="trl",
    ),
    PairFormat(
        "sharegpt pairs",
        ("conversations", "chosen", "rejected"),
        _with_conversation,
        written="`conversations`, and in `chosen` and `rejected` a message each",
        known_from="LLaMA-Factory",
    ),
    PairFormat(
        "alpaca pairs",
        ("instruction", "chosen", "rejected"),
        of_parts(asked("instruction", "input"), *_BOTH),
        written="`instruction`, perhaps `input`, `system`, `history`; `chosen`, `rejected`: texts",
        known_from="LLaMA-Factory",
    ),
    PairFormat(
        "question/chosen/rejected",
        ("question", "chosen", "rejected"),
        of_parts(asked("question"), *_BOTH),
        written="`question`, perhaps `system`; `chosen`, `rejected`: texts",
        known_from="Intel's orca_dpo_pairs",
    ),
    PairFormat(
        "messages/rejected_response",
        ("messages", "rejected_response"),
        _with_rejected_response,
        written="`messages`, whose last is preferred, and the text `rejected_response`",
        known_from="ms-swift",
    ),
    PairFormat(
        "messages/rejected_messages",
        ("messages", "rejected_messages"),
        lambda row: _without_prompt({"chosen": row["messages"], "rejected": row["rejected_messages"]}),
        written="`messages`, `rejected_messages`: conversations that begin with the same prompt",
        known_from="ms-swift",
    ),
    PairFormat(
        "preferred/non-preferred",
        ("input", "preferred_output", "non_preferred_output"),
        _of_openai,
        written="`input` with `messages`, perhaps `tools`; `preferred_output`, `non_preferred_output`: lists of "
        "messages",
        known_from="OpenAI",
        within="input",
    ),
    PairFormat(
        "chosen/rejected",
        ("chosen", "rejected"),
        _without_prompt,
        written="`chosen`, `rejected`: lists of messages, or texts, that begin with the same prompt",
        known_from="trl",
    ),
]
"""In the order in which they are tried."""


def find_pair_format(row: Any) -> PairFormat:
    """The format of preference data, from its first record.

    Raises:
        RowError: none fits; the message lists the columns found.
    """
    if not isinstance(row, dict):
        raise RowError(f"is no JSON object: {row!r:.80}")
    for known in PAIR_FORMATS:
        if all(column in row for column in known.columns):
            return known
    needed = "; ".join(" + ".join(known.columns) for known in PAIR_FORMATS)
    raise RowError(
        f"has the columns {', '.join(map(str, row)) or '(none)'}, but --task dpo needs one of these: {needed}"
    )


def read_answers(
    row: Any, known: PairFormat, columns: Columns, names: Sequence[str], beside: Sequence[str] = ()
) -> list[Said]:
    """The answers of a record, each behind its prompt.

    Args:
        names: of the answers that the format splits a record into, for messages.
        beside: further columns that are no part of what is said.

    Raises:
        RowError: a column is missing or holds something else.
    """
    check_columns(row, known.columns)
    prompt, *answers = known.split(row)
    more = _object(row, known.within) if known.within else {}
    others = {name: value for name, value in {**row, **more}.items() if name not in (*known.columns, *beside)}
    said = []
    for name, answer in zip(names, answers, strict=True):
        try:
            said.append(read_answer({**others, "prompt": prompt, "completion": answer}, columns))
        except RowError as error:
            if name == "completion":
                raise
            raise RowError(f"{error} ({name}, which is read as completion)") from error
    return said


_QUESTIONS = ("input", "query")
"""Columns that may hold a prompt, which texts without one do not have beside them."""


def _parsed(value: Any, column: str) -> Any:
    """A list of messages, also where a table has its JSON."""
    is_json = isinstance(value, str) and holds_messages(value)
    return json_value(value, column, list, "a list of messages") if is_json else value


def _is_answer(messages: list[Any]) -> bool:
    first = messages[0] if messages else None
    return not isinstance(first, dict) or first.get("role", first.get("from")) not in ("system", "user", "human")


def _object(row: Row, column: str) -> Row:
    found: Row = json_value(row[column], column, dict, "an object with messages") or {}
    return found


def _message(row: Row, column: str) -> Any:
    found = json_value(row[column], column, dict, "a message")
    if found is None:
        raise RowError(f"{column} is {row[column]!r:.80}, not a message")
    return found


def paired(table: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """A table of samples, chosen and rejected in turn, as one of pairs.

    A pair's tokens are those of both, one behind the other; `first` is the number of the first one's tokens, and
    `first_targets` that of its targets. A pair of which one side has no target has none.
    """
    columns: dict[str, list[Any]] = {name: [] for name in (*table, FIRST, FIRST_TARGETS)}
    for at in range(0, len(table["tokens"]), 2):
        one, other = ({name: values[i] for name, values in table.items()} for i in (at, at + 1))
        targets = (one["num_targets"], other["num_targets"])
        merged = {
            "tokens": one["tokens"] + other["tokens"],
            "is_trained": one["is_trained"] + other["is_trained"],
            "weights": [],
            "ends": sorted({*one["ends"], *other["ends"]}),
            "length": one["length"] + other["length"],
            "num_targets": sum(targets) if all(targets) and not (one["bad"] or other["bad"]) else 0,
            FIRST: one["length"],
            FIRST_TARGETS: one["num_targets"],
            **{name: one[name] + other[name] for name in ("full_length", "full_lengths", "lost")},
            **{name: one[name] or other[name] for name in _OF_EITHER},
            # an empty answer that is rejected teaches nothing wrong
            "is_empty": one["is_empty"],
            "bad": one["bad"] or other["bad"],
        }
        for name, column in columns.items():
            column.append(merged[name])
    return columns


class _Pairs(RecordKind):
    def find_format(self, row: Any, columns: Columns) -> PairFormat:
        return find_pair_format(row)

    def read(self, row: Any, data_format: PairFormat, columns: Columns, train_on: TrainOn) -> list[ReadEntry]:
        return [(read_answers(row, data_format, columns, ("chosen", "rejected")), {})]

    def tabulated(self, table: TokenTable, contents: Sequence[Sequence[Mapping[str, Any]]]) -> TokenTable:
        return paired(table)


PAIRS = _Pairs(
    "pairs",
    "pair",
    sequences=2,
    key=True,
    in_words="pairs of answers (columns chosen and rejected)",
    numbers={FIRST: "int32", FIRST_TARGETS: "int32"},
)
