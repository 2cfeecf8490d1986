"""Preference pairs: what each way to write them becomes, in a .jsonl and, with JSON in its cells, in a .csv."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.data.pairs import PAIRS
from expertmesh.training.data.preview import print_preview, warnings_of
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.samples import Pairs
from expertmesh.training.data.sequences import DataOrder, make_rows
from expertmesh.training.data.tokenizing import DataOptions
from tests.tiny import save_tokenizer

TEMPLATE = (
    "{% if tools %}<{{ tools[0].function.name }}>{% endif %}"
    "{% for message in messages %}[{{ message.role[0] }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}"
    "{% if message.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
}

TOOL_CALL = {"role": "tool_call", "content": '{"name": "f", "arguments": {"x": 1}}'}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def of_gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


ASKED, YES, NO = [user("q")], [answer("yes")], [answer("no")]
TOLD = ("[u]q[a]{yes</s>}", "[u]q[a]{no</s>}")
SYSTEM = ("[s]s[u]q[a]{yes</s>}", "[s]s[u]q[a]{no</s>}")
WRITTEN: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "trl, messages": ({"prompt": ASKED, "chosen": YES, "rejected": NO}, TOLD),
    "trl, texts": ({"prompt": "q:", "chosen": " yes", "rejected": " no"}, ("q:{ yes</s>}", "q:{ no</s>}")),
    "trl, several messages": (
        {"prompt": ASKED, "chosen": [*YES, user("r"), answer("b")], "rejected": NO},
        ("[u]q[a]{yes</s>}[u]r[a]{b</s>}", TOLD[1]),
    ),
    "prompt as text": ({"prompt": "q", "chosen": YES, "rejected": NO}, TOLD),
    "prompt as text, and in the answers": ({"prompt": "q", "chosen": ASKED + YES, "rejected": ASKED + NO}, TOLD),
    "prompt in the answers too": ({"prompt": ASKED, "chosen": ASKED + YES, "rejected": ASKED + NO}, TOLD),
    "without a prompt": ({"chosen": ASKED + YES, "rejected": ASKED + NO}, TOLD),
    "without a prompt, texts": ({"chosen": "q: yes", "rejected": "q: no"}, ("q:{ yes</s>}", "q:{ no</s>}")),
    "without a prompt, equal": ({"chosen": ASKED + YES, "rejected": ASKED + YES}, (TOLD[0], TOLD[0])),
    "without a prompt, one is longer": (
        {"chosen": [*ASKED, *YES, user("r"), answer("b")], "rejected": ASKED + YES},
        ("[u]q[a]{yes</s>}[u]r[a]{b</s>}", TOLD[0]),
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "q"}], "chosen": of_gpt("yes"), "rejected": of_gpt("no")},
        TOLD,
    ),
    "alpaca": ({"instruction": "q", "input": "r", "chosen": "y", "rejected": "n"}, ("[u]q\nr[a]{y</s>}",
        "[u]q\nr[a]{n</s>}")),
    "alpaca with earlier turns": (
        {"instruction": "q", "history": [["o", "p"]], "chosen": "y", "rejected": "n"},
        ("[u]o[a]p</s>[u]q[a]{y</s>}", "[u]o[a]p</s>[u]q[a]{n</s>}"),
    ),
    "question": ({"question": "q", "system": "s", "chosen": "yes", "rejected": "no"}, SYSTEM),
    "question, answers begin alike": (
        {"question": "q", "chosen": "The a", "rejected": "The b"},
        ("[u]q[a]{The a</s>}", "[u]q[a]{The b</s>}"),
    ),
    "ms-swift": ({"messages": [{"role": "system", "content": "s"}, *ASKED, *YES], "rejected_response": "no"}, SYSTEM),
    "ms-swift, conversations": ({"messages": [{"role": "system", "content": "s"}, *ASKED, *YES],
        "rejected_messages": [{"role": "system", "content": "s"}, *ASKED, *NO]}, SYSTEM),
    "ms-swift, a text and its call": (
        {"messages": [*ASKED, answer("see"), TOOL_CALL], "rejected_response": "no"},
        ("[u]q[a]{seef{\"x\": 1}</s>}", TOLD[1]),
    ),
    "answers that begin with one text": (
        {
            "messages": [*ASKED, answer("see"), TOOL_CALL],
            "rejected_messages": [*ASKED, answer("see"), TOOL_CALL | {"content": '{"name": "g"}'}],
        },
        ("[u]q[a]{seef{\"x\": 1}</s>}", "[u]q[a]{seeg{}</s>}"),
    ),
    "openai": (
        {"input": {"messages": ASKED, "tools": [TOOL]}, "preferred_output": [CALL], "non_preferred_output": NO},
        ("<f>[u]q[a]{f{\"x\": 1}</s>}", "<f>[u]q[a]{no</s>}"),
    ),
}  # fmt: skip


def tokenizer_in(path: Path) -> Any:
    save_tokenizer(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read(path: Path, row: dict[str, Any], cells: bool = False) -> tuple[str, ...]:
    """The pair, trained tokens in braces."""
    tokenizer = tokenizer_in(path)
    data = path / ("pairs.csv" if cells else "pairs.jsonl")
    if cells:
        with data.open("w", newline="") as file:
            csv.writer(file).writerows(
                [row, [value if isinstance(value, str) else json.dumps(value) for value in row.values()]]
            )
    else:
        data.write_text(json.dumps(row) + "\n")
    pairs = load_samples("--dataset", [str(data)], tokenizer, DataOptions(200, kind=PAIRS), seed=0)
    assert isinstance(pairs, Pairs)
    said = []
    for sample in pairs.entry(0):
        text, inside = "", False
        for token, is_trained in zip([*sample.tokens, None], [*sample.is_trained, False], strict=True):
            text += "" if inside == is_trained else "{" if is_trained else "}"
            text, inside = text + (tokenizer.decode([token]) if token is not None else ""), is_trained
        said.append(text)
    return tuple(said)


@pytest.mark.parametrize("cells", [False, True], ids=["jsonl", "csv"])
@pytest.mark.parametrize("written", WRITTEN)
def test_what_pairs_become(written: str, cells: bool, tmp_path: Path) -> None:
    row, wanted = WRITTEN[written]
    assert read(tmp_path, row, cells) == wanted


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"input": "q", "chosen": "The a", "rejected": "The b"},
            "has input beside chosen and rejected, which are texts",
        ),
        ({"chosen": YES, "rejected": YES}, "do not begin alike, and no prompt"),
        (
            {"prompt": [user("q")], "chosen": [answer("a") | {"weight": 0.5}], "rejected": NO},
            "has a message with a weight, but preference data are not weighted; leave it out .chosen",
        ),
        ({"input": [], "preferred_output": YES, "non_preferred_output": NO}, "prompt is None, not a list of messages"),
    ],
)
def test_what_is_refused(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        read(tmp_path, row)


def test_preview_counts_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, data = tokenizer_in(tmp_path), tmp_path / "pairs.jsonl"
    rows = [{"prompt": "q", "chosen": "12345", "rejected": ""}, {"prompt": "q", "chosen": "1", "rejected": "2"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = load_samples("--dataset", [str(data)], tokenizer, DataOptions(200, kind=PAIRS), seed=0)
    # nothing is wrong with an empty answer that is rejected
    assert warnings_of(pairs.origins[0], 200) == []
    for packing, entries in ((False, "pairs"), (True, "sequence")):
        entry_rows = make_rows(pairs, packing, 200, seed=0)
        print_preview(entry_rows, DataOrder(len(entry_rows), len(entry_rows), 1, 1, seed=0), tokenizer, 200, number=1)
        printed = capsys.readouterr().out
        assert "pairs        2" in printed
        assert "tokens       15; longest sample 7" in printed
        assert f"1 step of {1 if packing else 2} {entries}" in printed
