"""Flash attention within segments, with a window and sinks: no scores of sequence length squared are kept.

A sink is a score of a head that every query also has, of no position and with values of zero (gpt-oss model card, 2025;
`eager_attention_forward` of transformers' gpt_oss). With sink s and the scores' log-sum-exp l, attention's weights are
those without it times exp(l - l'), where l' = log(exp(l) + exp(s)). Flash attention's backward (Dao 2023, algorithm 2)
recomputes weights from the log-sum-exp that it is given and subtracts the sum over a query's output times its gradient:
given l', and the output with the sink, it is the backward of attention with a sink. So any kernel that returns and
takes log-sum-exps works, and the sink's own gradient is the sum over queries of -exp(s - l') times what was
subtracted.

Shape suffixes: N positions of all segments, L of one, Q queries of a block, K keys that it sees, H heads, G heads of
keys and values, r heads of queries for each of those, q = r·Q, A head width.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...moe.torch_private import flash_operator
from ...moe.util.gpu import bring_to, is_gpu

_WIDEST = 256
"""Width of the widest heads that the GPU's kernel takes."""
_BLOCK = 256
"""Queries whose scores are held at a time where there is no kernel."""


def flash_attention(
    query_NHA: Tensor,
    key_NGA: Tensor,
    value_NGA: Tensor,
    segments: tuple[int, ...],
    scale: float | None = None,
    window: int = 0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention within each segment; (N, H, A) out, where A is the width of the values.

    On a GPU in half precision it is torch's flash-attention kernel, one for all segments; elsewhere scores are made of
    256 queries at a time, in fp32 or wider.

    Args:
        query_NHA, key_NGA, value_NGA: segments one after the other; H is a multiple of G, and values may be of another
            width.
        segments: lengths, N in all.
        scale: of scores; None: the inverse root of the width of the keys.
        window: keys that a query sees, itself among them; 0: all before it.
        sinks_H: a score for each head, in any dtype.
    """
    assert sum(segments) == len(query_NHA) == len(key_NGA) == len(value_NGA), (segments, query_NHA.shape)
    scale = query_NHA.shape[-1] ** -0.5 if scale is None else scale
    # one width of head, a multiple of 8: zeros add nothing to a score, and what they give as values is cut off
    width, value_width = _kernel_width(query_NHA, value_NGA), value_NGA.shape[-1]
    query_NHA, key_NGA, value_NGA = (_widened(x, width) for x in (query_NHA, key_NGA, value_NGA))
    out_NHA, _ = _forward(query_NHA, key_NGA, value_NGA, sinks_H, segments, scale, window)
    # in one piece, as every other attention gives it: models view heads side by side as one row
    return out_NHA[..., :value_width].contiguous()


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether a GPU has one for such heads (last dim): from Ampere on."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if not is_half or _kernel_width(query, value) > _WIDEST:
        return False
    is_old = query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0)
    return is_gpu(query.device.type) and not is_old


def _kernel_width(query: Tensor, value: Tensor) -> int:
    """Width of the heads that the kernel is given: the wider of keys' and values', up to a multiple of 8."""
    return -(-max(query.shape[-1], value.shape[-1]) // 8) * 8


def _widened(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


@torch.library.custom_op("expertmesh::flash_attention", mutates_args=())
def _forward(
    query_NHA: Tensor,
    key_NGA: Tensor,
    value_NGA: Tensor,
    sinks_H: Tensor | None,
    segments: list[int],
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Attention's output, and the log-sum-exp of each query's scores and its head's sink, (H, N) in fp32 or wider."""
    if not has_kernel(query_NHA, value_NGA):
        return _forward_by_blocks(query_NHA, key_NGA, value_NGA, sinks_H, segments, scale, window)
    ends, longest = _ends(tuple(segments), query_NHA.device), max(segments)
    out_NHA, lse_HN = flash_operator("_flash_attention_forward")(
        query_NHA, key_NGA, value_NGA, ends, ends, longest, longest, 0.0,
        window == 0, False, scale=scale, **_seen(window),
    )[:2]  # fmt: skip
    if sinks_H is None:
        return out_NHA, lse_HN
    with_sink_HN = torch.logaddexp(lse_HN, sinks_H.to(lse_HN.dtype).unsqueeze(1))
    share_NH1 = (lse_HN - with_sink_HN).exp().T.unsqueeze(-1)
    return (out_NHA * share_NH1).to(out_NHA.dtype), with_sink_HN


@_forward.register_fake
def _(query_NHA: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    positions, heads, _ = query_NHA.shape
    return torch.empty_like(query_NHA), query_NHA.new_empty(heads, positions, dtype=_summed_in(query_NHA.dtype))


@torch.library.custom_op("expertmesh::flash_attention_backward", mutates_args=())
def _backward(
    grad_NHA: Tensor,
    query_NHA: Tensor,
    key_NGA: Tensor,
    value_NGA: Tensor,
    out_NHA: Tensor,
    lse_HN: Tensor,
    segments: list[int],
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if not has_kernel(query_NHA, value_NGA):
        return _backward_by_blocks(grad_NHA, query_NHA, key_NGA, value_NGA, out_NHA, lse_HN, segments, scale, window)
    ends, longest = _ends(tuple(segments), query_NHA.device), max(segments)
    # random numbers are of dropout, which is 0 here
    state = torch.zeros(2, dtype=torch.uint64, device=query_NHA.device)
    unused = torch.empty(0, device=query_NHA.device)
    gradients: tuple[Tensor, Tensor, Tensor] = flash_operator("_flash_attention_backward")(
        grad_NHA.contiguous(), query_NHA, key_NGA, value_NGA, out_NHA, lse_HN, ends, ends, longest, longest, 0.0,
        window == 0, state, unused, scale=scale, **_seen(window),
    )  # fmt: skip
    return gradients


@_backward.register_fake
def _(grad_NHA: Tensor, query_NHA: Tensor, key_NGA: Tensor, value_NGA: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(query_NHA), torch.empty_like(key_NGA), torch.empty_like(value_NGA)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.segments, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_NHA: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_NHA is None:
        return (None,) * 7
    query_NHA, key_NGA, value_NGA, sinks_H, out_NHA, lse_HN = ctx.saved_tensors
    gradients = _backward(grad_NHA, query_NHA, key_NGA, value_NGA, out_NHA, lse_HN, ctx.segments, ctx.scale, ctx.window)
    grad_H = None
    if sinks_H is not None and ctx.needs_input_grad[3]:
        weight_HN = (sinks_H.to(lse_HN.dtype).unsqueeze(1) - lse_HN).exp()
        grad_H = -(weight_HN * _subtracted(grad_NHA, out_NHA)).sum(1).to(sinks_H.dtype)
    return *gradients, grad_H, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def _subtracted(grad_NHA: Tensor, out_NHA: Tensor) -> Tensor:
    """What softmax's backward subtracts from the gradient of each of a query's weights, (H, N)."""
    wide = _summed_in(out_NHA.dtype)
    return (grad_NHA.to(wide) * out_NHA.to(wide)).sum(-1).T


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _seen(window: int) -> dict[str, Any]:
    """How the kernel is told of a window, which counts the keys before a query."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


@lru_cache(maxsize=1)
def _ends(segments: tuple[int, ...], device: torch.device) -> Tensor:
    """Where segments begin, and the last one ends, int32; once for all layers of a batch."""
    return bring_to(torch.tensor([0, *segments]).cumsum(0).int(), device)


def _blocks(segments: list[int], window: int) -> Iterator[tuple[slice, slice]]:
    """(queries, keys that any of them sees) of every block, as slices of N."""
    begin = 0
    for length in segments:
        for first in range(begin, begin + length, _BLOCK):
            last = min(first + _BLOCK, begin + length)
            yield slice(first, last), slice(max(begin, first - window + 1) if window else begin, last)
        begin += length


def _scores(query_QHA: Tensor, key_KGA: Tensor, scale: float, window: int) -> Tensor:
    """(G, r·Q, K), the last of the K keys being that of the last query; those not seen are minus infinity. The queries
    of all heads that share a key are rows of one matmul."""
    queries, keys = len(query_QHA), len(key_KGA)
    scores_GqK = (_by_group(query_QHA, key_KGA) @ key_KGA.permute(1, 2, 0)) * scale
    ahead_QK = torch.arange(keys, device=scores_GqK.device) - torch.arange(
        keys - queries, keys, device=scores_GqK.device
    ).unsqueeze(1)
    is_hidden_QK = ahead_QK > 0
    if window:
        is_hidden_QK |= ahead_QK <= -window
    scores_GqK.unflatten(1, (-1, queries)).masked_fill_(is_hidden_QK, float("-inf"))
    return scores_GqK


def _by_group(x_QHA: Tensor, like_KGA: Tensor) -> Tensor:
    """(G, r·Q, A)."""
    return x_QHA.unflatten(1, (like_KGA.shape[1], -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _by_position(x_GqA: Tensor, queries: int) -> Tensor:
    """(Q, H, A): the inverse of `_by_group`."""
    return x_GqA.unflatten(1, (-1, queries)).permute(2, 0, 1, 3).flatten(1, 2)


def _forward_by_blocks(
    query_NHA: Tensor,
    key_NGA: Tensor,
    value_NGA: Tensor,
    sinks_H: Tensor | None,
    segments: list[int],
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    wide = _summed_in(query_NHA.dtype)
    out_NHA = torch.empty_like(query_NHA)
    lse_HN = query_NHA.new_empty(query_NHA.shape[1], len(query_NHA), dtype=wide)
    for block, seen in _blocks(segments, window):
        query_QHA, key_KGA, value_KGA = (x.to(wide) for x in (query_NHA[block], key_NGA[seen], value_NGA[seen]))
        scores_GqK = _scores(query_QHA, key_KGA, scale, window)
        lse_HQ = scores_GqK.logsumexp(-1).reshape(-1, len(query_QHA))
        if sinks_H is not None:
            lse_HQ = torch.logaddexp(lse_HQ, sinks_H.to(wide).unsqueeze(1))
        lse_HN[:, block] = lse_HQ
        weights_GqK = (scores_GqK - lse_HQ.reshape(len(scores_GqK), -1, 1)).exp_()
        out_NHA[block] = _by_position(weights_GqK @ value_KGA.transpose(0, 1), len(query_QHA))
    return out_NHA, lse_HN


def _backward_by_blocks(
    grad_NHA: Tensor,
    query_NHA: Tensor,
    key_NGA: Tensor,
    value_NGA: Tensor,
    out_NHA: Tensor,
    lse_HN: Tensor,
    segments: list[int],
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _summed_in(query_NHA.dtype)
    subtracted_HN = _subtracted(grad_NHA, out_NHA)
    grad_query_NHA = torch.empty_like(query_NHA)
    grad_key_GNA, grad_value_GNA = (torch.zeros_like(x.transpose(0, 1), dtype=wide) for x in (key_NGA, value_NGA))
    for block, seen in _blocks(segments, window):
        query_QHA, key_KGA, value_KGA = (x.to(wide) for x in (query_NHA[block], key_NGA[seen], value_NGA[seen]))
        grad_GqA, groups = _by_group(grad_NHA[block].to(wide), key_KGA), key_KGA.shape[1]
        lse_Gq1, subtracted_Gq1 = (x[:, block].reshape(groups, -1, 1) for x in (lse_HN, subtracted_HN))
        weights_GqK = (_scores(query_QHA, key_KGA, scale, window) - lse_Gq1).exp_()
        grad_value_GNA[:, seen] += weights_GqK.mT @ grad_GqA
        grad_scores_GqK = weights_GqK.mul_(grad_GqA @ value_KGA.permute(1, 2, 0) - subtracted_Gq1).mul_(scale)
        grad_query_NHA[block] = _by_position(grad_scores_GqK @ key_KGA.transpose(0, 1), len(query_QHA))
        grad_key_GNA[:, seen] += grad_scores_GqK.mT @ _by_group(query_QHA, key_KGA)
    return (
        grad_query_NHA,
        grad_key_GNA.transpose(0, 1).to(key_NGA.dtype, memory_format=torch.contiguous_format),
        grad_value_GNA.transpose(0, 1).to(value_NGA.dtype, memory_format=torch.contiguous_format),
    )
