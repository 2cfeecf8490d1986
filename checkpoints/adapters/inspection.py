"""What the commands `inspect` and `verify` say of adapters."""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

from ..files.dtype_names import ALL_NAMES
from ..files.open_files import OpenFiles
from ..files.tensors import DiskTensor
from ..hf.headers import read_header
from ..hf.json_files import read_json
from ..verify import Comparison, whole_difference
from .adapter import CONFIG, ROPE, WEIGHTS, read_rope
from .peft_format import (
    SCALE_SETTINGS,
    unread_settings,
)


def describe_adapter(path: Path, list_tensors: bool) -> Iterator[str]:
    """Lines: form, base, rank, targets, tensors, file."""
    config, stored = read_json(path / CONFIG), read_header(path / WEIGHTS)
    sizes = {name: prod(part.shape) for name, part in stored.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    dtypes = sorted({ALL_NAMES[part.dtype] for part in stored.values()})
    targets = [*(config.get("target_modules") or []), *(config.get("target_parameters") or [])]
    yield f"path        {path}"
    yield f"form        PEFT adapter, {config.get('peft_type')}, of peft {config.get('peft_version')}"
    yield f"base        {config.get('base_model_name_or_path')}"
    yield f"rank        {config.get('r')}, alpha {config.get('lora_alpha')}" + ", rsLoRA" * bool(
        config.get("use_rslora")
    )
    yield f"targets     {', '.join(map(str, targets))}"
    yield f"elements    {sum(sizes.values()):,}, of them {experts:,} in tensors of experts"
    yield f"tensors     {len(stored):,}: {', '.join(dtypes)}"
    yield f"files       1, {(path / WEIGHTS).stat().st_size / 1e9:,.2f} GB"
    if (scaling := read_rope(path)) is not None:
        yield f"rope        for RoPE scaling by {json.dumps(scaling.as_json())}"
    if list_tensors:
        for name, part in stored.items():
            yield f"  {name}  {list(part.shape)}"


def compare_adapters(a: Path, b: Path, rtol: float | None, ignore_config: bool = False) -> Comparison:
    """Compare two adapters: what their configs say of scales and of anything beyond low-rank deltas, and the union of
    their tensors, by name: shape, then dtype and bits; or, with `rtol`, values within rtol of their row's largest. Not
    the path of the base, which may have moved."""
    differences = []
    if not ignore_config:
        configs = [read_json(path / CONFIG) for path in (a, b)]
        one, other = ({key: c[key] for key in SCALE_SETTINGS if c.get(key)} | unread_settings(c) for c in configs)
        differences += [
            f"{CONFIG}: {key} is {one.get(key)!r:.80} in {a}, {other.get(key)!r:.80} in {b}"
            for key in sorted(one.keys() | other.keys())
            if one.get(key) != other.get(key)
        ]
        if read_rope(a) != read_rope(b):
            differences.append(f"{ROPE}: RoPE scaling differs")
    of_a, of_b = (
        {name: DiskTensor(name, part.shape, part.dtype, parts=(part,)) for name, part in parts.items()}
        for parts in map(read_header, (a / WEIGHTS, b / WEIGHTS))
    )
    files = OpenFiles()
    for name in sorted(of_a.keys() | of_b.keys()):
        if name not in of_a or name not in of_b:
            differences.append(f"{name}: only in {a if name in of_a else b}")
        elif (problem := whole_difference(of_a[name], of_b[name], rtol, files, by_row=True)) is not None:
            differences.append(f"{name}: {problem}")
    return Comparison(differences, len(of_a.keys() | of_b.keys()))
