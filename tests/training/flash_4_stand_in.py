"""A stand-in for flash_attn.cute.interface of flash-attn-4, by all scores of a segment: tests write it where Python
finds it under that name. Like the package it refuses widths of heads, and gives back more than output and
log-sum-exps."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MAJOR = 9
"""Compute capability that widths are checked for."""
given: list[tuple[str, tuple[int, int], bool]] = []
"""(function, widths of keys and values, whether there is a window) of each call."""


def _check(of: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int | None, right: int | None) -> None:
    widths = q.shape[-1], v.shape[-1]
    assert k.shape[-1] == widths[0]
    assert all(8 <= width <= 256 and width % 8 == 0 for width in widths), widths
    if MAJOR == 10:
        assert max(widths) <= 128 or widths in ((192, 128), (256, 256)), widths
        assert not (of == "bwd" and max(widths) == 256 and left is not None), "no local attention"
    assert causal is not (left is not None and right == 0)
    given.append((of, widths, left is not None))


def _parts(x: Tensor, ends: Tensor | None) -> list[Tensor]:
    """Segments, (H, L, A), of x (N, H, A), or of the rows of x (B, L, H, A)."""
    of_rows = [*x] if ends is None else list(x.split(ends.diff().tolist()))
    return [part.transpose(0, 1) for part in of_rows]


def _whole(parts: list[Tensor], ends: Tensor | None) -> Tensor:
    in_order = [part.transpose(0, 1) for part in parts]
    return torch.stack(in_order) if ends is None else torch.cat(in_order)


def _scores(q: Tensor, k: Tensor, scale: float, left: int | None) -> Tensor:
    place = torch.arange(q.shape[1])
    ahead = place - place[:, None]
    is_hidden = (ahead > 0) | (ahead < -(len(place) if left is None else left))
    return (q @ k.repeat_interleave(len(q) // len(k), 0).mT * scale).masked_fill(is_hidden, float("-inf"))


def _flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, qv: None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, seqused_k: None = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    page_table: None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size_left: int | None = None, window_size_right: int | None = None, num_splits: int = 1,
    return_lse: bool = False, out: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert return_lse
    assert (num_splits, seqused_k, page_table) == (1, None, None)
    assert type(max_seqlen_q) is type(max_seqlen_k) is int
    _check("fwd", q, k, v, causal, window_size_left, window_size_right)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    outs, sums = [], []
    for query, key, value in zip(*(_parts(x, cu_seqlens_q) for x in (q, k, v)), strict=True):
        scores = _scores(query, key, scale, window_size_left)
        outs.append(scores.softmax(-1) @ value.repeat_interleave(len(query) // len(value), 0))
        sums.append(scores.logsumexp(-1))
    found = _whole(outs, cu_seqlens_q)
    lse = torch.stack(sums) if cu_seqlens_q is None else torch.cat(sums, 1)
    return (found if out is None else out.copy_(found)), lse, None, None, None


def _flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
    causal: bool = False, window_size_left: int | None = None, window_size_right: int | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, deterministic: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert not deterministic
    _check("bwd", q, k, v, causal, window_size_left, window_size_right)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    sums = [*lse] if cu_seqlens_q is None else list(lse.split(cu_seqlens_q.diff().tolist(), 1))
    gradients = list(_gradients([_parts(x, cu_seqlens_q) for x in (q, k, v, out, dout)], sums, scale, window_size_left))
    return tuple(_whole(list(parts), cu_seqlens_q) for parts in zip(*gradients, strict=True))


def _gradients(
    parts: list[list[Tensor]], sums: list[Tensor], scale: float, left: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for query, key, value, out, grad, own in zip(*parts, sums, strict=True):
        groups = len(key)
        weights = (_scores(query, key, scale, left) - own[..., None]).exp()
        of_weights = grad @ value.repeat_interleave(len(query) // groups, 0).mT
        of_scores = weights * (of_weights - (grad * out).sum(-1, keepdim=True)) * scale
        of_key, of_value = (x.unflatten(0, (groups, -1)).sum(1) for x in (of_scores.mT @ query, weights.mT @ grad))
        yield of_scores @ key.repeat_interleave(len(query) // groups, 0), of_key, of_value
