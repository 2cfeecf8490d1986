"""Docstrings and comments name what exists, and pages quote messages as the code has them.

Quoted are blocks labelled `text` (what a program prints; a formula has no label), code of four plain words or more,
and what the tables of what goes wrong have in their first cells. In a quote, values cannot be told from words that are
gone, so it is read as runs of plain words, which end at punctuation, numbers, paths, names and wide gaps. Each run has
to stand in a string of the product, whose holes are for whole pieces of other strings. One word that is changed at
random was found in 95 % of runs of six words or more, 71 % of those of four or five, and 40 % of shorter ones. Rows of
tables are not read, nor what begins as another library's `ValueError: ...`.
"""

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

from tests.errors_page import WRONG

ROOT = Path(__file__).parents[1]
FOLDERS = ["moe", "sharding", "checkpoints", "training", "benchmarks"]
OURS = {*FOLDERS, "tests", "configs", "docs"}
PACKAGE = ROOT / ".package" / "expertmesh"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def sources() -> dict[Path, str]:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return {file: file.read_text(encoding="utf-8") for file in [*files, ROOT / "train_ep.py", *PACKAGE.glob("*.py")]}


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Of each file."""
    gc.disable()  # which takes three times as long as parsing, of so many objects
    try:
        return {file: list(ast.walk(ast.parse(source))) for file, source in sources().items()}
    finally:
        gc.enable()


# Names in docstrings and comments

TEXT = re.compile(r'("""(?s:.*?)""")|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|(#[^\n]*)')
NAME = re.compile(r"(?<![\w/.-])[a-zA-Z_][\w-]*(?:[./][\w-]+)+")


@cache
def places() -> dict[str, set[Path]]:
    """Modules and packages by their last name."""
    found = defaultdict(set)
    for file in sources():
        for path in (file, *file.relative_to(ROOT).parents):
            found[path.stem].add(ROOT / path)
    return found


@cache
def defined(module: Path) -> dict[str, ast.AST]:
    """What a module or package defines or imports."""
    found: dict[str, ast.AST] = {}
    for node in nodes().get(module / "__init__.py" if module.is_dir() else module, []):
        for name in (getattr(node, field, None) for field in ("name", "asname", "id")):
            if isinstance(name, str):
                found.setdefault(name, node)
    return found


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    found = defaultdict(list)
    for node in (node for each in nodes().values() for node in each if isinstance(node, ast.ClassDef)):
        found[node.name].append(node)
    return found


@cache
def has(kind: ast.ClassDef, member: str) -> bool:
    """Whether a class has it, or may have it of a class of another package."""
    names = {getattr(node, field, None) for node in ast.walk(kind) for field in ("name", "attr", "id")}
    bases = [ast.unparse(base).partition("[")[0] for base in kind.bases]
    others = [base for base in bases if base not in classes() and base not in ("Protocol", "Generic")]
    return member in names or bool(others) or any(has(each, member) for base in bases for each in classes()[base])


@cache
def attributes() -> set[str]:
    """Of any object."""
    return {name for source in sources().values() for name in re.findall(r"[\w)\]]\.([a-zA-Z_]\w*)", source)}


def leads(place: Path, parts: list[str]) -> bool:
    """Whether a module or package has what the rest of a dotted name says."""
    if not parts:
        return True
    first, *rest = parts
    for inner in (place / first, place / f"{first}.py"):
        if inner.exists():
            return leads(inner, rest)
    node = defined(place).get(first)
    return node is not None and (not rest or not isinstance(node, ast.ClassDef) or has(node, rest[0]))


@cache
def is_dead(name: str) -> bool:
    """Whether a name says where something of ours is, and it is not there."""
    if "/" in name or name.endswith(".py"):
        folder, _, inner = name.rpartition("/")
        if name.split("/")[0] in OURS:
            return not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()
        near = [place for place in places().get(Path(folder).name, ()) if str(place).endswith(f"/{folder}")]
        if inner.endswith(".py") and (near or not folder):
            return not any((place / inner).exists() for place in near or {file.parent for file in sources()})
        return False
    first, *rest = name.split(".")
    if first in {*OURS, "expertmesh"}:
        return not leads(PACKAGE if first == "expertmesh" else ROOT / first, rest)
    if first in places() and name not in all_strings() and find_spec(first) is None:
        is_variable = attributes().issuperset(rest)
        return not is_variable and not any(leads(place, rest) for place in places()[first])
    return first in classes() and not any(has(kind, rest[0]) for kind in classes()[first])


def test_docstrings_and_comments_name_what_exists() -> None:
    dead = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, source in sources().items()
        for match in TEXT.finditer(source)
        for name in NAME.findall(match[1] or match[2] or "")
        if is_dead(name)
    ]
    assert not dead


@pytest.mark.parametrize(
    ("name", "dead"),
    [
        ("moe.experts.forward", False),
        ("moe.experts.backward", True),
        ("moe.experts.forward.Forward", False),
        ("moe.experts.forward.Backward", True),
        ("moe.experts.forward.Forward.moved", True),
        ("experts.forward.Forward", False),
        ("forward.Backward", True),
        ("Forward.is_token_BS", False),
        ("Forward.moved", True),
        ("engine.step", False),
        ("expertmesh.load", False),
        ("expertmesh.unload", True),
        ("training/run/run.py", False),
        ("training/run/walk.py", True),
        ("run/walk.py", True),
        ("commands.py", False),
        ("orders.py", True),
        ("models/llama4/infra/parallelize.py", False),
        ("torch.nowhere", False),
        ("metrics.jsonl", False),
    ],
)
def test_what_is_dead(name: str, dead: bool) -> None:
    assert is_dead(name) is dead


# Messages that pages quote

HOLE = "\0"
MANY = 64
"""Ways of one string."""


def ways(node: ast.AST) -> list[str]:
    """What an expression gives, with holes: each choice between strings, where they are not too many."""
    if isinstance(node, ast.Constant):
        return [node.value if isinstance(node.value, str) else HOLE]
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.IfExp):
        return [*ways(node.value.body), *ways(node.value.orelse)]
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        parts = [node.left, node.right] if isinstance(node, ast.BinOp) else node.values
        found = ["".join(each) for each in product(*map(ways, parts))]
        return found if len(found) <= MANY else [HOLE]
    return [HOLE]


@cache
def all_strings() -> str:
    """Of the product, one a line, with holes."""
    every = [node for each in nodes().values() for node in each]
    texts = {id(node.value) for node in every if isinstance(node, ast.Expr)}
    found = {
        string
        for node in every
        if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)) and id(node) not in texts
        for string in ways(node)
    }
    script = (ROOT / "training" / "report" / "page.js").read_text(encoding="utf-8")
    found.update(re.sub(r"\$\{[^}]*\}", HOLE, string) for string in re.findall(r"`([^`]*)`", script))
    return "\n".join(" ".join(re.sub(f"{HOLE}+", f" {HOLE} ", string).split()) for string in sorted(found))


PLAIN = re.compile(r"([(\"'«]*)([a-z][a-z'-]*?)(['\"»]*[;:,.)?!]*)")
LINE = "\n"


def runs(text: str) -> Iterator[tuple[str, ...]]:
    """Plain words, and holes, that stand beside each other; the end of a line is one of them."""
    run: list[str] = []
    for line in text.splitlines():
        if len(re.findall(r" {3,}", line)) > 1:  # a row of a table
            words = [""]
        else:
            words = [*re.sub(r"(?<=\S) {2,}", " \1 ", line.strip()).split(), LINE]
        for word in words:
            plain = PLAIN.fullmatch(word)
            if run and (plain is None or plain[1]) and word not in (HOLE, LINE):
                yield tuple(run)
                run = []
            if word in (HOLE, LINE):
                run.append(word)
            elif plain is not None and plain[2] not in VALUES:
                run.append(plain[2])
                if plain[3]:
                    yield tuple(run)
                    run = []
    yield tuple(run)


VALUES = ("nan", "inf")
"""Numbers in words."""


@cache
def clauses() -> tuple[set[tuple[str, ...]], dict[str, list[tuple[str, ...]]], str]:
    """Runs of all strings: those without holes; those with some, by their words; and all, one a line."""
    found = {tuple(" ".join(run).split()) for string in all_strings().split(LINE) for run in runs(string)}
    by_word = defaultdict(list)
    for clause in (clause for clause in found if HOLE in clause):
        for word in {*clause} - {HOLE}:
            by_word[word].append(clause)
    whole = {clause for clause in found if HOLE not in clause}
    return whole, by_word, LINE.join(f" {' '.join(clause)} " for clause in found)


def is_told(run: tuple[str, ...]) -> bool:
    """Whether a run is part of one string, or its lines are of several."""
    words, lines = tuple(word for word in run if word != LINE), " ".join(run).split(LINE)
    whole, by_word, every = clauses()
    if len(words) < 2 or f" {' '.join(words)} " in every:
        return True

    def fits(at: int, clause: tuple[str, ...]) -> bool:
        """Whether the run is, from a word on, as a clause begins."""
        if at == len(words):
            return True
        if not clause or clause[0] != HOLE:
            return bool(clause) and clause[0] == words[at] and fits(at + 1, clause[1:])
        ends = [end for end in range(at, len(words) + 1) if end == at or words[at:end] in whole]
        return any(fits(end, clause[1:]) for end in ends)

    near = {clause: None for word in words for clause in by_word.get(word, ())}
    if any(fits(0, clause[at:]) for clause in near for at in range(len(clause))):
        return True
    return len(lines) > 1 and all(is_told(tuple(line.split())) for line in lines)


def quotes(page: Path) -> Iterator[str]:
    """What a page has as a program prints it."""
    text = page.read_text(encoding="utf-8")
    yield from re.findall(r"^ *```text\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    cells = [line.split(" | ")[0] for section in WRONG.findall(text) for line in section.splitlines()]
    told = [quote for cell in cells for quote in re.findall(r'`([^`]+)`|"([^"]+)"', cell)]
    code = re.findall(r"(?<!`)`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    sentences = [each for each in code if len(re.findall(r"(?:^|\s)[a-z]{2,}(?=[\s,;:]|$)", each)) > 3]
    yield from (quote for quote in [*map("".join, told), *sentences] if not re.match(r"\w+Error: ", quote))


def test_pages_quote_messages_as_they_are() -> None:
    dead = [
        f"{page.relative_to(ROOT)}: {' '.join(run)!r} in {quote!r:.100}"
        for page in PAGES
        for quote in quotes(page)
        for run in runs(quote)
        if not is_told(run)
    ]
    assert not dead


@pytest.mark.parametrize(
    ("quote", "told"),
    [
        ("stopped by a signal; --resume auto resumes from here (exit code 75)", True),
        ("stopped by a signal; --resume auto goes on from here (exit code 75)", False),
        ("rank 1 has made no progress for 20 s (--ddp-timeout 20)", True),
        ("rank 1 has made no headway for 20 s (--ddp-timeout 20)", False),
        ("would\nkeep 95 % of all tokens, 14,962 99 %; --truncation split keeps all", True),
        ("hf has the weights of the last step, 60, and of the best\n  evaluation (step 60)", True),
        ("hf holds the weights of the last step, 60, and of the best\n  evaluation (step 60)", False),
        ("step 20: eval loss 1.6498\n    time    step  of no string", True),
    ],
)
def test_what_is_told(quote: str, told: bool) -> None:
    assert all(map(is_told, runs(quote))) is told
