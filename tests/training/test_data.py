"""Data: files of every format to tokens and targets, and what is said of those that cannot be read."""

import csv
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, datetime
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.banner import _data
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import collate
from expertmesh.training.data.chat import set_chat_template
from expertmesh.training.data.data_files import READERS, parse_datasets
from expertmesh.training.data.formats import Columns, Conversation, PlainText, find_format, read_row
from expertmesh.training.data.samples import (
    DataOptions,
    Sample,
    Samples,
    TokenizingProgress,
    cache_directory,
    cached_bytes,
    filling_cache,
    hold_out,
    load_samples,
)
from expertmesh.training.data.sequences import DataOrder, make_rows
from expertmesh.training.inputs import Inputs, _read_samples

OPTIONS = DataOptions(max_seq_length=512)
PLAIN = replace(OPTIONS, prompt_template="{prompt}\\n")


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    set_chat_template(tokenizer, "mistral")
    return tokenizer


def load(tokenizer: Any, *entries: object, options: DataOptions = OPTIONS, seed: int = 0) -> Samples:
    return load_samples("--dataset", [str(entry) for entry in entries], tokenizer, options, seed)


def shown(tokenizer: Any, sample: Sample) -> str:
    """The sample's text with what is trained on in brackets; the first token never is."""
    text, inside = "", False
    for position, (token, is_trained) in enumerate(zip(sample.tokens, sample.is_trained, strict=True)):
        is_trained = is_trained and position > 0
        text += ("{" if is_trained and not inside else "}" if inside and not is_trained else "") + tokenizer.decode(
            [token]
        )
        inside = is_trained
    return text + ("}" if inside else "")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# Formats: rows as users have them, and what the model is to see; {} around what is trained on.

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALL_TEXT = '[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]'
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "messages": (
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "yo"},
                {"role": "user", "content": "and now"},
                {"role": "assistant", "content": "bye"},
            ]
        },
        "<s> [INST] be brief\n\nhi [/INST]{ yo</s>} [INST] and now [/INST]{ bye</s>}",
    ),
    "messages of text parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": " now"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "bye"}]},
            ]
        },
        "<s> [INST] and now [/INST]{ bye</s>}",
    ),
    "messages with tools": (
        {
            "messages": [
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "2"},
                {"role": "assistant", "content": "two"},
            ],
            "tools": [{"type": "function"}],
        },
        '<s> [AVAILABLE_TOOLS] [{"type": "function"}] [/AVAILABLE_TOOLS] [INST] 1+1? [/INST]'
        f"{{ [TOOL_CALLS] {CALL_TEXT}</s>}} [TOOL_RESULTS] 2 [/TOOL_RESULTS]{{ two</s>}}",
    ),
    "messages of LLaMA-Factory's parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "1+1?"}], "loss_weight": 0.0},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_call", "value": '{"name": "add", "arguments": {"a": 1}}'}],
                    "loss_weight": 1.0,
                },
                {"role": "tool", "content": [{"type": "text", "value": "2"}], "loss_weight": 0.0},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "value": "it is"}, {"type": "text", "value": " two"}],
                    "loss_weight": 0.0,
                },
            ],
        },
        f"<s> [INST] 1+1? [/INST]{{ [TOOL_CALLS] {CALL_TEXT}</s>}} [TOOL_RESULTS] 2 [/TOOL_RESULTS] it is two</s>",
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], "system": "be brief"},
        "<s> [INST] be brief\n\nhi [/INST]{ yo</s>}",
    ),
    "alpaca": (
        {"instruction": "add", "input": "1 2", "output": "3"},
        "<s> [INST] add\n1 2 [/INST]{ 3</s>}",
    ),
    "alpaca without input, with history": (
        {"instruction": "again", "input": "", "output": "b", "history": [["say a", "a"]]},
        "<s> [INST] say a [/INST]{ a</s>} [INST] again [/INST]{ b</s>}",
    ),
    "dolly": (
        {"instruction": "sum up", "context": "long", "response": "short", "category": "x"},
        "<s> [INST] sum up\nlong [/INST]{ short</s>}",
    ),
    "sharegpt with calls": (
        {
            "conversations": [
                {"from": "human", "value": "1+1?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "two"},
            ],
            "system": "be brief",
            "tools": '[{"name": "add"}]',
        },
        '<s> [AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "add"}}] [/AVAILABLE_TOOLS] [INST] be brief'
        f"\n\n1+1? [/INST]{{ [TOOL_CALLS] {CALL_TEXT}</s>}} [TOOL_RESULTS] 2 [/TOOL_RESULTS]{{ two</s>}}",
    ),
    "ms-swift's calls": (
        {
            "messages": [
                {"role": "user", "content": "1+1?"},
                {"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 1}}'},
                {"role": "tool_call", "content": '[{"name": "add", "arguments": "{\\"a\\": 1}"}]'},
                {"role": "tool_response", "content": "2"},
                {"role": "assistant", "content": "two", "loss": False},
            ],
        },
        f"<s> [INST] 1+1? [/INST]{{ [TOOL_CALLS] [{CALL_TEXT[1:-1]}, {CALL_TEXT[1:-1]}]</s>}}"
        " [TOOL_RESULTS] 2 [/TOOL_RESULTS] two</s>",
    ),
    "query and response": (
        {"query": "again", "response": "b", "history": [["say a", "a"]], "system": "be brief"},
        "<s> [INST] be brief\n\nsay a [/INST]{ a</s>} [INST] again [/INST]{ b</s>}",
    ),
    "functions": (
        {
            "messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}],
            "functions": [{"name": "add"}],
        },
        '<s> [AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "add"}}] [/AVAILABLE_TOOLS] [INST] 1? [/INST]'
        "{ 1</s>}",
    ),
    "prompt and completion": ({"prompt": "hi", "completion": " yo"}, "hi{ yo</s>}"),
    "an ended completion": ({"prompt": "hi ", "completion": "yo</s>"}, "hi {yo</s>}"),
    "prompt and completion as messages": (
        {
            "prompt": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ],
            "completion": [{"role": "assistant", "content": "d"}],
        },
        "<s> [INST] a [/INST] b</s> [INST] c [/INST]{ d</s>}",
    ),
    "prompt and response": ({"prompt": "hi", "response": "yo"}, "<s> [INST] hi [/INST]{ yo</s>}"),
    "question and answer": ({"question": "hi", "answer": "yo"}, "<s> [INST] hi [/INST]{ yo</s>}"),
    "text": ({"text": "once"}, "o{nce</s>}"),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize(("name", "kind"), product(FORMATS, ["json", "jsonl", "parquet", "directory"]))
def test_formats(tmp_path: Path, tokenizer: Any, name: str, kind: str) -> None:
    row, expected = FORMATS[name]
    file = tmp_path / f"data.{kind}"
    if kind == "json":
        file.write_text(json.dumps([row, row]))
    elif kind == "jsonl":
        write(file, [row, row])
    elif kind == "parquet":
        write_parquet(file, [row, row])
    else:
        file.mkdir()
        write(file / "a.jsonl", [row])
        write_parquet(file / "b.parquet", [row])
        (file / "README.md").write_text("what these are")
    samples = load(tokenizer, file)
    assert [shown(tokenizer, sample) for sample in samples] == [expected] * 2
    assert samples.targets.tolist() == [sum(sample.is_trained[1:]) for sample in samples]
    assert samples.lengths.tolist() == [len(sample.tokens) for sample in samples]


def write_parquet(file: Path, rows: list[Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def test_csv(tmp_path: Path, tokenizer: Any) -> None:
    """Line breaks in quotes, commas, and numbers that stay text."""
    file = tmp_path / "data.csv"
    file.write_text('prompt,response,more\n"two\nlines, one comma",007,\n', encoding="utf-8")
    (sample,) = load(tokenizer, file)
    assert shown(tokenizer, sample) == "<s> [INST] two\nlines, one comma [/INST]{ 007</s>}"


@pytest.mark.parametrize("name", FORMATS)
def test_a_table_with_json_in_its_cells_says_what_json_lines_do(tmp_path: Path, name: str) -> None:
    row, _ = FORMATS[name]
    with open(tmp_path / "data.csv", "w", newline="", encoding="utf-8") as file:
        cells = [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
        csv.writer(file).writerows([list(row), cells])
    ((_, read),) = READERS[".csv"]("--dataset", tmp_path / "data.csv")
    found = find_format(read, Columns())
    assert found.name == find_format(row, Columns()).name
    assert read_row(read, found, Columns()) == read_row(row, found, Columns())


@pytest.mark.parametrize("beside", ["prompt_column", "response_column", "system_column"])
def test_a_text_column_alone_is_read(beside: str) -> None:
    config: dict[str, Any] = {"model": "m", "dataset": ["d"], "text_column": "text", beside: "other"}
    with pytest.raises(ExpertMeshError, match="--text-column: give no prompt, response or system column"):
        TrainConfig(**config)


@pytest.mark.parametrize(("question", "answer"), [("User", "Assistant"), ("human", "ai"), ("USER ", " GPT")])
def test_names_of_roles(question: str, answer: str) -> None:
    """Under another name an answer would have no loss, and the template would write that name."""
    row = {"messages": [{"role": question, "content": "hi"}, {"role": answer, "content": "yo"}]}
    said = read_row(row, find_format(row, Columns()), Columns())
    assert isinstance(said, Conversation)
    assert [message["role"] for message in said.messages] == ["user", "assistant"]


def test_one_text_alone_may_quote_messages() -> None:
    row = {"prompt": '[{"role": "user", "content": "hi"}]\nIs this polite?', "completion": "no"}
    assert read_row(row, find_format(row, Columns()), Columns()) == PlainText(row["completion"], row["prompt"])


def test_saved_by_datasets_and_from_the_hub(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    loaded = datasets.Dataset.from_list([{"prompt": "hi", "response": "yo"}])
    loaded.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": loaded, "test": loaded}).save_to_disk(tmp_path / "splits")
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> Any:
        asked.append((name, config, split))
        return loaded

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for entry in (tmp_path / "plain", tmp_path / "splits", "someone/data"):
        (sample,) = load(tokenizer, entry)
        assert shown(tokenizer, sample) == "<s> [INST] hi [/INST]{ yo</s>}"
    load(tokenizer, "openai/gsm8k", options=replace(OPTIONS, hub_config="main", split="test"))
    assert asked == [("someone/data", None, "train"), ("openai/gsm8k", "main", "test")]
    with pytest.raises(ExpertMeshError, match="has no split 'dev'; found: train, test"):
        load(tokenizer, tmp_path / "splits", options=replace(OPTIONS, split="dev"))


def weather_and_sum() -> list[dict[str, Any]]:
    """Records whose tools, calls and messages have other keys each."""

    def tool(name: str, **properties: Any) -> dict[str, Any]:
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    def row(name: str, arguments: Any, **keys: Any) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        tools = [tool("weather", city={"type": "string"}), tool("add", a={"type": "integer", "minimum": 0})]
        result = {"role": "tool", "content": "1", "tool_call_id": "x"}
        return {
            "messages": [*turns, result, {"role": "assistant", "content": "A", "weight": 1}],
            "tools": tools,
            **keys,
        }

    return [row("weather", {"city": "Paris"}, system="S"), row("add", {"a": 1}), row("none", {})]


@pytest.mark.parametrize("kind", ["parquet", "saved", "hub", "parquet of pyarrow"])
def test_keys_that_arrow_fills_in_are_absent(
    tmp_path: Path, tokenizer: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a table has is what JSON Lines have: null in a struct is a key that another record has."""
    import datasets

    rows, path = weather_and_sum(), tmp_path / "train.parquet"
    table = datasets.Dataset.from_list(rows)
    assert table[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": None, "a": 1}
    if kind == "parquet":
        table.to_parquet(path)
    elif kind == "saved":
        path = tmp_path / "saved"
        table.save_to_disk(path)
    elif kind == "hub":
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
        path = Path("someone/data")
    else:
        write_parquet(path, rows)
    expected, found = load(tokenizer, write(tmp_path / "rows.jsonl", rows)), load(tokenizer, path)
    assert [shown(tokenizer, sample) for sample in found] == [shown(tokenizer, sample) for sample in expected]
    assert not any("null" in shown(tokenizer, sample) for sample in found)


def test_dates_and_maps_of_a_table(tmp_path: Path) -> None:
    """As JSON has them: text, and objects without what Arrow fills in."""
    import pyarrow
    import pyarrow.parquet

    inner = pyarrow.struct({"a": pyarrow.int64(), "b": pyarrow.int64()})
    kind = pyarrow.struct(
        {"at": pyarrow.timestamp("s"), "day": pyarrow.date32(), "x": pyarrow.map_(pyarrow.string(), inner)}
    )
    value = {"at": datetime(2024, 5, 6), "day": date(2024, 5, 6), "x": [("k", {"a": 1, "b": None})]}
    pyarrow.parquet.write_table(pyarrow.table({"v": pyarrow.array([value], kind)}), tmp_path / "data.parquet")
    ((_, row),) = READERS[".parquet"]("--dataset", tmp_path / "data.parquet")
    assert row == {"v": {"at": "2024-05-06T00:00:00", "day": "2024-05-06", "x": {"k": {"a": 1}}}}


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_null_in_json_of_a_table_is_null(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    """Values of mixed kinds are JSON in a table, which lacks nothing: what is null there was null."""
    import datasets

    rows = [
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "tool_calls": [{"function": function}]}]}
        for function in ({"name": "f", "arguments": {"a": "x", "b": None}}, {"name": "g", "arguments": {"a": [1]}})
    ]
    message = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    call = {"function": {"name": datasets.Value("string"), "arguments": datasets.Json()}}
    columns: Any = {"messages": datasets.List({**message, "tool_calls": datasets.List(call)})}
    table = datasets.Dataset.from_list(rows, features=datasets.Features(columns))
    path = tmp_path / "train.parquet"
    if kind == "parquet":
        table.to_parquet(path)
    else:
        path = tmp_path / "saved"
        table.save_to_disk(path)
    expected, found = load(tokenizer, write(tmp_path / "rows.jsonl", rows)), load(tokenizer, path)
    assert [shown(tokenizer, sample) for sample in found] == [shown(tokenizer, sample) for sample in expected]
    assert '"b": null' in shown(tokenizer, found[0])


CARD = """---
license: mit
configs:
- config_name: main
  default: true
  data_files:
  - {split: train, path: "main/a*.jsonl"}
  - {split: test, path: [main/b.jsonl]}
- config_name: other
  data_dir: other
  data_files: "*.jsonl"
---
What these are.
"""
LAYOUTS: dict[str, dict[str, str]] = {
    "names of files": {"train.jsonl": "train", "test.jsonl": "test", "README.md": "about"},
    "shards": {f"data/train-0000{i}-of-00002.jsonl": "train" for i in range(2)}
    | {"data/test-00000-of-00001.jsonl": "test", "data/extra-00000-of-00001.jsonl": "extra"},
    "shards at the top": {f"train-0000{i}-of-00002.jsonl": "train" for i in range(2)}
    | {"test-00000-of-00001.jsonl": "test"},
    "folders": {"train/a.jsonl": "train", "train/b/c.jsonl": "train", "test/a.jsonl": "test"},
    "other names": {"my_dev.jsonl": "validation", "my_training_1.jsonl": "train", "notes.txt": "about"},
    "a card": {
        "README.md": CARD, "main/a1.jsonl": "train", "main/a2.jsonl": "train", "main/b.jsonl": "test",
        "other/a.jsonl": "other",
    },
    "beside what is no data": {"train.jsonl": "train", "test.png": "x", "eval.py": "x"},
    "no names": {"a.jsonl": "train", "b.jsonl": "train", "c/d.jsonl": "train", "test.png": "x"},
}  # fmt: skip


def lay_out(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"text": text}) if name.endswith(".jsonl") else text)
    return directory


def read_texts(tokenizer: Any, samples: Samples) -> list[str]:
    return [tokenizer.decode(sample.tokens, skip_special_tokens=True) for sample in samples]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "parent"), product(LAYOUTS, ["plain", "test [1] x", "train"]))
def test_splits_of_a_directory(tmp_path: Path, tokenizer: Any, name: str, parent: str) -> None:
    """Each split holds its own files alone, whatever the folder above is called."""
    directory = lay_out(tmp_path / parent, LAYOUTS[name])
    splits = {text for file, text in LAYOUTS[name].items() if file.endswith(".jsonl") and text != "other"}
    for split in splits:
        found = read_texts(tokenizer, load(tokenizer, directory, options=replace(OPTIONS, split=split)))
        assert found == [split] * sum(text == split for text in LAYOUTS[name].values())
    with pytest.raises(ExpertMeshError, match=r"has no split 'nothing'; found: .*--dataset-split names one") as raised:
        load(tokenizer, directory, options=replace(OPTIONS, split="nothing"))
    assert all(split in str(raised.value) for split in splits)


def test_splits_by_a_card(tmp_path: Path, tokenizer: Any) -> None:
    lay_out(tmp_path, LAYOUTS["a card"])
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "README.md").write_text(CARD.replace("  default: true\n", ""))
    other = replace(OPTIONS, hub_config="other")
    assert read_texts(tokenizer, load(tokenizer, tmp_path, options=other)) == ["other"]
    with pytest.raises(ExpertMeshError, match=r"README\.md has the configs main, other, not 'third'; --dataset-config"):
        load(tokenizer, tmp_path, options=replace(OPTIONS, hub_config="third"))
    with pytest.raises(ExpertMeshError, match=r"README\.md has the configs main, other; --dataset-config names one"):
        load(tokenizer, tmp_path / "two")


@pytest.mark.parametrize("pattern", ["../x.jsonl", "/etc/*.json", "https://example.org/x.jsonl", "zip://a.json::b.zip"])
def test_a_card_that_names_other_places(tmp_path: Path, tokenizer: Any, pattern: str) -> None:
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: a\n  data_files: '{pattern}'\n---\n")
    write(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ExpertMeshError, match="which is not in the directory"):
        load(tokenizer, tmp_path)


@pytest.mark.parametrize("card", ["---\nconfigs: 3\n---\n", "---\nconfigs: [{data_files: a}]\n---\n", "---\n{\n---\n"])
def test_a_card_that_cannot_be_read(tmp_path: Path, tokenizer: Any, card: str) -> None:
    (tmp_path / "README.md").write_text(card)
    write(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ExpertMeshError, match=r"README\.md: its configs cannot be read"):
        load(tokenizer, tmp_path)


def test_what_is_trained_and_evaluated_on(tmp_path: Path, tokenizer: Any) -> None:
    """A directory for both flags: neither sees the other's split."""
    both = [str(lay_out(tmp_path / "both", LAYOUTS["names of files"]))]
    whole = [str(lay_out(tmp_path / "whole", {"a.jsonl": "a"}))]
    for evaluated, expected in ((both, "test"), (whole, "a")):
        config = TrainConfig(model="m", dataset=both, eval_dataset=evaluated, dataset_num_proc=1)
        training, evaluation = _read_samples(config, tokenizer)
        assert evaluation is not None
        assert [read_texts(tokenizer, samples) for samples in (training, evaluation)] == [["train"], [expected]]


def test_files_of_no_split_are_told_of(tmp_path: Path, tokenizer: Any) -> None:
    lay_out(tmp_path, {"train.jsonl": "train", "more.jsonl": "more"})
    (origin,) = load(tokenizer, tmp_path).origins
    assert origin.name == f"{tmp_path}, split train of train; in none: more.jsonl"


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        (Columns(prompt="q", response="a"), {"q": "hi", "a": "yo", "prompt": "no"}, "<s> [INST] hi [/INST]{ yo</s>}"),
        (Columns(response="a"), {"prompt": "hi", "a": "yo"}, "<s> [INST] hi [/INST]{ yo</s>}"),
        (Columns(text="prompt"), {"prompt": "once", "response": "no"}, "o{nce</s>}"),
        (Columns(system="s"), {"prompt": "hi", "response": "yo", "s": "be"}, "<s> [INST] be\n\nhi [/INST]{ yo</s>}"),
        (
            Columns(messages="chat"),
            {"chat": [{"role": "user", "content": "hi"}, {"from": "model", "value": "yo"}], "messages": 3},
            "<s> [INST] hi [/INST]{ yo</s>}",
        ),
    ],
)
def test_columns_named_by_flags(tmp_path: Path, tokenizer: Any, columns: Columns, row: Any, expected: str) -> None:
    (sample,) = load(tokenizer, write(tmp_path / "data.jsonl", [row]), options=replace(OPTIONS, columns=columns))
    assert shown(tokenizer, sample) == expected


TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


@pytest.mark.parametrize(
    ("train_on", "changes", "expected"),
    [
        ("assistant", {}, "<s> [INST] a [/INST]{ b</s>} [INST] c [/INST]{ d</s>}"),
        ("last", {}, "<s> [INST] a [/INST] b</s> [INST] c [/INST]{ d</s>}"),
        ("all", {}, "<s>{ [INST] a [/INST] b</s> [INST] c [/INST] d</s>}"),
        ("assistant", {1: {"train": False}}, "<s> [INST] a [/INST] b</s> [INST] c [/INST]{ d</s>}"),
        ("last", {1: {"training": True}}, "<s> [INST] a [/INST]{ b</s>} [INST] c [/INST]{ d</s>}"),
        ("assistant", {2: {"weight": 1}}, "<s> [INST] a [/INST]{ b</s> [INST] c [/INST] d</s>}"),
        ("all", {3: {"weight": 0}}, "<s>{ [INST] a [/INST] b</s> [INST] c [/INST]} d</s>"),
    ],
)
def test_what_is_trained_on(
    tmp_path: Path, tokenizer: Any, train_on: Any, changes: dict[int, Any], expected: str
) -> None:
    turns = [{**turn, **changes.get(i, {})} for i, turn in enumerate(TURNS)]
    file = write(tmp_path / "data.jsonl", [{"messages": turns}])
    (sample,) = load(tokenizer, file, options=replace(OPTIONS, train_on=train_on))
    assert shown(tokenizer, sample) == expected


def test_chatml(tmp_path: Path, tokenizer: Any) -> None:
    """The answer ends with the token that ends generation; the line break after it is the template's."""
    set_chat_template(tokenizer, "chatml")
    (sample,) = load(tokenizer, write(tmp_path / "data.jsonl", [{"messages": TURNS[:2]}]))
    expected = "<s><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{b<|im_end|></s>}\n"
    assert shown(tokenizer, sample) == expected


def thinking(**answer: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}, {"role": "assistant", **answer}]


@pytest.mark.parametrize(
    "answer",
    [
        {"content": [{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "b"}], "loss_weight": 1.0},
        {"content": "b", "reasoning_content": "hm"},
    ],
)
def test_reasoning(tmp_path: Path, tokenizer: Any, answer: dict[str, Any]) -> None:
    """The model is to write it; a template that would leave it out is refused, unless the answer is not trained on."""
    file = write(tmp_path / "data.jsonl", [{"messages": thinking(**answer)}])
    with pytest.raises(ExpertMeshError, match="line 1: the chat template leaves out the reasoning of message 2"):
        load(tokenizer, file)
    with pytest.raises(ExpertMeshError, match="--prompt-template is for one prompt and its response"):
        load(tokenizer, file, options=PLAIN)
    untrained = thinking(**{**answer, "loss_weight": 0}) + TURNS[:1]
    file = write(tmp_path / "untrained.jsonl", [{"messages": untrained}])
    assert len(load(tokenizer, file, options=replace(OPTIONS, train_on="all"))) == 1
    set_chat_template(tokenizer, "chatml")
    (sample,) = load(tokenizer, tmp_path / "data.jsonl")
    assert shown(tokenizer, sample) == (
        "<s><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{<think>\nhm\n</think>\n\nb<|im_end|></s>}\n"
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"content": "b", "loss_weight": 0.5}, "message 2: loss_weight is 0.5; expected true or false"),
        ({"content": [{"type": "image_url", "value": "x"}]}, "part that is none of text, reasoning, tool_call"),
        ({"content": [{"type": "text", "value": 3}]}, "part that is none of text"),
        ({"content": [{"type": "tool_call", "value": "add(1)"}]}, "its tool_call is no JSON"),
        (
            {"content": [{"type": "tool_call", "value": '{"name": "add"}'}]},
            "expected an object with name and arguments",
        ),
        (
            {"content": [{"type": "tool_call", "value": '{"name": "f", "arguments": {}}'}], "tool_calls": [CALL]},
            "tool calls among the parts of its content and beside it",
        ),
        (
            {"content": [{"type": "reasoning", "value": "hm"}], "reasoning_content": "hm"},
            "reasoning among the parts of its content and beside it",
        ),
    ],
)
def test_parts_that_cannot_be_read(tmp_path: Path, tokenizer: Any, answer: dict[str, Any], said: str) -> None:
    file = write(tmp_path / "data.jsonl", [{"messages": thinking(**answer)}])
    with pytest.raises(ExpertMeshError, match=said) as raised:
        load(tokenizer, file)
    assert str(raised.value).startswith(f"--dataset {file}: line 1 messages, message 2")


TEXT = "\ufeffone\r\n\r\n  two\nthree \n \n\nfour"


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("line", ["one", "  two", "three ", "four"]),
        ("paragraph", ["one", "  two\nthree ", "four"]),
        ("document", ["one\n\n  two\nthree \n \n\nfour"]),
    ],
)
def test_plain_text(tmp_path: Path, tokenizer: Any, sample_by: Any, expected: list[str]) -> None:
    """A byte-order mark, blank lines and the line ends of Windows are no text; nothing stale comes out of the cache."""
    file = tmp_path / "data.txt"
    file.write_bytes(TEXT.encode())
    for by in ("document", sample_by):
        samples = load(tokenizer, file, options=replace(OPTIONS, sample_by=by))
    assert [tokenizer.decode(sample.tokens, skip_special_tokens=True) for sample in samples] == expected
    assert all(all(sample.is_trained) for sample in samples)


def said_of(samples: Samples, tokenizer: Any, evaluation: Samples | None = None) -> list[str]:
    held = None if evaluation is None else make_rows(evaluation, False, 512, 0)
    inputs = Inputs(tokenizer, None, "", make_rows(samples, False, 512, 0), held)
    order = DataOrder(len(samples), 1, 1, 1, 0)
    config = TrainConfig(model="m", dataset=["d"], max_seq_length=512)
    return _data(inputs, order, config)


def told_of(samples: Samples, tokenizer: Any, evaluation: Samples | None = None) -> list[str]:
    """The warnings among what a run says of its data."""
    return [line for line in said_of(samples, tokenizer, evaluation) if "warning" in line]


@pytest.mark.parametrize("name", ["data.jsonl", "train.jsonl"])
def test_text_beside_tables_is_about_them(tmp_path: Path, tokenizer: Any, name: str) -> None:
    (tmp_path / "LICENCE.txt").write_text("all rights")
    samples = load(tokenizer, tmp_path)
    assert (len(samples), told_of(samples, tokenizer)) == (1, [])
    write(tmp_path / name, [{"prompt": "hi", "response": "yo"}] * 2)
    samples = load(tokenizer, tmp_path)
    assert len(samples) == 2
    (line,) = told_of(samples, tokenizer)
    assert "1 file beside those that are read is not (a text is, where it is named;" in line
    assert line.endswith(f"; the first: {tmp_path / 'LICENCE.txt'}")


@pytest.mark.parametrize("name", ["data.jsonl.gz", "DATA.PARQUET", "notes.txt.zst"])
def test_data_that_are_not_read_are_told(tmp_path: Path, tokenizer: Any, name: str) -> None:
    write(tmp_path / "train.jsonl", [{"prompt": "hi", "response": "yo"}])
    (tmp_path / name).write_bytes(b"...")
    (line,) = told_of(load(tokenizer, tmp_path), tokenizer)
    assert line.endswith(f"what is compressed must be unpacked); the first: {tmp_path / name}")


ONE_TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "x" * 600, "response": "b"}, "left out, as nothing of their answers is within --max-seq-length"),
        ({"messages": ONE_TURN[:1]}, "left out, as nothing in them is trained on"),
        ({"prompt": "a", "response": " "}, "have an empty answer"),
        ({"prompt": "a", "completion": ""}, "have an empty answer"),
        ({"messages": [ONE_TURN[0], {"role": "assistant", "content": ""}]}, "have an empty answer"),
        ({"messages": [ONE_TURN[0], {"role": "assistant", "content": "<think>b</think> "}]}, "have an empty answer"),
        ({"messages": [ONE_TURN[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]}, ""),
        ({"messages": [ONE_TURN[0], {"role": "assistant", "content": "", "train": False}, *ONE_TURN]}, ""),
    ],
)
def test_records_to_look_at_are_told(tmp_path: Path, tokenizer: Any, row: dict[str, Any], said: str) -> None:
    """Counted, with the place of the first one; of data to evaluate on, too."""
    kinds: list[dict[str, Any]] = [
        {"prompt": "a", "response": "b"},
        {"prompt": "a", "completion": "b"},
        {"messages": ONE_TURN},
    ]
    kind = next(kind for kind in kinds if kind.keys() == row.keys())
    good = load(tokenizer, write(tmp_path / "good.jsonl", [kind]))
    samples = load(tokenizer, write(tmp_path / "data.jsonl", [kind, row, kind, row]))
    for lines in (told_of(samples, tokenizer), told_of(good, tokenizer, samples), told_of(samples, tokenizer, samples)):
        assert len(lines) == bool(said)
        for line in lines:
            assert line.startswith(f"warning: {tmp_path / 'data.jsonl'}: 2 of 4 records")
            assert said in line
            assert line.endswith("; the first: --dataset " + f"{tmp_path / 'data.jsonl'}: line 2")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\r\n\n", "has no records"),
        (b"good\nbad \xff\n", "line 2 is not UTF-8 text"),
        ("text".encode("utf-16"), "line 1 is not UTF-8 text"),
    ],
)
def test_text_that_cannot_be_read(tmp_path: Path, tokenizer: Any, content: bytes, said: str) -> None:
    file = tmp_path / "data.txt"
    file.write_bytes(content)
    with pytest.raises(ExpertMeshError, match=said) as raised:
        load(tokenizer, file)
    assert str(raised.value).startswith(f"--dataset {file}: ")


# As Mixtral-8x22B-Instruct does it: the system prompt stands in the last question.
LAST_QUESTION = """\
{%- set ns = namespace(system='', last=-1) %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content + ' ' %}{% endif %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '[INST] ' + (ns.system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}{{ '[CALL] ' + (m.tool_calls | tojson) + eos_token }}
    {%- elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + eos_token }}
    {%- elif m.role == 'tool' %}{{ '[RESULT] ' + m.content }}
    {%- endif %}
{%- endfor %}
"""
# As Qwen3 does it: thoughts of all but the last answer are left out.
THOUGHTS = """\
{%- for m in messages %}
    {{- bos_token if loop.first }}{{ m.role + ': ' }}
    {{- '(thinks) ' if loop.last and m.role == 'assistant' }}{{ m.content + eos_token }}
{%- endfor %}
"""


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (
            LAST_QUESTION,
            [("system", "Answer T or F."), ("user", "Is it so?"), ("assistant", "T")],
            "<s>[INST] Answer T or F. Is it so?[/INST]{ T</s>}",
        ),
        (
            LAST_QUESTION,
            [("system", "S"), ("user", "S?"), ("assistant", "S"), ("user", "I?"), ("assistant", " I ")],
            "<s>[INST] S?[/INST] {S</s>}[INST] S I?[/INST]{ I</s>}",
        ),
        (
            LAST_QUESTION,
            [("system", "S"), ("user", "a"), ("call", ""), ("tool", "2"), ("user", "c"), ("assistant", "d")],
            f"<s>[INST] a[/INST]{{[CALL] {CALL_TEXT}</s>}}[RESULT] 2[INST] S c[/INST]{{ d</s>}}",
        ),
        (
            THOUGHTS,
            [("user", "a"), ("assistant", "s"), ("user", "c"), ("assistant", "d")],
            "<s>user: a</s>{assistant: s</s>}user: c</s>{assistant: (thinks) d</s>}",
        ),
    ],
)
def test_templates_that_do_not_write_left_to_right(
    tmp_path: Path, tokenizer: Any, template: str, messages: list[tuple[str, str]], expected: str
) -> None:
    """Answers are then found by what changes when they do, not by their words, which may stand elsewhere."""
    (tmp_path / "own.jinja").write_text(template)
    assert set_chat_template(tokenizer, str(tmp_path / "own.jinja")) == str(tmp_path / "own.jinja")
    turns = [
        {"role": "assistant", "tool_calls": [CALL]} if role == "call" else {"role": role, "content": content}
        for role, content in messages
    ]
    (sample,) = load(tokenizer, write(tmp_path / "data.jsonl", [{"messages": turns}]))
    assert shown(tokenizer, sample) == expected


@pytest.mark.parametrize(
    ("train_on", "train", "expected"),
    [
        ("all", False, "<s>{ [INST] }SECRET{\n\nhi [/INST] yo</s>}"),
        ("assistant", True, "<s> [INST] {SECRET}\n\nhi [/INST]{ yo</s>}"),
    ],
)
def test_system_prompt_that_the_template_moves(
    tmp_path: Path, tokenizer: Any, train_on: Any, train: bool, expected: str
) -> None:
    turns = [
        {"role": "system", "content": "SECRET", "train": train},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    ]
    file = write(tmp_path / "data.jsonl", [{"messages": turns}])
    (sample,) = load(tokenizer, file, options=replace(OPTIONS, train_on=train_on))
    assert shown(tokenizer, sample) == expected


def test_system_prompt_without_a_question(tmp_path: Path, tokenizer: Any) -> None:
    turns = [{"role": "system", "content": "be nice"}, {"role": "assistant", "content": "yo"}]
    (sample,) = load(tokenizer, write(tmp_path / "data.jsonl", [{"messages": turns}]))
    assert shown(tokenizer, sample) == "<s> [INST] be nice [/INST]{ yo</s>}"


def test_prompt_messages_keep_their_overrides(tmp_path: Path, tokenizer: Any) -> None:
    prompt = [{"role": "user", "content": "u", "train": True}, {"role": "assistant", "content": "a", "weight": 1}]
    row = {"prompt": [*prompt, {"role": "user", "content": "v"}], "completion": [{"role": "assistant", "content": "b"}]}
    (sample,) = load(tokenizer, write(tmp_path / "data.jsonl", [row]))
    assert shown(tokenizer, sample) == "<s>{ [INST] u [/INST] a</s>} [INST] v [/INST]{ b</s>}"


def test_tools_and_calls_in_other_forms(tmp_path: Path, tokenizer: Any) -> None:
    """Tools as JSON text, and OpenAI's older function_call."""
    call = {"name": "add", "arguments": {"a": 1}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "function_call": call}]
    row = {"messages": turns, "tools": '[{"type": "function"}]'}
    (sample,) = load(tokenizer, write(tmp_path / "data.jsonl", [row]))
    assert shown(tokenizer, sample) == (
        '<s> [AVAILABLE_TOOLS] [{"type": "function"}] [/AVAILABLE_TOOLS] [INST] x [/INST]{ [TOOL_CALLS] '
        + CALL_TEXT
        + "</s>}"
    )


@pytest.mark.parametrize(
    "call",
    [
        {"name": "add", "parameters": {"a": 1}},
        {"type": "function", "function": {"name": "add", "parameters": '{"a": 1}'}},
        {"type": "function", "function": {"name": "add"}, "arguments": {"a": 1}},
        {"name": "add", "arguments": {"a": 1}, "parameters": None},
    ],
)
def test_arguments_in_other_places(tmp_path: Path, tokenizer: Any, call: Any) -> None:
    """Under Llama's name, or beside the function: a call of the same arguments, none without any."""
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    (sample,) = load(tokenizer, write(tmp_path / "data.jsonl", [{"messages": turns}]))
    assert shown(tokenizer, sample) == "<s> [INST] x [/INST]{ [TOOL_CALLS] " + CALL_TEXT + "</s>}"


def read(turns: list[dict[str, Any]]) -> Conversation:
    """Messages as a record's reader hands them on."""
    row = {"messages": turns}
    found = read_row(row, find_format(row, Columns()), Columns())
    assert isinstance(found, Conversation)
    return found


def test_calls_in_a_row_keep_what_each_thinks() -> None:
    """One that says more than its call is no part of the message before it."""
    call = '{"name": "add", "arguments": {"a": 1}}'
    turns = [{"from": "function_call", "value": call}, {"from": "function_call", "value": "<think>why</think>" + call}]
    (parallel,) = read(turns[:1] * 2).messages
    assert len(parallel["tool_calls"]) == 2
    first, second = read(turns).messages
    assert (len(first["tool_calls"]), len(second["tool_calls"]), second["reasoning_content"]) == (1, 1, "why")


@pytest.mark.parametrize("content", ["", None])
def test_empty_content_beside_a_value(content: str | None) -> None:
    turn = {"role": "user", "content": content, "value": "text"}
    assert read([turn]).messages == [{"role": "user", "content": "text"}]


def test_which_template(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert set_chat_template(tokenizer, "") == "built-in mistral (the tokenizer has none)"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    assert set_chat_template(tokenizer, "") == "built-in chatml (the tokenizer has none)"
    assert set_chat_template(tokenizer, "") == "the tokenizer's own"
    with pytest.raises(
        ExpertMeshError,
        match=r"neither a built-in one \(mistral, chatml, harmony, deepseek, glm, olmoe\) nor a readable file",
    ):
        set_chat_template(tokenizer, "mistrall")
    (tmp_path / "bad.jinja").write_text("{% for")
    with pytest.raises(ExpertMeshError, match=r"bad\.jinja: cannot be used"):
        set_chat_template(tokenizer, str(tmp_path / "bad.jinja"))


def test_prompt_template(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "ab", "response": "cde"}, {"prompt": "", "response": ""}]
    file = write(tmp_path / "data.json", rows)
    assert [shown(tokenizer, s) for s in load(tokenizer, file, options=PLAIN)] == ["ab\n{cde</s>}", "\n{</s>}"]
    whole = replace(PLAIN, train_on="all")
    assert [shown(tokenizer, s) for s in load(tokenizer, file, options=whole)] == ["a{b\ncde</s>}", "\n{</s>}"]
    with pytest.raises(ExpertMeshError, match=r"line 1: --prompt-template is for one prompt and its response"):
        load(tokenizer, write(tmp_path / "chat.jsonl", [{"messages": TURNS}]), options=PLAIN)


@pytest.mark.parametrize(
    ("question", "answer", "train_on", "expected"),
    [
        ({}, {"train": False}, "all", "a{b\n}cd</s>"),
        ({}, {"weight": 0}, "all", "a{b\n}cd</s>"),
        ({"train": True}, {}, "assistant", "a{b\ncd</s>}"),
        ({"weight": 1}, {"loss_weight": 0.0}, "last", "a{b\n}cd</s>"),
    ],
)
def test_messages_in_a_prompt_template(
    tmp_path: Path, tokenizer: Any, question: Any, answer: Any, train_on: Any, expected: str
) -> None:
    """What a message says of itself goes before --train-on; one with nothing to learn is left out."""
    turns = [{"role": "user", "content": "ab", **question}, {"role": "assistant", "content": "cd", **answer}]
    file = write(tmp_path / "data.jsonl", [{"messages": turns}])
    (sample,) = load(tokenizer, file, options=replace(PLAIN, train_on=train_on))
    assert shown(tokenizer, sample) == expected


def test_an_untrained_answer_in_a_prompt_template(tmp_path: Path, tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd", "train": False}]
    file = write(tmp_path / "data.jsonl", [{"messages": turns}, {"messages": TURNS[:2]}])
    samples = load(tokenizer, file, options=PLAIN)
    assert [shown(tokenizer, sample) for sample in samples] == ["a\n{b</s>}"]
    assert samples.origins[0].without_target == 1


def test_tools_have_no_place_in_a_prompt_template(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "data.jsonl", [{"messages": TURNS[:2], "tools": [{"name": "add"}]}])
    with pytest.raises(
        ExpertMeshError, match=r"line 1: --prompt-template .* tools, which only a chat template can write"
    ):
        load(tokenizer, file, options=PLAIN)


# Special tokens: one BOS, and an end


def adding(tokenizer: Any, template: str) -> Any:
    """The tokenizer with special tokens around what it is given, as `template` has them."""
    from tokenizers import processors

    specials = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=specials)
    return tokenizer


@pytest.mark.sample(12)
@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize(
    ("row", "prompt_template", "bare", "with_bos"),
    [
        ({"text": "ab"}, "", "a{b</s>}", "<s>{ab</s>}"),
        ({"text": "<s>ab"}, "", "<s>{ab</s>}", "<s>{ab</s>}"),
        ({"text": "<s>ab</s>"}, "", "<s>{ab</s>}", "<s>{ab</s>}"),
        ({"prompt": "ab", "completion": "cd"}, "", "ab{cd</s>}", "<s>ab{cd</s>}"),
        ({"prompt": "<s>ab", "completion": "cd</s>"}, "", "<s>ab{cd</s>}", "<s>ab{cd</s>}"),
        ({"prompt": "", "completion": "cd"}, "", "c{d</s>}", "<s>{cd</s>}"),
        ({"prompt": "ab", "completion": ""}, "", "ab{</s>}", "<s>ab{</s>}"),
        ({"prompt": "ab", "response": "cd"}, "<s>{prompt}: ", "<s>ab: {cd</s>}", "<s>ab: {cd</s>}"),
        ({"prompt": "ab", "response": "cd"}, "{prompt}: ", "ab: {cd</s>}", "<s>ab: {cd</s>}"),
        ({"prompt": "ab", "completion": "cd"}, "{prompt}: ", "ab: {cd</s>}", "<s>ab: {cd</s>}"),
        ({"messages": TURNS[:2]}, "", "<s> [INST] a [/INST]{ b</s>}", "<s> [INST] a [/INST]{ b</s>}"),
    ],
)
def test_one_bos_and_one_end(
    tmp_path: Path, tokenizer: Any, template: str, row: Any, prompt_template: str, bare: str, with_bos: str
) -> None:
    """Whether the text has them, the tokenizer adds them, or the template writes them."""
    options = replace(OPTIONS, prompt_template=prompt_template)
    (sample,) = load(adding(tokenizer, template), write(tmp_path / "data.jsonl", [row]), options=options)
    assert shown(tokenizer, sample) == (bare if template == "$A" else with_bos)


@pytest.mark.parametrize(
    ("bos", "adds", "is_told"), [("", True, True), ("{{ bos_token }}", True, False), ("", False, False)]
)
def test_a_template_without_bos_is_told_of(tmp_path: Path, tokenizer: Any, bos: str, adds: bool, is_told: bool) -> None:
    """It is used as it stands, as those do who serve the model."""
    (tmp_path / "own.jinja").write_text(bos + "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    told = set_chat_template(adding(tokenizer, "<s> $A" if adds else "$A"), str(tmp_path / "own.jinja"))
    assert ("writes no <s>, which the tokenizer puts before plain text" in told) == is_told


def test_plain_prompts_have_no_place_for_more(tmp_path: Path, tokenizer: Any) -> None:
    row = {"prompt": "ab", "completion": "cd", "system": "be brief"}
    file = write(tmp_path / "data.jsonl", [row])
    with pytest.raises(ExpertMeshError, match="line 1 has system beside a prompt and completion of plain text"):
        load(tokenizer, file)
    asked = replace(OPTIONS, columns=Columns(prompt="prompt", response="completion"))
    (sample,) = load(tokenizer, file, options=asked)
    assert shown(tokenizer, sample) == "<s> [INST] be brief\n\nab [/INST]{ cd</s>}"
    with pytest.raises(ExpertMeshError, match="line 2 has messages, and those before it plain text"):
        load(
            tokenizer,
            write(file, [{"prompt": "ab", "completion": "cd"}, {"prompt": TURNS[:1], "completion": TURNS[1:2]}]),
        )


ENDLESS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("rows", "template", "eos", "endless"),
    [
        ([{"messages": TURNS}], "", True, 0),
        ([{"messages": TURNS}, {"messages": [*TURNS[:3], {**TURNS[3], "train": False}]}], "", True, 0),
        ([{"messages": TURNS}] * 2, ENDLESS, True, 2),
        ([{"text": "ab"}], "", True, 0),
        ([{"text": "ab"}, {"text": "x" * 600}], "", False, 1),
        ([{"prompt": "ab", "completion": "cd"}], "", False, 1),
        ([{"messages": TURNS}], "", False, 1),
    ],
)
def test_answers_that_never_end_are_counted(
    tmp_path: Path, tokenizer: Any, rows: list[Any], template: str, eos: bool, endless: int
) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    if not eos:
        tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", "''")
        tokenizer.eos_token = None
    samples = load(tokenizer, write(tmp_path / "data.jsonl", rows))
    assert [origin.endless for origin in samples.origins] == [endless]
    told = told_of(samples, tokenizer)
    assert len(told) == bool(endless)
    assert all("no special token ends what is trained on" in line for line in told)


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        ({"prompt": "a", "response": "b"}, {}, ["</s>"]),
        ({"prompt": "a", "response": "b" * 50}, {"max_seq_length": 20}, []),
        ({"prompt": "a", "completion": "b"}, {}, ["</s>"]),
        ({"prompt": "a", "response": "b"}, {"prompt_template": "{prompt}:"}, ["</s>"]),
        (
            {"messages": [{"role": "assistant", "content": "b"}, {"role": "user", "content": "a", "train": True}]},
            {},
            ["</s>"],
        ),
        ({"prompt": "a", "response": "b"}, {"train_on": "all"}, ["</s>"]),
    ],
)
def test_what_answers_end_with(
    tmp_path: Path, tokenizer: Any, row: Any, settings: dict[str, Any], expected: list[str]
) -> None:
    """Tokens that end answers are told, as far as they are trained on; those that end other turns are not."""
    samples = load(tokenizer, write(tmp_path / "data.jsonl", [row, {**row}]), options=replace(OPTIONS, **settings))
    assert tokenizer.convert_ids_to_tokens(samples.ends) == expected


def test_truncation(tmp_path: Path, tokenizer: Any) -> None:
    """What is cut is counted; what is left without a target is counted and left out."""
    rows = [{"prompt": prompt, "response": "ghi"} for prompt in ("abcdef", "a", "")]
    samples = load(tokenizer, write(tmp_path / "data.jsonl", rows), options=replace(PLAIN, max_seq_length=4))
    assert [shown(tokenizer, s) for s in samples] == ["a\n{gh}", "\n{ghi}"]
    (origin,) = samples.origins
    assert (origin.rows, origin.cut, origin.without_target, origin.used) == (3, 3, 1, 2)
    assert "evaluation on 2 samples, 2 of them truncated" in said_of(samples, tokenizer, samples)
    with pytest.raises(ExpertMeshError, match="no record has a trained token within --max-seq-length 2"):
        load(tokenizer, tmp_path / "data.jsonl", options=DataOptions(2, prompt_template="{prompt}{prompt}  "))


def test_cache(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tokenised twice, and nothing outlives the file, the template or the flags that it was made from."""
    file = write(tmp_path / "data.jsonl", [{"prompt": "ab", "response": "cde"}])
    first = shown(tokenizer, load(tokenizer, file)[0])
    with monkeypatch.context() as patch:
        patch.setattr("expertmesh.training.data.samples._tokenize_batch", lambda *_: lambda batch: pytest.fail("again"))
        patch.setattr("expertmesh.training.data.samples._read", lambda *_: pytest.fail("again"))
        assert shown(tokenizer, load(tokenizer, file)[0]) == first
    assert shown(tokenizer, load(tokenizer, file, options=replace(OPTIONS, train_on="all"))[0]) != first
    set_chat_template(tokenizer, "chatml")
    assert "im_start" in shown(tokenizer, load(tokenizer, file)[0])
    write(file, [{"prompt": "ab", "response": "fgh"}])
    assert "fgh" in shown(tokenizer, load(tokenizer, file)[0])


@pytest.mark.parametrize("place", ["", "/datasets"])
def test_a_cache_that_cannot_be_written(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", f"{tmp_path}/file{place}")
    with pytest.raises(
        ExpertMeshError, match=r"file.*expertmesh: tokenized samples cannot be written there: Not a dir.*"
    ):
        load(tokenizer, write(tmp_path / "data.jsonl", [{"text": "a"}]))


@pytest.mark.parametrize("writing", ["_records", "_tokenize_batch"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, writing: str, workers: int
) -> None:
    """While records are written, and while samples are, by this process or another one."""
    file = write(tmp_path / "data.jsonl", [{"text": "a"}] * 4)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def fails(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    replaced = fails if writing == "_records" else lambda *_: fails
    with monkeypatch.context() as patch:
        patch.setattr(f"expertmesh.training.data.samples.{writing}", replaced)
        with pytest.raises(ExpertMeshError, match="cannot be written there: No space left on device; the environment"):
            load(tokenizer, file, options=replace(OPTIONS, num_workers=workers))
    assert len(load(tokenizer, file)) == 4


def test_a_file_that_cannot_be_read_is_not_the_cache_s_fault(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setitem(READERS, ".jsonl", fails)
    with pytest.raises(ExpertMeshError, match=r"data\.jsonl: cannot be read: .*Input/output error"):
        load(tokenizer, write(tmp_path / "data.jsonl", [{"text": "a"}]))


def test_what_ended_runs_left_is_removed(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """But not what a resumed run is writing, nor complete samples."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = write(tmp_path / "data.jsonl", [{"text": "a"}])
    load(tokenizer, file)
    whole = {path for path in cache_directory().rglob("*") if path.is_file()}
    (directory,) = (path.parent for path in whole if path.suffix == ".arrow" and "cache" in path.name)
    left = [directory / "tmpabc", directory.parent / "0.0.1.incomplete" / "a.arrow"]
    left[1].parent.mkdir()
    for path in left:
        path.write_bytes(bytes(600_000))
    with filling_cache():
        load(tokenizer, file)
    assert not any(path.exists() for path in left)
    assert "removed 1.2 MB of unfinished samples that an ended run left in" in capfd.readouterr().err
    left[0].write_bytes(bytes(10))
    with open(cache_directory() / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        load(tokenizer, file)
    assert left[0].exists()
    left[0].unlink()
    assert {path for path in cache_directory().rglob("*") if path.is_file()} == whole
    assert cached_bytes() == sum(path.stat().st_size for path in whole)


def test_the_cache_is_measured_while_another_run_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was listed is renamed or removed before it is looked into."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    for name in ("gone.incomplete", "whole"):
        (cache_directory() / name).mkdir(parents=True)
    (cache_directory() / "whole" / "a.arrow").write_bytes(bytes(7))
    scandir = os.scandir

    def scan(path: Any) -> Any:
        if Path(path).name == "gone.incomplete":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert cached_bytes() == 7


@contextmanager
def stderr_appended_to(path: Path) -> Iterator[None]:
    """Also what other processes and threads write."""
    before, file = os.dup(2), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.dup2(file, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(file)


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_is_told(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """While records are read and while they are tokenized, to who asked for it."""
    monkeypatch.setattr("expertmesh.training.data.samples.SECONDS_IN_LOG", 0.001)
    # capfd's file must not be read while another thread writes to it: what is written meanwhile may be lost
    told = tmp_path / "stderr.txt"

    def wait_for(text: str) -> None:
        while text not in told.read_text():
            time.sleep(0.001)

    reader = READERS[".jsonl"]

    def reads(flag: str, path: Path) -> Any:
        for number, row in enumerate(reader(flag, path)):
            if number == 150:
                wait_for("data.jsonl: 100 records")
            yield row

    def joined(self: TokenizingProgress, *given: Any) -> None:
        if "tokenizing" in self.line():
            wait_for("data.jsonl: 200 of 200 records")
        leave(self, *given)

    leave = TokenizingProgress.__exit__
    monkeypatch.setitem(READERS, ".jsonl", reads)
    monkeypatch.setattr(TokenizingProgress, "__exit__", joined)
    file = write(tmp_path / "data.jsonl", [{"text": str(number)} for number in range(200)])
    with stderr_appended_to(told):
        load_samples("--dataset", [str(file)], tokenizer, replace(OPTIONS, num_workers=workers), 0, tells=True)
    lines = told.read_text().splitlines(keepends=True)
    assert all(
        re.search(r"(reading|tokenizing) \S+/data\.jsonl: [\d,]+( of 200)? records, \d+ s\n$", line)
        for line in lines
        if str(file) in line  # another test's reading may still be told of
    )
    monkeypatch.setattr(TokenizingProgress, "__exit__", leave)
    told.unlink()
    with stderr_appended_to(told):
        load(tokenizer, file, options=replace(OPTIONS, train_on="all"))
    assert f"{file}: " not in told.read_text()


def test_several_processes_tokenise_alike(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "data.jsonl", [{"prompt": str(i), "response": "x" * (i % 7)} for i in range(40)])
    alone = list(load(tokenizer, file, options=replace(OPTIONS, num_workers=1)))
    other = replace(OPTIONS, num_workers=2, max_seq_length=511)  # else it would come out of the cache
    assert list(load(tokenizer, file, options=other)) == alone


# Mixtures


def test_weights(tmp_path: Path, tokenizer: Any) -> None:
    """The scarcest data set is used whole, the others as far as their share allows; which rows depends on the seed."""
    a = write(tmp_path / "a.jsonl", [{"text": f"a{i}"} for i in range(30)])
    b = write(tmp_path / "b.jsonl", [{"prompt": f"b{i}", "response": "x"} for i in range(30)])
    together = load(tokenizer, a, b)
    assert len(together) == 60
    mixed = load(tokenizer, f"{a}:0.75", f"{b}:0.25")
    assert [origin.used for origin in mixed.origins] == [30, 10]
    assert [origin.format for origin in mixed.origins] == ["text", "prompt/response"]
    texts = [shown(tokenizer, sample) for sample in mixed]
    assert len(set(texts)) == 40
    assert texts == [shown(tokenizer, sample) for sample in load(tokenizer, f"{a}:3", f"{b}:1")]
    assert texts != [shown(tokenizer, sample) for sample in load(tokenizer, f"{a}:3", f"{b}:1", seed=1)]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["a.jsonl:0.5", "b.jsonl"], "a.jsonl has a weight and b.jsonl has none"),
        (["a.jsonl:0"], "the weight 0 must be a positive number"),
        (["a.jsonl:-1"], "the weight -1 must be a positive number"),
        (["a.jsonl:nan"], "the weight nan must be a positive number"),
    ],
)
def test_bad_weights(entries: list[str], said: str) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        parse_datasets("--dataset", entries)


def test_hold_out(tmp_path: Path, tokenizer: Any) -> None:
    samples = load(tokenizer, write(tmp_path / "data.jsonl", [{"text": f"t{i}"} for i in range(20)]))
    train, held_out = hold_out(samples, 0.1, seed=3)
    assert (len(train), len(held_out)) == (18, 2)
    texts = [shown(tokenizer, sample) for part in (train, held_out) for sample in part]
    assert sorted(texts) == sorted(shown(tokenizer, sample) for sample in samples)
    assert list(hold_out(samples, 0.1, seed=3)[1]) == list(held_out)
    with pytest.raises(ExpertMeshError, match=r"--eval-ratio 0\.99: takes all 20 samples"):
        hold_out(samples, 0.99, seed=3)


# Bad data


def dumped_call(arguments: Any, **more: Any) -> bytes:
    """A record with one message, which calls."""
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    return json.dumps({"messages": [{"role": "assistant", "tool_calls": calls, **more}]}).encode()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}\n[1, 2]\n', "data.jsonl: line 2 is no JSON object"),
        (b'\n{"text": "caf\xe9"}\n', "data.jsonl: line 2 is not UTF-8 text"),
        (b" \n\n", "has no records"),
        (b"[]", "has no records"),
        (b"", "is empty"),
        (b"{}", r"line 1 has the columns \(none\), but one of these is needed: messages; conversations; prompt"),
        (b'{"q": 1, "a": 2}', "line 1 has the columns q, a, but .*--prompt-column and --response-column"),
        (b'[{"prompt": "a", "response": "b"}, {"prompt": "a"}]', "record 2 has no column 'response'.*found: prompt"),
        (b'{"prompt": "a", "response": 3}', "line 1 response is 3, not text"),
        (b'{"messages": []}', r"line 1 messages is \[\], not a list of messages"),
        (b'{"messages": "hi"}', "line 1 messages is 'hi', neither a list of messages nor the JSON"),
        (b'{"messages": ["hi"]}', "messages, message 1 is 'hi', not an object"),
        (b'{"messages": [{"content": "a"}]}', r"message 1 has no role \(or from\); found: content"),
        (b'{"messages": [{"role": "user"}]}', r"message 1 has no content \(or value\); found: role"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "message 1: content is 3, not text"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "a part that is none of text.*image"),
        (b'{"messages": [{"role": "user", "content": "a", "weight": 0.5}]}', "weight is 0.5; expected true or false"),
        (b'{"messages": [{"role": "judge", "content": "a"}]}', "line 1: the chat template refuses .*not judge"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "no record has a trained token"),
        (b'{"instruction": "a", "output": "b", "history": [1]}', "history has 1 for a pair"),
        (
            b'{"prompt": "a", "response": "b", "tools": "hammer"}',
            "tools is 'hammer', neither a list nor the JSON of one",
        ),
        (b'{"prompt": "a", "response": "b", "tools": "{\\"a\\": 1}"}', "tools is .*, not a list"),
        (b'{"prompt": "a", "chosen": "b", "rejected": "c"}', "has the column rejected: preference data, as DPO or KTO"),
        (b'{"prompt": "a", "completion": "b", "label": false}', "has the column label: preference data"),
        (b'{"prompt": "a", "completion": "b", "label": "False"}', "has the column label: preference data"),
        (b'{"prompt": "a", "completion": "b", "images": ["a.png"]}', "has images beside a prompt and completion"),
        (
            b"{\"prompt\": \"[{'role': 'user'}]\", \"completion\": \"[{'role': 'assistant'}]\"}",
            "prompt is .*, neither a list of messages nor the JSON of one",
        ),
        (
            b'{"question": "a", "answer": "b", "context": "c"}',
            "has context beside question and answer, where it",
        ),
        (b'{"prompt": "a", "response": "b", "history": [["c", "d"]]}', "has history beside prompt and response"),
        (b'{"messages": [{"role": "user", "content": "a"}], "images": ["a.png"]}', "has images, and only text is"),
        (
            b'{"messages": [{"role": "user", "content": "a", "images": ["a.png"]}]}',
            "message 1 has images, and only text",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "", "refusal": "no"}]}',
            "message 1 has refusal: give what it",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "a", "reasoning_details": [{"text": "b"}]}]}',
            "message 1 has reasoning_details, whose text would be left out; give it as reasoning_content",
        ),
        (
            b'{"messages": [{"role": "user", "content": "a", "train_detail": [{}]}]}',
            "message 1: train_detail: parts of",
        ),
        (b'{"conversations": [{"from": "function_call", "value": "add(1)"}]}', "function_call is no JSON .*'add.1.'"),
        (
            b'{"conversations": [{"from": "function_call", "value": "[]"}]}',
            "function_call has no call; expected an object",
        ),
        (
            b'{"conversations": [{"from": "function_call", "value": "[3]"}]}',
            "has the tool call 3; expected an object with name",
        ),
        *[
            (dumped_call(arguments), rf"line 1 messages, message 1: the arguments of its call of f are {said}")
            for arguments, said in (
                ("add 1", "'add 1', neither an object nor the JSON of one: Expecting"),
                ("[1]", r"'\[1\]', not an object"),
                ('"{}"', "'\"{}\"', not an object"),
                ([1], r"\[1\], not an object or the JSON of one"),
                (3, "3, not an object"),
            )
        ],
        (
            b'{"system": "a", "messages": [{"role": "system", "content": "b"}]}',
            "has a system prompt in system and another",
        ),
        (dumped_call({}, **{"from": "user"}), "message 1 has role and from; leave one of them out"),
        (dumped_call({}, content="a", value="b"), "message 1 has content and value"),
        (dumped_call({}, function_call={"name": "g"}), "message 1 has tool_calls and function_call"),
        (dumped_call(None, train=True, weight=0), "message 1 has train and weight, which do not say the same"),
        (
            b'{"prompt": "a", "response": "b", "tools": [{"name": "f"}], "functions": [{"name": "g"}]}',
            "has tools and functions, not the same; leave one of them out",
        ),
        *[
            (json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode(), said)
            for call, said in (
                ({"name": "f", "args": {"a": 1}}, "its call of f has args and no arguments; name what it hands over"),
                ({"function": {"name": "f"}, "input": '{"a": 1}'}, "its call of f has input and no arguments"),
                ({"function": {"name": "f", "arguments": {}}, "arguments": {"a": 1}}, "has two different arguments"),
                ({"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}, "has two different arguments"),
            )
        ],
        (dumped_call({}, tool_responses=[{"name": "f", "response": 1}]), "has tool_responses: give each result as a"),
        (b'{"prompt": "a", "response": "b", "tools": [null]}', "tools has an entry that is None, not an object"),
        (b"[" * 100_000, "not valid JSON"),
        (b'[{"prompt": "a", "response": ', "the file is not valid JSON .*line 1 column 30"),
    ],
)
def test_bad_rows(tmp_path: Path, tokenizer: Any, content: bytes, said: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(content)
    with pytest.raises(ExpertMeshError, match=said):
        load(tokenizer, file)


def _empty_directory(path: Path) -> Path:
    (path / "photos").mkdir()
    (path / "photos" / "a.png").touch()
    return path / "photos"


def _broken_parquet(path: Path) -> Path:
    (path / "a.parquet").write_bytes(b"PAR1 and no more")
    return path / "a.parquet"


def _ragged_csv(path: Path) -> Path:
    (path / "a.csv").write_text("prompt,response\na,b\nc\n")
    return path / "a.csv"


def _other_kind(path: Path) -> Path:
    (path / "a.docx").write_bytes(b"x")
    return path / "a.docx"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path / "missing.jsonl", "missing.jsonl: no such file or directory"),
        (lambda path: "someone/nothing", "someone/nothing: no such file or directory, and split 'train' of a hub"),
        (_empty_directory, r"photos: has no data file \(\.jsonl, .*found: a\.png"),
        (_broken_parquet, r"a\.parquet: cannot be read as Parquet"),
        (_ragged_csv, r"a\.csv: line 3 has 1 cells, the first line names 2 columns"),
        (_other_kind, r"a\.docx: unknown kind of file '\.docx'; known: \.jsonl"),
    ],
)
def test_bad_files(tmp_path: Path, tokenizer: Any, make: Callable[[Path], Any], said: str) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        load(tokenizer, make(tmp_path))


@pytest.mark.parametrize("name", ["data[1].jsonl", "a b*.json", "odd:name.jsonl"])
def test_text_that_looks_like_something_else(tmp_path: Path, tokenizer: Any, name: str) -> None:
    """Dates and numbers in quotes stay text, a byte order mark is no text, and a file's name is no pattern."""
    file = tmp_path / name
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "007", "response": "2024-01-01", "other": 1}\n')
    (sample,) = load(tokenizer, file, options=PLAIN)
    assert tokenizer.decode(sample.tokens) == "007\n2024-01-01</s>"


# Batches


def test_targets_are_the_trained_tokens() -> None:
    samples = [Sample.of_prompt([10, 11, 12, 13], 2), Sample.of_prompt([20, 21], 0), Sample.of_prompt([30, 31], 2)]
    batch = collate([[sample] for sample in samples])
    assert batch.tokens_BS.tolist() == [[10, 11, 12, 13], [20, 21, 0, 0], [30, 31, 0, 0]]
    assert batch.positions_BS is None
    assert batch.is_token_BS is not None
    assert batch.is_token_BS.sum(dim=1).tolist() == [4, 2, 2]
    assert batch.targets_BS.tolist() == [[-100, 12, 13, -100], [21, -100, -100, -100], [-100] * 4]
    assert batch.target_index_N.tolist() == [1, 2, 4]
    assert (batch.num_tokens, batch.num_targets, batch.spans) == (8, 3, (range(4), range(2), range(2)))


def test_packed_rows() -> None:
    samples = [Sample.of_prompt([10, 11, 12], 1), Sample.of_prompt([20], 0), Sample.of_prompt([30, 31], 0)]
    batch = collate([samples, [samples[2]]])
    assert batch.tokens_BS.tolist() == [[10, 11, 12, 20, 30, 31], [30, 31, 0, 0, 0, 0]]
    assert batch.positions_BS is not None
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 0, 0, 0, 0]]
    # the last token of a sample has no target: what follows is another sample
    assert batch.targets_BS.tolist() == [[11, 12, -100, -100, 31, -100], [31, -100, -100, -100, -100, -100]]
    assert sum(map(len, batch.spans)) == batch.num_tokens


def test_no_sample_is_one_position_of_padding() -> None:
    batch = collate([])
    assert batch.tokens_BS.shape == (1, 1)
    assert batch.is_token_BS is not None
    assert not batch.is_token_BS.any()
    assert (batch.num_tokens, batch.num_targets) == (0, 0)


def test_no_padding_no_mask() -> None:
    assert collate([[Sample.of_prompt([1, 2], 1)], [Sample.of_prompt([3, 4], 1)]]).is_token_BS is None


# Order


def test_rows_of_a_step_do_not_depend_on_how_they_are_shared_out() -> None:
    shares = [(1, 12, 1), (1, 4, 3), (2, 6, 1), (4, 3, 1), (2, 2, 3), (4, 1, 3), (12, 1, 1)]
    orders = [DataOrder(50, world, per_device, accumulation, seed=7) for world, per_device, accumulation in shares]
    for step in range(11):  # into the third epoch; each ends in a short batch of 2 rows
        expected = sorted(orders[0].global_batch(step))
        for order in orders:
            forwards = [order.micro_batches(step, rank) for rank in range(order.num_readers)]
            assert len({len(f) for f in forwards}) == 1, "ranks must make equally many forwards"
            assert sorted(row for rank in forwards for rows in rank for row in rows) == expected
            assert all(len(rows) <= order.per_device for rank in forwards for rows in rank)


@pytest.mark.parametrize("grouped", [False, True])
def test_each_epoch_has_every_row_once_in_an_order_of_its_own(grouped: bool) -> None:
    import torch

    lengths = torch.arange(50) * 7 % 10 if grouped else None
    order = DataOrder(50, 1, 4, 1, seed=0, lengths=lengths)
    epochs = [[row for step in range(13 * e, 13 * e + 13) for row in order.global_batch(step)] for e in range(2)]
    assert all(sorted(rows) == list(range(50)) for rows in epochs)
    assert epochs[0] != epochs[1]
    assert DataOrder(50, 1, 4, 1, seed=1, lengths=lengths).global_batch(1) != order.global_batch(1)


def test_group_by_length() -> None:
    """Batches of like length, in random order, the longest sequence first; the same whatever the parallel layout."""
    import torch

    lengths = torch.randint(1, 500, (1000,), generator=torch.Generator().manual_seed(0))
    order = DataOrder(1000, 4, 2, 1, seed=0, lengths=lengths)
    batches = [lengths[order.global_batch(step)] for step in range(order.steps_per_epoch)]
    spread = torch.stack([batch.max() - batch.min() for batch in batches]).float().mean()
    assert spread < 20, "of rows chosen at random it would be near 390"
    assert batches[0].max() == lengths.max()
    means = torch.stack([batch.float().mean() for batch in batches])
    assert 10 < (means[1:] < means[:-1]).sum() < 115, "in random order, not sorted"
    other = DataOrder(1000, 2, 2, 2, seed=0, lengths=lengths)
    assert all(order.global_batch(step) == other.global_batch(step) for step in range(200))
