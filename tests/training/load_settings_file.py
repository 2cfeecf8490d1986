"""The settings of `expertmesh.load` as a TypedDict: `python -m tests.training.load_settings_file >
training/config/load_settings.py`."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import Field
from typing import Any

from expertmesh.training.config import settings
from expertmesh.training.config.train_config import SETTINGS, TrainConfig

HEAD = '''"""The settings that `expertmesh.load` takes, by name and type, for editors and type checkers.

Written by `python -m tests.training.load_settings_file > training/config/load_settings.py`.
"""

'''
CLASS = '''

class LoadSettings(TypedDict, total=False):
    """The flags of `train_ep.py`, by their names with underscores, but for `model`, and `config`, a YAML file with more
    of them.

    `train_ep.py --help` says what each does.

    Example:
        settings: expertmesh.LoadSettings = {"ep_size": 1, "learning_rate": 1e-5}
        engine = expertmesh.load("DIR", **settings)
    """

    config: str | Path
'''
TREE = ast.parse(inspect.getsource(settings))


def kind(setting: Field[Any], written: str) -> str:
    """What a keyword argument may be: what the field is, and what is made that."""
    kinds = [written]
    if written.startswith("list[str]"):
        kinds.append("str")
    if setting.metadata.get("scope") in ("input", "output"):
        kinds.append("Path")
    return " | ".join([*kinds, *setting.metadata.get("also", ())])


def lines() -> Iterator[str]:
    """The fields, by their classes."""
    written = {
        node.target.id: ast.unparse(node.annotation)
        for of in TREE.body
        if isinstance(of, ast.ClassDef)
        for node in of.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for base in reversed(TrainConfig.__mro__[1:-1]):
        yield f"\n    # {inspect.getdoc(base)}"
        for name in inspect.get_annotations(base):
            if name in SETTINGS and name != "model":
                yield f"    {name}: {kind(SETTINGS[name], written[name])}"


def imports(code: str) -> Iterator[str]:
    """What the code needs, from where the settings have it, or from there."""
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)} - {"Path"}
    own = [name for name in vars(settings) if name in used]
    yield "from pathlib import Path\nfrom typing import Any, TypedDict\n"
    for node in TREE.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            found = [each.name for each in node.names if each.name in used]
            own = [name for name in own if name not in found]
            if found:
                yield f"from {'.' * node.level}{node.module} import {', '.join(found)}"
    own = sorted(name for name in own if name not in ("Any", "Literal"))
    yield "\n".join(["from .settings import (", *(f"    {name}," for name in own), ")"])


def module() -> str:
    """The file."""
    body = CLASS + "\n".join([*lines(), ""])
    return HEAD + "\n".join(imports(body)) + "\n" + body


if __name__ == "__main__":
    print(module(), end="")
