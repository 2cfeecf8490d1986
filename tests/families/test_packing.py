"""Every causal MoE family with packed samples: the loss of each by itself, or an error that says why not.

In one process; test_parity.py holds gradients on several ranks for some of them.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from expertmesh.moe import ExpertMeshError, build_model
from expertmesh.training.attention.packed_attention import OWN, check_packing, choose_attention
from expertmesh.training.data import Batch, collate
from expertmesh.training.loss.head import attach_loss_head
from expertmesh.training.micro_batch import token_loss_sum
from tests.distributed.reference import random_samples
from tests.families.configs import tiny_config, tiny_model
from tests.families.test_families import FAMILIES
from tests.tiny import loaded

TOLERANCE = 1e-5
LEAK = 1e-4
"""What samples that see one another change the loss by, at least: far more than the tolerance."""
# of one token, and longer than windows (8) and than what DeepSeek-V4 compresses; one row is padded
A, B, C, D, E, F, G = random_samples([13, 4, 27, 1, 9, 18, 3], vocabulary=290)
ROWS = [[A, B, C], [D, E, F, G]]
CARRIES = "carry a state from one token to the next"
BLOCKS = "group a sequence's tokens in blocks"
REFUSED = {
    "axk2": "select the tokens to attend to in the complete sequence",
    "bailing_hybrid": CARRIES,
    "deepseek_v32": "select the tokens to attend to in the complete sequence",
    "deepseek_v4": BLOCKS,
    "dots3_note": "select the tokens to attend to in the complete sequence",
    "glm_moe_dsa": "select the tokens to attend to in the complete sequence",
    "granitemoehybrid": CARRIES,
    "hy_v4": "select the tokens to attend to in the complete sequence",
    "inkling_text": CARRIES,
    "jamba": CARRIES,
    "kimi_linear": CARRIES,
    "lfm2_moe": CARRIES,
    "minimax": CARRIES,
    "minimax_m3_vl_text": BLOCKS,
    "nemotron_h": CARRIES,
    "qwen3_5_moe": CARRIES,
    "qwen3_next": CARRIES,
    "qwen4_exp": CARRIES,
    "zaya": CARRIES,
}
"""What the error says. A family that is not here, as one that a new release brings, is packed or refused, and exact."""
SOME_WINDOWS = ["full_attention", "sliding_attention", "sliding_attention"]
SINKS = ["flint", "gpt_oss", "granitemoe_swa", "mimo_v2_flash"]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone_or_is_refused(family: str) -> None:
    config = tiny_config(family)
    refusal = why_refused(config)
    if refusal is not None:
        assert refusal.startswith("--packing: ")
        assert REFUSED.get(family, "") in refusal
        return
    assert family not in REFUSED
    chosen = choose_attention("auto", True, config)
    theirs = tiny_model(family, seed=1)
    for attention in dict.fromkeys([chosen, choose_attention("eager", True, config)]):
        model = loaded(build_model(config, attention), theirs).eval()
        attach_loss_head(model, "full")
        alone = sum(loss_of(model, collate([[sample]])) for row in ROWS for sample in row)
        packed = collate(ROWS)
        assert loss_of(model, packed) == pytest.approx(alone, rel=TOLERANCE), attention
        # the same rows as if each were one sample
        leaking = loss_of(model, replace(packed, positions_BS=None, segments=None))
        assert abs(leaking - alone) > LEAK * alone, attention


def why_refused(config: Any) -> str | None:
    """By what train_ep.py asks before it loads a model."""
    try:
        check_packing(build_model(config, choose_attention("auto", True, config)))
    except ExpertMeshError as error:
        return str(error)
    return None


@torch.no_grad()
def loss_of(model: Any, batch: Batch) -> float:
    return float(token_loss_sum(model, batch))


@pytest.mark.parametrize("family", SINKS)
def test_sdpa_would_leave_out_sinks(family: str) -> None:
    """auto is our own attention there; asking for sdpa is an error, packed or not."""
    config = tiny_config(family)
    assert choose_attention("auto", True, config) == choose_attention("auto", False, config) == OWN
    with pytest.raises(ExpertMeshError, match="with --attn-implementation sdpa"):
        build_model(config, "sdpa")


@pytest.mark.parametrize("family", [*SINKS, "afmoe", "gemma4_text"])
def test_answers(family: str) -> None:
    """With windows, most with sinks too: prompts of two lengths, padded in front, and what is kept of keys, values."""
    config, theirs = tiny_config(family), tiny_model(family, seed=1)
    prompts_BS, is_token_BS = torch.tensor([A.tokens, [0] * 4 + E.tokens]), torch.ones(2, 13, dtype=torch.int64)
    is_token_BS[1, :4] = 0
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    results = []
    for attention in (OWN, "eager"):
        model = loaded(build_model(config, attention), theirs).eval()
        results.append(model.generate(prompts_BS, attention_mask=is_token_BS, generation_config=settings))
    ours, eager = results
    assert torch.equal(ours.sequences, eager.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(eager.logits), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("phimoe", {"sliding_window": 8}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "layer_types": SOME_WINDOWS}),
        ("mixtral", {"sliding_window": 8}),
    ],
)
def test_windows(family: str, changes: dict[str, Any]) -> None:
    """Two families do not tell their attention of them: its masks do. Packed or not, as eager attention has them."""
    config = tiny_config(family, **changes)
    theirs, losses = tiny_model(family, seed=1), []
    for attention in (choose_attention("auto", True, config), "eager"):
        model = loaded(build_model(config, attention), theirs).eval()
        attach_loss_head(model, "full")
        alone = sum(loss_of(model, collate([[sample]])) for row in ROWS for sample in row)
        losses += [alone, loss_of(model, collate(ROWS))]
    assert choose_attention("auto", False, config) == choose_attention("auto", True, config) == OWN
    assert losses == pytest.approx([losses[0]] * 4, rel=TOLERANCE)
    whole = loaded(build_model(tiny_config(family), "eager"), theirs).eval()
    attach_loss_head(whole, "full")
    without = sum(loss_of(whole, collate([[sample]])) for row in ROWS for sample in row)
    assert abs(without - losses[0]) > LEAK * losses[0], "windows are to matter"


@pytest.mark.parametrize("family", ["qwen2_moe", "mellum", "laguna"])
def test_a_window_that_no_layer_has(family: str) -> None:
    """sliding_window stands in the config, and every layer is one of full attention: sample by sample."""
    config = tiny_config(family)
    text = config.get_text_config()
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    text.sliding_window = 8
    assert choose_attention("auto", True, config) == OWN
    build_model(config, OWN)
