"""Packages that import a name when it is first used, so that a command loads only what it needs.

torch and transformers take seconds to import, and neither `--help` nor a mistake in a flag nor reading the headers of a
checkpoint needs them. So an `__init__.py` lists its imports under `if TYPE_CHECKING:`, where type checkers and readers
find them, and hands this module the rest: `from expertmesh.moe import ExpertMeshError` loads `moe/base/errors.py` and
nothing else.

No package may export a name that one of its modules has, as importing the module sets that attribute.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def import_on_demand(package: str) -> Callable[[str], Any]:
    """The `__getattr__` (PEP 562) of a package: it performs the import that the package's `__init__.py` lists for a
    name."""
    module = sys.modules[package]
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    places = {alias.name: str(node.module) for node in imports for alias in node.names}

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(places[name]), name)
        setattr(module, name, value)  # looked up only once
        return value

    return find
