"""Between arrays, as files are read and written, and torch's tensors."""

import torch
from torch import Tensor

from .dtypes import ARRAY_TYPES, DTYPE_NAMES, Array

_TORCH_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in DTYPE_NAMES.items()}
DTYPE_CODES = {dtype: code for code, dtype in _TORCH_DTYPES.items()}


def torch_dtype(dtype: str) -> torch.dtype:
    return _TORCH_DTYPES[dtype]


def as_tensor(array: Array, dtype: str) -> Tensor:
    """A tensor on the array's memory."""
    return torch.from_numpy(array).view(_TORCH_DTYPES[dtype])


def as_array(tensor: Tensor) -> Array:
    """An array on a CPU tensor's memory."""
    bits = tensor.detach().view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor.detach()
    array: Array = bits.numpy()
    assert array.dtype == ARRAY_TYPES[DTYPE_CODES[tensor.dtype]]
    return array
