"""Conversion of arrays between data types."""

from .dtypes import Array


def cast(array: Array, dtype: str, wanted: str) -> Array:
    """The same values, rounded as torch does; the array itself where nothing changes."""
    if dtype == wanted:
        return array
    from .tensors import as_array, as_tensor, torch_dtype  # the one conversion that needs torch

    return as_array(as_tensor(array, dtype).to(torch_dtype(wanted)))
