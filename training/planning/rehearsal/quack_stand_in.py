"""Stands in for quack-kernels in a dry run, whatever is installed here: what its GEMMs read and write, and their FLOPs,
for a recorder.

Arguments are named as in the package, but for a GEMM's operands: a, b, and before, what the activation was applied to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor

from ....moe.kernels import quack
from .recurrent_stand_in import Record


@contextmanager
def taken_as_installed() -> Iterator[None]:
    """Within it, its kernel can be chosen as where it is installed."""
    with mock.patch.object(quack, "_check_package"):
        yield


@contextmanager
def recorded_quack(kernel: Record) -> Iterator[None]:
    """Within it, its kernels are not run.

    Args:
        kernel: is told of each its name, the tensors that it reads, those that it writes, and its FLOPs.
    """
    functions = {each.__name__.removeprefix("_"): partial(each, kernel) for each in (_gemm, _gemm_gated, _gemm_dgated)}
    with mock.patch.object(quack, "_package", return_value=SimpleNamespace(**functions)):
        yield


def _gemm(
    kernel: Record,
    a: Tensor,
    b: Tensor,
    out: Tensor | None = None,
    cu_seqlens_m: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    A_idx: Tensor | None = None,
    **how: Any,
) -> Tensor:
    if cu_seqlens_k is None:
        assert cu_seqlens_m is not None
        rows, bounds = _rows(a, A_idx), cu_seqlens_m
        out = a.new_empty(rows, b.shape[2])
        flops = 2.0 * rows * b.shape[1] * b.shape[2]
    else:
        rows, bounds = _rows(a.t(), A_idx), cu_seqlens_k
        if out is None:
            out = a.new_empty(len(bounds) - 1, a.shape[0], b.shape[1])
        flops = 2.0 * rows * a.shape[0] * b.shape[1]
    _record(kernel, "gemm", [a, b], [out], flops, bounds, A_idx)
    return out


def _gemm_gated(
    kernel: Record, a: Tensor, b: Tensor, cu_seqlens_m: Tensor, A_idx: Tensor | None = None, **how: Any
) -> tuple[Tensor, Tensor]:
    rows, width = _rows(a, A_idx), b.shape[2]
    before, after = a.new_empty(rows, width), a.new_empty(rows, width // 2)
    _record(kernel, "gemm_gated", [a, b], [before, after], 2.0 * rows * b.shape[1] * width, cu_seqlens_m, A_idx)
    return before, after


def _gemm_dgated(
    kernel: Record,
    a: Tensor,
    b: Tensor,
    before: Tensor,
    cu_seqlens_m: Tensor,
    A_idx: Tensor | None = None,
    colvec_scale: Tensor | None = None,
    **how: Any,
) -> tuple[Tensor, ...]:
    rows, width = _rows(a, A_idx), b.shape[2]
    d_before, after = a.new_empty(rows, 2 * width), a.new_empty(rows, width)
    weights = [] if colvec_scale is None else [colvec_scale]
    sums = [colvec_scale.new_empty(rows) for colvec_scale in weights]
    read, flops = [a, b, before, *weights], 2.0 * rows * b.shape[1] * width
    _record(kernel, "gemm_dgated", read, [d_before, after, *sums], flops, cu_seqlens_m, A_idx)
    return d_before, after, *sums


def _rows(a: Tensor, A_idx: Tensor | None) -> int:
    return len(a if A_idx is None else A_idx)


def _record(
    kernel: Record,
    name: str,
    read: list[Tensor],
    written: list[Tensor],
    flops: float,
    bounds: Tensor,
    A_idx: Tensor | None,
) -> None:
    read = [*read, bounds] if A_idx is None else [*read, bounds, A_idx]
    kernel(name, read, written, flops, None, "grouped matmul", len(bounds) - 1)
