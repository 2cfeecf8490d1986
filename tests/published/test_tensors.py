"""Tensors of published checkpoints, by their names there: each is a part of the model, or known not to be one."""

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from expertmesh.checkpoints.files.encodings import decoded
from expertmesh.checkpoints.files.tensors import StoredTensor
from expertmesh.checkpoints.hf.source import ModelSource, open_source
from tests.published.models import CONFIGS
from tests.published.tensors import TENSORS, Published

FILE = "model.safetensors"


def shortened(name: str, changes: dict[str, Any], directory: Path) -> ModelSource:
    """A published config.json with changes, which apply to its language model where that is a part of it."""
    raw = json.loads((CONFIGS / name / "config.json").read_text())
    raw.get("text_config", raw).update(changes)
    (directory / "config.json").write_text(json.dumps(raw))
    return open_source(directory)


def tensors_of(published: Published, num_experts: int) -> Iterator[tuple[str, tuple[int, ...], str, bool]]:
    """(name, shape, dtype, whether it is trained) of each tensor that lines stand for, scales included."""
    kinds = {**published.kinds, "expert": tuple(range(num_experts))}
    for line in published.lines.strip().splitlines():
        is_trained = not line.lstrip().startswith("-")
        beginning, _, several = line.replace("- ", "").rpartition(":")
        for entry in several.split(", "):
            pattern, *sizes = f"{beginning.strip()}.{entry.strip()}".lstrip(".").split()
            dtype = "BF16" if sizes[-1].isdigit() else sizes.pop()
            shape = tuple(map(int, sizes))
            fixed = re.split(r"{([\w,]+)}", pattern)
            choices = [
                [part] if number % 2 == 0 else [str(n) for kind in part.split(",") for n in kinds[kind]]
                for number, part in enumerate(fixed)
            ]
            for parts in product(*choices):
                name = "".join(parts)
                yield name, shape, "F8_E4M3" if dtype == "F8" else dtype, is_trained
                if dtype == "F8":
                    yield f"{name}_scale_inv", tuple(-(-size // 128) for size in shape), "F32", is_trained


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", TENSORS)
def test_published_tensors_map_without_a_rest(name: str, tmp_path: Path) -> None:
    published = TENSORS[name]
    source = shortened(name, published.changes, tmp_path)
    names = source.names
    tensors = list(tensors_of(published, names.shape.num_experts))
    stored = {tensor: StoredTensor(tensor, shape, dtype) for tensor, shape, dtype, _ in tensors}
    assert len(stored) == len(tensors)
    found = decoded(stored, source.quantization, names.experts_transposed)
    matched = names.match({name: tensor.shape for name, tensor in found.tensors.items()})
    assert found.problems == {}
    assert matched.problems == {}
    untrained = {tensor for tensor, _, _, is_trained in tensors if not is_trained}
    assert set(matched.untrained) == untrained & set(found.tensors)
    assert set(matched.tensors) == set(found.tensors) - untrained
    assert not matched.tied_copies


def test_a_tensor_too_many_or_too_few_is_named(tmp_path: Path) -> None:
    """So that the lines above are known to be held."""
    published = TENSORS["mixtral-8x7b"]
    names = shortened("mixtral-8x7b", published.changes, tmp_path).names
    shapes = {tensor: shape for tensor, shape, _, _ in tensors_of(published, names.shape.num_experts)}
    gone = "model.layers.1.block_sparse_moe.experts.5.w3.weight"
    more = {other: shape for other, shape in shapes.items() if other != gone} | {"model.layers.2.norm.weight": (4096,)}
    said = " ".join(names.match(more).problems.values())
    assert "model.layers.2.norm.weight has no place in this model" in said
    assert "experts.5.w3.weight" in said
