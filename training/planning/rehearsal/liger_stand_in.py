"""Stands in for liger-kernel in a dry run, whose figures are those of a GPU with it, whatever is installed here: what
its kernels compute, in torch's operators, for the trials of `training.fused`; what they read and write, for a recorder.

Shape suffixes: N rows, D width; B sequences, S positions, H heads of queries and G of keys, A head width, T width of
the tables.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...fused import liger, liger_norm, liger_rotary
from ...fused.liger_norm import Norm, norm_kind

_PROCESSORS = 132
"""Of an H100, each of which sums up its part of a weight's gradient."""


@contextmanager
def computed_by_torch() -> Iterator[None]:
    """Within it, models are tried and built as where liger-kernel is installed."""
    with (
        mock.patch.object(liger, "is_installed", return_value=True),
        mock.patch.object(liger_norm, "try_norm", _try_once),
        mock.patch.object(liger_norm, "rms_norm", plain_norm),
        mock.patch.object(liger_rotary, "rotate", plain_rotate),
    ):
        yield


_try_norm = liger_norm.try_norm
_TRIED: dict[Hashable, Norm | None] = {}
"""What trials have found: of all models of a process, as a plan builds many of the same layers."""


def _try_once(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Norm | None:
    key = norm_kind(module), dtype, device
    if key not in _TRIED:
        _TRIED[key] = _try_norm(module, dtype, device)
    return _TRIED[key]


def plain_norm(x: Tensor, weight_D: Tensor | None, norm: Norm) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if weight_D is None:
        return normed.to(x.dtype)
    if norm.casting == "llama":
        return normed.to(x.dtype) * (weight_D + norm.offset)
    return (normed * (weight_D.float() + norm.offset)).to(x.dtype)


def plain_rotate(
    q_BHSA: Tensor, k_BGSA: Tensor, cos_BST: Tensor, sin_BST: Tensor, width: int, has_pairs: bool
) -> tuple[Tensor, Tensor]:
    half = width // 2
    cos, sin = cos_BST[..., :half].unsqueeze(1), sin_BST[..., :half].unsqueeze(1)

    def rotated(x: Tensor) -> Tensor:
        if has_pairs:
            x = x.unflatten(-1, (-1, 2)).mT.flatten(-2)
        x_1, x_2, rest = x.split([half, half, x.shape[-1] - width], dim=-1)
        return torch.cat([x_1 * cos - x_2 * sin, x_2 * cos + x_1 * sin, rest], dim=-1).to(x.dtype)

    return rotated(q_BHSA), rotated(k_BGSA)


@contextmanager
def recorded_liger(kernel: Callable[[str, list[Tensor], list[Tensor]], None]) -> Iterator[None]:
    """Within it, liger's kernels are not run.

    Args:
        kernel: is told of each its name, the tensors that it reads, and those that it writes.
    """

    def norm_forward(x_ND: Tensor, weight_D: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor, Any]:
        out_ND, factor_N = torch.empty_like(x_ND), x_ND.new_empty(len(x_ND), dtype=torch.float32)
        kernel("_rms_norm_forward_kernel", [x_ND, *_given(weight_D)], [out_ND, factor_N])
        return out_ND, factor_N, None

    def norm_backward(
        grad_ND: Tensor, x_ND: Tensor, weight_D: Tensor | None, factor_N: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        d_x_ND, read = torch.zeros_like(grad_ND), [grad_ND, x_ND, factor_N, *_given(weight_D)]
        if weight_D is None or not rest[-1]:
            kernel("_rms_norm_backward_kernel", read, [d_x_ND])
            return d_x_ND, None
        sums_PD = x_ND.new_empty(_PROCESSORS, x_ND.shape[1], dtype=torch.float32)
        kernel("_rms_norm_backward_kernel", read, [d_x_ND, sums_PD])
        return d_x_ND, sums_PD.sum(dim=0).to(weight_D.dtype)

    def rotate_in_place(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, width: int, **rest: Any
    ) -> tuple[Tensor, Tensor]:
        kernel("_triton_rope", [q, k, cos, sin], [q, k])
        return q, k

    with (
        mock.patch.multiple(liger_norm, norm_forward=norm_forward, norm_backward=norm_backward),
        mock.patch.multiple(liger_rotary, rotate_in_place=rotate_in_place, has_equal_halves=lambda table: True),
    ):
        yield


def _given(weight_D: Tensor | None) -> list[Tensor]:
    return [] if weight_D is None else [weight_D]
