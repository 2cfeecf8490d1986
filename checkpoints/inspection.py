"""Says what a checkpoint is: from its files' heads alone, or held against the model that its config describes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from checkpoints.dtypes import DTYPE_NAMES
from checkpoints.manifest import MANIFEST, read_manifest
from checkpoints.opening import Readable, is_shards
from checkpoints.source import TensorInfo, open_source, read_header, read_headers
from checkpoints.state.marker import MARKER, read_marker
from moe import active_parameters
from sharding.topology import divisors


@dataclass(frozen=True)
class Heads:
    """What the heads of a checkpoint's files say: tensors by name, and the family that config.json names."""

    model_type: str
    infos: dict[str, TensorInfo]
    files: list[Path]


def read_heads(path: Path) -> Heads:
    """Of any form, without transformers, and without torch unless it is a training checkpoint.

    Raises:
        ExpertMeshError: a file is missing or damaged in its head.
    """
    if (path / MARKER).exists():
        from checkpoints.state.table import StateReader
        from checkpoints.tensors import DTYPE_CODES

        saved: dict[str, Any] = StateReader(path / "state").read_metadata().state_dict_metadata
        infos = {
            name.removeprefix("model."): TensorInfo("state", tuple(entry.size), DTYPE_CODES[entry.properties.dtype])
            for name, entry in saved.items()
            if name.startswith("model.")
        }
        files = [path / name for name in read_marker(path)["files"] if name.startswith("state/")]
        return Heads(open_source(path / "model").model_type, infos, files)
    model_type = open_source(path).model_type
    if is_shards(path):
        names = [path / name for name in read_manifest(path)["files"] if name.endswith(".safetensors")]
        infos = {name: info for file in names for name, info in read_header(file).items()}
        return Heads(model_type, infos, names)
    infos = read_headers(path)
    return Heads(model_type, infos, sorted({path / info.file for info in infos.values()}))


def describe(path: Path, heads: Heads, list_tensors: bool) -> Iterator[str]:
    """Lines: form, family, numbers in all and in experts, tensors, dtypes, files."""
    sizes = {name: prod(info.shape) for name, info in heads.infos.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    dtypes = Counter(DTYPE_NAMES[info.dtype] for info in heads.infos.values())
    yield f"path        {path}"
    yield f"form        {_form(path)}"
    yield f"family      {heads.model_type}"
    yield f"numbers     {sum(sizes.values()):,}, of them {experts:,} in tensors of experts"
    yield f"tensors     {len(heads.infos):,}: " + ", ".join(f"{n:,} {dtype}" for dtype, n in dtypes.items())
    yield f"files       {len(heads.files):,}, {sum(file.stat().st_size for file in heads.files) / 1e9:,.2f} GB"
    if list_tensors:
        for name, info in heads.infos.items():
            yield f"  {info.file}  {name}  {list(info.shape)}  {DTYPE_NAMES[info.dtype]}"


def describe_model(readable: Readable) -> Iterator[str]:
    """Lines: the model's experts, parameters in all, active for a token and on a rank at each ep; what is left out;
    whether the checkpoint is whole."""
    checkpoint, names = readable.checkpoint, readable.names
    num_experts, top_k = names.shape.num_experts, names.shape.top_k
    yield f"experts     {num_experts} in each of {names.num_moe_layers} layers, {top_k} a token"
    total = sum(prod(shape) for name, shape in names.parameters.items() if name not in names.buffers)
    experts = sum(prod(names.parameters[name]) for name in names.experts)
    yield f"parameters  {total:,}, of them {experts:,} in experts"
    yield f"active      {active_parameters(total, experts, names.shape):,} for a token"
    held = ", ".join(f"{total // n:,} at ep {n}" for n in divisors(num_experts))
    yield f"on a rank   {held} (as many ranks as ep, all else sharded over them)"
    if checkpoint.left_out:
        yield f"left out    {len(checkpoint.left_out):,} tensors that no trained layer has: {checkpoint.some_left_out}"
    if checkpoint.problems:
        yield "whole       no:"
        yield from (f"  {problem}" for problem in checkpoint.problems)
    else:
        yield "whole       yes"


def _form(path: Path) -> str:
    if (path / MARKER).exists():
        marker = read_marker(path)
        return (
            f"training checkpoint, step {marker['step']:,}, {marker['tokens']:,} tokens, {marker['world_size']} ranks"
        )
    if is_shards(path):
        manifest = read_manifest(path)
        return (
            f"EP shards, ep {manifest['ep_size']}, of {manifest['source']!r} ({MANIFEST} version {manifest['version']})"
        )
    return "Hugging Face directory"
