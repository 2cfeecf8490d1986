"""Modules that run sample by sample: where positions go, which modules these are, and what is refused."""

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralAttention, MixtralDecoderLayer, MixtralSparseMoeBlock

from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.experts.model_layers import decoder_layers
from expertmesh.moe.hf_model import facts_cache
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.attention import by_sample
from expertmesh.training.attention.by_sample import BySample, apply_packing, lay_out
from expertmesh.training.attention.packed_attention import OWN
from tests.families.configs import tiny_config as config_of
from tests.tiny import tiny_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("segments", [(1,), (5, 1, 7, 3, 9, 3, 2, 2), (300, 299, 4, 3, 1, 1, 225, 224), (4,) * 9])
def test_layout(segments: tuple[int, ...]) -> None:
    """Samples in order, each padded with its last position; a way back; and little padding."""
    layout = lay_out(segments, CPU)
    total = sum(segments)
    assert torch.equal(layout.place_M[layout.back_N], torch.arange(total))
    assert sum(n * longest for n, longest in layout.sizes) == len(layout.place_M) <= total / 0.75
    ends = torch.tensor(segments).cumsum(0)
    starts = {int(end) - length: length for end, length in zip(ends, segments, strict=True)}
    for places, (n, longest) in zip(
        layout.place_M.split([n * longest for n, longest in layout.sizes]), layout.sizes, strict=True
    ):
        for row in places.view(n, longest).tolist():
            length = starts.pop(row[0])
            assert row == [row[0] + min(place, length - 1) for place in range(longest)]
    assert not starts


class _Sums(nn.Module):
    """Sums up what came before: a state."""

    def forward(self, x_BSD: Tensor, mask: Tensor | None = None, chosen: Tensor | None = None) -> Any:
        self.sizes = [*getattr(self, "sizes", []), tuple(x_BSD.shape[:2])]
        seen = None if mask is None else mask.sum(dim=-1)[:, 0]
        return x_BSD.cumsum(dim=1), seen, chosen


def test_one_module() -> None:
    """State, mask and chosen tokens of each sample by itself; sequences of one sample as they are."""
    sums = _Sums()
    sums.forward = BySample(sums.forward)  # type: ignore[method-assign]
    segments, x_BSD = (3, 2, 1, 4, 2), torch.arange(12.0).view(2, 6, 1).requires_grad_()
    mask_B1SS = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    chosen_BSK = torch.arange(6).expand(2, 6, 6)
    with Forward(segments=segments):
        state_BSD, seen_BS, back_BSK = sums(x_BSD, mask=mask_B1SS, chosen=chosen_BSK)
    samples = x_BSD.detach().flatten().split(segments)
    assert torch.equal(state_BSD.flatten(), torch.cat([sample.cumsum(0) for sample in samples]))
    assert torch.equal(seen_BS.flatten(), torch.cat([torch.arange(length) + 1 for length in segments]))
    assert back_BSK.shape == (2, 6, 4)
    assert back_BSK[0, 3].tolist() == [0, 1, 0, 0]
    state_BSD.sum().backward()
    assert x_BSD.grad is not None
    assert torch.equal(x_BSD.grad.flatten(), torch.cat([torch.arange(n, 0, -1.0) for n in segments]))
    assert sums.sizes == [(2, 4), (2, 2), (1, 1)]
    with Forward():
        whole_BSD, _, back_BSK = sums(x_BSD, chosen=chosen_BSK)
    assert torch.equal(whole_BSD, x_BSD.cumsum(dim=1))
    assert back_BSK is chosen_BSK


def found_in(model: Any) -> list[str]:
    layer = decoder_layers(model)[0]
    return [name for name, child in layer.named_children() if isinstance(child.forward, BySample)]


def test_masks_suffice_for_attention() -> None:
    model = build_model(tiny_config(), OWN)
    apply_packing(model)
    assert found_in(model) == []


def test_a_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer that its config calls by no name."""
    own = MixtralAttention.forward

    @wraps(own)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(self, hidden_states.cumsum(dim=1), *args, **kwargs)

    monkeypatch.setattr(MixtralAttention, "forward", forward)
    model = build_model(tiny_config(), OWN)
    apply_packing(model)
    assert found_in(model) == ["self_attn"]


def test_a_trial_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For the same model and attention, in this process and for others; also which layers it has run by sample."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts_cache._known.clear()
    runs = []

    def noting(*args: Any) -> list[Tensor]:
        runs.append(args)
        return own(*args)

    own = by_sample._layers_results
    monkeypatch.setattr(by_sample, "_layers_results", noting)
    for attention, by_itself, times in ((OWN, [], 2), (OWN, [], 0), ("eager", ["mamba"], 4), ("eager", ["mamba"], 0)):
        model = build_model(config_of("granitemoehybrid"), attention)
        apply_packing(model)
        assert found_in(model) == ["mamba"]
        # whose mask eager attention would look for in vain
        of_attention = [part for part in decoder_layers(model)[1].children() if isinstance(part.forward, BySample)]
        assert len(of_attention) == len(by_itself)
        assert len(runs) == times
        runs.clear()
        facts_cache._known.clear()
    facts_cache._known.clear()


@pytest.mark.parametrize(
    ("mixing", "says"),
    [
        (
            MixtralDecoderLayer,
            r"layers of MixtralForCausalLM \(MixtralDecoderLayer\) compute different outputs for packed samples",
        ),
        (
            MixtralSparseMoeBlock,
            r"layers of MixtralForCausalLM \(MixtralSparseMoeBlock\) mix tokens outside of attention",
        ),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, mixing: Any, says: str) -> None:
    """What mixes tokens in no module that could run sample by sample: none that takes a cache, or one with experts."""
    own = mixing.forward

    def of_layer(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(self, hidden_states.cumsum(dim=1), *args, **kwargs)

    def of_block(self: Any, hidden_states: Tensor, past_key_values: Any = None) -> Any:
        return own(self, hidden_states.cumsum(dim=1))

    forward = of_layer if mixing is MixtralDecoderLayer else of_block
    monkeypatch.setattr(mixing, "forward", forward)
    model = build_model(tiny_config(), OWN)
    with pytest.raises(ExpertMeshError, match=f"--packing: {says}.*; leave --packing out"):
        apply_packing(model)
