"""Attention within segments against attention under a mask."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GptOssConfig, JambaConfig, Lfm2MoeConfig, Qwen2MoeConfig, Qwen3NextConfig

from moe import ExpertMeshError
from tests.tiny import relative_error, tiny_config
from training.attention import PACKED, choose_attention, packed_attention

LAYERS: dict[str, Any] = {"num_hidden_layers": 4}
ROWS = ((5, 1, 9, 9), (17, 3, 4))


def inputs(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 24, 32, generator=generator).to(device, dtype) for heads in (8, 2, 2))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    number = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in ROWS])
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    mask = (number[:, None, :, None] == number[:, None, None, :]) & causal
    out = F.scaled_dot_product_attention(query, key, value, mask.to(query.device), scale=0.2, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 1e-6),
        ("cpu", torch.bfloat16, 2e-2),
        pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
    ],
)
def test_same_as_under_a_mask(device: str, dtype: torch.dtype, tolerance: float) -> None:
    segments = tuple(length for row in ROWS for length in row)
    results = []
    for segmented in (True, False):
        query, key, value = inputs(device, dtype)
        if segmented:
            out, _ = packed_attention(None, query, key, value, None, scaling=0.2, segments=segments)
        else:
            out = masked(query, key, value)
        assert out.shape == (2, 24, 8, 32)
        out.square().sum().backward()
        results.append([out.detach().float(), *(t.grad.float() for t in (query, key, value) if t.grad is not None)])
    assert len(results[0]) == 4
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) <= tolerance


def test_when_it_is_chosen() -> None:
    config, windowed = tiny_config(), tiny_config(sliding_window=8)
    assert choose_attention("sdpa", True, config) == PACKED
    assert choose_attention("sdpa", False, config) == "sdpa"
    assert choose_attention("sdpa", True, windowed) == "sdpa"
    assert choose_attention("eager", True, config) == "eager"
    assert choose_attention("auto", True, config) == PACKED
    assert choose_attention("auto", False, config) == "sdpa"


def test_the_kinds_of_layers_decide() -> None:
    """A config that lists its layers says there whether any has a window; a family without sdpa is left its mask."""
    windows, whole = Qwen2MoeConfig(**LAYERS, use_sliding_window=True), Qwen2MoeConfig(**LAYERS)
    assert choose_attention("sdpa", True, windows) == "sdpa"
    assert choose_attention("sdpa", True, whole) == PACKED
    assert choose_attention("auto", True, GptOssConfig(**LAYERS)) == "eager"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Qwen3NextConfig(**LAYERS), r"qwen3_next \(linear_attention\)"),
        (JambaConfig(**LAYERS), r"jamba \(linear_attention, mamba\)"),
        (Lfm2MoeConfig(**LAYERS, layer_types=["conv", "full_attention", "conv", "conv"]), r"lfm2_moe \(conv\)"),
    ],
)
def test_layers_that_carry_a_state_are_not_packed(config: Any, said: str) -> None:
    for attention in ("auto", "sdpa", "eager"):
        with pytest.raises(ExpertMeshError, match=f"--packing: layers of {said} carry a state"):
            choose_attention(attention, True, config)
    assert choose_attention("auto", False, config) == "sdpa"


def test_flash_attention_is_not_packed() -> None:
    with pytest.raises(ExpertMeshError, match="--attn-implementation flash_attention_2: does not keep packed samples"):
        choose_attention("flash_attention_2", True, tiny_config())
    assert choose_attention("flash_attention_2", False, tiny_config()) == "flash_attention_2"
