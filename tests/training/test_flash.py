"""Attention in segments, with windows and sinks, against all scores of a row; and what the GPU's kernel is given."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.training.attention import flash
from expertmesh.training.attention.flash import flash_attention
from tests.rounding import OTHER_ORDER
from tests.tiny import relative_error

SEGMENTS = (1, 50, 19)
HEADS, GROUPS = 6, 2
WIDTHS = [(16, 16), (24, 16), (16, 24), (20, 20)]
"""Of keys and of values: also those of multi-head latent attention, and no multiple of 8."""
WINDOWS = [0, 1, 7, 40, 64]
"""Keys that a query sees: all, itself, less and more than a block of queries, and more than a segment has."""


def inputs(widths: tuple[int, int], has_sinks: bool, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values, and sinks."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, widths[0]), (GROUPS, widths[0]), (GROUPS, widths[1])]
    drawn = [torch.randn(sum(SEGMENTS), *shape, generator=generator) for shape in shapes]
    if has_sinks:
        drawn.append(torch.randn(HEADS, generator=generator))
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def by_all_scores(inputs: list[Tensor], scale: float, window: int) -> Tensor:
    """As `eager_attention_forward` of transformers' gpt_oss, segment by segment."""
    query_NHA, key_NGA, value_NGA = inputs[:3]
    outputs = []
    for end, length in zip(accumulate(SEGMENTS), SEGMENTS, strict=True):
        query_HLA, key_HLA, value_HLA = (
            x[end - length : end].transpose(0, 1).repeat_interleave(HEADS // x.shape[1], dim=0)
            for x in (query_NHA, key_NGA, value_NGA)
        )
        place_L = torch.arange(length, device=query_NHA.device)
        is_hidden_LL = place_L > place_L.unsqueeze(1)
        if window:
            is_hidden_LL |= place_L <= place_L.unsqueeze(1) - window
        scores_HLL = (query_HLA @ key_HLA.mT * scale).masked_fill(is_hidden_LL, float("-inf"))
        for sinks_H in inputs[3:]:
            scores_HLL = torch.cat([scores_HLL, sinks_H.view(-1, 1, 1).expand(-1, length, 1)], dim=-1)
        outputs.append((scores_HLL.softmax(-1)[..., :length] @ value_HLA).transpose(0, 1))
    return torch.cat(outputs)


def assert_same_as_by_all_scores(
    widths: tuple[int, int], window: int, has_sinks: bool, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Output, and gradients of queries, keys, values and sinks."""
    given, wide = inputs(widths, has_sinks, device, dtype), inputs(widths, has_sinks, device, dtype)
    found = flash_attention(given[0], given[1], given[2], SEGMENTS, 0.3, window, *given[3:])
    expected = by_all_scores([x.double() for x in wide], 0.3, window)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    assert found.is_contiguous()
    weights = torch.linspace(-1, 1, expected.numel(), device=device).view(expected.shape)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert relative_error(found.detach().double(), expected.detach()) <= tolerance
    # all together: a query that sees one key alone has no gradient
    gradients = [torch.cat([x.grad.flatten().double() for x in xs if x.grad is not None]) for xs in (given, wide)]
    assert len(gradients[0]) == sum(x.numel() for x in given)
    assert relative_error(gradients[0], gradients[1]) <= tolerance


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_same_as_by_all_scores(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, int], window: int, has_sinks: bool
) -> None:
    monkeypatch.setattr(flash, "_BLOCK", 16)
    assert_same_as_by_all_scores(widths, window, has_sinks, "cpu", torch.float64, 1e-14)
    assert_same_as_by_all_scores(widths, window, has_sinks, "cpu", torch.float32, OTHER_ORDER)
    assert_same_as_by_all_scores(widths, window, has_sinks, "cpu", torch.bfloat16, 2e-2)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("widths", WIDTHS)
def test_what_the_kernel_is_given(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, int], window: int, has_sinks: bool
) -> None:
    """With stand-ins for the two operators of torch, which know no sinks: heads of one width that is a multiple of 8,
    a window as the keys before a query, and where segments end, made once for forward and backward."""
    seen_ends = []

    def assert_taken(operator: Any, tensors: tuple[Tensor, ...], settings: dict[str, Any]) -> None:
        assert len({x.shape[-1] for x in tensors}) == 1
        assert tensors[0].shape[-1] % 8 == 0
        assert settings.keys() <= {argument.name for argument in operator.default._schema.arguments}

    def forward(*args: Any, **settings: Any) -> tuple[Tensor, ...]:
        query, key, value, ends, other_ends, longest, other_longest, dropout, is_causal, _ = args
        assert_taken(torch.ops.aten._flash_attention_forward, args[:3], settings)
        assert ends is other_ends
        assert (longest, other_longest, dropout, is_causal) == (50, 50, 0.0, window == 0)
        seen_ends.append(ends)
        return flash._forward_by_blocks(query, key, value, None, list(SEGMENTS), settings["scale"], told(settings))

    def backward(*args: Any, **settings: Any) -> tuple[Tensor, ...]:
        grad, query, key, value, out, lse, ends, _, _, _, dropout, is_causal, _, _ = args
        assert_taken(torch.ops.aten._flash_attention_backward, args[:5], settings)
        assert grad.is_contiguous()
        assert (dropout, is_causal) == (0.0, window == 0)
        seen_ends.append(ends)
        return flash._backward_by_blocks(
            grad, query, key, value, out, lse, list(SEGMENTS), settings["scale"], told(settings)
        )

    def told(settings: dict[str, Any]) -> int:
        if window == 0:
            return 0
        assert settings["window_size_right"] == 0
        return int(settings["window_size_left"]) + 1

    operators = {"_flash_attention_forward": forward, "_flash_attention_backward": backward}
    flash._ends.cache_clear()
    monkeypatch.setattr(flash, "has_kernel", lambda query, value: True)
    monkeypatch.setattr(flash, "flash_operator", operators.__getitem__)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    assert_same_as_by_all_scores(widths, window, has_sinks, "cpu", torch.float32, OTHER_ORDER)
    assert len(seen_ends) == 2
    assert seen_ends[0] is seen_ends[1]
    assert seen_ends[0].tolist() == [0, 1, 51, 70]
    flash._ends.cache_clear()
