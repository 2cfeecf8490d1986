"""The command line of checkpoints, in this process, and what is found in a directory."""

import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from expertmesh.checkpoints.__main__ import main
from expertmesh.checkpoints.files.checksums import seal

Tensors = dict[str, Tensor]


def lines(*arguments: object, code: int | set[int] = 0) -> list[str]:
    """What a command says, which ends with this code, or one of these."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        found = main([str(argument) for argument in arguments])
    assert found in ({code} if isinstance(code, int) else code), output.getvalue()
    return output.getvalue().splitlines()


def run(*arguments: object, code: int | set[int] = 0) -> str:
    """The same in one line, however it was wrapped."""
    return " ".join(" ".join(lines(*arguments, code=code)).split())


def read(path: Path) -> Tensors:
    """All tensors in a directory."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def change_tensors(file: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def change_manifest(path: Path, change: Callable[[Any], Any]) -> None:
    """And seal it again."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["checksum"]
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(seal(manifest)))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
