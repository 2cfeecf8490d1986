"""The import graph of the product: no circle of files, none of rooms, nothing upward; a public name means one thing.

A room is a folder below one of the four, or a file directly in one. Imports within functions count too, as they only
put off what a circle costs its reader; those under `if TYPE_CHECKING:` count between rooms alone.
"""

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ["moe", "sharding", "checkpoints", "training"]
"""Each imports only from itself and from those before it."""

Graph = dict[Path, set[Path]]


@cache
def product_files(root: Path) -> set[Path]:
    """By their paths from `root`."""
    return {path.relative_to(root) for floor in FLOORS for path in (root / floor).rglob("*.py")}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def read_graph(root: Path, with_types: bool = False) -> Graph:
    """Which files each file imports, by their paths from `root`.

    Args:
        with_types: whether imports for type checkers alone count.
    """
    files = product_files(root)
    gc.disable()  # which takes three times as long as parsing, of so many objects
    try:
        return {file: set(imported(root, file, files, with_types)) for file in files}
    finally:
        gc.enable()


@cache
def imports(file: Path) -> list[tuple[ast.ImportFrom, bool]]:
    """Each with whether it is for type checkers alone."""
    nodes = list(ast.walk(parsed(file)))
    for_types = {
        node
        for block in nodes
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    return [(node, node in for_types) for node in nodes if isinstance(node, ast.ImportFrom)]


def imported(root: Path, file: Path, files: set[Path], with_types: bool) -> Iterator[Path]:
    for node, is_for_types in imports(root / file):
        if is_for_types and not with_types:
            continue
        module = (node.module or "").split(".") if node.module else []
        if node.level:
            module = [*file.parts[: len(file.parts) - node.level], *module]
        elif module[0] == "expertmesh":
            module = module[1:]
        else:
            continue
        for alias in node.names:
            for parts in ([*module, alias.name], module):
                if parts and (found := Path(*parts).with_suffix(".py")) in files:
                    yield found
                    break


def room(file: Path) -> Path:
    return Path(*file.parts[:2])


def circle(graph: Graph) -> list[Path]:
    """One of the graph's circles; empty if it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[Path] = error.args[1]
        return found
    return []


def rooms(graph: Graph) -> Graph:
    found: Graph = defaultdict(set)
    for file, targets in graph.items():
        found[room(file)] |= {room(target) for target in targets} - {room(file)}
    return found


def upward(graph: Graph) -> list[tuple[str, str]]:
    floor = {file: FLOORS.index(file.parts[0]) for file in graph}
    return [(str(file), str(target)) for file in graph for target in graph[file] if floor[target] > floor[file]]


def test_imports_have_no_circle() -> None:
    graph = read_graph(ROOT)
    assert len(graph) > 200
    assert circle(graph) == []
    assert circle(rooms(graph)) == []
    assert circle(rooms(read_graph(ROOT, with_types=True))) == []
    assert upward(graph) == []


@pytest.mark.parametrize(
    ("source", "files", "of_rooms", "up"),
    [
        ("from ..kernels.a import x", [], [], 0),
        ("from .c import x", ["moe/experts/b.py", "moe/experts/c.py"], [], 0),
        ("def f():\n    from . import c", ["moe/experts/b.py", "moe/experts/c.py"], [], 0),
        ("from ..dispatch.d import x", [], ["moe/dispatch", "moe/experts"], 0),
        ("from ...training.e import x", [], [], 1),
        ("from expertmesh.training.e import x", [], [], 1),
        ("if TYPE_CHECKING:\n    from .c import x", [], [], 0),
        ("if TYPE_CHECKING:\n    from ..dispatch.d import x", [], ["moe/dispatch", "moe/experts"], 0),
    ],
)
def test_what_would_be_found(tmp_path: Path, source: str, files: list[str], of_rooms: list[str], up: int) -> None:
    content = {
        "moe/experts/b.py": source,
        "moe/experts/c.py": "from .b import x",
        "moe/dispatch/d.py": "",
        "moe/dispatch/d2.py": "from ..experts import c",
        "moe/kernels/a.py": "",
        "training/e.py": "",
    }
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    graph = read_graph(tmp_path)
    assert sorted({str(file) for file in circle(graph)}) == files
    assert sorted({str(file) for file in circle(rooms(read_graph(tmp_path, with_types=True)))}) == of_rooms
    assert len(upward(graph)) == up


DEFINED_TWICE = {
    "build_parser": "each command's own parser",
    "main": "each command's own entry",
    "read_flags": "each command's own flags, read",
    "script": "each command's own entry, as pip installs it",
}
"""Public names that several files define, and why they may."""


def names_defined(root: Path) -> dict[str, set[str]]:
    """Public functions and classes, by name the files that define them."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in [*product_files(root), Path("train_ep.py")]:
        for node in parsed(root / file).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                found[node.name].add(str(file))
    return found


def test_a_public_name_means_one_thing() -> None:
    twice = {name: sorted(files) for name, files in names_defined(ROOT).items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in DEFINED_TWICE} == {}
    assert twice.keys() == DEFINED_TWICE.keys(), "these are defined once by now"


def asking_for_dry_runs(root: Path) -> set[str]:
    """Files outside of forecasts that know of dry runs."""
    planning = Path("training/planning")
    files = [file for file in product_files(root) if not file.is_relative_to(planning)]
    return {str(file) for file in files if "rehears" in re.sub(r'"""(?s:.*?)"""|#.*', "", (root / file).read_text())}


def test_a_run_does_not_ask_whether_it_is_a_dry_run() -> None:
    """What a dry run replaces it patches; and in one file a tensor is said to be as on a GPU."""
    commands = {"training/cluster/commands.py", "training/cluster/support.py"}
    assert asking_for_dry_runs(ROOT) - commands == {"moe/util/gpu.py"}
