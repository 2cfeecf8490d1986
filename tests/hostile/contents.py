"""Broken and hostile content of files that people write: data, templates, YAML."""

from typing import Any

from tests.hostile.mutations import nested

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

LAUGHS = "a: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
YAML_TEXTS: dict[str, bytes] = {
    "billion laughs": LAUGHS.encode(),
    "billion laughs in a known key": LAUGHS.replace("a9:", "dataset:").encode(),
    "laughs in a table": b"lr_scheduler_kwargs: {a: &a [1, 1], b: &b [*a, *a], c: [*b, *b]}",
    "list of itself": b"dataset: &a [*a]",
    "table of itself": b"lr_scheduler_kwargs: &a {a: *a}",
    "a Python object": b"model: !!python/object/apply:os.system ['touch canary']",
    "a Python name": b"model: !!python/name:os.system",
    "bytes": b"model: !!binary aGVsbG8=",
    "a set": b"dataset: !!set {a, b}",
    "a date": b"run_name: 2024-01-01",
    "a date that is none": b"run_name: 2024-99-99",
    "base 60": b"max_steps: 1:30",
    "octal": b"max_steps: 017",
    "huge number": b"max_steps: 1" + b"0" * 5000,
    "not a number": b"learning_rate: .nan",
    "infinite": b"learning_rate: .inf",
    "a key twice": b"max_steps: 1\nmax_steps: 2",
    "merged keys": b"<<: {max_steps: 3}\nmodel: m\ndataset: d",
    "a list as key": b"? [a, b]\n: c",
    "a table as key": b"? {a: b}\n: c",
    "no key": b"? \n: c",
    "tabs": b"\tmodel: m",
    "several documents": b"model: m\n---\nmodel: n",
    "unknown alias": b"model: *x",
    "flag in a value": b"model: --overwrite_output_dir",
    "flag in a list": b"dataset: [--model, x]",
    "NUL": b'model: "a\\0b"',
    "surrogate": b'model: "\\ud800"',
    "deep flow": b"model: " + b"[" * 5000,
    "deep blocks": b"".join(b" " * n + b"a:\n" for n in range(3000)),
}
