"""Packed samples that do not see one another, in models of unusual configs: the loss of each by itself, and every
gradient. test_families.py has every family packed."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from expertmesh.moe.experts.model_layers import decoder_layers
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.parallelize.recompute import checkpoint_layers
from expertmesh.training.attention.by_sample import BySample, apply_packing
from expertmesh.training.attention.packed_attention import OWN, choose_attention
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.loss.head import attach_loss_head
from expertmesh.training.steps.micro_batch import token_loss_sum
from tests.families.configs import few_choices, tiny_config, tiny_model
from tests.parity.case import random_samples
from tests.rounding import OTHER_ORDER, assert_near, gradient_errors
from tests.tiny import loaded

TOLERANCE = OTHER_ORDER
LEAK = 1e-4
"""What choices and windows change the loss by, at least: far more than the tolerance."""
# of one token, and longer than windows (8) and than what DeepSeek-V4 compresses; one row is padded
LENGTHS = [13, 4, 27, 1, 9, 18, 3]
A, B, C, D, E, F, G = random_samples(LENGTHS, vocabulary=290)
ROWS = [[A, B, C], [D, E, F, G]]
SOME_WINDOWS = ["full_attention", "sliding_attention", "sliding_attention"]
SINKS = ["flint", "gpt_oss", "granitemoe_swa", "mimo_v2_flash"]
FEW_TOKENS = 64
UNUSUAL: dict[str, tuple[str, dict[str, Any], list[list[Sample]]]] = {
    # its own code views all heads of a token as one row
    "heads of which 8 divides no width": ("afmoe", {"head_dim": 12}, ROWS),
    # a layer has the experts of each token in a table
    "few tokens": (
        *("deepseek_v4", {"vocab_size": FEW_TOKENS}),
        [(few := random_samples(LENGTHS, vocabulary=FEW_TOKENS - 4))[:3], few[3:]],
    ),
    # of layers that are alike but for that, one leaves keys and values for another
    "shared keys and values": (
        "gemma4_text",
        {
            **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", *["full_attention"] * 3]},
            **{"num_kv_shared_layers": 1, "per_layer_config": {layer: {"head_dim": 32} for layer in (1, 2, 3)}},
        },
        ROWS,
    ),
    # behind a short sample it may be long enough for what compresses tokens, where no sample is: weights that have a
    # gradient of zeros decay, those that have none do not
    "padding that is long enough": (
        "deepseek_v4",
        {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12}},
        [(short := random_samples([9, 9, 3], vocabulary=290))[:2], short[2:]],
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_configs(name: str) -> None:
    family, changes, rows = UNUSUAL[name]
    by_itself = [[sample] for row in rows for sample in row]
    model = packable(family, "auto", changes)
    (packed, packed_grads), (alone, grads) = (losses_and_gradients(model, collate(some)) for some in (rows, by_itself))
    assert packed == pytest.approx(alone, rel=TOLERANCE)
    assert_near_gradients(packed_grads, grads)


@pytest.mark.parametrize("family", ["deepseek_v32", "qwen4_exp", "minimax_m3_vl_text"])
def test_choices_matter(family: str) -> None:
    """Of the few tokens that layers choose in the tests of families: all would give another loss."""
    changes = few_choices(family)
    all_chosen = {name: value for name, value in changes.items() if "_heads" in name}
    few, many = (loss_of(packable(family, "auto", some), collate(ROWS)) for some in (changes, all_chosen))
    assert abs(few - many) > LEAK * many


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_samples_stay_apart_where_layers_are_recomputed(family: str) -> None:
    model = packable(family, "auto", {})
    loss, grads = losses_and_gradients(model, collate(ROWS))
    checkpoint_layers(model, "full")
    again, recomputed = losses_and_gradients(model, collate(ROWS))
    assert again == loss
    assert_near_gradients(recomputed, grads)


@pytest.mark.parametrize("chosen", [2, 3])
def test_choices_among_scores_of_few_heads(chosen: int) -> None:
    """Whose scores are 0 for many tokens alike: in the trial they are not, where it would look as if samples saw one
    another."""
    model = build_model(tiny_config("glm_moe_dsa", index_topk=chosen, index_n_heads=2), "eager")
    apply_packing(model)
    layers: Any = decoder_layers(model)
    assert any(isinstance(layer.self_attn.forward, BySample) for layer in layers)


def packable(family: str, attention: str, changes: dict[str, Any]) -> Any:
    """A model as train_ep.py builds it for packed samples."""
    config = tiny_config(family, **changes)
    model = build_model(config, choose_attention(attention, True, config))
    apply_packing(model)
    attach_loss_head(loaded(model, tiny_model(family, seed=1, **changes)), "full")
    return model


def losses_and_gradients(model: Any, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    model.train().zero_grad()
    loss = token_loss_sum(model, batch)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    errors = gradient_errors(found, wanted)
    assert not {name: error for name, error in errors.items() if not error <= TOLERANCE}


@torch.no_grad()
def loss_of(model: Any, batch: Batch) -> float:
    return float(token_loss_sum(model, batch))


def test_sdpa_would_leave_out_sinks() -> None:
    """auto is our own attention there; asking for sdpa is an error, packed or not."""
    for config in map(tiny_config, SINKS):
        assert choose_attention("auto", True, config) == choose_attention("auto", False, config) == OWN
        with pytest.raises(ExpertMeshError) as refused:
            build_model(config, "sdpa")
        said = str(refused.value)
        assert said.startswith(f"--attn-implementation sdpa: transformers does not run {config.model_type} with it (")
        assert said.endswith("yet); leave it out, or give eager"), "no more than the sentence about this model"


@pytest.mark.sample(3)
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
    assert_near(torch.stack(ours.logits), torch.stack(eager.logits))


def test_labels_change_no_attention() -> None:
    """A Gemma 4 that sees images hands them down to its attention when it is asked for its loss, as each model is that
    is probed."""
    config, theirs = tiny_config("gemma4"), tiny_model("gemma4", seed=1)
    tokens_BS, losses = torch.tensor([A.tokens]), []
    for attention in (OWN, "eager"):
        model = loaded(build_model(config, attention), theirs).eval()
        losses.append(model(tokens_BS, labels=tokens_BS).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE)


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


def test_a_window_that_no_layer_has() -> None:
    """sliding_window stands in the config, and every layer is one of full attention: sample by sample."""
    for config in map(tiny_config, ("qwen2_moe", "mellum", "laguna")):
        text = config.get_text_config()
        text.layer_types = ["full_attention"] * text.num_hidden_layers
        text.sliding_window = 8
        assert choose_attention("auto", True, config) == OWN
        build_model(config, OWN)
