"""One of each thing that can be added, added from outside: by one call of a public function, and nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.data import formats
from expertmesh.training.data.chat import set_chat_template
from expertmesh.training.data.formats import FORMATS, Format, conversation, register_format, table_of_formats
from expertmesh.training.data.samples import DataOptions, Sample, Samples, load_samples

ROOT = Path(__file__).parents[1]
DATA_README = (ROOT / "training" / "data" / "README.md").read_text(encoding="utf-8")


# A data format: the one that its README shows.


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    set_chat_template(tokenizer, "mistral")
    return tokenizer


@pytest.fixture
def no_formats_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes registrations."""
    monkeypatch.setattr(formats, "FORMATS", [*FORMATS])
    monkeypatch.setattr(formats, "_added", {})


def read_data(tmp_path: Path, tokenizer: Any, **row: Any) -> Samples:
    file, content = tmp_path / "data.jsonl", json.dumps(row) + "\n"
    if not (file.exists() and file.read_text() == content):
        file.write_text(content)
    return load_samples("--dataset", [str(file)], tokenizer, DataOptions(max_seq_length=64), seed=0)


def trained_text(tokenizer: Any, sample: Sample) -> str:
    trained = [token for token, is_trained in zip(sample.tokens, sample.is_trained, strict=True) if is_trained]
    return str(tokenizer.decode(trained)).strip()


@pytest.mark.usefixtures("no_formats_left")
def test_a_data_format(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ExpertMeshError, match=r"has the columns ask, say, but one of these is needed: .*; text;"):
        read_data(tmp_path, tokenizer, ask="hi", say="yo")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", DATA_README, re.DOTALL) if "Format(" in block]
    exec(code, {"__name__": "a_script_of_ones_own"})

    samples = read_data(tmp_path, tokenizer, ask="hi", say="yo", system="Be brief.")
    assert samples.origins[0].format == "ask/say"
    (sample,) = samples
    as_messages = [("system", "Be brief."), ("user", "hi"), ("assistant", "yo")]
    messages = [{"role": role, "content": text} for role, text in as_messages]
    (reference,) = read_data(tmp_path, tokenizer, messages=messages)
    assert (sample.tokens, sample.is_trained) == (reference.tokens, reference.is_trained)
    assert trained_text(tokenizer, sample) == "yo</s>"

    with pytest.raises(ExpertMeshError, match=r"one of these is needed: .*; ask \+ say; text;"):
        read_data(tmp_path, tokenizer, say="yo")
    with pytest.raises(ExpertMeshError, match="has images, and only text is trained on"):
        read_data(tmp_path, tokenizer, ask="hi", say="yo", images=["a.png"])


def upside_down(row: Any, columns: Any) -> Any:
    turns = [{"role": "user", "content": row["say"]}, {"role": "assistant", "content": row["ask"]}]
    return conversation(row, columns, turns, [None, None])


def test_what_is_cached_was_read_by_the_same_format(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = FORMATS

    def answer(read: Any, version: int) -> str:
        monkeypatch.setattr(formats, "FORMATS", [*known])
        monkeypatch.setattr(formats, "_added", {})
        register_format(
            Format("ask/say", ("ask", "say"), read, (), "`ask`, `say`", "us"), before="text", version=version
        )
        (sample,) = read_data(tmp_path, tokenizer, ask="hi", say="yo")
        return trained_text(tokenizer, sample)

    assert answer(upside_down, version=1) == answer(lambda *_: pytest.fail("is cached"), version=1) == "hi</s>"

    def upright(row: Any, columns: Any) -> Any:
        return upside_down({"ask": row["say"], "say": row["ask"]}, columns)

    assert answer(upright, version=2) == "yo</s>"


@pytest.mark.usefixtures("no_formats_left")
@pytest.mark.parametrize(
    ("changed", "before", "wrong"),
    [
        ({}, "txet", "no format 'txet' to come before; known: messages, sharegpt, "),
        ({"name": "alpaca"}, "text", "another format is called 'alpaca'"),
        ({"columns": ("output", "instruction")}, "text", r"another format has the columns \('instruction', 'output'\)"),
        ({"columns": ("question", "answer", "why")}, "text", "'ask/say' would never be found behind 'question/answer'"),
        ({"written": ""}, "text", "the format 'ask/say' has no written"),
        ({"columns": ()}, "text", "the format 'ask/say' has no columns"),
    ],
)
def test_a_data_format_that_cannot_be_added(changed: dict[str, Any], before: str, wrong: str) -> None:
    entry = {"name": "ask/say", "columns": ("ask", "say"), "read": upside_down, "unread": ()}
    with pytest.raises(ValueError, match=wrong):
        register_format(Format(**{**entry, "written": "w", "known_from": "k", **changed}), before=before, version=1)


def test_readme_lists_all_data_formats() -> None:
    assert table_of_formats() in DATA_README
