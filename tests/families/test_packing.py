"""Every causal MoE family with packed samples: the loss of each by itself, and every gradient.

In one process; test_parity.py holds gradients on several ranks for some of them.
"""

from dataclasses import replace
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
from expertmesh.training.micro_batch import token_loss_sum
from tests.distributed.reference import random_samples
from tests.families.configs import is_older, tiny_config, tiny_model
from tests.families.test_families import FAMILIES
from tests.tiny import loaded, relative_error

TOLERANCE = 1e-5
LEAK = 1e-4
"""What samples that see one another change the loss by, at least: far more than the tolerance."""
# of one token, and longer than windows (8) and than what DeepSeek-V4 compresses; one row is padded
A, B, C, D, E, F, G = random_samples([13, 4, 27, 1, 9, 18, 3], vocabulary=290)
ROWS = [[A, B, C], [D, E, F, G]]
ALONE = [[sample] for row in ROWS for sample in row]
CANCELLED = 1e-3
"""Gradients below this share of the norm of all are held to the tolerance at that share."""
FEW: dict[str, int] = {"index_topk": 2, "indexer_budget": 8, "index_topk_blocks": 2}
"""How many tokens, or blocks of them, layers choose: fewer than the samples have."""
MANY_HEADS = {"index_n_heads": 16, "indexer_n_heads": 16, "index_kpool": 2}
"""Scores are sums of what is positive of each head's: of few heads' many are 0, and which of equal ones is chosen may
turn on how many there are. Blocks are chosen by each head for itself. Tokens that are chosen together are to be few."""
SOME_WINDOWS = ["full_attention", "sliding_attention", "sliding_attention"]
REFUSED = {"mistral_large4": "do not run with packed samples"}
"""What the error says: keys and values that a layer has from another one are not found by sample."""
SINKS = ["flint", "gpt_oss", "granitemoe_swa", "mimo_v2_flash"]


@pytest.mark.sample(10)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone(family: str) -> None:
    """A family that an older transformers has, and that cannot be packed there, is refused."""
    config = tiny_config(family)
    if (is_older() or family in REFUSED) and (refusal := why_refused(config)):
        assert refusal.startswith("--packing: ")
        assert REFUSED.get(family, "") in refusal
        return
    assert family not in REFUSED
    theirs = tiny_model(family, seed=1)
    for attention in dict.fromkeys([choose_attention(name, True, config) for name in ("auto", "eager")]):
        model = packable(config, attention, theirs)
        _compare(model, attention)
        # the same rows as if each were one sample
        packed, alone = collate(ROWS), loss_of(model, collate(ALONE))
        leaking = loss_of(model, replace(packed, positions_BS=None, segments=None))
        assert abs(leaking - alone) > LEAK * alone, attention


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_choose_tokens(family: str) -> None:
    """Each sample's own, by fewer choices than it has tokens."""
    changes = few_choices(family)
    if not changes or family in REFUSED:
        return
    config, theirs = tiny_config(family, **changes), tiny_model(family, seed=1, **changes)
    attention = choose_attention("auto", True, config)
    model = packable(config, attention, theirs)
    _compare(model, str(changes))
    scored_alike = {name: value for name, value in changes.items() if name in MANY_HEADS}
    all_chosen = packable(tiny_config(family, **scored_alike), attention, theirs)
    few, many = (loss_of(one, collate(ALONE)) for one in (model, all_chosen))
    assert abs(few - many) > LEAK * many, "choices are to matter"


def test_padding_reaches_nothing() -> None:
    """Behind a short sample it may be long enough for what compresses tokens, where no sample is: weights that have a
    gradient of zeros decay, those that have none do not."""
    changes = {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12}}
    theirs = tiny_model("deepseek_v4", seed=1, **changes)
    model = packable(tiny_config("deepseek_v4", **changes), "eager", theirs)
    samples = random_samples([9, 9, 3], vocabulary=290)
    _compare(model, "padded", [samples[:2], samples[2:]])


FEW_TOKENS = 64


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_samples_stay_apart_where_layers_are_recomputed(family: str) -> None:
    config = tiny_config(family)
    model = packable(config, choose_attention("auto", True, config), tiny_model(family, seed=1))
    loss, grads = _loss_and_gradients(model, collate(ROWS))
    grads = {name: grad.clone() for name, grad in grads.items()}
    checkpoint_layers(model, "full")
    again, recomputed = _loss_and_gradients(model, collate(ROWS))
    assert again == loss
    assert recomputed.keys() == grads.keys()
    floor = CANCELLED * float(torch.stack([grad.norm() for grad in grads.values()]).norm())
    errors = {name: relative_error(recomputed[name], grad, floor) for name, grad in grads.items()}
    assert max(errors.values()) <= TOLERANCE, errors


UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    # its own code views all heads of a token as one row
    "heads of which 8 divides no width": ("afmoe", {"head_dim": 12}),
    # a layer has the experts of each token in a table
    "few tokens": ("deepseek_v4", {"vocab_size": FEW_TOKENS}),
    # of layers that are alike but for that, one leaves keys and values for another
    "shared keys and values": (
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", *["full_attention"] * 3],
            "num_kv_shared_layers": 1,
            "per_layer_config": {layer: {"head_dim": 32} for layer in (1, 2, 3)},
        },
    ),
}


@pytest.mark.parametrize(("family", "changes"), UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_configs(family: str, changes: dict[str, Any]) -> None:
    samples = random_samples([13, 4, 27, 1, 9, 18, 3], vocabulary=FEW_TOKENS - 4)
    theirs = tiny_model(family, seed=1, **changes)
    config = tiny_config(family, **changes)
    model = packable(config, choose_attention("auto", True, config), theirs)
    _compare(model, str(changes), [samples[:3], samples[3:]])


@pytest.mark.parametrize("chosen", [2, 3])
def test_choices_among_scores_of_few_heads(chosen: int) -> None:
    """Whose scores are 0 for many tokens alike: in the trial they are not, where it would look as if samples saw one
    another."""
    model = build_model(tiny_config("glm_moe_dsa", index_topk=chosen, index_n_heads=2), "eager")
    apply_packing(model)
    layers: Any = decoder_layers(model)
    assert any(isinstance(layer.self_attn.forward, BySample) for layer in layers)


def few_choices(family: str) -> dict[str, Any]:
    """Changes to the tiny config by which layers choose fewer tokens than samples have; none where they choose none."""
    named = tiny_config(family).get_text_config().to_dict()
    changes = {name: value for name, value in FEW.items() if name in named}
    if changes and "index_topk_blocks" not in changes:
        changes |= {name: value for name, value in MANY_HEADS.items() if name in named}
    return changes


def packable(config: Any, attention: str, theirs: Any) -> Any:
    """A model as train_ep.py builds it for packed samples, with the weights of another."""
    model = build_model(config, attention)
    apply_packing(model)
    attach_loss_head(loaded(model, theirs), "full")
    return model


def _compare(model: Any, what: str, rows: list[list[Sample]] = ROWS) -> None:
    """Of packed samples, and of the same in a row each."""
    by_itself = [[sample] for row in rows for sample in row]
    (packed, packed_grads), (alone, grads) = (_loss_and_gradients(model, collate(some)) for some in (rows, by_itself))
    assert packed == pytest.approx(alone, rel=TOLERANCE), what
    assert packed_grads.keys() == grads.keys()
    floor = CANCELLED * float(torch.stack([grad.norm() for grad in grads.values()]).norm())
    errors = {name: relative_error(packed_grads[name], grad, floor) for name, grad in grads.items()}
    assert not {name: error for name, error in errors.items() if not error <= TOLERANCE}, what


def _loss_and_gradients(model: Any, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    model.train().zero_grad()
    loss = token_loss_sum(model, batch)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def why_refused(config: Any) -> str | None:
    """By what train_ep.py asks before it loads a model."""
    try:
        apply_packing(build_model(config, choose_attention("auto", True, config)))
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
