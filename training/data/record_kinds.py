"""What a record is: a conversation or plain text here; a preference pair in `pairs`, labelled answers in `labels`.

Nothing of this imports torch, as flags are read before it is loaded. What the samples of each kind hold is in
`samples`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .chat import TrainOn, split_turns
from .data_files import RowError
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
        in_words: for errors; by default the name.
        heeds: of settings that say how records are read, those that `find_format` and `read` follow. by_turns: the kind
            that --split-turns makes of it; None: it has none. in_pieces: likewise --truncation split.
        numbers, flags: further columns of the samples, by name with the kind of number; each truth values.
    """

    name: str
    noun: str = "sample"
    sequences: int = 1
    key: bool | str = False
    in_words: str = ""
    heeds: Sequence[str] = ()
    by_turns: "RecordKind | None" = None
    in_pieces: "RecordKind | None" = None
    numbers: Mapping[str, str] = field(default_factory=dict)
    flags: Sequence[str] = ()

    def __post_init__(self) -> None:
        if ("split_turns" in self.heeds) != (self.by_turns is not None):
            raise ValueError(f"records {self.name}: heed split_turns where they have by_turns, and there alone")

    @property
    def blank(self) -> dict[str, Any]:
        """Values of the further columns of what is no entry."""
        return dict.fromkeys(self.numbers, 0) | dict.fromkeys(self.flags, False)

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


RECORD = "record"
"""The column that has the number of the record that an entry was part of."""
SPLIT_TURNS = _Turns("split_turns", key="split", numbers={RECORD: "int64"})
"""Conversations of which each trained answer is a sample of its own."""


class _Pieces(RecordKind):
    def read(self, row: Any, data_format: Any, columns: Columns, train_on: TrainOn) -> list[ReadEntry]:
        said = read_row(row, data_format, columns)
        if not isinstance(said, PlainText):
            raise RowError("is a conversation, which --truncation split does not cut; give --split-turns instead")
        if said.prompt is not None:
            raise RowError("is a prompt and its completion, which --truncation split does not cut; give another")
        return [((said,), {})]


PIECES = _Pieces("pieces", "piece", key="pieces", numbers={RECORD: "int64"})
"""Plain text that is split into pieces, each a sample of its own."""
CONVERSATIONS = RecordKind(
    "conversations",
    heeds=(
        *("messages_column", "prompt_column", "response_column", "text_column", "prompt_template", "train_on"),
        *("split_turns", "images"),
    ),
    by_turns=SPLIT_TURNS,
    in_pieces=PIECES,
)
