"""Quantizing: codes and a scale per block, rounded as the published encoders round them.

    FP8, E4M3     the block's largest value becomes 448; codes to the nearest, ties to even, of values times 1 / scale:
                  transformers' `Fp8Quantize` (`integrations/finegrained_fp8.py`); scales that are powers of two are
                  rounded up, as there and in DeepSeek's and DeepGEMM's (`ceil_to_ue8m0`)
    MXFP4         the least power of two that makes no value larger than 6; codes to the nearest, ties away from zero:
                  `downcast_to_mxfp_torch` of triton_kernels (`numerics_details/mxfp.py`), which transformers calls

Of other encodings no encoder is published: they can be read, and not written.

Shape suffixes: R rows, C columns of a matrix of codes; r, c of its blocks.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..files.dtypes import Array, torch_dtype
from ..files.encodings import E2M1, Encoding

LARGEST_FP8 = 448.0
LARGEST_FP4 = 6.0
GROUP = 32
EXPONENTS = ("U8", "F8_E8M0")
"""Dtypes of scales that are powers of two."""

_TIES = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)])
"""Between two values of E2M1; what is as large is rounded to the larger."""


def has_encoder(encoding: Encoding) -> bool:
    """Whether an encoder of this encoding is published."""
    if encoding.codes == "E2M1":
        return encoding.block == (1, GROUP) and encoding.scale_dtype in EXPONENTS
    return encoding.codes == "F8_E4M3"


def encode(values_RC: Tensor, encoding: Encoding, powers_of_two: bool = False) -> tuple[Array, Array]:
    """(codes (R, C), one per byte; bytes of the scales (r, c · bytes per scale)) of a matrix, as it lies in a file.

    Args:
        values_RC: complete blocks, but for the last of each dim; finite, of any floating-point dtype.
        powers_of_two: whether scales are, though their dtype could hold others.
    """
    assert has_encoder(encoding), encoding
    largest_rc = by_blocks(values_RC.float().abs(), encoding).amax(dim=(1, 3))
    if encoding.codes == "E2M1":
        scales_rc = _power_above(largest_rc / LARGEST_FP4)
        factors_rc = torch.where(scales_rc == 0, 0.0, 1.0 / scales_rc)
    else:
        # in the order of transformers' operations, which decides the last bit
        factors_rc = torch.where(largest_rc > 0, LARGEST_FP8 / torch.where(largest_rc > 0, largest_rc, 1.0), 1.0)
        scales_rc = 1.0 / factors_rc
        if powers_of_two or encoding.scale_dtype in EXPONENTS:
            scales_rc = scales_rc.clamp(min=torch.finfo(torch.float32).tiny).log2().ceil().exp2()
            factors_rc = 1.0 / scales_rc
        elif encoding.scale_dtype != "F32":
            # codes belong to the scale that is stored
            scales_rc = scales_rc.to(torch_dtype(encoding.scale_dtype)).float()
            factors_rc = 1.0 / scales_rc
    scaled_RC = values_RC.float() * spread(factors_rc, encoding, values_RC.shape)
    codes_RC = _e2m1(scaled_RC) if encoding.codes == "E2M1" else _e4m3(scaled_RC)
    return codes_RC.numpy(), _stored(scales_rc, encoding.scale_dtype)


def by_blocks(values_RC: Tensor, encoding: Encoding) -> Tensor:
    """(r, block's rows, c, block's columns), with zeros where the last blocks are not full."""
    (rows, columns), (block_rows, block_columns) = values_RC.shape, encoding.block
    padding = (0, -columns % block_columns, 0, -rows % block_rows)
    if any(padding):
        values_RC = torch.nn.functional.pad(values_RC, padding)
    return values_RC.unflatten(0, (-1, block_rows)).unflatten(2, (-1, block_columns))


def spread(scales_rc: Tensor, encoding: Encoding, shape: Any) -> Tensor:
    """Each block's value at each of its places: (R, C)."""
    rows, columns = shape
    wide = scales_rc.repeat_interleave(encoding.block[1], dim=1)[:, :columns]
    return wide.repeat_interleave(encoding.block[0], dim=0)[:rows]


def _power_above(values: Tensor) -> Tensor:
    """The least powers of two that are not smaller; 0 of 0."""
    return ((values.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def _e2m1(scaled: Tensor) -> Tensor:
    # 8 is the sign, as it is of -0
    return torch.bucketize(scaled.abs(), _TIES, right=True).to(torch.uint8) + 8 * torch.signbit(scaled).to(torch.uint8)


def _e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)


def _stored(scales_rc: Tensor, dtype: str) -> Array:
    if dtype in EXPONENTS:
        return (scales_rc.view(torch.int32) >> 23).to(torch.uint8).numpy()
    stored = scales_rc.to(torch_dtype(dtype)).contiguous()
    return np.ascontiguousarray(stored.view(torch.uint8).numpy())
