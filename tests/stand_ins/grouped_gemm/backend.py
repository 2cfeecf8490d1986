"""A matmul an expert, with the arguments and the demands of grouped_gemm 0.3.0."""

import torch
from torch import Tensor


def gmm(
    a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False, c: Tensor | None = None
) -> Tensor:
    assert batch_sizes.device.type == "cpu"
    assert batch_sizes.dtype == torch.int64
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert not (trans_a and trans_b)
    runs = a.split(batch_sizes.tolist())
    if trans_a:
        out = torch.stack([x.t() @ y for x, y in zip(runs, b.split(batch_sizes.tolist()), strict=True)])
    else:
        out = torch.cat([x @ (w.t() if trans_b else w) for x, w in zip(runs, b, strict=True)])
    return out if c is None else c.copy_(out)
