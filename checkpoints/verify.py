"""Compares two checkpoints of any form, by the names their tensors have in Hugging Face form."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..moe.util.progress import CountedProgress
from ..sharding.topology import rows_of
from .files.dtype_names import ALL_NAMES, DTYPE_BYTES
from .files.dtypes import Array, as_double, cast, same_bits
from .files.open_files import OpenFiles
from .files.tensors import DiskTensor, Region, overlap
from .hf.checkpoint import Checkpoint
from .hf.reader import tied_copies_that_differ
from .hf.untrained_tensors import carried_values

_NOT_COMPUTED = {
    # who wrote the file, how the tensors are stored, what outputs are called
    *("transformers_version", "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype"),
    *("quantization_config", "id2label", "label2id", "problem_type", "return_dict"),
    *("output_attentions", "output_hidden_states"),
    # how random weights are drawn, whether generation caches, and which tokens begin, end and pad
    *("initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
}
"""Keys of config.json, also of those within it, that change neither a logit nor a loss. Every other one counts."""


@dataclass(frozen=True)
class Comparison:
    """differences: a line each, naming the tensor or the key of a config. num_tensors: how many there are in all, those
    that only one side has included."""

    differences: list[str]
    num_tensors: int


def compare(a: Checkpoint, b: Checkpoint, rtol: float | None, ignore_config: bool = False) -> Comparison:
    """Compare all that `a` and `b` have: their configs, as far as they change what is computed, and the union of their
    tensors. Of each tensor first whether both have it, then its shape, then dtype and bits; or, with `rtol`, values
    within rtol · max(|a|, |b|), whatever the dtypes. Codes with a scale per block cannot be that near to small values:
    where one of the two is encoded, the largest value of the row takes the place of the value. What one side lacks, or
    has too much, by its own config is a difference as well. Tensors that are carried over are compared likewise."""
    differences = [f"{problem} ({side.path})" for side in (a, b) for problem in side.problems]
    for side in (a, b):
        for copy, original in tied_copies_that_differ(side):
            differences.append(f"{copy.name}: differs from {original}, which config.json ties to it ({side.path})")
    if not ignore_config:
        differences += _config_differences(a, b)
    of_a, of_b = _Side(a, is_second=False), _Side(b, is_second=True)
    names = set(of_a.tensors)
    sizes = [prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in a.exported]
    with CountedProgress(f"comparing {a.path} with {b.path}", sum(sizes)) as progress:
        for tensor, size in zip(a.exported, sizes, strict=True):
            differences += _tensor_differences(tensor, tensor.regions, of_a, of_b, rtol)
            progress.add(size)
    for tensor in b.exported:
        namesake = of_a.tensors.get(tensor.name)
        if namesake is None or namesake.shape == tensor.shape:
            rest = tuple(region for region in tensor.regions if not of_a.covers(region, of_b))
            names |= {tensor.name} if rest else set()
            differences += _tensor_differences(tensor, rest, of_b, of_a, rtol)
    of_a.reader.close()
    of_b.reader.close()
    carried_a, carried_b = ({tensor.name: tensor for tensor in side.carried} for side in (a, b))
    files = OpenFiles()
    for name in sorted(carried_a.keys() | carried_b.keys()):
        if name in carried_a and name in carried_b:
            problem = whole_difference(carried_a[name], carried_b[name], rtol, files)
        else:
            here, there = (of_a, of_b) if name in carried_a else (of_b, of_a)
            problem = f"is trained only in {there.path}" if name in there.tensors else f"only in {here.path}"
        if problem is not None:
            differences.append(f"{name}: {problem}")
    return Comparison(differences, len({*names, *carried_a, *carried_b}))


def _config_differences(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """A line for each key that changes what is computed, transformers' defaults filled in on both sides."""
    configs = [side.source.config for side in (a, b)]
    if configs[0].model_type != configs[1].model_type:  # whose keys mean different things
        found = [{"model_type": config.model_type} for config in configs]
    else:
        found = [dict(_computed(config.to_dict())) for config in configs]
    for key in sorted(found[0].keys() | found[1].keys()):
        one, other = (entries.get(key) for entries in found)
        if one != other:
            yield f"config.json: {key} is {one!r:.80} in {a.path}, {other!r:.80} in {b.path}"


def _computed(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of a config, those of nested tables by dotted names, without `_NOT_COMPUTED`."""
    for name, value in config.items():
        if isinstance(value, dict) and name not in _NOT_COMPUTED:
            yield from _computed(value, f"{prefix}{name}.")
        elif name not in _NOT_COMPUTED:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value


class _Side:
    """One of two checkpoints, and what its Hugging Face form holds.

    Attributes:
        tensors: by name. dtypes: of those that have them there, by parameter.
        is_second: whether it is the one that differences name last.
    """

    def __init__(self, checkpoint: Checkpoint, is_second: bool):
        self.is_second = is_second
        self.path = checkpoint.path
        self.reader = checkpoint.reader()
        self.parameters, self.experts = checkpoint.names.parameters, checkpoint.names.experts
        self.aliases = checkpoint.names.aliases
        self.encoded = checkpoint.encoded_parameters
        self.is_sound = not checkpoint.problems
        self.tensors = {tensor.name: tensor for tensor in checkpoint.exported}
        self.dtypes = {region.parameter: t.dtype for t in self.tensors.values() for region in t.regions}

    def covers(self, region: Region, other: "_Side") -> bool:
        """Whether a walk over this side's tensors has met a region of the other side's."""
        if region.parameter not in self.dtypes:
            return False
        # experts beyond those of this side; other rows beyond are a difference of shape, which was met
        return region.parameter not in other.experts or region.rows.stop <= rows_of(self.parameters[region.parameter])


def _tensor_differences(
    tensor: DiskTensor, regions: tuple[Region, ...], here: _Side, there: _Side, rtol: float | None
) -> list[str]:
    """A line on each of some regions of a tensor that differs from what the other side has there; a single one where
    there is but one thing to say of all of them."""
    namesake = there.tensors.get(tensor.name)
    if regions and namesake is not None and namesake.shape != tensor.shape:
        return [f"{tensor.name}: shape {list(tensor.shape)} against {list(namesake.shape)}"]
    found = {region: _region_difference(tensor, region, here, there, rtol) for region in regions}
    if found and set(found.values()) == {f"only in {here.path}"} and len(found) == len(tensor.regions):
        return [f"{tensor.name}: only in {here.path}"]
    lines = []
    for region, problem in found.items():
        # in a fused one also whose rows they are
        which = f" (expert {region.index[0]}, {region.parameter.rpartition('.')[2]})" if region.index else ""
        lines += [] if problem is None else [f"{tensor.name}{which}: {problem}"]
    return lines


def _region_difference(tensor: DiskTensor, region: Region, here: _Side, there: _Side, rtol: float | None) -> str | None:
    parameter = there.aliases.get(region.parameter, region.parameter)
    if parameter not in there.parameters:
        return f"only in {here.path}"
    (a, name_a), (b, name_b) = sorted(
        ((here, region.parameter), (there, parameter)), key=lambda named: named[0].is_second
    )
    # each expert has rows of its own, so that those that both sides have can be compared
    shape_a, shape_b = _row_shape(a, name_a), _row_shape(b, name_b)
    if shape_a != shape_b:
        return f"shape {list(shape_a)} against {list(shape_b)}"
    rows = overlap(region.rows, range(rows_of(there.parameters[parameter])))
    if not region.rows:
        return None  # without elements
    if not rows:
        return f"only in {here.path}"
    rows_a, rows_b = a.reader.rows(name_a, rows), b.reader.rows(name_b, rows)
    if rows_a is None or rows_b is None:  # told among the problems of a side that has any
        lacking = a if rows_a is None else b
        return f"is incomplete in {lacking.path}" if lacking.is_sound else None
    # the dtype that the tensor has, or else one that has the parameter
    namesake = there.tensors.get(tensor.name)
    dtype_there = there.dtypes[parameter] if namesake is None else namesake.dtype
    dtype_a, dtype_b = (tensor.dtype, dtype_there) if a is here else (dtype_there, tensor.dtype)
    problem = _difference(
        *(cast(*rows_a, dtype_a), dtype_a, cast(*rows_b, dtype_b), dtype_b),
        *(rtol, bool({name_a, name_b} & (a.encoded | b.encoded))),
    )
    if problem is None and len(rows) < len(region.rows):
        return f"rows from {rows.stop} on are only in {here.path}"
    return problem


def _row_shape(side: _Side, parameter: str) -> tuple[int, ...]:
    """The shape of a parameter; of one that is experts', that of one expert's part."""
    shape = side.parameters[parameter]
    return (side.experts[parameter], *shape[1:]) if parameter in side.experts else shape


def whole_difference(
    a: DiskTensor, b: DiskTensor, rtol: float | None, files: OpenFiles, by_row: bool = False
) -> str | None:
    """The first difference between two tensors, none of whose rows are looked for elsewhere; None if there is none.

    Args:
        files: what they are read with; stays open.
        by_row: whether `rtol` is relative to a row's largest value, as it is of encoded ones.
    """
    if a.shape != b.shape:
        return f"shape {list(a.shape)} against {list(b.shape)}"
    by_row = by_row or a.encoding is not None or b.encoding is not None
    for part_a, part_b in _in_step(carried_values(a, files), carried_values(b, files)):
        if by_row and a.shape:
            part_a, part_b = (part.reshape(-1, a.shape[-1]) for part in (part_a, part_b))
        problem = _difference(part_a, a.dtype, part_b, b.dtype, rtol, by_row)
        if problem is not None:
            return problem
    return None


def _in_step(a: Iterator[Array], b: Iterator[Array]) -> Iterator[tuple[Array, Array]]:
    """Two sequences of flat arrays that are of one length altogether, cut alike."""
    rest_a = rest_b = np.empty(0)
    while True:
        rest_a = rest_a if len(rest_a) else next(a, rest_a)
        rest_b = rest_b if len(rest_b) else next(b, rest_b)
        size = min(len(rest_a), len(rest_b))
        if size == 0:
            return
        yield rest_a[:size], rest_b[:size]
        rest_a, rest_b = rest_a[size:], rest_b[size:]


def _difference(
    a: Array, dtype_a: str, b: Array, dtype_b: str, rtol: float | None, relative_to_row: bool
) -> str | None:
    if rtol is None and dtype_a != dtype_b:
        return f"{ALL_NAMES[dtype_a]} against {ALL_NAMES[dtype_b]}"
    assert a.shape == b.shape, (a.shape, b.shape)
    if dtype_a == dtype_b and same_bits(a, b, dtype_a):
        return None
    wide_a, wide_b = as_double(a, dtype_a), as_double(b, dtype_b)
    with np.errstate(invalid="ignore"):  # of infinities
        off = np.abs(wide_a - wide_b)
        bound = np.maximum(np.abs(wide_a), np.abs(wide_b)) * (rtol or 0.0)
        if relative_to_row:
            bound = np.broadcast_to(bound.max(axis=-1, keepdims=True), bound.shape)
    num_off = int((~(off <= bound)).sum())
    if rtol is not None and num_off == 0:
        return None
    # of equal values with other bits (0 and -0), none is off
    return f"{max(num_off, 1):,} of {a.size:,} values differ, by at most {float(off.max()):.3g}"
