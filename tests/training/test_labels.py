"""Labelled answers: what each way to write them becomes, and which answer stands behind which prompt."""

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.data.digest import samples_facts
from expertmesh.training.data.formats import label_in
from expertmesh.training.data.labels import LABELLED_ANSWERS
from expertmesh.training.data.preview import warnings_of
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.samples import Labelled, _partners
from expertmesh.training.data.sequences import make_rows
from expertmesh.training.data.tokenizing import DataOptions
from expertmesh.training.tasks.kto import MismatchedRows
from tests.training.test_pairs import ASKED, NO, TOLD, YES, answer, of_gpt, tokenizer_in, user

GOOD = [(TOLD[0], True)]
WRITTEN: dict[str, tuple[dict[str, Any], list[tuple[str, bool]]]] = {
    "trl, messages": ({"prompt": ASKED, "completion": YES, "label": True}, GOOD),
    "trl, texts": ({"prompt": "q:", "completion": " yes", "label": False}, [("q:{ yes</s>}", False)]),
    "messages": (
        {"messages": [*ASKED, *YES, user("r"), answer("b")], "label": 1}, [("[u]q[a]yes</s>[u]r[a]{b</s>}", True)]
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "q"}, of_gpt("yes")], "kto_tag": False}, [(TOLD[0], False)]
    ),
    "alpaca": (
        {"instruction": "q", "input": "r", "output": "y", "kto_tag": True}, [("[u]q\nr[a]{y</s>}", True)]
    ),
    "pairs": ({"prompt": ASKED, "chosen": YES, "rejected": NO}, [(TOLD[0], True), (TOLD[1], False)]),
    "pairs of ms-swift": ({"messages": ASKED + YES, "rejected_response": "no"}, [(TOLD[0], True), (TOLD[1], False)]),
}  # fmt: skip


def load(path: Path, *rows: dict[str, Any], cells: bool = False, max_length: int = 200, template: str = "") -> Labelled:
    tokenizer, data = tokenizer_in(path), path / ("answers.csv" if cells else "answers.jsonl")
    tokenizer.chat_template = template or tokenizer.chat_template
    if cells:
        with data.open("w", newline="") as file:
            values = ([v if isinstance(v, str) else json.dumps(v) for v in row.values()] for row in rows)
            csv.writer(file).writerows([list(rows[0]), *values])
    else:
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_samples("--dataset", [str(data)], tokenizer, DataOptions(max_length, kind=LABELLED_ANSWERS), seed=0)
    assert isinstance(found, Labelled)
    return found


def told(path: Path, sample: Any) -> str:
    """Its text, trained tokens in braces."""
    text, inside, tokenizer = "", False, tokenizer_in(path)
    for token, is_trained in zip([*sample.tokens, None], [*sample.is_trained, False], strict=True):
        text += "" if inside == is_trained else "{" if is_trained else "}"
        text, inside = text + (tokenizer.decode([token]) if token is not None else ""), is_trained
    return text


@pytest.mark.parametrize("cells", [False, True], ids=["jsonl", "csv"])
@pytest.mark.parametrize("written", WRITTEN)
def test_what_labelled_answers_become(written: str, cells: bool, tmp_path: Path) -> None:
    row, wanted = WRITTEN[written]
    samples = load(tmp_path, row, cells=cells)
    assert [(told(tmp_path, samples[i]), bool(samples.is_desirable[i])) for i in range(len(samples))] == wanted


def test_each_answer_stands_once_behind_another_prompt(tmp_path: Path) -> None:
    """Of pairs behind that of the same label; behind the one before where no neighbours share a prompt, as in trl."""
    alone = [{"prompt": f"{i}:", "completion": f" {c}", "label": True} for i, c in enumerate("abc")]
    samples = load(tmp_path, *alone)
    found = [told(tmp_path, samples.mismatched(i)) for i in range(3)]
    assert found == ["0:{ c</s>}", "1:{ a</s>}", "2:{ b</s>}"]
    pairs = load(tmp_path, *({"prompt": f"{i}:", "chosen": f" {c}", "rejected": " no"} for i, c in enumerate("abc")))
    found = [told(tmp_path, pairs.mismatched(i)) for i in range(6)]
    assert found == [
        f"{i}:{{ {c}</s>}}" for i, c in zip((0, 0, 1, 1, 2, 2), ("c", "no", "a", "no", "b", "no"), strict=True)
    ]
    assert samples_facts(pairs)["labels"] != samples_facts(pairs.select([1, 0, 2, 3, 4, 5]))["labels"]


@pytest.mark.parametrize("number", range(2, 7))
def test_no_answer_stands_behind_its_own_prompt(number: int) -> None:
    """Of any prompts that are not all one, in any order; each answer once wherever an assignment of each to another
    prompt exists, as an exhaustive search finds; and as before where one number of samples back does for all."""
    for prompts in itertools.product(range(3), repeat=number):
        if len({*prompts}) == 1 or prompts[0]:
            continue
        longest = max(len([*run]) for _, run in itertools.groupby(prompts))
        partners = _partners(torch.tensor(prompts), longest).tolist()
        assert all(prompts[one] != prompts[other] for one, other in enumerate(partners)), (prompts, partners)
        orders = itertools.permutations(range(number))
        can_be_once = any(all(prompts[a] != prompts[b] for a, b in enumerate(order)) for order in orders)
        assert (len({*partners}) == number) is can_be_once, (prompts, partners)
        back = [(at - longest) % number for at in range(number)]
        if all(prompts[a] != prompts[b] for a, b in enumerate(back)):
            assert partners == back


def test_answers_to_a_prompt_that_comes_again(tmp_path: Path) -> None:
    rows = [{"prompt": f"{p}:", "completion": f" {i}", "label": True} for i, p in enumerate("AABA")]
    samples = load(tmp_path, *rows)
    found = [told(tmp_path, samples.mismatched(i)) for i in range(4)]
    assert found == ["A:{ 2</s>}", "A:{ 2</s>}", "B:{ 0</s>}", "A:{ 2</s>}"]
    assert samples_facts(samples)["labels"] != samples_facts(load(tmp_path, *rows[1:], rows[0]))["labels"]
    one = load(tmp_path, *rows[:2])
    assert one.shift == len(one)


def test_a_prompt_is_that_of_the_record(tmp_path: Path) -> None:
    """Also where a template writes an empty thought before the answer that has none, which is context then."""
    rows = [{"prompt": ASKED, "completion": [YES[0] | {"reasoning_content": text}]} for text in ("hm", "", "so")]
    rows += [{"prompt": [user("other")], "completion": YES}] * 2
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[u]{% else %}"
        "[a]<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}"
    )
    samples = load(tmp_path, *({**row, "label": True} for row in rows), template=template)
    texts = [told(tmp_path, sample) for sample in samples]
    assert texts[:2] == ["[u]q[a]{<think>hm</think>yes}", "[u]q[a]<think></think>{yes}"]
    assert samples.shift == 3
    assert {0, 1, 2}.isdisjoint(samples.partners[:3].tolist())


def test_no_sequence_is_longer_than_asked_for(tmp_path: Path) -> None:
    """Also of a long prompt before the long answer to a short one."""
    rows = [
        {"prompt": "1", "completion": "2 3 4 5 6", "label": True},
        {"prompt": "7 8 9", "completion": "3", "label": False},
    ]
    for packing in (False, True):
        samples = load(tmp_path, *rows, *rows[:1], max_length=9)
        found = make_rows(samples, packing, 9, seed=0)
        parts = (found, MismatchedRows(found, 9))
        both = [row for part in parts for i in range(len(found)) for row in part.sequences(i)]
        assert max(sum(len(sample.tokens) for sample in row) for row in both) == 9
        assert all(any(sample.is_trained) for row in both for sample in row)


def test_what_is_told_of_them(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "completion": text, "label": label} for text, label in (("", False), ("", True), ("1", True))
    ]
    (warned,) = warnings_of(load(tmp_path, *rows).origins[0], 200)
    assert "1 of 3 records have an empty answer" in warned


def test_a_label_in_some_records(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "q", "completion": "a", "label": True}, {"prompt": "q", "completion": "a"}]
    with pytest.raises(ExpertMeshError, match=r"line 2.* has neither label nor kto_tag"):
        load(tmp_path, *rows)
    torch.testing.assert_close(load(tmp_path, rows[0]).is_desirable, torch.tensor([True]))


@pytest.mark.parametrize(("label", "is_desirable"), [(1.0, True), (0.0, False), (1, True), ("0.0", False), (0.5, None)])
def test_labels_that_are_numbers(label: object, is_desirable: bool | None) -> None:
    """Beside records without one, those of a table are floats."""
    assert label_in({"label": label}) is is_desirable
