"""Data: files of every format to tokens and targets, and what is said of those that cannot be read."""

import csv
import errno
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config.train_config import TrainConfig, parse_config
from expertmesh.training.data.chat import set_chat_template
from expertmesh.training.data.data_files import READERS, DatasetSpec, parse_datasets
from expertmesh.training.data.digest import samples_facts
from expertmesh.training.data.formats import Columns, Conversation, PlainText, find_format, read_row
from expertmesh.training.data.preview import describe_origin
from expertmesh.training.data.record_kinds import SPLIT_TURNS
from expertmesh.training.data.sample_cache import load_samples
from expertmesh.training.data.samples import Samples, column_of, hold_out
from expertmesh.training.data.sequences import DataOrder, make_rows
from expertmesh.training.data.templates import built_in_template
from expertmesh.training.data.tokenizing import DataOptions
from expertmesh.training.data.tools import TOOLS
from expertmesh.training.run.banner import data_line, data_sets
from expertmesh.training.start.inputs import (
    Inputs,
    _check_names_of_parts,
    _read_samples,
    _tokenizer,
    _tokens_in,
    _unseen,
    _without_effect,
)
from tests.tiny import save_tokenizer


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    set_chat_template(tokenizer, "mistral")
    return tokenizer


def load(tokenizer: Any, *entries: object, seed: int = 0, **settings: Any) -> Samples:
    options = DataOptions(**{"max_seq_length": 512, **settings})
    return load_samples("--dataset", [str(entry) for entry in entries], tokenizer, options, seed)


def shown(tokenizer: Any, samples: Samples) -> list[str]:
    """The text of each with what is trained on in brackets; the first token never is."""
    texts = []
    for sample in samples:
        trained = [False, *sample.is_trained[1:], False]
        marks = [{(0, 1): "{", (1, 0): "}"}.get(pair, "") for pair in zip([0, *trained], trained, strict=False)]
        tokens = [*(tokenizer.decode([token]) for token in sample.tokens), ""]
        texts.append("".join(mark + token for mark, token in zip(marks, tokens, strict=True)))
    return texts


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(file: Path, rows: list[Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def say(text: str, **more: Any) -> dict[str, Any]:
    role, _, content = text.partition(": ")
    return {"role": role, "content": content, **more}


def chat(*turns: str | dict[str, Any], **more: Any) -> dict[str, Any]:
    """A record of messages."""
    return {"messages": [say(turn) if isinstance(turn, str) else turn for turn in turns], **more}


# Records as users have them, and what the model is to see; {} around what is trained on.

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALL_TEXT = '[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]'
TOOLS_TEXT = '<s> [AVAILABLE_TOOLS] [{"type": "function"}] [/AVAILABLE_TOOLS]'
TOLD_TEXT = TOOLS_TEXT.replace('"}', '", "function": {"name": "add"}}')
CALLED = "[INST] 1? [/INST]{ [TOOL_CALLS] " + CALL_TEXT + "</s>}"
ANSWERED = "<s> [INST] hi [/INST]{ yo</s>}"
HELLO = ("user: hi", "assistant: yo")
TURNS = ("user: a", "assistant: b", "user: c", "assistant: d")
PLAIN: dict[str, Any] = {"prompt_template": "{prompt}\\n"}
THOUGHT = "<s><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{<think>\nhm\n</think>\n\nb<|im_end|></s>}\n"
ADD = '{"name": "add", "arguments": {"a": 1}}'


SAID_CALL = f"<tool_call>\n{ADD}\n</tool_call>"


HERMES = 'You are a function calling AI model. <tools>[{"name": "f"}]</tools>'


def call(name: str, number: str | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {"a": 1}}} | ({"id": number} if number else {})


def result(number: str | None, content: str = "r") -> dict[str, Any]:
    return {"role": "tool", "content": content} | ({"tool_call_id": number} if number else {})


def parts(**texts: str) -> list[dict[str, str]]:
    """Content as LLaMA-Factory has it."""
    return [{"type": kind, "value": text} for kind, text in texts.items()]


def calls(*made: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(made), **more}


RECORDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "messages": (
        chat("system: be brief", *HELLO, "user: and now", "assistant: bye"), {},
        "<s> [INST] be brief\n\nhi [/INST]{ yo</s>} [INST] and now [/INST]{ bye</s>}",
    ),
    "other names of roles": (chat("User: hi", "Assistant: yo"), {}, ANSWERED),
    "human and ai": (chat("human: hi", "ai: yo"), {}, ANSWERED),
    "roles with spaces": (chat("USER : hi", " GPT: yo"), {}, ANSWERED),
    "text parts": (
        chat(
            {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "yo"}]},
        ), {}, ANSWERED,
    ),
    "tools and calls": (
        chat("user: 1?", calls(CALL), "tool: 2", "assistant: two", tools=[{"type": "function"}]), {},
        f"{TOOLS_TEXT} {CALLED} [TOOL_RESULTS] 2 [/TOOL_RESULTS]{{ two</s>}}",
    ),
    "tools as JSON text, OpenAI's older call": (
        chat("user: 1?", say("assistant: ", function_call=CALL["function"]), tools='[{"type": "function"}]'), {},
        f"{TOOLS_TEXT} {CALLED}",
    ),
    "calls as JSON text": (chat("user: 1?", calls(content=None) | {"tool_calls": CALL_TEXT}), {}, "<s> " + CALLED),
    "an older call as JSON text": (chat("user: 1?", say("assistant: ", function_call=ADD)), {}, "<s> " + CALLED),
    "a function as JSON text": (chat("user: 1?", calls({"type": "function", "function": ADD})), {}, "<s> " + CALLED),
    "no calls as JSON text": (chat(HELLO[0], say(HELLO[1], tool_calls="[]"), tools="null"), {}, ANSWERED),
    "messages, tools and arguments as JSON text": (
        {
            "messages": json.dumps(
                chat("user: 1?", calls({"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}))[
                    "messages"
                ]
            ),
            "tools": '[{"type": "function"}]',
        }, {},
        f"{TOOLS_TEXT} {CALLED}",
    ),
    "content that is the JSON of messages": (
        chat("user: " + json.dumps([say(HELLO[0])]), "assistant: " + json.dumps([CALL])), {},
        f"<s> [INST] {json.dumps([say(HELLO[0])])} [/INST]{{ {json.dumps([CALL])}</s>}}",
    ),
    "a question that is the JSON of messages": (
        {"question": json.dumps([say(HELLO[0])]), "answer": '{"role": "user"}'}, {},
        f'<s> [INST] {json.dumps([say(HELLO[0])])} [/INST]{{ {{"role": "user"}}</s>}}',
    ),
    "Llama's parameters": (chat("user: 1?", calls({"name": "add", "parameters": {"a": 1}})), {}, "<s> " + CALLED),
    "parameters as text": (
        chat("user: 1?", calls({"function": {"name": "add", "parameters": '{"a": 1}'}})), {},
        "<s> " + CALLED.replace('"type": "function", ', ""),
    ),
    "arguments beside the function": (
        chat("user: 1?", calls({"type": "function", "function": {"name": "add"}, "arguments": {"a": 1}})), {},
        "<s> " + CALLED,
    ),
    "LLaMA-Factory's parts": (
        chat(
            {"role": "user", "content": parts(text="1?"), "loss_weight": 0.0},
            {"role": "assistant", "content": parts(tool_call=ADD), "loss_weight": 1.0},
            {"role": "tool", "content": parts(text="2"), "loss_weight": 0.0},
            {"role": "assistant", "content": parts(text="it is") + parts(text=" two"), "loss_weight": 0.0},
        ), {},
        f"<s> {CALLED} [TOOL_RESULTS] 2 [/TOOL_RESULTS] it is two</s>",
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], "system": "be"}, {},
        "<s> [INST] be\n\nhi [/INST]{ yo</s>}",
    ),
    "sharegpt with calls": (
        {
            "conversations": [
                {"from": "human", "value": "1?"}, {"from": "function_call", "value": ADD},
                {"from": "observation", "value": "2"}, {"from": "gpt", "value": "two"},
            ],
            "system": "be", "tools": '[{"name": "add"}]',
        }, {},
        f"{TOLD_TEXT} {CALLED.replace('1?', 'be' + chr(10) * 2 + '1?')} [TOOL_RESULTS] 2 [/TOOL_RESULTS]{{ two</s>}}",
    ),
    "ms-swift's calls": (
        chat(
            "user: 1?", f"tool_call: {ADD}", 'tool_call: [{"name": "add", "arguments": "{\\"a\\": 1}"}]',
            "tool_response: 2", say("assistant: two", loss=False),
        ), {},
        f"<s> {CALLED.replace('}}}]', '}}}, ' + CALL_TEXT[1:])} [TOOL_RESULTS] 2 [/TOOL_RESULTS] two</s>",
    ),
    **{
        column: (chat(*HELLO, **{column: value}), {}, TOLD_TEXT + ANSWERED[3:])
        for column, value in zip(TOOLS[1:], [[{"name": "add"}], '[{"name": "add"}]'] * 2, strict=True)
    },
    "a text and its calls": (
        chat(HELLO[0], "assistant: see", f"tool_call: {ADD}", f"tool_call: {ADD}", "tool: 2", "tool: 2", HELLO[1]),
        {"template": "chatml"},
        f"<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{{see\n{SAID_CALL}\n{SAID_CALL}<|im_end|></s>}}\n"
        + "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        + "<|im_start|>assistant\n{yo<|im_end|></s>}\n",
    ),
    "sharegpt's text and its call": (
        {
            "conversations": [
                {"from": "human", "value": "1?"}, {"from": "gpt", "value": ""}, {"from": "function_call", "value": ADD}
            ]
        }, {}, "<s> " + CALLED,
    ),
    "results in the order of their calls": (
        chat(HELLO[0], calls(call("f", "a"), call("g", "b")), result("b", "RB"), result("a", "RA"), HELLO[1]),
        {"template": "chatml"},
        "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        f"{{{SAID_CALL.replace('add', 'f')}\n{SAID_CALL.replace('add', 'g')}<|im_end|></s>}}\n<|im_start|>user\n"
        "<tool_response>\nRA\n</tool_response>\n<tool_response>\nRB\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n{yo<|im_end|></s>}\n",
    ),
    "alpaca": ({"instruction": "h", "input": "i", "output": "yo"}, {}, "<s> [INST] h\ni [/INST]{ yo</s>}"),
    "alpaca without input, with history": (
        {"instruction": "again", "input": "", "output": "b", "history": [["say a", "a"]]}, {},
        "<s> [INST] say a [/INST]{ a</s>} [INST] again [/INST]{ b</s>}",
    ),
    "dolly": (
        {"instruction": "sum up", "context": "long", "response": "short", "category": "x"}, {},
        "<s> [INST] sum up\nlong [/INST]{ short</s>}",
    ),
    "query and response": (
        {"query": "again", "response": "b", "history": [["say a", "a"]], "system": "be brief"}, {},
        "<s> [INST] be brief\n\nsay a [/INST]{ a</s>} [INST] again [/INST]{ b</s>}",
    ),
    "prompt and completion": ({"prompt": "hi", "completion": " yo"}, {}, "hi{ yo</s>}"),
    "an ended completion": ({"prompt": "hi ", "completion": "yo</s>"}, {}, "hi {yo</s>}"),
    "a text that quotes messages": (
        {"prompt": '[{"role": "user", "content": "hi"}]\nPolite?', "completion": "no"}, {},
        '[{"role": "user", "content": "hi"}]\nPolite?{no</s>}',
    ),
    "prompt and completion as messages": (
        {"prompt": chat(*TURNS[:3])["messages"], "completion": chat(TURNS[3])["messages"]}, {},
        "<s> [INST] a [/INST] b</s> [INST] c [/INST]{ d</s>}",
    ),
    "messages of a prompt that say what is trained on": (
        {
            "prompt": [say(TURNS[0], train=True), say(TURNS[1], weight=1), say(TURNS[2])],
            "completion": chat(TURNS[3])["messages"],
        }, {},
        "<s>{ [INST] a [/INST] b</s>} [INST] c [/INST]{ d</s>}",
    ),
    "prompt and response": ({"prompt": "hi", "response": "yo"}, {}, ANSWERED),
    "question and answer": ({"question": "hi", "answer": "yo"}, {}, ANSWERED),
    "text": ({"text": "once"}, {}, "o{nce</s>}"),
    "a system prompt without a question": (chat("system: hi", HELLO[1]), {}, ANSWERED),
    # columns that flags name
    "both columns": ({"q": "hi", "a": "yo", "prompt": "no"}, {"columns": Columns("q", "a")}, ANSWERED),
    "one column": ({"prompt": "hi", "a": "yo"}, {"columns": Columns(response="a")}, ANSWERED),
    "text column": ({"prompt": "once", "response": "no"}, {"columns": Columns(text="prompt")}, "o{nce</s>}"),
    "system column": (
        {"prompt": "hi", "response": "yo", "s": "be"}, {"columns": Columns(system="s")},
        "<s> [INST] be\n\nhi [/INST]{ yo</s>}",
    ),
    "messages column": (
        {"chat": [say(HELLO[0]), {"from": "model", "value": "yo"}], "messages": 3},
        {"columns": Columns(messages="chat")}, ANSWERED,
    ),
    "columns that make a chat of plain text": (
        {"prompt": "hi", "completion": "yo", "system": "be"}, {"columns": Columns("prompt", "completion")},
        "<s> [INST] be\n\nhi [/INST]{ yo</s>}",
    ),
    # what is trained on: --train-on, and what a message says of itself, which goes before
    "assistant": (chat(*TURNS), {}, "<s> [INST] a [/INST]{ b</s>} [INST] c [/INST]{ d</s>}"),
    "last": (chat(*TURNS), {"train_on": "last"}, "<s> [INST] a [/INST] b</s> [INST] c [/INST]{ d</s>}"),
    "all": (chat(*TURNS), {"train_on": "all"}, "<s>{ [INST] a [/INST] b</s> [INST] c [/INST] d</s>}"),
    "train": (
        chat(TURNS[0], say(TURNS[1], train=False), *TURNS[2:]), {},
        "<s> [INST] a [/INST] b</s> [INST] c [/INST]{ d</s>}",
    ),
    "training": (
        chat(TURNS[0], say(TURNS[1], training=True), *TURNS[2:]), {"train_on": "last"},
        "<s> [INST] a [/INST]{ b</s>} [INST] c [/INST]{ d</s>}",
    ),
    "a trained question, reasoning left out": (
        chat(*TURNS[:2], say(TURNS[2], train=True), TURNS[3]), {"train_on": "final"},
        "<s> [INST] a [/INST] {b</s> [INST] c [/INST]} {d</s>}",
    ),
    "a trained question": (
        chat(*TURNS[:2], say(TURNS[2], weight=1), TURNS[3]), {},
        "<s> [INST] a [/INST]{ b</s> [INST] c [/INST] d</s>}",
    ),
    "an untrained answer": (
        chat(*TURNS[:3], say(TURNS[3], weight=0)), {"train_on": "all"},
        "<s>{ [INST] a [/INST] b</s> [INST] c [/INST]} d</s>",
    ),
    "an untrained system prompt that is moved": (
        chat(say("system: be", train=False), *HELLO), {"train_on": "all"}, "<s>{ [INST] }be{\n\nhi [/INST] yo</s>}",
    ),
    "a trained system prompt that is moved": (
        chat(say("system: be", train=True), *HELLO), {}, "<s> [INST] {be}\n\nhi [/INST]{ yo</s>}",
    ),
    # the answer ends with the token that ends generation; the line break after it is the template's
    "chatml": (
        chat(*TURNS[:2]), {"template": "chatml"},
        "<s><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{b<|im_end|></s>}\n",
    ),
    "reasoning": (chat(TURNS[0], say(TURNS[1], reasoning_content="hm")), {"template": "chatml"}, THOUGHT),
    "reasoning as a part": (
        chat(
            {"role": "user", "content": parts(text="a")},
            {"role": "assistant", "content": parts(reasoning="hm", text="b"), "loss_weight": 1.0},
        ), {"template": "chatml"}, THOUGHT,
    ),
    "reasoning that is left out of an untrained answer": (
        chat(TURNS[0], say(TURNS[1], reasoning_content="hm", loss_weight=0), TURNS[2]), {"train_on": "all"},
        "<s>{ [INST] a [/INST]} b</s>{ [INST] c [/INST]}",
    ),
    "prompt template": ({"prompt": "ab", "response": "cde"}, PLAIN, "ab\n{cde</s>}"),
    "empty texts in a prompt template": ({"prompt": "", "response": ""}, PLAIN, "\n{</s>}"),
    "all of a prompt template": ({"prompt": "ab", "response": "c"}, {**PLAIN, "train_on": "all"}, "a{b\nc</s>}"),
    "messages in a prompt template": (
        chat("user: ab", say("assistant: cd", train=False)), {**PLAIN, "train_on": "all"}, "a{b\n}cd</s>",
    ),
    "a trained message in a prompt template": (
        chat(say("user: ab", train=True), "assistant: cd"), PLAIN, "a{b\ncd</s>}",
    ),
    "one message of two in a prompt template": (
        chat(say("user: ab", weight=1), say("assistant: cd", loss_weight=0.0)), {**PLAIN, "train_on": "last"},
        "a{b\n}cd</s>",
    ),
}  # fmt: skip
"""(record, settings of the data and the template where it is another than mistral's, expected)"""


@pytest.mark.parametrize("name", RECORDS)
def test_records(tmp_path: Path, tokenizer: Any, name: str) -> None:
    row, settings, expected = RECORDS[name]
    settings = dict(settings)
    set_chat_template(tokenizer, settings.pop("template", "mistral"))
    samples = load(tokenizer, write(tmp_path / "data.jsonl", [row, row]), **settings)
    assert shown(tokenizer, samples) == [expected] * 2
    assert samples.targets.tolist() == [sum(sample.is_trained[1:]) for sample in samples]
    assert samples.lengths.tolist() == [len(sample.tokens) for sample in samples]


def test_every_kind_of_file_says_the_same(tmp_path: Path) -> None:
    """JSON in the cells of a CSV, and a table's columns of structs, are what JSON has."""
    for name, (row, settings, _) in RECORDS.items():
        columns = settings.get("columns", Columns())
        expected = find_format(row, columns)
        for kind in ("jsonl", "ndjson"):
            write(tmp_path / f"data.{kind}", [row])
        (tmp_path / "data.json").write_text(json.dumps([row]))
        write_parquet(tmp_path / "data.parquet", [row])
        cells = [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
        for kind, delimiter in (("csv", ","), ("tsv", "\t")):
            with open(tmp_path / f"data.{kind}", "w", newline="", encoding="utf-8") as file:
                csv.writer(file, delimiter=delimiter).writerows([list(row), cells])
        for kind, reader in READERS.items():
            ((_, read),) = reader("--dataset", tmp_path / f"data{kind}")
            found = find_format(read, columns)
            assert found.name == expected.name, (name, kind)
            assert read_row(read, found, columns) == read_row(row, expected, columns), (name, kind)


@pytest.mark.parametrize(
    ("name", "content", "settings", "expected"),
    [
        # line breaks in quotes, commas, numbers and dates in quotes are text; a byte order mark and the line ends of
        # Windows are none; a file's name is no pattern
        ("a.csv", b'prompt,response,more\n"two\nlines, 1",007,\n', {}, "<s> [INST] two\nlines, 1 [/INST]{ 007</s>}"),
        ("data[1].jsonl", b'\xef\xbb\xbf{"prompt": "007", "response": "2024-01-01"}', PLAIN, "007\n{2024-01-01</s>}"),
        ("a b*.json", b'{"prompt": "hi", "response": "yo", "other": 1}', {}, ANSWERED),
        ("odd:name.jsonl", b'{"prompt": "hi", "response": "yo"}\r\n\r\n', {}, ANSWERED),
    ],
)  # fmt: skip
def test_files(tmp_path: Path, tokenizer: Any, name: str, content: bytes, settings: Any, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert shown(tokenizer, load(tokenizer, tmp_path / name, **settings)) == [expected]


def test_plain_text(tmp_path: Path, tokenizer: Any) -> None:
    """A byte order mark, blank lines and the line ends of Windows are no text; nothing stale comes out of the cache."""
    (tmp_path / "data.txt").write_bytes("\ufeffone\r\n\r\n  two\nthree \n \n\nfour".encode())
    for sample_by, expected in (
        ("line", ["one", "  two", "three ", "four"]),
        ("paragraph", ["one", "  two\nthree ", "four"]),
        ("document", ["one\n\n  two\nthree \n \n\nfour"]),
    ):
        samples = load(tokenizer, tmp_path / "data.txt", sample_by=sample_by)
        assert texts(tokenizer, samples) == expected
        assert all(all(sample.is_trained) for sample in samples)


def texts(tokenizer: Any, samples: Samples) -> list[str]:
    return [tokenizer.decode(sample.tokens, skip_special_tokens=True) for sample in samples]


def read(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages as a record's reader hands them on."""
    row = chat(*turns)
    found = read_row(row, find_format(row, Columns()), Columns())
    assert isinstance(found, Conversation)
    return found.messages


def test_turns_of_one_answer() -> None:
    """Calls are part of the assistant's turn before them; a thought behind other calls begins another answer."""
    call, thinking = ({"from": "function_call", "value": text} for text in (ADD, "<think>why</think>" + ADD))
    text, thoughtful = {"from": "gpt", "value": "see"}, {"role": "assistant", "content": "see", "reasoning": "why"}
    images = {"role": "assistant", "content": "see", "name": "bot"}
    for turns, expected in (
        ([call, call], [("", 2, "")]),
        ([text, call, call], [("see", 2, "")]),
        ([thoughtful, call], [("see", 1, "why")]),
        ([text, thinking], [("see", 1, "why")]),
        ([images, call], [("see", 1, "")]),
        ([call, thinking], [("", 1, ""), ("", 1, "why")]),
        ([text, call, thinking], [("see", 1, ""), ("", 1, "why")]),
        ([call, text], [("", 1, ""), ("see", 0, "")]),
        ([text, calls(CALL)], [("see", 0, ""), ("", 1, "")]),
        ([{"role": "user", "content": "see"}, call], [("see", 0, ""), ("", 1, "")]),
    ):
        found = read(*turns)
        assert [
            (message["content"], len(message.get("tool_calls", ())), message.get("reasoning_content", ""))
            for message in found
        ] == expected
    assert read(images, call)[0]["name"] == "bot"


A, B = call("f", "a"), call("g", "b")


@pytest.mark.parametrize(
    ("made", "results", "order", "told"),
    [
        ([A, B], ["b", "a"], ["b", "a"][::-1], ""),
        ([A, B, call("h", "c")], ["c", "a", "b"], ["a", "b", "c"], ""),
        ([A, B], ["a", "b"], ["a", "b"], ""),
        ([A], ["a"], ["a"], ""),
        ([A], [None], [None], ""),
        ([call("f")], [None], [None], ""),
        ([call("f"), call("g")], [None, None], [None, None], ""),
        ([A], ["zz"], ["zz"], "tool_call_id is not that of the only call before it"),
        ([A], ["a", "a"], ["a", "a"], "several results of one call"),
        ([A, B], ["a"], ["a"], "the last ones have no result"),
        ([A, B], [None, None], [None, None], "incomplete or repeat"),
        ([A, B], ["a", None], ["a", None], "incomplete or repeat"),
        ([A, A], ["a", "a"], ["a", "a"], "incomplete or repeat"),
        ([call("f"), call("g")], ["b", "a"], ["b", "a"], "incomplete or repeat"),
        ([], ["a"], ["a"], "tool_call_id is that of no call before it"),
    ],
)
def test_order_of_results(made: list[Any], results: list[Any], order: list[Any], told: str) -> None:
    answer = calls(*made) if made else say("assistant: see")
    row = chat("user: hi", answer, *(result(number) for number in results), say("assistant: yo"))
    found = read_row(row, find_format(row, Columns()), Columns())
    assert isinstance(found, Conversation)
    assert [message.get("tool_call_id") for message in found.messages[2:-1]] == order
    assert len(found.told) == bool(told)
    assert all(told in each for each in found.told)


def test_results_keep_what_is_said_of_them() -> None:
    """What is trained on moves with a result; results of an earlier call are none of the calls before them."""
    row = chat(calls(A, B), result("b") | {"train": True}, result("a"), say("assistant: yo"), result("a"))
    found = read_row(row, find_format(row, Columns()), Columns())
    assert isinstance(found, Conversation)
    assert (found.is_trained, found.told) == ([None, None, True, None, None], [])


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (chat(*HELLO, tool_schema=[{"name": "f"}]), "tool_schema"),
        (chat(*HELLO, Functions_json='[{"name": "f"}]'), "Functions_json"),
        ({"text": "a", "tools": [{"name": "f"}]}, "tools"),
        (chat(*HELLO, tool_used="hammer", parallel_tool_calls=False, tool_defs=None, toolbox=[]), ""),
        (chat(*HELLO, functionality="[1"), ""),
    ],
)
def test_columns_like_tools_that_are_not_read_are_told(row: dict[str, Any], column: str) -> None:
    found = read_row(row, find_format(row, Columns()), Columns())
    assert isinstance(found, Conversation | PlainText)
    assert len(found.told) == bool(column)
    assert all(each.startswith(f"have the column {column}, which looks like tools") for each in found.told)


def test_what_is_told_of_records(tmp_path: Path, tokenizer: Any) -> None:
    """Each kind once, with its number and the place of the first."""
    set_chat_template(tokenizer, "chatml")
    odd = chat("user: hi", calls(A), result("zz"), say("assistant: yo"))
    rows = [chat(*HELLO), odd, odd | {"tool_list": [1]}, chat(*HELLO, tool_list=[1])]
    file = write(tmp_path / "data.jsonl", rows)
    notes = [line for line in said_of(load(tokenizer, file), tokenizer) if line.startswith("note")]
    assert [(line.partition(" have ")[0], line[-6:]) for line in notes] == [
        (f"note: {file}: 2 of 4 records", "line 2"),
        (f"note: {file}: 2 of 4 records", "line 3"),
    ]


def test_messages_as_they_are_read() -> None:
    """Empty content, arguments, and their names."""
    for content in ("", None):
        assert read({"role": "user", "content": content, "value": "text"}) == [say("user: text")]
    for given in ({}, {"arguments": None}, {"arguments": " "}, {"arguments": "null"}):
        (message,) = read(calls({"function": {"name": "add", **given}}))
        assert message["tool_calls"] == [{"function": {"name": "add", "arguments": {}}}]
    (message,) = read(calls({"name": "add", "arguments": {"a": 1}, "parameters": None}))
    assert message["tool_calls"] == [CALL]


# Tables of Arrow, of `datasets` and of the hub


@pytest.fixture(params=["parquet", "saved", "hub", "pyarrow"])
def stored(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Writes rows in one of the ways that take them through Arrow, and returns how --dataset names them."""
    import datasets

    def store(rows: list[Any], features: Any = None) -> object:
        table = datasets.Dataset.from_list(rows, features)
        if request.param == "hub":
            monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
            return "someone/data"
        if request.param == "saved":
            table.save_to_disk(tmp_path / "saved")
            return tmp_path / "saved"
        if request.param == "parquet" or features is not None:
            table.to_parquet(tmp_path / "a.parquet")
        else:
            write_parquet(tmp_path / "a.parquet", rows)
        return tmp_path / "a.parquet"

    return store


def test_what_arrow_fills_in_is_absent(tmp_path: Path, tokenizer: Any, stored: Callable[..., object]) -> None:
    """Null in a struct is a key that another record has; in columns of JSON, which lack nothing, it was null."""
    import datasets

    def row(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
        return chat(
            "user: Q", calls({"type": "function", "function": {"name": name, "arguments": arguments}}, content=""),
            say("tool: 1", tool_call_id="x"), say("assistant: A", weight=1), **more,
        )  # fmt: skip

    def tool(name: str, **properties: Any) -> dict[str, Any]:
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = [tool("weather", city={"type": "string"}), tool("add", a={"type": "integer", "minimum": 0})]
    rows = [row("weather", {"city": "Paris"}, tools=tools, system="S"), row("add", {"a": 1}, tools=tools)]
    rows.append(row("none", {}, tools=tools))
    filled = datasets.Dataset.from_list(rows)[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert filled == {"city": None, "a": 1}
    expected = shown(tokenizer, load(tokenizer, write(tmp_path / "rows.jsonl", rows)))
    assert shown(tokenizer, load(tokenizer, stored(rows))) == expected
    assert "null" not in "".join(expected)

    functions = {"name": "f", "arguments": {"a": "x", "b": None}}, {"name": "g", "arguments": {"a": [1]}}
    rows = [chat("user: Q", calls({"function": function}, content="")) for function in functions]
    text = datasets.Value("string")
    call = {"function": {"name": text, "arguments": datasets.Json()}}
    columns: Any = {"messages": datasets.List({"role": text, "content": text, "tool_calls": datasets.List(call)})}
    expected = shown(tokenizer, load(tokenizer, write(tmp_path / "rows.jsonl", rows)))
    assert shown(tokenizer, load(tokenizer, stored(rows, datasets.Features(columns)))) == expected
    assert '"b": null' in expected[0]


def test_dates_and_maps_of_a_table(tmp_path: Path) -> None:
    """As JSON has them: text, and objects without what Arrow fills in."""
    import pyarrow
    import pyarrow.parquet

    inner = pyarrow.map_(pyarrow.string(), pyarrow.struct({"a": pyarrow.int64(), "b": pyarrow.int64()}))
    kind = pyarrow.struct({"at": pyarrow.timestamp("s"), "day": pyarrow.date32(), "x": inner})
    value = {"at": datetime(2024, 5, 6), "day": date(2024, 5, 6), "x": [("k", {"a": 1, "b": None})]}
    pyarrow.parquet.write_table(pyarrow.table({"v": pyarrow.array([value], kind)}), tmp_path / "data.parquet")
    ((_, row),) = READERS[".parquet"]("--dataset", tmp_path / "data.parquet")
    assert row == {"v": {"at": "2024-05-06T00:00:00", "day": "2024-05-06", "x": {"k": {"a": 1}}}}


def test_directories_and_the_hub(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    row, asked = {"prompt": "hi", "response": "yo"}, []
    loaded = datasets.Dataset.from_list([row])
    datasets.DatasetDict({"train": loaded, "test": loaded}).save_to_disk(tmp_path / "splits")
    (tmp_path / "mixed").mkdir()
    write(tmp_path / "mixed" / "a.jsonl", [row])
    write_parquet(tmp_path / "mixed" / "b.parquet", [row])
    (tmp_path / "mixed" / "README.md").write_text("what these are")

    def load_dataset(name: str, config: str | None, split: str) -> Any:
        asked.append((name, config, split))
        return loaded

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for entry, number in ((tmp_path / "splits", 1), ("someone/data", 1), (tmp_path / "mixed", 2)):
        assert shown(tokenizer, load(tokenizer, entry)) == [ANSWERED] * number
    load(tokenizer, "openai/gsm8k", hub_config="main", split="test")
    assert asked == [("someone/data", None, "train"), ("openai/gsm8k", "main", "test")]
    with pytest.raises(ExpertMeshError, match="has no split 'dev'; found: train, test"):
        load(tokenizer, tmp_path / "splits", split="dev")


# Splits of directories

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


@pytest.mark.parametrize(("name", "parent"), zip(LAYOUTS, ["plain", "test [1] x", "train", "test"] * 2, strict=True))
def test_splits_of_a_directory(tmp_path: Path, tokenizer: Any, name: str, parent: str) -> None:
    """Each split holds its own files alone, whatever the folder above is called."""
    directory = lay_out(tmp_path / parent, LAYOUTS[name])
    splits = {text for file, text in LAYOUTS[name].items() if file.endswith(".jsonl") and text != "other"}
    for split in splits:
        expected = [split] * sum(text == split for text in LAYOUTS[name].values())
        assert texts(tokenizer, load(tokenizer, directory, split=split)) == expected
    with pytest.raises(
        ExpertMeshError, match=r"has no split 'nothing'; found: .*choose one with --dataset-split"
    ) as raised:
        load(tokenizer, directory, split="nothing")
    assert all(split in str(raised.value) for split in splits)


NAMES_OF_PARTS: dict[str, dict[str, Any]] = {"split": {"dataset_split": "dev"}, "config": {"dataset_config": "dev"}}
KINDS_OF_DATA: dict[str, tuple[str, set[str]]] = {
    "a file": ("a file", set()),
    "a directory": ("a directory", set()),
    "a directory with splits": ("a directory", {"split"}),
    "a directory with a card": ("a directory", {"split", "config"}),
    "a saved dataset": ("a saved dataset", set()),
    "a saved dataset with splits": ("a saved dataset", {"split"}),
    "a hub dataset": ("a hub dataset", {"split", "config"}),
}
"""Each with what it is called, and what parts of it have names."""


def data_of_a_kind(kind: str, path: Path) -> str:
    import datasets

    row = {"text": "x"}
    if kind == "a file":
        path.mkdir()
        return str(write(path / "a.jsonl", [row]))
    if kind.startswith("a saved"):
        loaded = datasets.Dataset.from_list([row])
        saved = datasets.DatasetDict({"train": loaded, "dev": loaded}) if kind.endswith("splits") else loaded
        saved.save_to_disk(str(path))
    elif kind != "a hub dataset":
        files = {"a.jsonl": "x", "b.jsonl": "x"}
        if kind.endswith("splits"):
            files = {"train.jsonl": "x", "dev.jsonl": "x"}
        if kind.endswith("card"):
            files = {**LAYOUTS["a card"], "README.md": CARD.replace("config_name: other", "config_name: dev")}
        lay_out(path, files)
    return "someone/data" if kind == "a hub dataset" else str(path)


@pytest.mark.parametrize("part", NAMES_OF_PARTS)
@pytest.mark.parametrize("kind", KINDS_OF_DATA)
def test_a_name_that_nothing_has_is_refused(tmp_path: Path, kind: str, part: str) -> None:
    """Of a split or a configuration, by each kind of data, alone and beside a hub dataset, which may have it."""
    called, has = KINDS_OF_DATA[kind]
    config = TrainConfig(model="m", dataset=[data_of_a_kind(kind, tmp_path / "data")])
    _check_names_of_parts(config)
    if kind.endswith("card") and part == "config":
        with pytest.raises(ExpertMeshError, match="has the configs main, dev, not 'nosuch'"):
            _check_names_of_parts(replace(config, dataset_config="nosuch"))
    named = replace(config, **NAMES_OF_PARTS[part])
    _check_names_of_parts(replace(named, dataset=[*named.dataset, "someone/data"]))
    if part in has:
        _check_names_of_parts(named)
        return
    with pytest.raises(ExpertMeshError, match=f"--dataset-{part} dev: the data are {called} without a {part} to name"):
        _check_names_of_parts(named)


def test_a_system_prompt_of_plain_text_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    for row in ({"text": "hi", "sys": "S"}, ENDED | {"sys": ""}):
        with pytest.raises(ExpertMeshError, match=r"line 1 is plain text, .*; leave out --system-column"):
            load(tokenizer, write(tmp_path / "data.jsonl", [row]), columns=Columns(system="sys"))


def test_a_card_names_configs(tmp_path: Path, tokenizer: Any) -> None:
    lay_out(tmp_path, LAYOUTS["a card"] | {"two/README.md": CARD.replace("  default: true\n", "")})
    assert texts(tokenizer, load(tokenizer, tmp_path, hub_config="other")) == ["other"]
    with pytest.raises(
        ExpertMeshError, match=r"README\.md has the configs main, other, not 'third'; choose one with --dataset-config"
    ):
        load(tokenizer, tmp_path, hub_config="third")
    with pytest.raises(
        ExpertMeshError, match=r"README\.md has the configs main, other; choose one with --dataset-config"
    ):
        load(tokenizer, tmp_path / "two")


NAMED = "configs:\n- config_name: a\n  data_files: '{}'"


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (NAMED.format("../x.jsonl"), "which is not in the directory"),
        (NAMED.format("/etc/*.json"), "which is not in the directory"),
        (NAMED.format("https://example.org/x.jsonl"), "which is not in the directory"),
        (NAMED.format("zip://a.json::b.zip"), "which is not in the directory"),
        ("configs: 3", r"README\.md: its configs cannot be read"),
        ("configs: [{data_files: a}]", r"README\.md: its configs cannot be read"),
        ("{", r"README\.md: its configs cannot be read"),
    ],
)  # fmt: skip
def test_a_card_that_cannot_be_used(tmp_path: Path, tokenizer: Any, card: str, said: str) -> None:
    lay_out(tmp_path, {"README.md": f"---\n{card}\n---\n", "a.jsonl": "a"})
    with pytest.raises(ExpertMeshError, match=said):
        load(tokenizer, tmp_path)


def test_what_is_trained_and_evaluated_on(tmp_path: Path, tokenizer: Any) -> None:
    """A directory for both flags: neither sees the other's split."""
    both = [str(lay_out(tmp_path / "both", LAYOUTS["names of files"]))]
    whole = [str(lay_out(tmp_path / "whole", {"a.jsonl": "a"}))]
    for evaluated, expected in ((both, "test"), (whole, "a")):
        config = TrainConfig(model="m", dataset=both, eval_dataset=evaluated, dataset_num_proc=1)
        training, evaluation, _ = _read_samples(config, tokenizer)
        assert evaluation is not None
        assert (texts(tokenizer, training), texts(tokenizer, evaluation)) == (["train"], [expected])


# What is told


def said_of(samples: Samples, tokenizer: Any, evaluation: Samples | None = None) -> list[str]:
    held = None if evaluation is None else make_rows(evaluation, False, 512, 0)
    inputs = Inputs(tokenizer, None, "", make_rows(samples, False, 512, 0), held)
    config = TrainConfig(model="m", dataset=["d"], max_seq_length=512)
    return [data_line(inputs, DataOrder(len(samples), 1, 1, 1, 0)), *data_sets(inputs, config)]


def told_of(samples: Samples, tokenizer: Any, evaluation: Samples | None = None) -> list[str]:
    """The warnings among what a run says of its data."""
    return [line for line in said_of(samples, tokenizer, evaluation) if "warning" in line]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"prompt_template": "{prompt} "}, ""),
        ({"prompt_template": "{prompt} ", "train_on": "last"}, "--train-on last has no effect without a chat template"),
        ({"text_column": "response", "prompt_template": "{prompt} "}, "--prompt-template has no effect on plain"),
    ],
)
def test_flags_without_effect_on_the_data(
    tmp_path: Path, tokenizer: Any, settings: dict[str, str], expected: str
) -> None:
    """A prompt template is used where there are prompts."""
    (data := tmp_path / "data.jsonl").write_text('{"prompt": "sum 1 1", "response": "2"}\n')
    config = TrainConfig(model="m", dataset=[str(data)], dataset_num_proc=1, **settings)  # type: ignore[arg-type]
    told = _without_effect(config, _read_samples(config, tokenizer)[0], "")
    assert told.startswith(expected)
    assert bool(told) == bool(expected)


def test_files_that_are_not_read_are_told(tmp_path: Path, tokenizer: Any) -> None:
    """Of no split, compressed, and a text beside tables, which is about them, though it is data where it is alone."""
    lay_out(tmp_path / "more", {"train.jsonl": "train", "more.jsonl": "more"})
    (origin,) = load(tokenizer, tmp_path / "more").origins
    assert origin.name == f"{tmp_path / 'more'}, split train of train; in no split: more.jsonl"
    samples = load(tokenizer, lay_out(tmp_path / "text", {"LICENCE.txt": "all rights"}))
    assert (len(samples), told_of(samples, tokenizer)) == (1, [])
    for number, (data, beside) in enumerate(
        (
            ("data.jsonl", "LICENCE.txt"), ("train.jsonl", "LICENCE.txt"), ("train.jsonl", "data.jsonl.gz"),
            ("train.jsonl", "DATA.PARQUET"), ("train.jsonl", "notes.txt.zst"),
        )
    ):  # fmt: skip
        directory = lay_out(tmp_path / str(number), {data: "yes", beside: "..."})
        samples = load(tokenizer, directory)
        assert texts(tokenizer, samples) == ["yes"]
        (line,) = told_of(samples, tokenizer)
        assert "1 file in the directory is not read (name text files directly," in line
        assert line.endswith(f"and unpack compressed files); the first: {directory / beside}")


def answers(content: str, **more: Any) -> dict[str, Any]:
    return chat(HELLO[0], say(f"assistant: {content}", **more))


ENDLESS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "x" * 600, "response": "b"}, "left out, because their answers begin beyond --max-seq-length"),
        (chat(HELLO[0]), "left out, because they have no trained token"),
        ({"prompt": "a", "response": " "}, "have an empty answer"),
        ({"prompt": "a", "completion": ""}, "have an empty answer"),
        (answers(""), "have an empty answer"),
        (answers("<think>b</think> "), "have an empty answer"),
        (answers("", tool_calls=[CALL]), ""),
        (chat(HELLO[0], say("assistant: ", train=False), *HELLO), ""),
    ],
)
def test_records_to_look_at_are_told(tmp_path: Path, tokenizer: Any, row: dict[str, Any], said: str) -> None:
    """Counted, with the place of the first one; of data to evaluate on, too."""
    kinds: list[dict[str, Any]] = [{"prompt": "a", "response": "b"}, {"prompt": "a", "completion": "b"}, chat(*HELLO)]
    kind = next(kind for kind in kinds if kind.keys() == row.keys())
    good = load(tokenizer, write(tmp_path / "good.jsonl", [kind]))
    file = tmp_path / "data.jsonl"
    samples = load(tokenizer, write(file, [kind, row, kind, row]))
    for lines in (told_of(samples, tokenizer), told_of(good, tokenizer, samples), told_of(samples, tokenizer, samples)):
        lines = [line for line in lines if "are lost" not in line]
        assert len(lines) == bool(said)
        for line in lines:
            assert line.startswith(f"warning: {file}: 2 of 4 records")
            assert said in line
            assert line.endswith(f"; the first: --dataset {file}: line 2")


@pytest.mark.parametrize(
    ("rows", "template", "eos", "endless"),
    [
        ([chat(*TURNS)], "", True, 0),
        ([chat(*TURNS), chat(*TURNS[:3], say(TURNS[3], train=False))], "", True, 0),
        ([chat(*TURNS)] * 2, ENDLESS, True, 2),
        ([{"text": "ab"}], "", True, 0),
        ([{"text": "ab"}, {"text": "x" * 600}], "", False, 1),
        ([{"prompt": "ab", "completion": "cd"}], "", False, 1),
        ([chat(*TURNS)], "", False, 1),
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
    told = [line for line in told_of(samples, tokenizer) if "are lost" not in line]
    assert len(told) == bool(endless)
    assert all("no special token ends the trained text" in line for line in told)


def test_what_answers_end_with(tmp_path: Path, tokenizer: Any) -> None:
    """Tokens that end answers are told, as far as they are trained on; those that end other turns are not."""
    asked = {"prompt": "a", "response": "b"}
    cases: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
        (asked, {}, ["</s>"]),
        ({"prompt": "a", "response": "b" * 50}, {"max_seq_length": 20}, []),
        ({"prompt": "a", "completion": "b"}, {}, ["</s>"]),
        (asked, {"prompt_template": "{prompt}:"}, ["</s>"]),
        (asked, {"train_on": "all"}, ["</s>"]),
        (chat("assistant: b", say("user: a", train=True)), {}, ["</s>"]),
    ]
    for number, (row, settings, expected) in enumerate(cases):
        samples = load(tokenizer, write(tmp_path / f"{number}.jsonl", [row] * 2), **settings)
        assert tokenizer.convert_ids_to_tokens(samples.ends) == expected


def test_truncation(tmp_path: Path, tokenizer: Any) -> None:
    """What is cut is counted; what is left without a target is counted and left out."""
    file = write(tmp_path / "data.jsonl", [{"prompt": prompt, "response": "ghi"} for prompt in ("abcdef", "a", "")])
    samples = load(tokenizer, file, **PLAIN, max_seq_length=4)
    assert shown(tokenizer, samples) == ["a\n{gh}", "\n{ghi}"]
    (origin,) = samples.origins
    assert (origin.rows, origin.cut, origin.without_target, origin.used) == (3, 3, 1, 2)
    (line,) = (line for line in told_of(samples, tokenizer, samples) if "are lost" in line)
    assert "3 of 3 samples are truncated at --max-seq-length 512: 14 tokens of 22 (63.6%) are lost" in line
    with pytest.raises(ExpertMeshError, match="no record has a trained token within --max-seq-length 2"):
        load(tokenizer, file, max_seq_length=2, prompt_template="{prompt}{prompt}  ")
    untrained = chat("user: ab", say("assistant: cd", train=False))
    samples = load(tokenizer, write(tmp_path / "one.jsonl", [untrained, chat(*TURNS[:2])]), **PLAIN)
    assert shown(tokenizer, samples) == ["a\n{b</s>}"]
    assert samples.origins[0].without_target == 1


# Special tokens: one BOS, and an end


def adding(tokenizer: Any, template: str) -> Any:
    """The tokenizer with special tokens around what it is given, as `template` has them."""
    from tokenizers import processors

    specials = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=specials)
    return tokenizer


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>"])
def test_one_bos_and_one_end(tmp_path: Path, tokenizer: Any, template: str) -> None:
    """Whether the text has them, the tokenizer adds them, or the template writes them."""
    adding(tokenizer, template)
    cases: list[tuple[dict[str, Any], str, str, str]] = [
        ({"text": "ab"}, "", "a{b</s>}", "<s>{ab</s>}"),
        ({"text": "<s>ab"}, "", "<s>{ab</s>}", "<s>{ab</s>}"),
        ({"text": "<s>ab</s>"}, "", "<s>{ab</s>}", "<s>{ab</s>}"),
        ({"prompt": "ab", "completion": "cd"}, "", "ab{cd</s>}", "<s>ab{cd</s>}"),
        ({"prompt": "<s>ab", "completion": "cd</s>"}, "", "<s>ab{cd</s>}", "<s>ab{cd</s>}"),
        ({"prompt": "", "completion": "cd"}, "", "c{d</s>}", "<s>{cd</s>}"),
        ({"prompt": "ab", "completion": ""}, "", "ab{</s>}", "<s>ab{</s>}"),
        (chat(*HELLO), "", ANSWERED, ANSWERED),
        ({"prompt": "ab", "response": "cd"}, "<s>{prompt}: ", "<s>ab: {cd</s>}", "<s>ab: {cd</s>}"),
        ({"prompt": "ab", "response": "cd"}, "{prompt}: ", "ab: {cd</s>}", "<s>ab: {cd</s>}"),
        ({"prompt": "ab", "completion": "cd"}, "{prompt}: ", "ab: {cd</s>}", "<s>ab: {cd</s>}"),
    ]
    for prompt_template in ("", "<s>{prompt}: ", "{prompt}: "):
        chosen = [case for case in cases if case[1] == prompt_template]
        files = [write(tmp_path / f"{number}.jsonl", [row]) for number, (row, *_) in enumerate(chosen)]
        found = shown(tokenizer, load(tokenizer, *files, prompt_template=prompt_template))
        assert found == [bare if template == "$A" else with_bos for *_, bare, with_bos in chosen]


@pytest.mark.parametrize(
    ("bos", "adds", "told"), [("", True, True), ("{{ bos_token }}", True, False), ("", False, False)]
)
def test_a_template_without_bos_is_told_of(tmp_path: Path, tokenizer: Any, bos: str, adds: bool, told: bool) -> None:
    """It is used as it stands, as those do who serve the model."""
    (tmp_path / "own.jinja").write_text(bos + "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    said = set_chat_template(adding(tokenizer, "<s> $A" if adds else "$A"), str(tmp_path / "own.jinja"))
    assert ("without the <s> that the tokenizer puts before plain text" in said) == told


# What cannot be used


def one(turn: dict[str, Any]) -> dict[str, Any]:
    """A record of one message of the assistant's."""
    return chat({"role": "assistant", **turn})


def call_of(arguments: Any, **more: Any) -> dict[str, Any]:
    return one({"tool_calls": [{"function": {"name": "f", "arguments": arguments}}], **more})


def shared(call: str) -> dict[str, Any]:
    return {"conversations": [{"from": "function_call", "value": call}]}


PAIR = {"prompt": "a", "response": "b"}
ENDED = {"prompt": "a", "completion": "b"}
TOOL_PART = [{"type": "tool_call", "value": '{"name": "f", "arguments": {}}'}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}\n[1, 2]\n', "data.jsonl: line 2 is no JSON object"),
        (b'\n{"text": "caf\xe9"}\n', "data.jsonl: line 2 is not UTF-8 text"),
        (b" \n\n", "has no records"),
        (b"[]", "has no records"),
        (b"", "is empty"),
        (b"[" * 100_000, "not valid JSON"),
        (b'[{"prompt": "a", "response": ', "the file is not valid JSON .*line 1 column 30"),
        # formats
        ({}, r"line 1 has the columns \(none\); it needs one of: messages; conversations; prompt"),
        ({"q": 1, "a": 2}, "line 1 has the columns q, a; .*--prompt-column and --response-column"),
        (b'[{"prompt": "a", "response": "b"}, {"prompt": "a"}]', "record 2 has no column 'response'.*found: prompt"),
        ([ENDED, {"prompt": [say(TURNS[0])], "completion": [say(TURNS[1])]}], "line 2 has messages, but the records"),
        ({"prompt": "a", "response": 3}, "line 1 response is 3, not text"),
        ({"instruction": "a", "output": "b", "history": [1]}, "history has 1, not a pair"),
        (PAIR | {"history": [["c", "d"]]}, "has history beside prompt and response"),
        ({"question": "a", "answer": "b", "context": "c"}, "has context beside question and answer, where it"),
        (ENDED | {"system": "c"}, "line 1 has system, which a plain-text prompt and completion"),
        (ENDED | {"images": ["a.png"]}, "has images, which a plain-text prompt and completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "has the column rejected: preference data, but this"),
        (ENDED | {"label": False}, "has the column label: preference data"),
        (ENDED | {"label": "False"}, "has the column label: preference data"),
        *[
            (record | {"label": value}, "has the column label: preference data, .* --task kto for labelled answers")
            for record in (ENDED, {"messages": TURNS}, {"conversations": TURNS}, {"instruction": "a", "output": "b"})
            for value in (False, True, 0, 1, "0")
        ],
        ([ENDED, ENDED | {"label": 0}], "line 2 has the column label: preference data"),
        (
            {"prompt": "[{'role': 'user'}]", "completion": "[{'role': 'assistant'}]"},
            "prompt is .*, neither a list of messages nor the JSON of one",
        ),
        # messages
        ({"messages": []}, r"line 1 messages is \[\], not a list of messages"),
        ({"messages": "hi"}, "line 1 messages is 'hi', neither a list of messages nor the JSON"),
        ({"messages": ["hi"]}, "messages, message 1 is 'hi', not an object"),
        ({"messages": [{"content": "a"}]}, r"message 1 has no role \(or from\); found: content"),
        ({"messages": [{"role": "user"}]}, r"message 1 has no content \(or value\); found: role"),
        (call_of({}, **{"from": "user"}), "message 1 has role and from; leave one of them out"),
        (call_of({}, content="a", value="b"), "message 1 has content and value"),
        (call_of({}, function_call={"name": "g"}), "message 1 has tool_calls and function_call"),
        (call_of(None, train=True, weight=0), "message 1 has train and weight, which contradict each other"),
        (one({"content": 3}), "message 1: content is 3, not text"),
        (one({"content": "a", "weight": -0.5}), "message 1: weight is -0.5; expected a weight from 0 to 1,000,000"),
        (one({"content": "a", "weight": "0.5"}), "message 1: weight is '0.5'; expected a weight"),
        (one({"content": "a", "weight": 10**400}), "message 1: weight is 1000.*; expected a weight"),
        (b'{"messages": [{"role": "assistant", "content": "a", "weight": NaN}]}', "weight is nan; expected a weight"),
        (one({"content": "a", "weight": 0.5, "loss": 0.25}), "has weight and loss, which contradict each other"),
        (one({"content": "a", "weight": 0.5, "train": False}), "has train and weight, which contradict each other"),
        (one({"content": "a", "train_detail": [{}]}), "message 1: train_detail is not supported"),
        (chat("judge: a"), "line 1: the chat template refuses .*not judge"),
        (chat("user: a"), "no record has a trained token"),
        (chat("system: b", system="a"), "has a system prompt in system and another"),
        (chat("user: a", images=["a.png"]), "line 1 has images; give --images to train on them"),
        (one({"content": "a", "images": ["a.png"]}), "message 1 has images; images are read as parts"),
        (one({"content": "", "refusal": "no"}), "message 1 has refusal; give its text"),
        # parts and reasoning
        (one({"content": [{"type": "image_url", "value": "x"}]}), "message 1: an image has value; an image has"),
        (one({"content": [{"type": "text", "value": 3}]}), "part that is not one of text"),
        (one({"content": parts(tool_call="add(1)")}), "its tool_call is not JSON"),
        (one({"content": parts(tool_call='{"name": "add"}')}), "expected an object with name and arguments"),
        (one({"content": TOOL_PART, "tool_calls": [CALL]}), "tool calls inside and outside of its content"),
        (
            one({"content": parts(reasoning="hm"), "reasoning_content": "hm"}),
            "reasoning inside and outside of its content",
        ),
        (one({"content": "b", "reasoning_content": "hm"}), "line 1: the chat template leaves out the reasoning of"),
        (one({"content": parts(reasoning="hm", text="b")}), "the chat template leaves out the reasoning of message 1"),
        (
            one({"content": "a", "reasoning_details": [{"text": "b"}]}),
            "message 1 has reasoning_details, which would be lost; give it as reasoning_content",
        ),
        # calls and tools
        (one({"tool_calls": "add"}), "line 1 messages, message 1: tool_calls is 'add', neither a list of them nor"),
        (one({"tool_calls": '{"a": 1}'}), "message 1: tool_calls is .*, not a list of them"),
        (one({"function_call": "[1]"}), r"message 1: function_call is '\[1\]', not an object with name"),
        (one({"tool_calls": [{"function": "add"}]}), "message 1: function is 'add', neither an object with name"),
        ({"messages": '[{"role": "user"'}, "line 1 messages is .*, neither a list of messages nor the JSON of one"),
        ({"messages": '{"role": "user"}'}, "line 1 messages is .*, not a list of messages"),
        (chat(*HELLO, tools="[1,"), "line 1 tools is '.1,', neither a list nor the JSON of one"),
        (one({"tool_calls": ["add"]}), "message 1: a tool call is 'add', neither an object with name and"),
        (one({"tool_calls": [{"function": {"arguments": {}}}]}), "expected an object with name and arguments"),
        (shared("add(1)"), "function_call is not JSON .*'add.1.'"),
        (shared("[]"), "function_call has no call; expected an object"),
        (shared("[3]"), "has the tool call 3; expected an object with name"),
        (call_of("add 1"), "line 1 messages, message 1: the arguments of its call to f are 'add 1', neither an"),
        (call_of("[1]"), r"arguments of its call to f are '\[1\]', not an object"),
        (call_of('"{}"'), "arguments of its call to f are '\"{}\"', not an object"),
        (call_of([1]), r"arguments of its call to f are \[1\], not an object or the JSON of one"),
        (call_of(3), "arguments of its call to f are 3, not an object"),
        (chat(calls({"name": "f", "args": {"a": 1}})), "its call to f has args but no arguments; name"),
        (chat(calls({"function": {"name": "f"}, "inputs": "{}"})), "its call to f has inputs but no arguments"),
        # parts in an order that no template writes, and Anthropic's
        (one({"content": [*parts(text="a"), {"type": "thinking", "thinking": "b"}]}), "has reasoning behind text"),
        (one({"content": [*parts(tool_call=ADD), "so"]}), "content has text behind calls, but chat templates write"),
        (one({"content": [{"type": "redacted_thinking", "data": "x"}]}), "is not one of text, reasoning, thinking"),
        (
            chat({"role": "user", "content": ["a", {"type": "tool_result", "tool_use_id": "x"}]}),
            "message 1: content has a part before a tool_result; put results first",
        ),
        # tools and calls
        (chat(*HELLO, tools=[{"name": "f", "parameters": {}, "input_schema": {}}]), "a tool with parameters and input"),
        (chat("system: " + HERMES, *HELLO, tools=[{"name": "g"}]), "has other tools in its system prompt than"),
        ({"query": "a", "answers": "[]"}, "line 1 answers has no tool call"),
        ({"query": "a", "answers": '["b"]'}, "answers: a tool call is 'b', neither an object with name and arguments"),
        (chat(calls({"function": {"name": "f", "arguments": {}}, "arguments": {"a": 1}})), "two different sets of"),
        (chat(calls({"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}})), "two different sets of"),
        (call_of({}, tool_responses=[{"name": "f", "response": 1}]), "has tool_responses; give each result as its"),
        (chat("assistant: a", f"tool_call: <think>b</think>{ADD}", say(f"tool_call: {ADD}", loss=True)),
         "message 3: is one answer with the message before it, which says otherwise whether"),
        (chat(say("assistant: a", loss=0.5), f"tool_call: {ADD}"), "message 2: is one answer with the message before"),
        (chat(say("assistant: a", reasoning="b"), f"tool_call: <think>c</think>{ADD}"),
         "message 2: is one answer with the message before it, and both have reasoning_content; give it in one"),
        (one({"content": parts(reasoning="a", text=f"<think>b</think>{ADD}"), "role": "tool_call"}),
         "message 1 has reasoning inside and outside of its call"),
        (chat(calls(A, B), result("a"), result("zz")), "message 3 is the result of a call 'zz', but the calls before "),
        (chat(calls(A, B), result("a"), result("a")), "message 2 is one of 2 results of the call 'a' among those of"),
        (chat(calls(A, B), result("b")), "have no result of the call 'a', but one of 'b', made"),
        (chat(calls(A, B), result("b"), result(None)), "message 2 is the result of the call 'b', in another"),
        (chat(calls(A), result("a"), result("zz")), "message 3 is the result of a call 'zz', but the calls before it"),
        (PAIR | {"tool_defs": [{"name": "f"}], "tools": [{"name": "g"}]}, "different tools and tool_defs; leave one"),
        (PAIR | {"tools": "hammer"}, "tools is 'hammer', neither a list nor the JSON of one"),
        (PAIR | {"tools": '{"a": 1}'}, "tools is .*, not a list"),
        (PAIR | {"tools": [None]}, "tools has an entry that is None, not an object"),
        (PAIR | {"tools": [{"name": "f"}], "functions": [{"name": "g"}]}, "different tools and functions; leave"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_used(tmp_path: Path, tokenizer: Any, content: Any, said: str) -> None:
    file = tmp_path / "data.jsonl"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        write(file, content if isinstance(content, list) else [content])
    with pytest.raises(ExpertMeshError, match=said) as raised:
        load(tokenizer, file)
    assert f"--dataset {file}" in str(raised.value) or "--dataset: " in str(raised.value)


WEIGHED = Columns(weight="w")
AS_WEIGHED: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[str, float]]]] = {
    "of messages": (
        chat(say(TURNS[0], weight=0.5), say(TURNS[1], weight=0.25), TURNS[2], say(TURNS[3], loss_scale=2, train=True)),
        {}, [(" [INST] a [/INST]", 0.5), (" b</s>", 0.25), (" d</s>", 2)],
    ),
    "of a message, all trained": (
        chat(*TURNS[:3], say(TURNS[3], weight=0.5)), {"train_on": "all"},
        [(" [INST] a [/INST] b</s> [INST] c [/INST]", 1), (" d</s>", 0.5)],
    ),
    "of a record": ({"prompt": "hi", "response": "yo", "w": "0.5"}, {"columns": WEIGHED}, [(" yo</s>", 0.5)]),
    "of both": (
        chat(TURNS[0], say(TURNS[1], weight=0.5), TURNS[2], TURNS[3], w=3), {"columns": WEIGHED},
        [(" b</s>", 1.5), (" d</s>", 3)],
    ),
    "of plain text": ({"text": "once", "w": 0.5}, {"columns": WEIGHED}, [("nce</s>", 0.5)]),
    "in a prompt template": (
        chat(say("user: ab", weight=2), say("assistant: cd", weight=0.5)), PLAIN, [("b\n", 2), ("cd</s>", 0.5)],
    ),
    "cut": (chat(TURNS[0], say("assistant: bcdef", weight=0.5)), {"max_seq_length": 19}, [(" b", 0.5)]),
}  # fmt: skip
"""(record, settings, trained texts in order and the weight of each)"""


@pytest.mark.parametrize("name", AS_WEIGHED)
def test_weights_of_losses(tmp_path: Path, tokenizer: Any, name: str) -> None:
    row, settings, expected = AS_WEIGHED[name]
    if name == "cut":
        settings = {"max_seq_length": len(tokenizer("<s> [INST] a [/INST] b", add_special_tokens=False)["input_ids"])}
    samples = load(tokenizer, write(tmp_path / "data.jsonl", [row, row]), **settings)
    assert samples.is_weighted
    assert samples.origins[0].weighted == 2
    for sample in samples:
        trained = [at for at in range(1, len(sample.tokens)) if sample.is_trained[at]]
        assert tokenizer.decode([sample.tokens[at] for at in trained]) == "".join(text for text, _ in expected)
        lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text, _ in expected]
        wanted = [weight for (_, weight), length in zip(expected, lengths, strict=True) for _ in range(length)]
        assert sample.weights is not None
        assert [sample.weights[at] for at in trained] == wanted


def test_weights_of_1_and_0_are_none(tmp_path: Path, tokenizer: Any) -> None:
    """They say what is trained on, and nothing is computed with them; with other weights the data are others."""
    both = [{**PAIR, "w": 1.0}, {**PAIR, "w": 0}, {**PAIR, "w": True}]
    samples = load(tokenizer, write(tmp_path / "a.jsonl", both), columns=WEIGHED)
    assert not samples.is_weighted
    assert [sample.weights for sample in samples] == [None, None]
    assert samples.origins[0].without_target == 1
    others = [samples, *(
        load(tokenizer, write(tmp_path / f"{w}.jsonl", [{**PAIR, "w": w}] * 2), columns=WEIGHED) for w in (0.5, 0.25)
    )]  # fmt: skip
    facts = [samples_facts(each) for each in others]
    assert len({of["targets in order"] for of in facts}) == 3
    assert len({of["tokens in order"] for of in facts}) == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (PAIR, "line 1 has no column 'w'; found: prompt, response; --weight-column names it"),
        ({**PAIR, "w": None}, "line 1 w is None; expected a weight from 0"),
        ({**PAIR, "w": "much"}, "line 1 w is 'much'; expected a weight from 0"),
        ({**PAIR, "w": "inf"}, "line 1 w is inf; expected a weight from 0"),
    ],
)
def test_what_is_no_weight_of_a_record(tmp_path: Path, tokenizer: Any, row: Any, said: str) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        load(tokenizer, write(tmp_path / "data.jsonl", [row]), columns=WEIGHED)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (chat(*TURNS), "line 1: --prompt-template takes one prompt and its response"),
        (one({"content": "b", "reasoning_content": "hm"}), "--prompt-template takes one prompt and its response"),
        (chat(*HELLO, tools=[{"name": "add"}]), "line 1: --prompt-template .* tools, which need a chat template"),
    ],
)
def test_what_has_no_place_in_a_prompt_template(tmp_path: Path, tokenizer: Any, row: Any, said: str) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        load(tokenizer, write(tmp_path / "data.jsonl", [row]), **PLAIN)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.jsonl", None, "missing.jsonl: no such file or directory"),
        ("someone/nothing", None, "someone/nothing: no such file or directory, and split 'train' of a hub"),
        ("photos", {"a.png": ""}, r"photos: has no data file \(\.jsonl, .*found: a\.png"),
        ("a.parquet", b"PAR1 and no more", r"a\.parquet: cannot be read as Parquet"),
        ("a.csv", b"prompt,response\na,b\nc\n", r"a\.csv: line 3 has 1 cells, the first line names 2 columns"),
        ("a.docx", b"x", r"a\.docx: unknown file type '\.docx'; known: \.jsonl"),
        ("a.txt", b"", "is empty"),
        ("a.txt", b" \n\r\n\n", "has no records"),
        ("a.txt", b"good\nbad \xff\n", "line 2 is not UTF-8 text"),
        ("a.txt", "text".encode("utf-16"), "line 1 is not UTF-8 text"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, name: str, content: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(content, bytes):
        Path(name).write_bytes(content)
    elif content is not None:
        lay_out(Path(name), content)
    with pytest.raises(ExpertMeshError, match=said) as raised:
        load(tokenizer, name)
    assert str(raised.value).startswith(f"--dataset {name}")


# The cache, and what is told meanwhile


def test_cache(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tokenised twice, and nothing outlives the file, the template or the flags that it was made from."""
    file = write(tmp_path / "data.jsonl", [{"prompt": "ab", "response": "cde"}])
    first = shown(tokenizer, load(tokenizer, file))
    with monkeypatch.context() as patch:
        patch.setattr(
            "expertmesh.training.data.sample_cache.table_maker", lambda *_: lambda batch: pytest.fail("again")
        )
        patch.setattr("expertmesh.training.data.tokenizing._read", lambda *_: pytest.fail("again"))
        assert shown(tokenizer, load(tokenizer, file)) == first
    assert shown(tokenizer, load(tokenizer, file, train_on="all")) != first
    set_chat_template(tokenizer, "chatml")
    assert "im_start" in shown(tokenizer, load(tokenizer, file))[0]
    tokenizer.chat_template += "{{ strftime_now('%Y') }}"
    assert ["2031" in shown(tokenizer, load(tokenizer, file, template_date=f"{y}-01-02"))[0] for y in (2030, 2031)] == [
        False,
        True,
    ]
    versions = {"transformers": "5", "jinja2": "3", "tokenizers": "0"}
    monkeypatch.setattr("expertmesh.training.data.sample_cache.installed_version", lambda of: versions[of])
    load(tokenizer, file)
    for package in versions:
        with monkeypatch.context() as patch:
            patch.setitem(versions, package, "next")
            patch.setattr("expertmesh.training.data.sample_cache.table_maker", lambda *_: failing(errno.EDOM))
            with pytest.raises(ExpertMeshError, match=os.strerror(errno.EDOM)):
                load(tokenizer, file)
    write(file, [{"prompt": "ab", "response": "fgh"}])
    assert "fgh" in shown(tokenizer, load(tokenizer, file))[0]


@pytest.mark.parametrize("place", ["", "/datasets"])
def test_a_cache_that_cannot_be_written(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", f"{tmp_path}/file{place}")
    with pytest.raises(
        ExpertMeshError, match=r"file.*expertmesh: tokenized samples cannot be written there: Not a dir"
    ):
        load(tokenizer, write(tmp_path / "data.jsonl", [{"text": "a"}]))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of `datasets` that no other test has."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("names", "change"),
    [
        ("*.arrow", lambda content: b""),
        ("*.arrow", None),
        ("*.json", lambda content: b"{"),
        ("*.arrow", lambda content: content[: len(content) // 2]),
        ("*.arrow", lambda content: content[:8] + b"\xff" * 64 + content[72:]),
        ("*.arrow", lambda content: bytes(len(content))),
        ("*.arrow", lambda content: b"damaged" * 100),
        ("cache-*.arrow", lambda content: b"\xff" * len(content)),
    ],
)
def test_a_damaged_cache(
    tmp_path: Path, tokenizer: Any, own_cache: Path, names: str, change: Callable[[bytes], bytes] | None
) -> None:
    """As after a disk was full, or damaged, or somebody has deleted what was large. change: None: the files are
    gone."""
    file = write(tmp_path / "data.jsonl", [{"text": "a"}])
    load(tokenizer, file)
    for path in own_cache.rglob(names):
        path.unlink() if change is None else path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ExpertMeshError, match=r"cache/expertmesh: .* cannot be read there: .*; delete that directory"):
        load(tokenizer, file)
    shutil.rmtree(own_cache / "expertmesh")
    load(tokenizer, file)


def test_a_flipped_bit_of_a_cached_token_is_told(tmp_path: Path, tokenizer: Any, own_cache: Path) -> None:
    """The file is well formed all the same, and would be trained on."""
    file = write(tmp_path / "data.jsonl", [{"text": "a b c d e f"}])
    tokens = load(tokenizer, file)[0].tokens
    (kept,) = own_cache.rglob("cache-*.arrow")
    before, after = (np.array(of, dtype=np.int32).tobytes() for of in (tokens, [tokens[0] ^ 1, *tokens[1:]]))
    assert kept.read_bytes().count(before) == 1
    kept.write_bytes(kept.read_bytes().replace(before, after))
    with pytest.raises(ExpertMeshError, match=rf"read there: {kept}: is damaged: .*; delete that directory"):
        load(tokenizer, file)
    kept.write_bytes(kept.read_bytes().replace(after, before))
    assert load(tokenizer, file)[0].tokens == tokens


@pytest.mark.parametrize("names", ["dataset_info.json", "*.arrow", "[0-9a-f]*.json"])
def test_damage_of_any_file_of_the_cache_is_told(tmp_path: Path, tokenizer: Any, own_cache: Path, names: str) -> None:
    """Whatever `datasets` makes of it: a letter of a type's name, of a column's, of a key."""
    file, other = (write(tmp_path / f"{name}.jsonl", [{"text": name}]) for name in ("data", "other"))
    load(tokenizer, other)
    others = {path.name: path for path in own_cache.rglob(names)}
    load(tokenizer, file)
    for path in {*own_cache.rglob(names)} - {*others.values()}:
        content = path.read_bytes()
        texts = [found.start() for found in re.finditer(rb"[a-z]{4}", content)][:12]
        changed = [content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] for at in texts]
        of_another = others.get(path.name, next(iter(others.values()))).read_bytes()
        for damaged in (*changed, of_another, b"\x80" + content[1:]):
            path.unlink()
            path.write_bytes(damaged)
            with pytest.raises(ExpertMeshError, match=r"cannot be read there: .*is damaged.*; delete that directory"):
                load(tokenizer, file)
        path.write_bytes(content)
    load(tokenizer, file)


def test_a_file_that_was_replaced_and_kept_its_time_and_size(tmp_path: Path, tokenizer: Any) -> None:
    """As `cp -p` and archives keep them."""
    file = write(tmp_path / "data.jsonl", [{"text": "a"}])
    before, times = shown(tokenizer, load(tokenizer, file)), file.stat()
    write(file, [{"text": "b"}])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert shown(tokenizer, load(tokenizer, file)) != before


def test_a_file_of_a_saved_data_set_that_was_replaced(tmp_path: Path, tokenizer: Any) -> None:
    """Its fingerprint is in another one."""
    import datasets

    for text in ("a", "b"):
        datasets.Dataset.from_list([{"text": text}]).save_to_disk(tmp_path / text)
    before = shown(tokenizer, load(tokenizer, tmp_path / "a"))
    (file,), (other,) = ([*(tmp_path / text).glob("*.arrow")] for text in ("a", "b"))
    shutil.copy(other, file)
    assert shown(tokenizer, load(tokenizer, tmp_path / "a")) != before


def failing(number: int) -> Callable[..., Any]:
    def fails(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fails


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("writing", "workers"), [("records_of", 1), ("table_maker", 1), ("table_maker", 2)])
def test_a_full_disk(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, writing: str, workers: int
) -> None:
    """While records are written, and while samples are, by this process or another one."""
    file = write(tmp_path / "data.jsonl", [{"text": "a"}] * 4)
    fails = failing(errno.ENOSPC)
    with monkeypatch.context() as patch:
        patch.setattr(
            f"expertmesh.training.data.sample_cache.{writing}", fails if writing == "records_of" else lambda *_: fails
        )
        with pytest.raises(ExpertMeshError, match="cannot be written there: No space left on device; choose"):
            load(tokenizer, file, num_workers=workers)
    assert len(load(tokenizer, file)) == 4


def test_a_file_that_cannot_be_read_is_not_the_cache_s_fault(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(READERS, ".jsonl", failing(errno.EIO))
    with pytest.raises(ExpertMeshError, match=r"data\.jsonl: cannot be read: .*Input/output error"):
        load(tokenizer, write(tmp_path / "data.jsonl", [{"text": "a"}]))


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_is_told(
    tmp_path: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """While records are read and while they are tokenized, in lines that stay; not of what is kept."""
    import datasets  # which tests forbid to show bars

    switches = sys.modules[f"{datasets.__name__}.utils.tqdm"]
    monkeypatch.setattr(switches, "_hf_datasets_progress_bars_disabled", False)
    monkeypatch.setattr(switches, "HF_DATASETS_DISABLE_PROGRESS_BARS", None)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr("expertmesh.moe.util.progress.QUIET", 0)
    monkeypatch.setattr("expertmesh.moe.util.progress.APART", 0)
    file = write(tmp_path / "data.jsonl", [{"text": str(number)} for number in range(200)])
    load(tokenizer, file, num_workers=workers)
    told = capfd.readouterr().err.splitlines()
    line = re.compile(r"(reading|tokenizing) \S+: \d+( of 200)? records, \d+ s(, about \d+ s left)?")
    assert told == [each for each in told if line.fullmatch(each)]
    assert any(each.startswith(f"reading {file}: 200 records") for each in told)
    assert any(each.startswith(f"tokenizing {file}: 200 of 200 records") for each in told)
    load(tokenizer, file, num_workers=workers)
    assert capfd.readouterr().err == ""


def test_several_processes_tokenise_alike(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "data.jsonl", [{"prompt": str(i), "response": "x" * (i % 7)} for i in range(40)])
    alone = list(load(tokenizer, file, num_workers=1))
    # with the same length it would come out of the cache
    assert list(load(tokenizer, file, num_workers=2, max_seq_length=511)) == alone


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
    chosen = shown(tokenizer, mixed)
    assert len(set(chosen)) == 40
    assert chosen == shown(tokenizer, load(tokenizer, f"{a}:3", f"{b}:1"))
    assert chosen != shown(tokenizer, load(tokenizer, f"{a}:3", f"{b}:1", seed=1))


def test_a_mixture_until_all_are_used_up(tmp_path: Path, tokenizer: Any) -> None:
    """As `datasets` has it: all of each data set, the scarce ones repeatedly, each record as often as another or once
    more."""
    a = write(tmp_path / "a.jsonl", [{"text": f"a{i}"} for i in range(30)])
    b = write(tmp_path / "b.jsonl", [{"text": f"b{i}"} for i in range(8)])

    def mixed(seed: int) -> Samples:
        entries = [f"{a}:0.6", f"{b}:0.4"]
        return load_samples("--dataset", entries, tokenizer, DataOptions(512), seed, repeats=True)

    samples = mixed(0)
    assert [origin.used for origin in samples.origins] == [30, 20]
    times = Counter(shown(tokenizer, samples))
    assert sorted(times.values()) == [1] * 30 + [2] * 4 + [3] * 4
    assert "20 used, some repeatedly, because of its weight" in describe_origin(samples.origins[1])
    assert samples_facts(samples) == samples_facts(mixed(0)) != samples_facts(mixed(1))
    with pytest.raises(ExpertMeshError, match="repeats records, of which --eval-ratio would hold out some"):
        TrainConfig(model="m", dataset=["a"], stopping_strategy="all_exhausted", eval_ratio=0.1)


def test_a_data_set_with_settings_of_its_own(tmp_path: Path, tokenizer: Any) -> None:
    """In the YAML file; the others keep the run's, and nothing of one is in the cache of another."""
    set_chat_template(tokenizer, "mistral")
    (tmp_path / "d").mkdir()
    for split in ("train", "validation"):
        write(tmp_path / f"d/{split}.jsonl", [chat(f"user: {split}", HELLO[1])])
    one = write(tmp_path / "one.jsonl", [chat(*HELLO), chat("system: so", *HELLO)])
    tables = [
        {"path": str(tmp_path / "d"), "weight": 2, "split": "validation", "chat_template": "chatml"},
        {"path": str(one), "weight": 4, "system": "be"},
        f"{one}:4",
    ]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": "m", "dataset": tables}))
    config = parse_config(["--config", str(tmp_path / "run.yaml")])
    samples = load_samples("--dataset", config.dataset, tokenizer, DataOptions(512), 0)
    assert shown(tokenizer, samples) == [
        "<s><|im_start|>user\nvalidation<|im_end|>\n<|im_start|>assistant\n{yo<|im_end|></s>}\n",
        "<s> [INST] be\n\nhi [/INST]{ yo</s>}", "<s> [INST] so\n\nhi [/INST]{ yo</s>}",
        ANSWERED, "<s> [INST] so\n\nhi [/INST]{ yo</s>}",
    ]  # fmt: skip
    assert built_in_template("mistral") == tokenizer.chat_template
    for table, said in (
        ({"name": "x"}, "unknown key name; known: path, weight, split, chat_template, system"),
        ({"weight": 1}, "has no path"),
        ({"path": "a", "weight": "1"}, "weight must be a number"),
        ({"path": "a", "system": 3}, "system must be a text"),
        ({"path": "a", "weight": 0}, "the weight 0 must be a positive number"),
        ({"path": str(one), "chat_template": "no"}, "--chat-template no: neither a built-in template"),
    ):
        with pytest.raises(ExpertMeshError, match=said):
            load_samples("--dataset", [json.dumps(table)], tokenizer, DataOptions(512), 0)
    text = write(tmp_path / "text.jsonl", [{"text": "a"}])
    with pytest.raises(ExpertMeshError, match="is plain text, which has no system prompt; leave out the data set's"):
        load_samples("--dataset", [json.dumps({"path": str(text), "system": "be"})], tokenizer, DataOptions(512), 0)


def test_bad_weights() -> None:
    for entries, said in (
        (["a.jsonl:0.5", "b.jsonl"], "a.jsonl has a weight and b.jsonl has none"),
        *[([f"a.jsonl:{weight}"], f"the weight {weight} must be a positive number") for weight in ("0", "-1", "nan")],
    ):
        with pytest.raises(ExpertMeshError, match=said):
            parse_datasets("--dataset", entries)


def test_a_path_that_ends_like_a_weight(tmp_path: Path, tokenizer: Any) -> None:
    """With a weight, without one, and as a directory."""
    (tmp_path / "run:2").mkdir()
    file = write(tmp_path / "run:2" / "data.jsonl", [{"text": "a"}])
    colon = write(tmp_path / "0.5:1", [{"text": "a"}])
    other = str(file.rename(tmp_path / "run:2" / "b.jsonl"))
    assert len(load(tokenizer, tmp_path / "run:2")) == 1
    specs = parse_datasets("--dataset", [f"{tmp_path / 'run:2'}:0.5", f"{colon}:2", f"{other}:1"])
    assert specs == [DatasetSpec(str(tmp_path / "run:2"), 0.5), DatasetSpec(str(colon), 2.0), DatasetSpec(other, 1.0)]
    assert parse_datasets("--dataset", [str(colon)]) == [DatasetSpec(str(colon), None)]


def test_tokens_that_were_added_before_stay_as_they_are(tmp_path: Path) -> None:
    """Of --add-tokens; the others are found in texts as they stand there."""
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens("<end>", special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    number = len(tokenizer)
    added = _tokenizer(str(tmp_path), ["<end>,<one>"]).added_tokens_decoder
    flags = {token.content: (token.special, token.normalized) for token in added.values()}
    assert flags["<end>"] == (True, False)
    assert flags["<one>"] == (False, False)
    assert max(added) == number


def test_new_tokens_that_no_record_contains(tmp_path: Path, tokenizer: Any) -> None:
    """Named, of names and of a file, where none of what is trained or evaluated on has them."""
    (tmp_path / "tokens.txt").write_text("<three>\n<four>\n")
    data = [write(tmp_path / f"{name}.jsonl", [{"text": f"a <{name}>"}]) for name in ("one", "three")]
    given = {"add_tokens": ["<one>,<two>", str(tmp_path / "tokens.txt")], "dataset": [str(data[0])]}
    for entry in given["add_tokens"]:
        tokenizer.add_tokens(_tokens_in(entry))
    training, evaluation = (load(tokenizer, file) for file in data)
    config = TrainConfig(model="m", **given)  # type: ignore[arg-type]
    said = "--add-tokens: no record contains {} of 4 tokens)"
    assert _unseen(config, tokenizer, training, None) == said.format("<two>, <three>, <four> (3")
    assert _unseen(config, tokenizer, training, evaluation) == said.format("<two>, <four> (2")
    assert _unseen(replace(config, add_tokens=["<one>"]), tokenizer, training, None) == ""
    assert _unseen(replace(config, add_tokens=[]), tokenizer, training, None) == ""


def test_turns_as_samples(tmp_path: Path, tokenizer: Any) -> None:
    """As the same conversations written out by hand, with weights and what is trained on; those of one record are held
    out together, and the cache keeps them apart from others."""
    talk: list[dict[str, Any]] = [*map(say, ("user: a", "assistant: b", "user: c", "assistant: d", "user: e"))]
    talk = [talk[0], talk[1] | {"weight": 0.5}, talk[2] | {"train": True}, *talk[3:], say("assistant: f")]
    talk[-1]["train"] = False
    by_hand = [talk[:2], [talk[0], talk[1] | {"weight": 0}, *talk[2:4]], talk[:2]]
    rows, written = ([{"messages": m, "by": 2} for m in them] for them in ([talk, talk[:2], talk[-2:]], by_hand))
    file, columns = write(tmp_path / "data.jsonl", rows), Columns(weight="by")
    split = load(tokenizer, file, kind=SPLIT_TURNS, columns=columns)
    assert [*split] == [*load(tokenizer, write(tmp_path / "by_hand.jsonl", written), columns=columns)]
    assert split.records.tolist() == [0, 0, 1]
    (origin,) = split.origins
    assert (origin.split, origin.rows, origin.without_target) == (3, 4, 1)
    assert "3 rows split into 4 samples" in describe_origin(origin)
    assert len(load(tokenizer, file)) == 2
    many = load(tokenizer, write(tmp_path / "many.jsonl", [{"messages": talk[:4]}] * 10), kind=SPLIT_TURNS)
    train, held_out = hold_out(many, 0.2, seed=3)
    assert (len(train), len(held_out)) == (16, 4)
    assert not {*column_of(train.dataset, "record").tolist()} & {*column_of(held_out.dataset, "record").tolist()}
    plain = load(tokenizer, write(tmp_path / "plain.jsonl", [{"text": "a"}]), kind=SPLIT_TURNS)
    config = TrainConfig(model="m", dataset=["d"], split_turns=True)
    assert _without_effect(config, many, "") == ""
    assert "--split-turns has no effect: no record has several answers" in _without_effect(config, plain, "")


def test_hold_out(tmp_path: Path, tokenizer: Any) -> None:
    samples = load(tokenizer, write(tmp_path / "data.jsonl", [{"text": f"t{i}"} for i in range(20)]))
    train, held_out = hold_out(samples, 0.1, seed=3)
    assert (len(train), len(held_out)) == (18, 2)
    assert sorted(shown(tokenizer, train) + shown(tokenizer, held_out)) == sorted(shown(tokenizer, samples))
    assert list(hold_out(samples, 0.1, seed=3)[1]) == list(held_out)
    with pytest.raises(ExpertMeshError, match=r"--eval-ratio 0\.99 takes all 20 samples"):
        hold_out(samples, 0.99, seed=3)
