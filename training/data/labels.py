"""Labelled answers: what a record says of a prompt, an answer to it, and whether that is desirable.

The prompt has no loss. Records of preference pairs give two labelled answers each.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .chat import TrainOn
from .data_files import RowError
from .formats import LABELLED, LABELS, Columns, answered, asked, label_in
from .pairs import FIRST, PAIR_FORMATS, PairFormat, ending_in_answer, of_parts, read_answers
from .record_kinds import ReadEntry, RecordKind, Said, TokenTable

DESIRABLE, PROMPT_HASH = "is_desirable", "prompt_hash"
"""Columns of labelled answers beside `FIRST`."""

LABEL_FORMATS = [
    PairFormat(
        "prompt/completion/label",
        LABELLED[0],
        lambda row: (row["prompt"], row["completion"]),
        written="`prompt`, `completion`: lists of messages, or plain texts, which no chat template wraps; `label`",
        known_from="trl",
    ),
    PairFormat(
        "messages/label",
        LABELLED[1],
        lambda row: ending_in_answer(row, "messages"),
        written="`messages`, whose last is the answer; `label` or `kto_tag`",
        known_from="ms-swift, LLaMA-Factory",
    ),
    PairFormat(
        "sharegpt with labels",
        LABELLED[2],
        lambda row: ending_in_answer(row, "conversations"),
        written="`conversations`, whose last is the answer; `kto_tag` or `label`",
        known_from="LLaMA-Factory",
    ),
    PairFormat(
        "alpaca with labels",
        LABELLED[3],
        of_parts(asked("instruction", "input"), answered("output")),
        written="`instruction`, `output`, perhaps `input`, `system`, `history`; `kto_tag` or `label`",
        known_from="LLaMA-Factory",
    ),
]
"""In the order in which they are tried, before those of pairs."""


def find_label_format(row: Any) -> PairFormat:
    """The format of labelled answers, or of pairs, from the first record.

    Raises:
        RowError: none fits; the message lists the columns found.
    """
    if not isinstance(row, dict):
        raise RowError(f"is no JSON object: {row!r:.80}")
    is_labelled = any(name in row for name in LABELS)
    for known in [*(LABEL_FORMATS if is_labelled else []), *PAIR_FORMATS]:
        if all(column in row for column in known.columns):
            return known
    needed = "; ".join(" + ".join(known.columns) for known in LABEL_FORMATS)
    raise RowError(
        f"has the columns {', '.join(map(str, row)) or '(none)'}, but --task kto needs label or kto_tag, and beside it "
        f"one of these: {needed}; or pairs: chosen + rejected"
    )


def read_labelled(row: Any, found: PairFormat, columns: Columns) -> list[tuple[Said, bool]]:
    """Answers behind their prompts, and whether each is desirable: one, or the two of a pair.

    Raises:
        RowError: a column is missing or holds something else.
    """
    if found in PAIR_FORMATS:
        return list(zip(read_answers(row, found, columns, ("chosen", "rejected")), (True, False), strict=True))
    (said,) = read_answers(row, found, columns, ("completion",), beside=LABELS)
    return [(said, _label(row))]


def _label(row: Mapping[str, Any]) -> bool:
    name = next((name for name in LABELS if name in row), None)
    if name is None:
        raise RowError("has neither label nor kto_tag, unlike the records before it")
    found = label_in(row)
    if found is None:
        raise RowError(f"{name} is {row[name]!r:.80}; expected true for a desirable answer, or false")
    return found


def _prompt_in(content: Sequence[Mapping[str, Any]]) -> str:
    """What stands before a labelled answer, as the record has it: what a template writes before the answer may depend
    on whether that has a thought."""
    (said,) = content
    if "text" in said:
        return said["prompt"] or ""
    before = itertools.takewhile(lambda both: both[1] is False, zip(said["messages"], said["is_trained"], strict=True))
    return json.dumps([[message for message, _ in before], said["tools"], said["arguments"]])


class _LabelledAnswers(RecordKind):
    def find_format(self, row: Any, columns: Columns) -> PairFormat:
        return find_label_format(row)

    def read(self, row: Any, data_format: PairFormat, columns: Columns, train_on: TrainOn) -> list[ReadEntry]:
        return [((said,), {DESIRABLE: label}) for said, label in read_labelled(row, data_format, columns)]

    def tabulated(self, table: TokenTable, contents: Sequence[Sequence[Mapping[str, Any]]]) -> TokenTable:
        # of an answer that is cut off completely, which is left out, all is prompt
        trained = [[False, *each[1:]] for each in table["is_trained"]]
        prompts = [hashlib.sha256(_prompt_in(each).encode()).hexdigest() for each in contents]
        return {
            **table,
            # an empty answer that is not desirable teaches nothing wrong
            "is_empty": [a and b for a, b in zip(table["is_empty"], table[DESIRABLE], strict=True)],
            FIRST: [each.index(True) if any(each) else len(each) for each in trained],
            PROMPT_HASH: [int(digest[:15], 16) for digest in prompts],
        }


LABELLED_ANSWERS = _LabelledAnswers(
    "labelled",
    key="labelled",
    in_words="labelled answers (column label or kto_tag)",
    numbers={FIRST: "int32", PROMPT_HASH: "int64"},
    flags=(DESIRABLE,),
)
