"""Local dispatch, routing statistics and the layer against HF's own block, and swapped models, without ranks."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from expertmesh.moe.dispatch.alltoall import LocalDispatcher, _transpose_blocks
from expertmesh.moe.dispatch.permute import count_experts
from expertmesh.moe.experts import layer as experts_layer
from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.experts.router_stats import (
    LOG_SCORES,
    RouterKind,
    RouterStats,
    load_balancing_loss,
    router_stats,
    router_z_loss,
)
from expertmesh.moe.hf_model.build import (
    _check_alike,
    build_model,
    dmoe_from,
)
from expertmesh.moe.util.errors import ExpertMeshError
from tests.families import configs as families
from tests.rounding import OTHER_ORDER, assert_near, near
from tests.tiny import loaded, our_experts, tiny_block, tiny_config, tiny_mixtral


def layer() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_local_experts": 4}
    return tiny_block(std=0.3, **sizes, num_experts_per_tok=2)


def test_padding_is_neither_routed_nor_counted() -> None:
    moe, x_BSD, grad_BSD = layer(), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    is_token_BS = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool()

    def run(x: Tensor, mask: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor, RouterStats]:
        x = x.clone().requires_grad_()
        with Forward(mask) as forward:
            out = moe(x)
        return out, torch.autograd.grad(out, x, grad)[0], forward.stats[moe.experts]

    out, grad, padded = run(x_BSD, is_token_BS, grad_BSD)
    alone, grad_alone, stats = run(x_BSD[is_token_BS].unsqueeze(0), None, grad_BSD[is_token_BS].unsqueeze(0))
    assert_near((out[is_token_BS], grad[is_token_BS]), (alone[0], grad_alone[0]))
    assert not out[~is_token_BS].any()
    assert not grad[~is_token_BS].any()
    for name in ("counts_E", "prob_sum_E", "z_sum", "entropy_sum"):
        torch.testing.assert_close(getattr(padded, name), getattr(stats, name), rtol=OTHER_ORDER, atol=0)


def test_nothing_but_padding() -> None:
    moe = layer()
    with Forward(torch.zeros(1, 3, dtype=torch.bool)):
        out = moe(torch.randn(1, 3, 16, requires_grad=True))
    grads = torch.autograd.grad(out.sum(), list(moe.parameters()))
    assert not any(tensor.any() for tensor in (out, *grads))


@pytest.mark.parametrize("has_padding", [False, True])
def test_dispatch_gradients_by_finite_differences(has_padding: bool) -> None:
    experts_TK = torch.tensor([[1, 0], [2, 1], [1, 2]])
    if has_padding:
        experts_TK[1] = 3
    counts_E = count_experts(experts_TK, 3)
    dispatcher = LocalDispatcher(3)

    def there_and_back(x_TD: Tensor, weights_TK: Tensor) -> Tensor:
        sent = dispatcher.send(x_TD, experts_TK, weights_TK, counts_E, has_padding)
        rows, experts = sent.parts[0].arrive(sent.rows[0]), sent.parts[0].experts
        scale = torch.arange(1, rows.shape[0] + 1, dtype=rows.dtype).unsqueeze(1)
        assert experts.counts_e.sum() == experts.num_rows == rows.shape[0] == (4 if has_padding else 6)
        return sent.combine([sent.parts[0].give_back(rows * scale)])

    torch.manual_seed(0)
    x_TD = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights_TK = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(there_and_back, (x_TD, weights_TK))


def test_transposing_blocks() -> None:
    """Rows grouped by source then expert come out grouped by expert then source."""
    lengths = torch.tensor([[2, 0, 1], [1, 3, 0]])
    labels = [(s, e, i) for s in range(2) for e in range(3) for i in range(int(lengths[s, e]))]
    index = _transpose_blocks(lengths, 7)
    inverse = _transpose_blocks(lengths.t(), 7)
    assert [labels[i] for i in index] == sorted(labels, key=lambda label: (label[1], label[0], label[2]))
    assert torch.equal(index[inverse], torch.arange(7))


def test_statistics_of_a_router() -> None:
    """By their definitions, from what HF's router returned in the same forward."""
    moe, seen = layer(), []
    moe.experts.kind = RouterKind("softmax")
    moe.gate.register_forward_hook(lambda router, args, output: seen.append(output))
    with Forward() as forward:
        moe(torch.randn(1, 11, 16))
        assert not forward.logits_TE, "the experts took them"
    ((logits_TE, _, experts_TK),) = seen
    stats = forward.stats[moe.experts]
    assert stats.rows_computed == 2 * 11
    assert torch.equal(stats.counts_E, experts_TK.flatten().bincount(minlength=4))
    assert_near(stats.prob_sum_E, logits_TE.softmax(dim=-1).sum(dim=0))
    assert_near(stats.z_sum, logits_TE.logsumexp(dim=-1).square().sum())
    entropy = torch.distributions.Categorical(logits=logits_TE.detach()).entropy()
    assert_near(stats.entropy_sum, entropy.sum())
    sums = (stats.prob_sum_E, stats.z_sum, stats.entropy_sum)
    assert [total is not None and total.requires_grad for total in sums] == [True, True, False]


def test_statistics_that_no_loss_is_made_of() -> None:
    """The same figures for the log, without a graph, and none in a recomputation."""
    moe = layer()
    moe.experts.kind = RouterKind("softmax")
    x_BSD, found = torch.randn(1, 11, 16), dict[bool, RouterStats]()
    for has_losses in (True, False):
        with Forward(torch.arange(11).view(1, 11) < 9, has_router_losses=has_losses) as forward:
            moe(x_BSD)
        found[has_losses] = forward.stats[moe.experts]
    with_losses, without = found[True], found[False]
    assert torch.equal(with_losses.counts_E, without.counts_E)
    assert with_losses.rows_computed == without.rows_computed
    assert with_losses.entropy_sum is not None
    assert without.entropy_sum is not None
    assert torch.equal(with_losses.entropy_sum, without.entropy_sum)
    assert (without.prob_sum_E, without.z_sum, without.entropy_sum.requires_grad) == (None, None, False)
    with forward.again() as again, mock.patch.object(experts_layer, "router_stats", side_effect=AssertionError):
        moe(x_BSD)
    assert not again.stats
    assert not again.logits_TE


def test_statistics_of_sure_routers() -> None:
    """A probability that is 0 in fp32 makes no NaN of the entropy, and bf16 logits are summed up in fp32."""
    logits_TE = torch.tensor([[300.0, 0.0], [0.0, 0.0]], dtype=torch.bfloat16)
    stats = router_stats(torch.tensor([1, 1]), logits_TE, None, 0, "softmax")
    assert stats.entropy_sum is not None
    assert stats.prob_sum_E is not None
    assert float(stats.entropy_sum) == near(math.log(2))
    assert stats.prob_sum_E.tolist() == near([1.5, 0.5])


@pytest.mark.parametrize("score", LOG_SCORES)
def test_entropy_is_of_the_scores(score: str) -> None:
    """As shares of their sum, whatever function the router takes; those far below the others count for nothing."""
    scores: dict[str, Any] = {
        "softmax": lambda x: x.softmax(dim=-1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
        "given": lambda x: x,
    }
    logits_TE = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).abs()
    logits_TE[0, 0] = 0.0 if score == "given" else -1e4
    is_token_T = torch.tensor([True, True, True, False, True])
    stats = router_stats(torch.ones(6), logits_TE, is_token_T, 0, score)
    shares_TE = scores[score](logits_TE.double()).clamp(min=0)
    entropy_T = torch.distributions.Categorical(probs=shares_TE / shares_TE.sum(dim=-1, keepdim=True)).entropy()
    assert stats.entropy_sum is not None
    assert float(stats.entropy_sum) == near(float(entropy_T[is_token_T].sum()))


def test_entropy_of_unknown_scores_is_not_told() -> None:
    stats = router_stats(torch.ones(6), torch.randn(5, 6), None, 0, None)
    assert stats.entropy_sum is None
    assert stats.z_sum is not None


def test_experts_without_a_router_count_alone() -> None:
    moe = layer()
    with Forward() as forward:
        moe.experts(torch.randn(3, 16), torch.tensor([[0, 1], [3, 1], [1, 2]]), torch.rand(3, 2))
    stats = forward.stats[moe.experts]
    assert stats.counts_E.tolist() == [1, 3, 1, 1]
    assert (stats.prob_sum_E, stats.z_sum, stats.entropy_sum) == (None, None, None)


def test_top_k_must_be_in_the_experts() -> None:
    theirs = tiny_mixtral().model.layers[0].mlp
    for top_k in (0, 9):
        with pytest.raises(ExpertMeshError, match=f"here: {top_k} experts per token, of 8"):
            dmoe_from(theirs.experts, top_k, "here")
    assert our_experts(theirs.experts, 8).shape.top_k == 8


def test_auxiliary_losses_add_up_over_ranks() -> None:
    """Two halves of a batch give parts that sum to HF's loss on the whole, or to its mean over the layers where each is
    balanced by itself, and to the z-loss by its definition."""
    torch.manual_seed(0)
    routers = torch.randn(3, 5, 8)
    x_TD = torch.randn(14, 8)
    logits: Any = tuple(x_TD @ router_ED.t() for router_ED in routers)

    def stats_of(logits_TE: Tensor) -> RouterStats:
        return router_stats(count_experts(logits_TE.topk(2).indices, 5), logits_TE, None, 0, "softmax")

    halves = [[stats_of(layer[half]) for layer in logits] for half in (slice(5), slice(5, 14))]
    counts_LE = torch.stack([sum(stats.counts_E for stats in layer) for layer in zip(*halves, strict=True)])
    pooled = sum(load_balancing_loss(half, counts_LE.sum(dim=0, keepdim=True), 14) for half in halves)
    assert_near(pooled, load_balancing_loss_func(logits, 5, 2))
    by_layer = sum(load_balancing_loss(half, counts_LE, 14) for half in halves)
    of_layers = [torch.as_tensor(load_balancing_loss_func((layer,), 5, 2)) for layer in logits]
    assert_near(by_layer, torch.stack(of_layers).mean())
    z = sum(router_z_loss(half, 14) for half in halves)
    assert_near(z, torch.stack(logits).logsumexp(dim=-1).square().mean())


def test_swapped_model_is_on_meta_and_padding_is_passed_on() -> None:
    model: Any = build_model(tiny_config())
    assert all(p.is_meta for p in model.parameters())
    layers = moe_layers(model)
    assert [layer.router for layer in layers] == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    model = loaded(model, tiny_mixtral())
    tokens = torch.ones(2, 4, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])

    def choices(forward: Forward, **arguments: Any) -> list[int]:
        with forward:
            model(**arguments, use_cache=False)
        return [int(stats.counts_E.sum()) for stats in forward.take_stats(moe_layers(model))]

    assert choices(Forward(), input_ids=tokens, attention_mask=mask) == [2 * 6, 2 * 6]
    assert choices(Forward(mask.bool()), input_ids=tokens) == [2 * 6, 2 * 6]
    embedded = model.get_input_embeddings()(tokens)
    assert choices(Forward(), input_ids=None, inputs_embeds=embedded, attention_mask=mask) == [2 * 6, 2 * 6]
    # a forward without a mask must not remember the last one
    assert choices(Forward(), input_ids=tokens) == [2 * 8, 2 * 8]


def test_buffers_are_those_of_transformers() -> None:
    """Filled as `from_pretrained` would fill them, though the model is built on the meta device."""
    found, expected = dict(build_model(tiny_config()).named_buffers()), dict(tiny_mixtral().named_buffers())
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], buffer) for name, buffer in expected.items())


def test_generation_equals_hf() -> None:
    """Greedy, with a KV cache and left padding, as a user of transformers generates."""
    theirs: Any = tiny_mixtral().eval()
    ours = loaded(build_model(theirs.config), theirs)
    tokens = torch.randint(0, 320, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    generate = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.eval().generate(tokens, **generate), theirs.generate(tokens, **generate))


def test_models_that_cannot_be_built() -> None:
    from transformers import DogeConfig, LlamaConfig, ViTConfig

    with pytest.raises(ExpertMeshError, match="LlamaForCausalLM has no mixture-of-experts layer with this config"):
        build_model(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=4,
                                num_attention_heads=2, num_key_value_heads=2))  # fmt: skip
    with pytest.raises(ExpertMeshError, match=r"does not mark the class of their experts \(DogeCDMoE at"):
        build_model(DogeConfig(is_moe=True, num_hidden_layers=1, num_experts=16))
    with pytest.raises(ExpertMeshError, match="transformers has no language model of type vit"):
        build_model(ViTConfig())
    with pytest.raises(
        ExpertMeshError, match=r"--attn-implementation nothing: .* run mixtral with it .*; leave it out"
    ):
        build_model(tiny_config(), "nothing")
    with pytest.raises(ExpertMeshError, match=r"model\.layers\.0\.mlp\.experts: 0 experts per token, of 8"):
        build_model(tiny_config(num_experts_per_tok=0))
    with pytest.raises(ExpertMeshError, match=r"transformers' MixtralForCausalLM does not run: .* not in range"):
        build_model(tiny_config(num_experts_per_tok=9))


def test_layers_with_unlike_experts() -> None:
    """By a family whose config has a list of choices per token; and by experts, of which none has such a list."""
    unlike = families.tiny_config("hunyuan_v1_moe", moe_topk=[1, 2, 2])
    with pytest.raises(ExpertMeshError, match="layers with 8 experts, top-1 routing and 8 experts, top-2"):
        build_model(unlike)
    assert len(moe_layers(build_model(families.tiny_config("hunyuan_v1_moe", moe_topk=[2, 2, 2])))) == 3
    models = torch.nn.ModuleList([build_model(tiny_config(num_local_experts=experts)) for experts in (8, 4)])
    with pytest.raises(ExpertMeshError, match="layers with 4 experts, top-2 routing and 8 experts, top-2"):
        _check_alike(models)


def test_buffers_that_cannot_be_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a config has a negative `initializer_range`, of a family whose buffers depend on it."""

    def refuse(model: Any, module: Any) -> None:
        raise RuntimeError("normal expects std >= 0.0")

    monkeypatch.setattr(type(tiny_mixtral().model), "_init_weights", refuse)
    with pytest.raises(
        ExpertMeshError, match=r"cannot fill the buffers of MixtralRotaryEmbedding.* RuntimeError: normal"
    ):
        build_model(tiny_config())
