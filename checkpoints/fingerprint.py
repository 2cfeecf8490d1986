"""Whether the weights beside which adapters were trained are the ones that are there now."""

import json
from pathlib import Path
from typing import Any

import xxhash

from checkpoints.source import Checkpoint
from checkpoints.state.marker import MARKER, read_marker
from moe import ExpertMeshError

_SAMPLES, _SAMPLE_BYTES = 64, 4096


def fingerprint(checkpoint: Checkpoint) -> str:
    """Of a model's files: their names, sizes, heads, and samples of their content, in hex. A model fine-tuned from
    another has the same heads; nowhere that is worth its name do all samples agree."""
    state = xxhash.xxh3_128()
    for file in checkpoint.files:
        size = file.stat().st_size
        state.update(json.dumps([file.name, size]).encode())
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            state.update(stream.read(min(length, size)))
            for number in range(_SAMPLES):
                stream.seek(8 + length + (size - 8 - length) * number // _SAMPLES)
                state.update(stream.read(_SAMPLE_BYTES))
    return state.hexdigest()


def base_of(checkpoint: Checkpoint) -> dict[str, str]:
    """What a training checkpoint of adapters says of the model that they belong to."""
    return {"path": str(checkpoint.source.path), "fingerprint": fingerprint(checkpoint)}


def check_base(path: Path, base: dict[str, Any]) -> None:
    """
    Raises:
        ExpertMeshError: the training checkpoint at `path` is of adapters beside another model than `base`.
    """
    there = read_marker(path).get("base")
    if not isinstance(there, dict) or there.get("fingerprint") != base["fingerprint"]:
        said = f"beside {there.get('path')!r:.200}" if isinstance(there, dict) else "of a whole model"
        raise ExpertMeshError(
            f"--resume {path}: its {MARKER} says that it was trained {said}, whose weights are not those of "
            f"--model {base['path']}; give the model it began with"
        )
