"""Matrix products on a CPU by oneDNN where torch would take MKL, which runs at half oneDNN's speed on AMD's processors.

The results differ in rounding alone.

Shape suffixes: M, K, N of a product a_MK · b_KN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL = 2**21
"""Below so many multiplications a call of oneDNN costs more than it gains."""


def matmul(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor | None = None) -> Tensor:
    """a_MK @ b_KN, written into `out_MN` (of any dtype) where that is given; without a gradient. Transposed views cost
    no copy."""
    if _suits_onednn(a_MK, b_KN):
        product = torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.t(), None, "none", [], "")
    elif out_MN is not None and out_MN.dtype == a_MK.dtype:
        return torch.mm(a_MK, b_KN, out=out_MN)
    else:
        product = a_MK @ b_KN
    return product if out_MN is None else out_MN.copy_(product)


def pad_rows(x_MK: Tensor) -> Tensor:
    """With a few rows of zeros more (from 512 rows on, less than a sixteenth), so that batches of all lengths have few
    different ones: oneDNN compiles code for each length it meets, which takes longer than a small product."""
    num_rows = len(x_MK)
    if x_MK.device.type != "cpu" or num_rows < 32:
        return x_MK
    step = max(32, 2 ** (num_rows.bit_length() - 6))
    return F.pad(x_MK, (0, 0, 0, -num_rows % step))


def _suits_onednn(a_MK: Tensor, b_KN: Tensor) -> bool:
    return (
        a_MK.device.type == "cpu"
        and a_MK.dtype == torch.float32
        and a_MK.numel() * b_KN.shape[1] >= SMALL
        and torch.backends.mkldnn.is_available()
    )
