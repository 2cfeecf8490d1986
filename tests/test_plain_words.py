"""What the program says to its users is plain English: messages, warnings, lines of the log and `--help`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("moe", "sharding", "checkpoints", "training")
SAYS = {
    "ExpertMeshError",
    "UnreadableError",
    "warn",
    "line",
    "detail",
    "tell",
    "print",
    "event",
    "_flag",
    "_list",
    "_add",
}
"""Calls whose strings users read; `add_argument`'s help and description are found by their names."""
HELP = {"help", "description", "epilog"}
NEVER = (
    "what is told",
    "as it came",
    "as they came",
    "has gone",
    "is gone",
    "but for",
    "of which",
    "be it",
    "such as it",
    "whatever",
    "is no file",
    "is no directory",
    "is no tensor",
    "is no matrix",
    "it cannot be told",
    "beside it those",
    "of one's own",
    "a loop of your own",
    "cannot be heeded",
    "is there already",
    "one another",
)
"""Phrases of a private dialect, each of which plain words can replace."""


def said(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The strings that a file's calls say to users, with their lines."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        parts = [*node.args, *(keyword.value for keyword in node.keywords)] if name in SAYS else []
        parts += [keyword.value for keyword in node.keywords if keyword.arg in HELP]
        for part in parts:
            for each in ast.walk(part):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.lineno, each.value


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_dialect(folder: str) -> None:
    never = re.compile(rf"\b(?:{'|'.join(map(re.escape, NEVER))})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in said(ast.parse(path.read_text(encoding="utf-8")))
        if never.search(text)
    ]
    assert found == []


def test_it_sees_what_is_said() -> None:
    """In messages, in f-strings, in lines of the log and in help; not in docstrings and names."""
    code = '''def f():
    """as it came"""
    raise ExpertMeshError(f"{path}: as it came {'has gone' if x else ''}")
log.line("as it came")
parser.add_argument("--x", help="as it came")
other("as it came")
'''
    assert sorted(line for line, text in said(ast.parse(code)) if "as it came" in text) == [3, 4, 5]
