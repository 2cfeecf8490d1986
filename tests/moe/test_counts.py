"""Parameter and FLOP counts against what transformers and torch count themselves."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralForCausalLM

from moe import build_model, count_parameters, training_flops
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
    expected = training_flops(counts, model.config, rows * length, rows * length, rows * length**2)
    # the scale vectors of norms count as matrices here
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)
