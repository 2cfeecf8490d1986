"""Attention within segments against attention under a mask."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig, JambaConfig, Lfm2MoeConfig, Qwen2MoeConfig, Qwen3NextConfig

from moe import ExpertMeshError
from tests.tiny import relative_error, tiny_config, tiny_mixtral
from training import attention
from training.attention import PACKED, choose_attention, packed_attention, told_whether_packed
from training.data import Sample, collate

LAYERS: dict[str, Any] = {"num_hidden_layers": 4}
ROWS = ((5, 1, 9, 9), (17, 3, 4))


def with_kinds(config: Any, kinds: list[str]) -> Any:
    """A config with kinds of layers that transformers would not accept of it."""
    config.layer_types = kinds
    return config


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


UNEQUAL = [(24, 16), (16, 24), (20, 20)]
"""Widths of keys and of values: DeepSeek's multi-head latent attention, the other way round, and no multiple of 8."""


def unequal(device: str, dtype: torch.dtype, key_width: int, value_width: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (x.detach() for x in inputs(device, dtype))
    parts = query[..., :key_width], key[..., :key_width], value[..., :value_width]
    return tuple(part.clone().requires_grad_() for part in parts)  # type: ignore[return-value]


def assert_same_as_under_a_mask(device: str, dtype: torch.dtype, widths: tuple[int, int], tolerance: float) -> None:
    segments = tuple(length for row in ROWS for length in row)
    found, expected = unequal(device, dtype, *widths), unequal(device, dtype, *widths)
    out, _ = packed_attention(None, *found, None, segments=segments, scaling=0.2)
    want = masked(*expected)
    assert out.shape == want.shape == (2, 24, 8, widths[1])
    assert relative_error(out.detach().float(), want.detach().float()) <= tolerance
    out.square().sum().backward()
    want.square().sum().backward()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert relative_error(ours.grad.float(), theirs.grad.float()) <= tolerance


@pytest.mark.parametrize("widths", UNEQUAL)
def test_unequal_widths(widths: tuple[int, int]) -> None:
    assert_same_as_under_a_mask("cpu", torch.float32, widths, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", UNEQUAL)
def test_unequal_widths_in_the_kernel(widths: tuple[int, int]) -> None:
    assert_same_as_under_a_mask("cuda", torch.bfloat16, widths, 2e-2)


@pytest.mark.parametrize("widths", UNEQUAL)
@pytest.mark.parametrize("scale", [0.2, None])
@pytest.mark.parametrize("takes_groups", [True, False])
def test_the_kernel_is_given_one_width(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, int], scale: float | None, takes_groups: bool
) -> None:
    """With a stand-in for the kernel that takes what flash attention takes: heads of one width, as many of keys as of
    queries, unless this torch's kernel takes groups; and where segments end, made once for all layers."""
    seen = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, *ends_and_longest: Any, **settings: Any) -> Tensor:
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert query.shape[-1] % 8 == 0
        assert key.shape[1] == value.shape[1] == (2 if takes_groups else 8)
        assert settings.get("enable_gqa", False) == takes_groups
        seen.append(ends_and_longest[0])
        ends, other_ends, longest, other_longest = ends_and_longest
        assert (longest, other_longest) == (17, 17)
        assert torch.equal(ends, other_ends)
        assert settings["window_size"] == (-1, 0)
        lengths = ends.diff().tolist()
        outputs = []
        for q, k, v in zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (query, key, value)), strict=True):
            outputs.append(
                F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=settings["scale"], enable_gqa=takes_groups
                )
            )
        return torch.cat(outputs, dim=1).transpose(0, 1)

    known = {"window_size", "enable_gqa"} if takes_groups else {"window_size"}
    monkeypatch.setattr("training.attention._varlen_parameters", lambda: frozenset(known))

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    segments = tuple(length for row in ROWS for length in row)
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in unequal("cpu", torch.float32, *widths))
    expected = attention._one_by_one(query, key, value, segments, scale, 0.0)
    found = attention._by_varlen_kernel(query, key, value, segments, scale)
    assert found.shape == (48, 8, widths[1])
    assert relative_error(found.detach(), expected.detach()) <= 1e-6
    attention._by_varlen_kernel(query, key, value, segments, scale)
    assert seen[0] is seen[1]


@pytest.mark.parametrize("segments", [(24, 24), None])
@pytest.mark.parametrize("name", ["s_aux", "sliding_window", "softcap", "position_bias", "what_comes_next"])
def test_what_it_would_leave_out_is_refused(name: str, segments: tuple[int, ...] | None) -> None:
    """Whatever a family gives its attention, and this one does not know."""
    query, key, value = inputs("cpu", torch.float32)
    module = torch.nn.Linear(1, 1)
    with pytest.raises(ExpertMeshError, match=f"--packing: Linear gives its attention {name}, which"):
        packed_attention(module, query, key, value, None, segments=segments, **{name: 8})
    known: dict[str, Any] = {name: None, "position_ids": torch.arange(24).unsqueeze(0), "use_cache": False}
    packed_attention(module, query, key[:, :1], value[:, :1], None, segments=(24, 24), **known)


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


CONVOLUTIONS = ["conv", "full_attention", "conv", "conv"]
STRANGE = ["conv", "full_attention", "indexed_attention", "of_next_year"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Qwen3NextConfig(**LAYERS), r"layers of qwen3_next \(linear_attention\) carry a state"),
        (JambaConfig(**LAYERS), r"layers of jamba \(linear_attention, mamba\) carry a state"),
        (Lfm2MoeConfig(**LAYERS, layer_types=CONVOLUTIONS), r"layers of lfm2_moe \(conv\) carry a state"),
        (
            with_kinds(Lfm2MoeConfig(**LAYERS), STRANGE),
            r"layers of lfm2_moe \(conv\) carry a state .*, layers of lfm2_moe \(indexed_attention\) choose the tokens "
            r".*, layers of lfm2_moe \(of_next_year\) are not known to keep the samples of a packed row apart; leave",
        ),
    ],
)
def test_layers_that_no_mask_keeps_within_a_sample(config: Any, said: str) -> None:
    for asked in ("auto", "sdpa", "eager"):
        with pytest.raises(ExpertMeshError, match=f"--packing: {said}"):
            choose_attention(asked, True, config)
    assert choose_attention("auto", False, config) == "sdpa"


def test_flash_attention_is_not_packed() -> None:
    with pytest.raises(ExpertMeshError, match="--attn-implementation flash_attention_2: does not keep packed samples"):
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
    with torch.no_grad(), _Searches() as told, told_whether_packed(batch):
        told_logits = model(**arguments).logits
    assert unasked.found > told.found == 0
    assert torch.equal(logits, told_logits)
