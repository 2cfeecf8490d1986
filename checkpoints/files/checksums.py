"""Checksums: of files, of JSON tables, and of tensors by row.

They guard against damage on the way (a flipped bit, a truncated copy, two experts swapped), not against forgery.

A tensor's row sum is the sum, modulo 2^64, of the hashes of its granules, runs of GRANULE rows counted from its first,
each seeded with its number. Ranks that each read some of the rows can so check the whole tensor between them: a rank
hashes the granules that begin among its rows, and reads at most GRANULE - 1 rows more to finish the last.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from ...moe.util.errors import ExpertMeshError
from .dtypes import Array, as_bytes, contiguous

GRANULE = 16
_MODULUS = 2**64
_BLOCK = 2**20


def file_checksum(path: Path, tell: Callable[[int], object] = int) -> str:
    """XXH3-128 of a file's bytes, in hex.

    Args:
        tell: is told how many bytes more are read.
    """
    state = xxhash.xxh3_128()
    # one buffer throughout: fresh ones of this size are mapped anew each time, and faulted in page by page
    buffer = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(buffer[:count])
            tell(count)
    return state.hexdigest()


def row_sum(rows: Array, first_row: int) -> int:
    """The part of a tensor's sum that the granules beginning among `rows` have.

    Args:
        rows: a run of the tensor's rows; ends where the tensor does, or where a granule does.
        first_row: the number of the first, in the tensor.
    """
    skipped = -first_row % GRANULE
    if rows.shape[0] <= skipped:
        return 0
    data = as_bytes(contiguous(rows))
    row_bytes = len(data) // rows.shape[0]
    step = max(1, GRANULE * row_bytes)  # rows may have no elements
    digest, number = xxhash.xxh3_64_intdigest, (first_row + skipped) // GRANULE
    total = 0
    for start in range(skipped * row_bytes, len(data), step):
        total += digest(data[start : start + step], number)
        number += 1
    return total % _MODULUS


def to_granule_end(rows: range, of: range) -> range:
    """`rows` out of all those `of` a tensor, extended to the end of the granule that the last of them is in."""
    end = of.start - (of.start - rows.stop) // GRANULE * GRANULE
    return range(rows.start, min(end, of.stop))


def add_sums(*sums: int) -> int:
    """The sum of a tensor from those of its parts."""
    return sum(sums) % _MODULUS


def seal(table: dict[str, Any]) -> dict[str, Any]:
    """The table with a checksum of its own content."""
    return {**table, "checksum": _table_checksum(table)}


def check_seal(table: dict[str, Any], file: Path) -> None:
    """
    Raises:
        ExpertMeshError: the table is not as it was sealed.
    """
    rest = {key: value for key, value in table.items() if key != "checksum"}
    if table.get("checksum") != _table_checksum(rest):
        raise ExpertMeshError(f"{file}: is damaged: its content does not match its own checksum")


def _table_checksum(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
