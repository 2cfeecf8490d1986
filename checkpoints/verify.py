"""Compares two checkpoints of any form, by the names their tensors have in Hugging Face form."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from expertmesh.checkpoints.hf.carried import Carried
from expertmesh.checkpoints.hf.mapping import Region
from expertmesh.checkpoints.hf.reader import gather
from expertmesh.checkpoints.hf.source import Checkpoint
from expertmesh.checkpoints.opening import Readable
from expertmesh.checkpoints.storage.dtypes import ALL_NAMES, Array, as_double, cast, same_bits
from expertmesh.checkpoints.storage.file_layout import OutputTensor


@dataclass(frozen=True)
class Comparison:
    """differences: a line each, naming the tensor. num_tensors: how many could be compared."""

    differences: list[str]
    num_tensors: int


def compare(a: Readable, b: Readable, rtol: float | None) -> Comparison:
    """Compare every tensor of `a` with the same rows in `b`: dtype and bits; or, with `rtol`, values within
    rtol · max(|a|, |b|), whatever the dtypes. Codes with a scale per block cannot be that near to small values: where
    one of the two is encoded, the largest value of the row takes the place of the value. What one of them lacks, or has
    too much, is a difference as well. Tensors that are carried over are compared likewise."""
    differences = [f"{problem} ({side.path})" for side in (a, b) for problem in side.checkpoint.problems]
    reader_a, reader_b = a.make_reader(), b.make_reader()
    dtypes_b = _dtypes(b.checkpoint)
    encoded = a.checkpoint.encoded_parameters | b.checkpoint.encoded_parameters
    compared = 0
    for output in a.checkpoint.exported:
        compared += 1
        for region in output.tensor.regions:
            rows_a, rows_b = (gather(reader, region.parameter, region.rows) for reader in (reader_a, reader_b))
            if rows_a is None or rows_b is None:
                continue  # told above, as a tensor that is missing
            dtype_b = dtypes_b.get(output.tensor.name, rows_b[1])
            problem = _difference(
                *(cast(*rows_a, output.dtype), output.dtype, cast(*rows_b, dtype_b), dtype_b),
                *(rtol, region.parameter in encoded),
            )
            if problem is not None:
                differences.append(f"{_name(output, region)}: {problem}")
    reader_a.close()
    reader_b.close()
    carried_a, carried_b = ({tensor.name: tensor for tensor in side.checkpoint.carried} for side in (a, b))
    for name in sorted(carried_a.keys() | carried_b.keys()):
        if name in carried_a and name in carried_b:
            compared += 1
            problem = _carried_difference(carried_a[name], carried_b[name], rtol)
        else:
            problem = f"is missing ({(b if name in carried_a else a).path})"
        if problem is not None:
            differences.append(f"{name}: {problem}")
    return Comparison(differences, compared)


def _carried_difference(a: Carried, b: Carried, rtol: float | None) -> str | None:
    """The first difference between two tensors that are carried over."""
    if a.info.shape != b.info.shape:
        return f"shape {list(a.info.shape)} against {list(b.info.shape)}"
    encoded = a.info.encoding is not None or b.info.encoding is not None
    for part_a, part_b in _in_step(a.values(), b.values()):
        if encoded:
            part_a, part_b = (part.reshape(-1, a.info.shape[-1]) for part in (part_a, part_b))
        problem = _difference(part_a, a.info.dtype, part_b, b.info.dtype, rtol, encoded)
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


def _dtypes(checkpoint: Checkpoint) -> dict[str, str]:
    return {output.tensor.name: output.dtype for output in checkpoint.exported}


def _name(output: OutputTensor, region: Region) -> str:
    """The tensor; in a fused one also whose rows they are."""
    if not region.index:
        return output.tensor.name
    return f"{output.tensor.name} (expert {region.index[0]}, {region.parameter.rpartition('.')[2]})"


def _difference(
    a: Array, dtype_a: str, b: Array, dtype_b: str, rtol: float | None, relative_to_row: bool
) -> str | None:
    if rtol is None and dtype_a != dtype_b:
        return f"{ALL_NAMES[dtype_a]} against {ALL_NAMES[dtype_b]}"
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
