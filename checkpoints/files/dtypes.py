"""Data types by their codes in safetensors files, arrays of them, and torch's tensors on an array's memory.

Files are read, converted and compared as numpy arrays: that takes a tenth of the time to import that torch does, which
is imported where it is used. numpy has no bfloat16; its bits stand in arrays of uint16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .dtype_names import ALL_NAMES, CODE_NAMES, DTYPE_BYTES, DTYPE_CODES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Array = np.ndarray[Any, Any]

ARRAY_TYPES: dict[str, Any] = {
    "F32": np.float32, "BF16": np.uint16, "F16": np.float16,
    "F64": np.float64, "I64": np.int64, "I32": np.int32, "BOOL": np.bool_, **dict.fromkeys(CODE_NAMES, np.uint8),
}  # fmt: skip
_BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_STRIP = 32
_TORCH_NAMES = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"}
"""What torch calls these, and nobody else."""


def wider(a: str, b: str) -> str:
    """The type that holds all values of both, of floats with 32 bits or fewer."""
    return a if a == b else "F32"


def as_double(array: Array, dtype: str) -> Array:
    """The same values in fp64."""
    if dtype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def same_bits(a: Array, b: Array, dtype: str) -> bool:
    """Whether two arrays of one type hold the same bits; NaNs and zeros too."""
    bits = _BITS[DTYPE_BYTES[dtype]]
    return bool(np.array_equal(a.view(bits), b.view(bits)))


def same_values(a: Array, dtype_a: str, b: Array, dtype_b: str) -> bool:
    """Whether two arrays hold the same values, whatever their types; a NaN equals nothing."""
    return bool(np.array_equal(as_double(a, dtype_a), as_double(b, dtype_b)))


def contiguous(array: Array) -> Array:
    """The array in row order; itself if it is so already."""
    if array.ndim != 2 or array.flags.c_contiguous or not array.flags.f_contiguous:
        return np.ascontiguousarray(array)
    out = np.empty(array.shape, array.dtype)
    copy_into(out, array)
    return out


def copy_into(out: Array, array: Array) -> None:
    """Copy an array into one in row order."""
    if array.ndim != 2 or array.flags.c_contiguous:
        out[...] = array
        return
    # strip by strip: a cache line that was read is used up before it is given up, as numpy by itself would not
    for start in range(0, array.shape[1], _STRIP):
        out[:, start : start + _STRIP] = array[:, start : start + _STRIP]


def as_bytes(array: Array) -> memoryview:
    """The memory of an array in row order."""
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8).data


def torch_dtype(code: str) -> torch.dtype:
    """torch's type of this code."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_NAMES.get(code) or ALL_NAMES[code])
    return dtype


def as_tensor(array: Array, dtype: str) -> Tensor:
    """A tensor on the array's memory."""
    import torch

    return torch.from_numpy(array).view(torch_dtype(dtype))


def as_array(tensor: Tensor) -> Array:
    """An array on a CPU tensor's memory."""
    import torch

    bits = tensor.detach().view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor.detach()
    array: Array = bits.numpy()
    assert array.dtype == ARRAY_TYPES[DTYPE_CODES[str(tensor.dtype)]]
    return array


def cast(array: Array, dtype: str, wanted: str) -> Array:
    """The same values, rounded as torch does; the array itself where nothing changes."""
    return array if dtype == wanted else as_array(as_tensor(array, dtype).to(torch_dtype(wanted)))
