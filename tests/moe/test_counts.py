"""Parameter and FLOP counts against what transformers and torch count themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertmesh.moe.experts.model_facts import Attention, facts_of
from expertmesh.moe.hf_model.build import build_model, count_parameters
from expertmesh.moe.hf_model.counts import seen_pairs, training_flops
from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.training.data.batch import collate
from expertmesh.training.data.samples import Sample
from tests.families.configs import tiny_config as config_of
from tests.tiny import tiny_config, tiny_mixtral


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_parameters(changes: dict[str, Any]) -> None:
    counts = count_parameters(build_model(tiny_config(**changes)))
    model = tiny_mixtral(**changes)
    assert counts.total == model.num_parameters()
    experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name)
    assert counts.experts == experts
    assert counts.active == counts.total - experts + experts * 2 // 8
    assert counts.embedding == counts.head == model.get_output_embeddings().weight.numel()


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 16}])
def test_flops(changes: dict[str, Any]) -> None:
    """Against torch's own counter, over forward and backward. It counts all pairs of attention, masked ones too."""
    changes = {"hidden_size": 64, "intermediate_size": 128, **changes}
    # transformers' eager experts: in-place products, as our loop kernel has them, escape torch's counter
    model = MixtralForCausalLM(tiny_config(**changes, attn_implementation="eager", experts_implementation="eager"))
    rows, length = 2, 40
    tokens = torch.randint(0, 320, (rows, length), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    counts = count_parameters(build_model(tiny_config(**changes)))
    expected = training_flops(counts, model.config, rows * length, rows * length, [rows * length**2])
    # the scale vectors of norms count as matrices here
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


LENGTHS = (21, 5, 13)
"""Of samples in a packed sequence; windows are 8 tokens wide."""


@pytest.mark.parametrize(
    ("family", "changes", "attention"),
    [
        ("mixtral", {}, "eager"),
        ("mixtral", {"sliding_window": 8}, "auto"),
        ("gpt_oss", {}, "auto"),
        ("qwen3_next", {}, "eager"),
        pytest.param("gemma4", {}, "auto", marks=pytest.mark.slow),
        pytest.param("kimi_linear", {}, "eager", marks=pytest.mark.slow),
        pytest.param("lfm2_moe", {}, "auto", marks=pytest.mark.slow),
        pytest.param("mimo_v2_flash", {}, "eager", marks=pytest.mark.slow),
        pytest.param("zaya", {}, "auto", marks=pytest.mark.slow),
    ],
)
def test_pairs_that_attention_multiplies(
    family: str, changes: dict[str, Any], attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the entries that are true in the masks that transformers itself makes for each layer of packed samples,
    times the widths that it multiplies."""
    config = config_of(family, **changes)
    facts = facts_of(build_model(config, attention))
    spans = [range(length) for length in LENGTHS]
    found = sum(
        kind.width * pairs for kind, pairs in zip(facts.attention, seen_pairs(facts.attention, spans), strict=True)
    )
    # some make no masks that keep packed samples apart
    sequences: list[tuple[int, ...]] = [LENGTHS] if facts.masks_by_position else [(length,) for length in LENGTHS]
    assert found == _multiplied(config, sequences, monkeypatch)


def _multiplied(config: Any, sequences: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> int:
    """By all layers, in a forward of each sequence, of samples of these lengths."""
    multiplied, get_interface = [], ALL_ATTENTION_FUNCTIONS.get_interface

    def counting(name: str, default: Any) -> Any:
        def attention(
            module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **more: Any
        ) -> Any:
            pairs = int((attention_mask[0, 0] == 0).sum())
            multiplied.append(pairs * query.shape[1] * (query.shape[-1] + value.shape[-1]))
            return get_interface(name, default)(module, query, key, value, attention_mask, **more)

        return attention

    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", counting)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for lengths in sequences:
        positions_1S = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
        with torch.no_grad():
            model(input_ids=torch.full_like(positions_1S, 5), position_ids=positions_1S, use_cache=False)
    return sum(multiplied)


@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_pairs_by_counting(window: int) -> None:
    """Pairs of complete samples, and of the parts of them that ranks of a context-parallel group hold, also beyond the
    end."""
    samples = [Sample.of_prompt(list(range(3, 3 + length)), 1) for length in LENGTHS]
    rows = [samples[:2], samples[2:]]
    kinds = [Attention(window, 1)]
    expected = sum(min(place + 1, window or place + 1) for length in LENGTHS for place in range(length))
    assert seen_pairs(kinds, collate(rows).spans) == (expected,)
    for ranks in (2, 4):
        parts = [collate(rows, CPGroup(ranks, rank, None)) for rank in range(ranks)]
        assert sum(seen_pairs(kinds, part.spans)[0] for part in parts) == expected
        assert [sum(map(len, part.spans)) for part in parts] == [part.num_tokens for part in parts]
