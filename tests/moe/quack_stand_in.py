"""A stand-in for quack-kernels' grouped GEMMs, an expert after the other, in fp32 and rounded once. Like the package it
refuses matrices that lie otherwise than its kernels read them; and it has to be given some rows.

`python -m tests.moe.compile_quack` holds it against the package's own references.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.moe.kernels import quack

called: list[str] = []
"""Functions, in the order of their calls."""
gathers: list[int] = []
"""Rows that were gathered, in the order of calls."""
plans: dict[int, None] = {}
"""Numbers of rows of `gemm`'s calls, in the place of what the package keeps of each."""
forgotten: list[str] = []
"""Whose plans have been dropped."""


class Makers:
    """Of epilogues, which keep plans too."""

    def __init__(self, name: str):
        self.name = name

    def cache_clear(self) -> None:
        forgotten.append(self.name)


@contextmanager
def installed() -> Iterator[None]:
    """Within it, this is where the kernel looks for the package, and nothing has been called yet."""
    makers = {name: Makers(name) for name in quack.PLANS["quack.epilogue.library"]}
    modules: dict[str, Any] = {
        quack.MODULE: sys.modules[__name__],
        "quack.gemm": SimpleNamespace(_gemm_plan_cache=plans),
        "quack.epilogue.library": SimpleNamespace(**makers),
    }
    for record in (called, gathers, plans, forgotten):
        record.clear()
    with mock.patch.dict(sys.modules, modules), mock.patch.object(quack, "installed_version", return_value="0.6.5"):
        yield


def in_turns(halves: Tensor) -> Tensor:
    """The first row of each half, then the second of each: of the dim that is not contiguous."""
    dim = -2 if halves.stride(-1) == 1 else -1
    return halves.unflatten(dim, (2, -1)).transpose(dim - 1, dim).flatten(dim - 1, dim)


def _check(*tensors: Tensor, bounds: Tensor, tuned: bool) -> None:
    assert not tuned, "tries out tiles, again for each number of rows"
    assert bounds.dtype == torch.int32
    for tensor in tensors:
        assert tensor.numel() > 0
        strides = tensor.stride()
        assert 1 in strides[-2:]
        assert all(stride * tensor.element_size() % 16 == 0 for stride in strides if stride != 1), strides
        assert tensor.data_ptr() % 16 == 0


def _by_row(A: Tensor, B: Tensor, bounds: Tensor, A_idx: Tensor | None) -> Tensor:
    assert A.stride(-1) == 1, "varlen_m requires A to be k-major"
    assert len(B) == len(bounds) - 1
    A = _gathered(A, A_idx, 0)
    parts = zip(A.float().split(bounds.diff().tolist()), B.float(), strict=True)
    return torch.cat([rows @ matrix for rows, matrix in parts])


def _gathered(A: Tensor, A_idx: Tensor | None, dim: int) -> Tensor:
    if A_idx is None:
        return A
    assert A_idx.dtype == torch.int32
    gathers.append(len(A_idx))
    return A.index_select(dim, A_idx)


def gemm(
    A: Tensor, B: Tensor, out: Tensor | None = None, *, cu_seqlens_m: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, A_idx: Tensor | None = None, tuned: bool = True,
    concat_layout: tuple[str, ...] | None = None,
) -> Tensor:  # fmt: skip
    called.append("gemm")
    layout = concat_layout or ()
    if cu_seqlens_m is not None:
        _check(A, B, bounds=cu_seqlens_m, tuned=tuned)
        plans[len(A)] = None
        return _by_row(A, in_turns(B) if "B" in layout else B, cu_seqlens_m, A_idx).to(A.dtype)
    assert cu_seqlens_k is not None
    _check(A, B, bounds=cu_seqlens_k, tuned=tuned)
    assert A.stride(-2) == 1, "varlen_k requires A to be m-major"
    assert B.stride(-1) == 1, "varlen_k requires B to be n-major"
    counts = cu_seqlens_k.diff().tolist()
    A = _gathered(A, A_idx, 1)
    parts = zip(A.float().split(counts, dim=1), B.float().split(counts), strict=True)
    found = torch.stack([a @ b for a, b in parts]).to(A.dtype)
    if out is None:
        out = torch.empty_like(found)
    assert out.shape == found.shape
    if "out" in layout:
        # by halves of the dim that is not contiguous, as the package writes them
        dim = -2 if out.stride(-1) == 1 else -1
        found = found.unflatten(dim, (-1, 2)).transpose(dim - 1, dim).flatten(dim - 1, dim)
    return out.copy_(found)


def gemm_gated(
    A: Tensor, B: Tensor, *, activation: Any = None, cu_seqlens_m: Tensor | None = None, A_idx: Tensor | None = None,
    tuned: bool = True, concat_layout: tuple[str, ...] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    called.append("gemm_gated")
    assert activation == "swiglu"
    assert cu_seqlens_m is not None
    _check(A, B, bounds=cu_seqlens_m, tuned=tuned)
    before = _by_row(A, in_turns(B) if concat_layout == ("B",) else B, cu_seqlens_m, A_idx)
    after = F.silu(before[:, 0::2]) * before[:, 1::2]
    return before.to(A.dtype), after.to(A.dtype)


def gemm_dgated(
    A: Tensor, B: Tensor, PreAct: Tensor, *, activation: Any = None, colvec_scale: Tensor | None = None,
    colvec_reduce: bool = False, cu_seqlens_m: Tensor | None = None, A_idx: Tensor | None = None, tuned: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    called.append("gemm_dgated")
    assert activation == "swiglu"
    assert cu_seqlens_m is not None
    _check(A, B, PreAct, bounds=cu_seqlens_m, tuned=tuned)
    assert PreAct.is_contiguous()
    grad = _by_row(A, B, cu_seqlens_m, A_idx)
    scale = torch.ones(len(grad), 1) if colvec_scale is None else colvec_scale.unsqueeze(1)
    with torch.enable_grad():
        before = PreAct.detach().float().requires_grad_()
        after = F.silu(before[:, 0::2]) * before[:, 1::2]
        (d_before,) = torch.autograd.grad(after, before, grad * scale)
    after = after.detach()
    sums = ((grad * after).sum(dim=1),) if colvec_reduce else ()
    return d_before.to(A.dtype), (after * scale).to(A.dtype), *sums
