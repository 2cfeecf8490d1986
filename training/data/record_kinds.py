"""What a record is: a conversation or plain text here; a preference pair in `pairs`, labelled answers in `labels`.

Nothing of this imports torch, as flags are read before it is loaded. What the samples of each kind hold is in
`samples`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .chat import TrainOn, split_turns
from .formats import Columns, Conversation, PlainText, find_format, read_row

Said = Conversation | PlainText
ReadEntry = tuple[Sequence[Said], Mapping[str, Any]]
"""What becomes one sample or one pair: its answers, each behind its prompt, and its values of further columns."""
TokenTable = dict[str, list[Any]]
"""Tokenized samples, column by column."""


@dataclass(frozen=True)
class RecordKind:
    """Records of conversations and plain text; further kinds are classes made of it.

    Attributes:
        name: of the kind. noun: what an entry is called.
        sequences: that an entry becomes in a batch that is not packed.
        key: stands for it in the keys of cached records.
        numbers, flags: further columns of the samples, by name with the kind of number; each truth values.
    """

    name: str
    noun: str = "sample"
    sequences: int = 1
    key: bool | str = False
    numbers: Mapping[str, str] = field(default_factory=dict)
    flags: Sequence[str] = ()

    def find_format(self, row: Any, columns: Columns) -> Any:
        """How records are written, from the first one.

        Raises:
            RowError: it is none of this kind.
        """
        return find_format(row, columns)

    def read(self, row: Any, data_format: Any, columns: Columns, train_on: TrainOn) -> list[ReadEntry]:
        """What a record says: an entry, or several.

        Raises:
            RowError: a column is missing or holds something else.
        """
        return [((read_row(row, data_format, columns),), {})]

    def tabulated(self, table: TokenTable, contents: Sequence[Sequence[Mapping[str, Any]]]) -> TokenTable:
        """A line for each entry, with the kind's further columns.

        Args:
            table: a line for each answer, with what `read` gave of further columns.
            contents: the answers of each entry, as the fields of `Said`.
        """
        return table


class _Turns(RecordKind):
    def read(self, row: Any, data_format: Any, columns: Columns, train_on: TrainOn) -> list[ReadEntry]:
        said = read_row(row, data_format, columns)
        turns = split_turns(said, train_on) if isinstance(said, Conversation) else [said]
        return [((turn,), {}) for turn in turns]


CONVERSATIONS = RecordKind("conversations")
RECORD = "record"
"""The column that has the number of the record that an entry was part of."""
SPLIT_TURNS = _Turns("split_turns", key="split", numbers={RECORD: "int64"})
"""Conversations of which each trained answer is a sample of its own."""
