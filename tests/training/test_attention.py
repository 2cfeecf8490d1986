"""Attention within segments against attention under a mask."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV4Config, GptOssConfig, JambaConfig, Lfm2MoeConfig, Qwen2MoeConfig, Qwen3NextConfig
from transformers.masking_utils import causal_mask_function

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.attention.packed_attention import (
    OWN,
    choose_attention,
    mask_where_needed,
    own_attention,
    told_whether_packed,
    window_told,
)
from expertmesh.training.data.batch import collate
from expertmesh.training.data.samples import Sample
from tests.rounding import OTHER_ORDER
from tests.tiny import relative_error, tiny_config, tiny_mixtral

LAYERS: dict[str, Any] = {"num_hidden_layers": 4}
ROWS = ((5, 1, 9, 9), (17, 3, 4))
SEGMENTS = tuple(length for row in ROWS for length in row)


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


UNEQUAL = [(24, 16), (16, 24), (20, 20)]
"""Widths of keys and of values: DeepSeek's multi-head latent attention, the other way round, and no multiple of 8."""


def unequal(device: str, dtype: torch.dtype, key_width: int, value_width: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (x.detach() for x in inputs(device, dtype))
    parts = query[..., :key_width], key[..., :key_width], value[..., :value_width]
    return tuple(part.clone().requires_grad_() for part in parts)  # type: ignore[return-value]


def assert_same_as_under_a_mask(device: str, dtype: torch.dtype, widths: tuple[int, int], tolerance: float) -> None:
    found, expected = unequal(device, dtype, *widths), unequal(device, dtype, *widths)
    out, _ = own_attention(None, *found, None, segments=SEGMENTS, scaling=0.2)
    want = masked(*expected)
    assert out.shape == want.shape == (2, 24, 8, widths[1])
    assert relative_error(out.detach().float(), want.detach().float()) <= tolerance
    out.square().sum().backward()
    want.square().sum().backward()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert relative_error(ours.grad.float(), theirs.grad.float()) <= tolerance


@pytest.mark.parametrize(
    ("widths", "dtype", "tolerance"),
    [
        ((32, 32), torch.float32, 1e-6),
        ((32, 32), torch.bfloat16, 2e-2),
        *((each, torch.float32, OTHER_ORDER) for each in UNEQUAL),
    ],
)
def test_same_as_under_a_mask(widths: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    assert_same_as_under_a_mask("cpu", dtype, widths, tolerance)


@pytest.mark.parametrize("segments", [(24, 24), None])
@pytest.mark.parametrize("name", ["softcap", "position_bias", "what_comes_next"])
def test_what_it_would_leave_out_is_refused(name: str, segments: tuple[int, ...] | None) -> None:
    """Whatever a family gives its attention, and this one does not know."""
    query, key, value = inputs("cpu", torch.float32)
    module = torch.nn.Linear(1, 1)
    unknown: dict[str, Any] = {name: 8}
    with pytest.raises(ExpertMeshError, match=f"--attn-implementation: Linear gives its attention {name}, which"):
        own_attention(module, query, key, value, None, segments=segments, **unknown)
    known: dict[str, Any] = {name: None, "position_ids": torch.arange(24).unsqueeze(0), "use_cache": False}
    own_attention(module, query, key[:, :1], value[:, :1], None, segments=(24, 24), **known)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, None),
        ({"local_size": 8}, 8),
        ({"local_size": 24}, None),
        ({"local_size": 8, "allow_is_causal_skip": False}, "read"),
        ({"local_size": 8, "kv_length": 25, "q_offset": 1}, "read"),
        ({"local_size": 8, "attention_mask": torch.ones(2, 24, dtype=torch.bool)}, "read"),
    ],
)
def test_a_mask_where_it_is_needed(changes: dict[str, Any], window: int | str | None) -> None:
    """Windows of square and causal attention are told by the width of a mask without memory; else it is read."""
    arguments: dict[str, Any] = dict(batch_size=2, q_length=24, kv_length=24, mask_function=causal_mask_function)
    mask = mask_where_needed(**(arguments | changes))
    if window == "read":
        assert mask is not None
        assert mask.shape == (2, 1, 24, changes.get("kv_length", 24))
        assert window_told(mask, 24) is None
    else:
        assert window_told(mask, 24) == window
        assert (mask is None) == (window is None)
    assert window_told(torch.ones(1, 1, 1, 9, dtype=torch.bool), 1) is None, "of a single query after 8 others"


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 1, 8)])
def test_dropout_beside_a_window(sinks: Tensor | None) -> None:
    """Under a mask, as no kernel has both; of next to no weights it changes nothing."""
    query, key, value = inputs("cpu", torch.float32)
    module: Any = torch.nn.Linear(1, 1)
    module.num_key_value_groups = 4
    told = mask_where_needed(q_length=24, kv_length=24, local_size=6)
    found, expected = (
        own_attention(module, query, key, value, told, dropout, 0.2, sinks, SEGMENTS)[0] for dropout in (1e-9, 0.0)
    )
    assert relative_error(found.detach(), expected.detach()) < OTHER_ORDER


def of_kinds(config: Any, *kinds: str) -> Any:
    """A config with kinds of layers that transformers would not accept of it."""
    config.layer_types = list(kinds)
    return config


CONVOLUTIONS = ["conv", "full_attention", "conv", "conv"]


@pytest.mark.parametrize(
    ("config", "choices"),
    [
        (tiny_config(), {"sdpa": (OWN, "sdpa"), "auto": (OWN, "sdpa"), "eager": ("eager", "eager")}),
        (tiny_config(sliding_window=8), {"sdpa": ("sdpa", "sdpa"), "auto": (OWN, OWN)}),
        # a config that lists its layers says there whether any has a window; one of chunks has its mask
        (Qwen2MoeConfig(**LAYERS, use_sliding_window=True), {"sdpa": ("sdpa", "sdpa"), "auto": (OWN, OWN)}),
        (Qwen2MoeConfig(**LAYERS), {"sdpa": (OWN, "sdpa"), "auto": (OWN, "sdpa")}),
        (of_kinds(Qwen2MoeConfig(**LAYERS), *["chunked_attention", "full_attention"] * 2), {"auto": ("sdpa", "sdpa")}),
        # a family without sdpa is given our own where it has flash attention, which is told windows and sinks as ours
        # is, and else eager
        (GptOssConfig(**LAYERS), {"auto": (OWN, OWN), "eager": ("eager", "eager")}),
        (DeepseekV4Config(**LAYERS), {"auto": ("eager", "eager")}),
        # layers that no mask keeps within a sample: their neighbours of full attention have our own, where all others
        # have no attention
        (Qwen3NextConfig(**LAYERS), {"auto": (OWN, "sdpa"), "eager": ("eager", "eager")}),
        (JambaConfig(**LAYERS), {"auto": (OWN, "sdpa"), "eager": ("eager", "eager")}),
        (Lfm2MoeConfig(**LAYERS, layer_types=CONVOLUTIONS), {"auto": (OWN, "sdpa"), "eager": ("eager", "eager")}),
        (
            of_kinds(Lfm2MoeConfig(**LAYERS), "conv", "full_attention", "indexed_attention", "of_next_year"),
            {"auto": ("sdpa", "sdpa"), "eager": ("eager", "eager")},
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_is_chosen(config: Any, choices: dict[str, tuple[str, str]]) -> None:
    """By --attn-implementation: with packing, and without."""
    for asked, (packed, alone) in choices.items():
        assert (choose_attention(asked, True, config), choose_attention(asked, False, config)) == (packed, alone)


def test_flash_attention_is_not_packed() -> None:
    with pytest.raises(ExpertMeshError, match="--attn-implementation flash_attention_2: cannot keep packed samples"):
        choose_attention("flash_attention_2", True, tiny_config())
    assert choose_attention("flash_attention_2", False, tiny_config()) == "flash_attention_2"


class _Searches(TorchDispatchMode):
    """Counts what transformers looks for packed samples by."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += operator.name() == "aten::all"
        return operator(*args, **(kwargs or {}))


def test_nobody_looks_for_samples_in_rows_that_are_one_each() -> None:
    model: Any = tiny_mixtral().eval()
    batch = collate([[Sample.of_prompt(list(range(7)), 2)] for _ in range(2)])
    assert batch.segments is None
    arguments: dict[str, Any] = dict(input_ids=batch.tokens_BS, position_ids=torch.arange(7)[None], use_cache=False)
    with torch.no_grad(), _Searches() as unasked:
        logits = model(**arguments).logits
    with torch.no_grad(), _Searches() as told, told_whether_packed(model, batch):
        told_logits = model(**arguments).logits
    assert unasked.found > told.found == 0
    assert torch.equal(logits, told_logits)
