"""Checksums: of whole files, of JSON tables, and of tensors by row.

They guard against damage on the way (a flipped bit, a truncated copy, two experts swapped), not against forgery.

A tensor's row sum is the sum, modulo 2^64, of the hash of each of its rows, seeded with the row's number. Ranks that
each read some of the rows can so check the whole between them without reading a byte more.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from moe import ExpertMeshError

_MODULUS = 2**64
_BLOCK = 8 * 2**20


def file_checksum(path: Path) -> str:
    """XXH3-128 of a file's bytes, in hex."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            state.update(block)
    return state.hexdigest()


def row_sum(rows: Tensor, first_row: int) -> int:
    """The rows' share of their tensor's sum. `first_row` is the number of the first, along dim 0."""
    if rows.shape[0] == 0:
        return 0
    data = as_bytes(rows.contiguous())
    size = len(data) // rows.shape[0]
    digest = xxhash.xxh3_64_intdigest
    total = sum(digest(data[i * size : (i + 1) * size], first_row + i) for i in range(rows.shape[0]))
    return total % _MODULUS


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, of any dtype."""
    array: Any = tensor.view(torch.uint8).numpy().reshape(-1)
    return memoryview(array)


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
