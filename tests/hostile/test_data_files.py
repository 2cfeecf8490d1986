"""Broken and hostile data: files through `load_samples`, rows through the formats, tokenizers and chat templates."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

from expertmesh.training.data.chat import set_chat_template
from expertmesh.training.data.data_files import open_rows
from expertmesh.training.data.formats import Columns
from expertmesh.training.data.samples import DataOptions, _records, load_samples
from expertmesh.training.inputs import load_tokenizer
from tests.hostile.harness import Refused, Watch, fuzz
from tests.hostile.mutations import BROKEN_TEXTS, changed_bytes, changed_document, dumped, nested
from tests.tiny import save_tokenizer

QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
ROWS: list[dict[str, Any]] = [
    {"prompt": "p", "response": "r"},
    {"prompt": [QUESTION], "completion": [ANSWER]},
    {"messages": [{"role": "system", "content": "s"}, QUESTION, {**ANSWER, "weight": 1}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "tools": [{"name": "t"}]},
    {"instruction": "i", "input": "x", "output": "o", "history": [["q", "a"]], "system": "s"},
    {"question": "q", "answer": "a"},
    {"text": "t"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, CALL]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "value": "q"}], "loss_weight": 0.0},
            {"role": "assistant", "content": [{"type": "tool_call", "value": '{"name": "f", "arguments": {}}'}]},
            {"role": "assistant", "content": [{"type": "reasoning", "value": "r"}, {"type": "text", "value": "a"}]},
        ]
    },
]
GOOD = b'{"prompt": "say", "response": "yes"}\n'
LINES: dict[str, bytes] = {
    "lone surrogate": b'{"prompt": "a", "response": "b\\ud800c"}\n',
    "lone surrogate in a key": b'{"prompt": "a", "response": "b", "\\ud800": 1}\n',
    "surrogate pair": b'{"prompt": "a", "response": "\\ud83d\\ude00"}\n',
    "NULs": b'{"prompt": "a\\u0000", "response": "\\u0000"}\n',
    "nulls": b'{"prompt": null, "response": null}\n',
    "nested nulls": b'{"messages": [null, {"role": null, "content": [null]}]}\n',
    "no tokens": b'{"prompt": "", "response": ""}\n',
    "no messages": b'{"messages": []}\n',
    "duplicate keys": b'{"prompt": "a", "prompt": "c", "response": "b"}\n',
    "mixed types": GOOD + b'{"prompt": 3, "response": "b"}\n',
    "list among objects": GOOD + b"[1, 2]\n",
    "deep": b'{"prompt": "a", "response": ' + nested(900).encode() + b"}\n",
    "deep tools": b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "tools": '
    + nested(900).encode() + b"}\n",
    "deeper": b'{"prompt": "a", "response": ' + nested(100_000).encode() + b"}\n",
    "NaN": b'{"prompt": NaN, "response": Infinity}\n',
    "huge number": b'{"prompt": "a", "response": "b", "x": 1' + b"0" * 5000 + b"}\n",
    "cut off": GOOD * 3 + b'{"prompt": "a", "resp',
    "CRLF": GOOD.replace(b"\n", b"\r\n") * 3,
    "BOM": b"\xef\xbb\xbf" + GOOD,
    "bad UTF-8": GOOD + b'{"prompt": "\xff\xfe", "response": "b"}\n',
    "10 MB": b'{"prompt": "a", "response": "' + b"word " * 2_000_000 + b'"}\n',
    "10 MB without a space": b'{"prompt": "a", "response": "' + b"x" * 10_000_000 + b'"}\n',
    "10 MB of text": b'{"text": "' + "ä".encode() * 5_000_000 + b'"}\n',
    "10 MB before the end": b"x" * 10_000_000,
    "list": b"[" + GOOD.strip() + b"]",
    "list of nulls": b"[null, null]",
    "empty list": b"[]",
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + bytes(50),
}  # fmt: skip
TABLES: dict[str, bytes] = {
    "NUL": b"prompt,response\na\0b,c\n",
    "NUL in the head": b"prompt\0,response\na,b\n",
    "quote without end": b'prompt,response\n"a,b\n',
    "too many cells": b"prompt,response\na,b,c\n",
    "too few cells": b"prompt,response\na\n",
    "columns twice": b"prompt,prompt,response\na,b,c\n",
    "only a head": b"prompt,response\n",
    "empty cells": b"prompt,response\n,\n",
    "long cell": b"prompt,response\na," + b"x" * 3_000_000 + b"\n",
    "CRLF": b"prompt,response\r\na,b\r\n",
    "old Macintosh": b"prompt,response\ra,b\r",
    "bad UTF-8": b"prompt,response\na,\xff\n",
}
TEXTS: dict[str, bytes] = {
    "NULs": b"\0\0\na\0b\n",
    "only NULs": bytes(100),
    "CRLF": b"a b\r\n\r\nc\r\n",
    "old Macintosh": b"a b\rc\r",
    "BOM": b"\xef\xbb\xbfa b\n",
    "only a BOM": b"\xef\xbb\xbf",
    "bad UTF-8": b"a b\n\xff\n",
    "half a character": "a ä".encode()[:-1],
    "lone surrogate": b"a \xed\xa0\x80 b\n",
    "blank": b" \n\t\n",
    "10 MB in a line": "ä".encode() * 5_000_000,
    "many lines": b"a b\n" * 20_000,
    "a million blank lines": b"\n" * 1_000_000 + b"a b",
}


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return path


def tokenizer_of(path: Path) -> Any:
    return load_tokenizer(str(path), SimpleNamespace(text_config=SimpleNamespace(vocab_size=320)))  # type: ignore[arg-type]


def data_files(watch: Watch, num_cases: int, tokenizer_directory: Path) -> None:
    """Each through all of `load_samples`."""
    tokenizer = tokenizer_of(tokenizer_directory)
    set_chat_template(tokenizer, "")
    watch.allow_writing(watch.directory / "cache")

    def attempt(case: str, name: str, content: bytes) -> None:
        file = watch.directory / name
        file.write_bytes(content)
        options = DataOptions(max_seq_length=64, num_workers=1)

        def load() -> Any:
            samples = load_samples("--dataset", [str(file)], tokenizer, options, 0)
            return [samples[index] for index in range(len(samples))]

        found = watch.attempt(case, load, str(file))
        if not isinstance(found, Refused):
            assert all(0 < len(sample.tokens) <= 64 and any(sample.is_trained[1:]) for sample in found), case
            assert all(0 <= token < 320 for sample in found for token in sample.tokens), case

    for name, text in LINES.items():
        attempt(name, "data.jsonl", text)
    for name, text in TABLES.items():
        attempt(name, "data.csv", text)
    for name, text in TEXTS.items():
        attempt(name, "data.txt", text)
    for name in ("empty", "blank", "UTF-16", "NULs", "binary", "many keys"):
        attempt(name, "data.json", BROKEN_TEXTS[name])
    import pyarrow
    import pyarrow.parquet

    file = watch.directory / "whole.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 50, "response": ["b"] * 50}), file)
    parquet = file.read_bytes()
    for end in (0, 4, len(parquet) // 2, len(parquet) - 4):
        attempt(f"the first {end} bytes", "data.parquet", parquet[:end])
    fuzz(num_cases, changed_bytes(parquet), lambda content: attempt(f"{content!r:.500}", "data.parquet", content))


def data_rows(watch: Watch, num_cases: int) -> None:
    """Through the readers of files and formats, up to what the tokenizer gets."""
    file = watch.directory / "rows.jsonl"

    def attempt(content: bytes) -> None:
        file.write_bytes(content)
        records = watch.attempt(f"{content!r:.2000}", read, str(file))
        if not isinstance(records, Refused):
            assert all(isinstance(json.loads(record["content"]), str | dict) for record in records)

    def read() -> list[dict[str, str]]:
        return list(_records(open_rows("--dataset", str(file), "", "train"), "--dataset", Columns()))

    documents = [changed_document(row).map(dumped) for row in ROWS]
    text = b"\n".join(map(dumped, ROWS[:3]))
    fuzz(num_cases, st.one_of(*documents, changed_bytes(text)), attempt)


def tokenizer_files(watch: Watch, num_cases: int, tokenizer_directory: Path) -> None:
    path = watch.directory / "tokenizer"
    shutil.copytree(tokenizer_directory, path)
    names = ["tokenizer.json", "tokenizer_config.json"]
    originals = {name: (path / name).read_bytes() for name in names}

    def attempt(case: str, name: str, content: bytes) -> None:
        (path / name).write_bytes(content)

        def use() -> list[int]:
            tokenizer = tokenizer_of(path)
            set_chat_template(tokenizer, "")
            return list(tokenizer("say hello", add_special_tokens=False)["input_ids"])

        tokens = watch.attempt(f"{name}: {case}", use, str(path), "tokenizer")
        (path / name).write_bytes(originals[name])
        if not isinstance(tokens, Refused):
            assert all(0 <= token < 320 for token in tokens), case

    for name in names:
        for case, text in BROKEN_TEXTS.items():
            attempt(case, name, text)
    panics = json.loads(originals["tokenizer.json"])
    panics["model"]["continuing_subword_prefix"] = "x" * 9
    attempt("a prefix longer than a token", "tokenizer.json", dumped(panics))
    changes = [
        st.tuples(st.just(name), changed_document(json.loads(content)).map(dumped))
        for name, content in originals.items()
    ]
    fuzz(num_cases, st.one_of(changes), lambda change: attempt(f"{change[1]!r:.2000}", *change))


TEMPLATES: dict[str, str | bytes] = {
    "long range": "{% for a in range(10**12) %}x{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "globals": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "init": "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "attr": "{{ messages | attr('__class__') }}",
    "self": "{{ self.__init__.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('touch canary').read() }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as x %}",
    "extends": "{% extends '/etc/passwd' %}",
    "changes its input": "{{ messages.append(1) }}{{ messages.clear() }}",
    "no end": "{% for m in messages %}",
    "unknown filter": "{{ messages | nothing }}",
    "undefined": "{{ x.y.z }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "bad UTF-8": b"\xff\xfe",
    "empty": "",
    "constant": "x",
    "NULs": "\0\0",
    "surrogate": "{{ '\\ud800' }}{% for m in messages %}{{ m.content }}{% endfor %}",
}


def chat_templates(watch: Watch, _: int, tokenizer_directory: Path) -> None:
    """As --chat-template, and as the tokenizer's own, which is first used on the data."""
    data, file = watch.directory / "data.jsonl", watch.directory / "template.jinja"
    data.write_bytes(GOOD)
    watch.allow_writing(watch.directory / "cache")
    options = DataOptions(max_seq_length=64, num_workers=1)
    for name, template in TEMPLATES.items():
        file.write_bytes(template if isinstance(template, bytes) else template.encode())
        tokenizer = tokenizer_of(tokenizer_directory)
        setting = functools.partial(set_chat_template, tokenizer, str(file))
        watch.attempt(f"{name} as --chat-template", setting, str(file))
        if isinstance(template, str):
            tokenizer = tokenizer_of(tokenizer_directory)
            tokenizer.chat_template = template
            load = functools.partial(load_samples, "--dataset", [str(data)], tokenizer, options, 0)
            watch.attempt(f"{name} as the tokenizer's", load, str(data))
        assert not Path("canary").exists(), name
    for name in ("x" * 300, "a\0b", "/dev/zero", "..", str(watch.directory)):
        watch.refuse(f"{name!r:.50}", functools.partial(set_chat_template, tokenizer, name), "--chat-template")


@pytest.mark.release
def test_data_files(campaign: Callable[..., None], tokenizer_directory: Path) -> None:
    campaign(data_files, tokenizer_directory)


@pytest.mark.slow
def test_data_rows(campaign: Callable[..., None]) -> None:
    campaign(data_rows)


@pytest.mark.slow
def test_tokenizer_files(campaign: Callable[..., None], tokenizer_directory: Path) -> None:
    campaign(tokenizer_files, tokenizer_directory)


@pytest.mark.slow
def test_chat_templates(campaign: Callable[..., None], tokenizer_directory: Path) -> None:
    campaign(chat_templates, tokenizer_directory)
