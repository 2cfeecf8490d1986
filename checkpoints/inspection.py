"""Says what a checkpoint is, from its config and its files' heads."""

from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path

from checkpoints.dtypes import DTYPE_NAMES
from checkpoints.manifest import MANIFEST, is_expert_name, read_manifest
from checkpoints.marker import MARKER, read_marker
from checkpoints.opening import is_shards
from checkpoints.source import Checkpoint, Parameters
from moe import active_parameters
from sharding.topology import divisors


def describe(path: Path, checkpoint: Checkpoint, parameters: Parameters, list_tensors: bool) -> Iterator[str]:
    """Lines: form, family, parameters in all, active for a token, and on a rank at each ep; tensors, dtypes, files."""
    source, shape = checkpoint.source, checkpoint.source.shape
    yield f"path        {path}"
    yield f"form        {_form(path)}"
    yield f"family      {source.family.model_type}: {shape.num_experts} experts, {shape.top_k} a token"
    sizes = {name: prod(size) for name, size in parameters.items()}
    experts = sum(size for name, size in sizes.items() if is_expert_name(name, source))
    dense = sum(sizes.values()) - experts
    yield f"parameters  {dense + experts:,}, of them {experts:,} in experts"
    yield f"active      {active_parameters(dense + experts, experts, shape):,} for a token"
    held = ", ".join(f"{(dense + experts) // n:,} at ep {n}" for n in divisors(shape.num_experts))
    yield f"on a rank   {held} (as many ranks as ep, all else sharded over them)"
    dtypes = Counter(DTYPE_NAMES[info.dtype] for info in checkpoint.infos.values())
    yield f"tensors     {len(checkpoint.infos):,}: " + ", ".join(f"{n:,} {dtype}" for dtype, n in dtypes.items())
    num_bytes = sum(file.stat().st_size for file in checkpoint.files)
    yield f"files       {len(checkpoint.files):,}, {num_bytes / 1e9:,.2f} GB"
    if list_tensors:
        for tensor in checkpoint.tensors + checkpoint.tied_copies:
            info = checkpoint.infos[tensor.name]
            yield f"  {info.file}  {tensor.name}  {list(info.shape)}  {DTYPE_NAMES[info.dtype]}"
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
