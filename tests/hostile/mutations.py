"""Ways to break a JSON document, a text, or a file."""

import json
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

HOSTILE_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**53 + 1, 2**63, 2**64, 10**12, 10**30, 10**400, -(10**18),
    0.0, -0.5, 0.5, 1e308, 1e-320, float("nan"), float("inf"), float("-inf"),
    "", " ", "0", "1", "1e9", "nan", "x", "x" * 100_000, "\0", "a\0b", "\ud800", "\u202e", "ü" * 3000,
    ".", "..", "../x", "/etc/passwd", "/dev/zero", "a/../../x", "\\..\\x", "file:///etc/passwd", "https://x/y--z",
    [], {}, [None], [[]], [1, "x", None], {"a": None}, {"": {}}, [[[[[[[[[[1]]]]]]]]]], ["a"] * 1000, [2**70],
]  # fmt: skip


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value in a document."""
    pairs = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in pairs:
        yield document, key
        if isinstance(value, dict | list):
            yield from places(value)


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth


@st.composite
def changed_document(draw: Callable[..., Any], original: Any) -> Any:
    """The document with one to three values replaced, deleted, doubled, or under another key."""
    document = deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(document))
        if not found:
            break
        holder, key = found[draw(st.integers(0, len(found) - 1))]
        how = draw(st.sampled_from(["replace"] * 5 + ["delete", "rename", "double"]))
        if how == "replace":
            holder[key] = deepcopy(draw(st.sampled_from(HOSTILE_VALUES)))
        elif how == "delete":
            del holder[key]
        elif isinstance(holder, list):
            holder.insert(key, deepcopy(holder[key]))
        else:
            other = draw(st.sampled_from(["x", "", "../x", "\0", f"{key} ", str(key).upper(), *map(str, holder)]))
            holder[other] = holder.pop(key) if how == "rename" else deepcopy(holder[key])
    return document


def dumped(document: Any) -> bytes:
    """As JSON, NaN and lone surrogates included."""
    return json.dumps(document).encode()


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Of a safetensors file, and the data behind it."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(text: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def changed_weights(original: bytes) -> st.SearchStrategy[bytes]:
    """Contents of a safetensors file, with another header, or with other bytes in it or anywhere."""
    header, data = header_of(original)
    documents = changed_document(header).map(dumped)
    texts = changed_bytes(original[8 : len(original) - len(data)])
    return st.one_of(
        *(strategy.map(lambda text: with_header(text, data)) for strategy in (documents, documents, texts)),
        changed_bytes(original),
    )


def changed_bytes(original: bytes, alphabet: bytes = bytes(range(256))) -> st.SearchStrategy[bytes]:
    """The file with one to four runs of bytes flipped, overwritten, cut out, doubled or put in, or its end cut off."""

    @st.composite
    def changed(draw: Callable[..., Any]) -> bytes:
        content = bytearray(original)
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, max(len(content) - 1, 0)))
            length = draw(st.sampled_from([1, 1, 1, 2, 8, 64]))
            how = draw(st.sampled_from(["flip", "flip", "overwrite", "remove", "insert", "double", "truncate"]))
            if how == "flip" and content:
                content[at] ^= 1 << draw(st.integers(0, 7))
            elif how == "overwrite":
                byte = alphabet[draw(st.integers(0, len(alphabet) - 1))]
                content[at : at + length] = bytes([byte]) * len(content[at : at + length])
            elif how == "remove":
                del content[at : at + length]
            elif how == "insert":
                content[at:at] = bytes([alphabet[draw(st.integers(0, len(alphabet) - 1))]]) * length
            elif how == "double":
                content[at:at] = content[at : at + length]
            elif how == "truncate":
                del content[at:]
        return bytes(content)

    return changed()


BROKEN_TEXTS: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n\t ",
    "bad UTF-8": b'{"model_type": "mixtral\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "BOM": b'\xef\xbb\xbf{"a": 1}',
    "NULs": b"\0" * 4096,
    "only brackets": nested(200_000).encode(),
    "open brackets": b"[" * 200_000,
    "deep objects": nested(100_000, '{"a":', "}").replace(":}", ":1}", 1).encode(),
    "deep, but readable": nested(900).encode(),
    "deep in an object": b'{"a": ' + nested(900).encode() + b"}",
    "huge number": b'{"hidden_size": 1' + b"0" * 5000 + b"}",
    "huge exponent": b'{"hidden_size": 1e999999999}',
    "number": b"3",
    "string": b'"x"',
    "null": b"null",
    "list": b"[1, 2]",
    "two documents": b"{}{}",
    "trailing comma": b'{"a": 1,}',
    "comment": b"// x\n{}",
    "HTML of a log-in page": b"<!DOCTYPE html><html><body>Log in</body></html>",
    "pointer of git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n",
    "binary": bytes(range(256)) * 16,
    "long": b'{"a": "' + b"x" * 10_000_000 + b'"}',
    "many keys": b"{" + b",".join(b'"%d":0' % n for n in range(200_000)) + b"}",
}


def broken_texts(_: bytes) -> Iterator[tuple[str, bytes]]:
    yield from BROKEN_TEXTS.items()


def hostile_values(every: int, wrap: Callable[[Any], bytes] = dumped) -> Callable[[bytes], Iterator[tuple[str, bytes]]]:
    """For each key of a JSON document one in so many hostile values, others for the next key."""

    def changed(original: bytes) -> Iterator[tuple[str, bytes]]:
        document = json.loads(original)
        document.pop("checksum", None)
        for number, key in enumerate(document):
            for value in HOSTILE_VALUES[number % every :: every]:
                yield f"{key} = {value!r:.60}", wrap({**document, key: value})

    return changed
