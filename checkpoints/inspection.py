"""Says what a checkpoint is: from its files' headers alone, or compared with the model that its config describes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ..moe.hf_model.counts import active_parameters
from ..sharding.topology import divisors
from .ep_shards.manifest import MANIFEST, is_shards, listed_tensors, read_manifest
from .files.dtype_names import ALL_NAMES, DTYPE_CODES
from .files.encodings import decoded
from .files.tensors import DiskTensor, StoredTensor
from .hf.checkpoint import Checkpoint
from .hf.headers import read_header, read_headers
from .hf.json_files import read_json
from .hf.reader import tied_copies_that_differ
from .hf.source import open_source
from .hf.untrained_parts import unfilled
from .training_state.marker import MARKER, read_marker


@dataclass(frozen=True)
class Heads:
    """What the headers of a checkpoint's files say.

    Attributes:
        model_type: the family that config.json names.
        stored: tensors as files have them, by name.
        known: tensors that they make up, which differ from these where values are encoded.
    """

    model_type: str
    stored: dict[str, StoredTensor]
    known: dict[str, DiskTensor]
    files: list[Path]


def read_heads(path: Path) -> Heads:
    """Read the headers of a checkpoint of any form, without transformers, and without torch unless it is a training
    one.

    Raises:
        ExpertMeshError: a file is missing or damaged in its header.
    """
    if (path / MARKER).exists():
        from .training_state.state_table import StateReader

        saved: dict[str, Any] = StateReader(path / "state").read_metadata().state_dict_metadata
        parts = {name.removeprefix("model."): entry for name, entry in saved.items() if name.startswith("model.")}
        stored = {
            name: StoredTensor(name, tuple(e.size), DTYPE_CODES[str(e.properties.dtype)], path / "state")
            for name, e in parts.items()
        }
        files = [path / name for name in read_marker(path)["files"] if name.startswith("state/")]
        known = {name: DiskTensor(name, part.shape, part.dtype) for name, part in stored.items()}
        return Heads(open_source(path / "model").model_type, stored, known, files)
    source = open_source(path)
    if is_shards(path):
        manifest = read_manifest(path)
        files = [path / name for name in manifest["files"] if name.endswith(".safetensors")]
        stored = {name: part for file in files for name, part in read_header(file).items()}
        return Heads(source.model_type, stored, listed_tensors(manifest, path), files)
    stored = read_headers(path)
    # which way the experts' matrices lie makes no difference here
    known = decoded(stored, source.quantization, transposed=False).tensors
    return Heads(source.model_type, stored, known, sorted({part.file for part in stored.values()}))


def describe(path: Path, heads: Heads, list_tensors: bool) -> Iterator[str]:
    """Lines: form, family, elements in all and in experts, tensors, dtypes, encodings, files."""
    sizes = {name: prod(tensor.shape) for name, tensor in heads.known.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    dtypes = Counter(ALL_NAMES[part.dtype] for part in heads.stored.values())
    encodings = Counter(str(tensor.encoding) for tensor in heads.known.values() if tensor.encoding is not None)
    yield f"path        {path}"
    yield f"form        {_form(path)}"
    yield f"family      {heads.model_type}"
    yield f"elements    {sum(sizes.values()):,}, of them {experts:,} in tensors of experts"
    yield f"tensors     {len(heads.stored):,}: " + ", ".join(f"{n:,} {dtype}" for dtype, n in dtypes.items())
    for encoding, count in encodings.items():
        yield f"quantized   {count:,} as {encoding}"
    yield f"files       {len(heads.files):,}, {sum(file.stat().st_size for file in heads.files) / 1e9:,.2f} GB"
    if list_tensors:
        for name, part in heads.stored.items():
            yield f"  {part.file.name}  {name}  {list(part.shape)}  {ALL_NAMES[part.dtype]}"


def describe_model(checkpoint: Checkpoint, without_tensors: str = "") -> Iterator[str]:
    """Lines: the model's experts, parameters in all, active per token and per rank at each ep; what is left out;
    whether the checkpoint is complete."""
    names = checkpoint.names
    num_experts, top_k = names.shape.num_experts, names.shape.top_k
    yield f"experts     {num_experts} in each of {names.num_moe_layers} layers, top-{top_k} routing"
    total = sum(prod(shape) for name, shape in names.parameters.items() if name not in names.buffers)
    experts = sum(prod(names.parameters[name]) for name in names.experts)
    yield f"parameters  {total:,}, of them {experts:,} in experts"
    yield f"active      {active_parameters(total, experts, names.shape):,} per token"
    held = ", ".join(f"{total // n:,} at ep {n}" for n in divisors(num_experts))
    yield f"per rank    {held} (with as many ranks as ep, non-expert parameters sharded over them)"
    if checkpoint.carried:
        yield f"carried     {checkpoint.carried_summary}; not trained, copied unchanged"
    if without_tensors:
        yield f"no tensors  of {without_tensors}"
    if checkpoint.activation_scales:
        yield f"left out    {len(checkpoint.activation_scales):,} tensors of activation quantization scales"
    if checkpoint.problems:
        yield "complete    no:"
        yield from (f"  {problem}" for problem in checkpoint.problems)
    else:
        yield "complete    yes"


def with_claims_checked(checkpoint: Checkpoint) -> tuple[Checkpoint, str]:
    """The same, what transformers would fill with random values among the checkpoint's problems, and tied tensors that
    differ; and what config.json claims and transformers does without, if no tensor is of it; else empty."""
    raw = read_json(checkpoint.source.path / "config.json")
    lacking = unfilled(raw, checkpoint)
    if lacking.parts:
        said = f"{lacking.parts}; an export with --drop-untrained has a config that does not claim them"
        checkpoint = replace(checkpoint, problems=[*checkpoint.problems, said])
    differing = [
        f"tensor {copy.name} differs from {original}, though config.json ties them"
        for copy, original in tied_copies_that_differ(checkpoint)
    ]
    claimed = lacking.predictors
    without_tensors = f"layers for multi-token prediction that config.json names: {claimed}" if claimed else ""
    return replace(checkpoint, problems=[*checkpoint.problems, *differing]), without_tensors


def _form(path: Path) -> str:
    if (path / MARKER).exists():
        marker = read_marker(path)
        said = (
            f"training checkpoint, step {marker['step']:,}, {marker['tokens']:,} tokens, {marker['world_size']} ranks"
        )
        return said + ", adapters without their base" * (marker.get("base") is not None)
    if is_shards(path):
        manifest = read_manifest(path)
        return (
            f"EP shards, ep {manifest['ep_size']}, of {manifest['source']!r} ({MANIFEST} version {manifest['version']})"
        )
    return "Hugging Face directory"
