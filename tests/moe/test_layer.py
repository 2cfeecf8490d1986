"""Router, permutations, local dispatch and the whole layer against HF's own block, without ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func

from moe import (
    KERNELS,
    DroplessMoE,
    ExpertMeshError,
    MoEShape,
    Router,
    build_model,
    check_config,
    family_of,
    load_balancing_loss,
    moe_blocks,
    router_z_loss,
    take_stats,
)
from moe.dispatch import LocalDispatcher, _transpose_blocks
from moe.router import count_experts
from tests.moe.test_kernels import CPU_KERNELS
from tests.tiny import relative_error, tiny_config, tiny_mixtral


def same_weights(ours: DroplessMoE, theirs: MixtralSparseMoeBlock) -> None:
    experts = theirs.experts
    gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
    width = gate.shape[-1]
    with torch.no_grad():
        ours.router.weight.copy_(theirs.gate.weight)
        ours.experts.w1.copy_(gate.reshape(-1, width))
        ours.experts.v1.copy_(up.reshape(-1, width))
        ours.experts.w2.copy_(experts.down_proj.transpose(1, 2).reshape(-1, width))


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize(
    "changes", [{}, {"num_local_experts": 6, "num_experts_per_tok": 3}, {"intermediate_size": 16}], ids=str
)
def test_equals_hf_block(changes: dict[str, Any], kernel: str) -> None:
    theirs = tiny_mixtral(**changes).model.layers[0].mlp
    config = tiny_config(**changes)
    ours = DroplessMoE(family_of("mixtral", "here").shape(config), KERNELS[kernel])
    same_weights(ours, theirs)
    x_BSD = torch.randn(3, 7, config.hidden_size)
    x_ours, x_theirs = x_BSD.clone().requires_grad_(), x_BSD.clone().requires_grad_()
    found, expected = ours(x_ours), theirs(x_theirs)
    assert relative_error(found.detach(), expected.detach()) < 1e-6
    grad = torch.randn_like(x_BSD)
    found.backward(grad)
    expected.backward(grad)
    assert x_ours.grad is not None
    assert x_theirs.grad is not None
    assert relative_error(x_ours.grad, x_theirs.grad) < 1e-5
    assert ours.router.weight.grad is not None
    assert relative_error(ours.router.weight.grad, theirs.gate.weight.grad) < 1e-5


def layer() -> DroplessMoE:
    torch.manual_seed(0)
    moe = DroplessMoE(MoEShape(model_width=16, expert_width=24, num_experts=4, top_k=2, normalize_top_k=True))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return moe


def test_padding_is_neither_routed_nor_counted() -> None:
    moe = layer()
    x_BSD = torch.randn(2, 5, 16)
    is_token_BS = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool()
    moe.is_token_BS = is_token_BS
    x_padded = x_BSD.clone().requires_grad_()
    out = moe(x_padded)
    padded_stats = moe.stats
    assert torch.equal(out[~is_token_BS], torch.zeros(3, 16))

    moe.is_token_BS = None
    x_alone = x_BSD[is_token_BS].unsqueeze(0).clone().requires_grad_()
    alone = moe(x_alone)
    torch.testing.assert_close(out[is_token_BS], alone[0])
    assert padded_stats is not None
    assert moe.stats is not None
    assert torch.equal(padded_stats.counts_E, moe.stats.counts_E)
    torch.testing.assert_close(padded_stats.prob_sum_E, moe.stats.prob_sum_E)
    torch.testing.assert_close(padded_stats.z_sum, moe.stats.z_sum)

    grad = torch.randn(2, 5, 16)
    out.backward(grad)
    alone.backward(grad[is_token_BS].unsqueeze(0))
    assert x_padded.grad is not None
    assert x_alone.grad is not None
    torch.testing.assert_close(x_padded.grad[is_token_BS], x_alone.grad[0])
    assert torch.equal(x_padded.grad[~is_token_BS], torch.zeros(3, 16))


def test_nothing_but_padding() -> None:
    moe = layer()
    moe.is_token_BS = torch.zeros(1, 3, dtype=torch.bool)
    out = moe(torch.randn(1, 3, 16, requires_grad=True))
    out.sum().backward()
    assert torch.equal(out, torch.zeros(1, 3, 16))
    for parameter in moe.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("has_padding", [False, True])
def test_dispatch_gradients_by_finite_differences(has_padding: bool) -> None:
    experts_TK = torch.tensor([[1, 0], [2, 1], [1, 2]])
    if has_padding:
        experts_TK[1] = 3
    counts_E = count_experts(experts_TK, 3)
    dispatcher = LocalDispatcher(3)

    def there_and_back(x_TD: Tensor, weights_TK: Tensor) -> Tensor:
        rows, counts, plan = dispatcher.dispatch(x_TD, experts_TK, counts_E, has_padding)
        scale = torch.arange(1, rows.shape[0] + 1, dtype=rows.dtype).unsqueeze(1)
        assert counts.sum() == rows.shape[0] == (4 if has_padding else 6)
        return dispatcher.combine(rows * scale, weights_TK, plan)

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


def test_router_counts_and_weights() -> None:
    router = Router(8, 5, 2, normalize_top_k=True)
    torch.nn.init.normal_(router.weight)
    routing = router(torch.randn(11, 8))
    torch.testing.assert_close(routing.weights_TK.sum(dim=1), torch.ones(11))
    assert torch.equal(routing.stats.counts_E, routing.experts_TK.flatten().bincount(minlength=5))
    not_normalized = Router(8, 5, 2, normalize_top_k=False)
    not_normalized.weight = router.weight
    assert not_normalized(torch.randn(11, 8)).weights_TK.sum(dim=1).max() < 1


def test_auxiliary_losses_add_up_over_ranks() -> None:
    """Two halves of a batch give parts that sum to HF's loss on the whole, or to its mean over the layers where each is
    balanced by itself, and to the z-loss by its definition."""
    torch.manual_seed(0)
    routers = [Router(8, 5, 2, True) for _ in range(3)]
    for router in routers:
        torch.nn.init.normal_(router.weight)
    x_TD = torch.randn(14, 8)
    halves = [[router(half).stats for router in routers] for half in (x_TD[:5], x_TD[5:])]
    counts_LE = torch.stack([sum(stats.counts_E for stats in layer) for layer in zip(*halves, strict=True)])
    logits: Any = tuple(x_TD @ router.weight.t() for router in routers)
    pooled = sum(load_balancing_loss(half, counts_LE.sum(dim=0, keepdim=True), 14) for half in halves)
    torch.testing.assert_close(pooled, load_balancing_loss_func(logits, 5, 2))
    by_layer = sum(load_balancing_loss(half, counts_LE, 14) for half in halves)
    of_layers = [torch.as_tensor(load_balancing_loss_func((layer,), 5, 2)) for layer in logits]
    torch.testing.assert_close(by_layer, torch.stack(of_layers).mean())
    z = sum(router_z_loss(half, 14) for half in halves)
    torch.testing.assert_close(z, torch.stack(logits).logsumexp(dim=-1).square().mean())


def test_swapped_model_is_on_meta_and_padding_is_passed_on() -> None:
    model: Any = build_model(family_of("mixtral", "here"), tiny_config(), KERNELS["loop"])
    assert all(p.is_meta for p in model.parameters())
    blocks = moe_blocks(model)
    assert len(blocks) == 2
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    tokens = torch.ones(2, 4, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    model(input_ids=tokens, attention_mask=mask, use_cache=False)
    assert [int(s.counts_E.sum()) for s in take_stats(model)] == [2 * 6, 2 * 6]
    model(input_ids=tokens, is_token_BS=mask.bool(), use_cache=False)
    assert [int(s.counts_E.sum()) for s in take_stats(model)] == [2 * 6, 2 * 6]
    embedded = model.get_input_embeddings()(tokens)
    model(input_ids=None, inputs_embeds=embedded, attention_mask=mask, use_cache=False)
    assert [int(s.counts_E.sum()) for s in take_stats(model)] == [2 * 6, 2 * 6]
    # the decoder stack alone, without a mask, must not remember the last one
    model.get_decoder()(input_ids=tokens, use_cache=False)
    assert [int(s.counts_E.sum()) for s in take_stats(model)] == [2 * 8, 2 * 8]
    assert blocks[0].is_token_BS is None


def test_generation_equals_hf() -> None:
    """Greedy, with a KV cache and left padding, as a user of transformers generates."""
    theirs = tiny_mixtral().eval()
    ours: Any = build_model(family_of("mixtral", "here"), theirs.config, KERNELS["loop"])
    ours.to_empty(device="cpu")
    ours.model.rotary_emb = type(ours.model.rotary_emb)(config=theirs.config)
    names = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name in names:
                parameter.copy_(names[name])
    for mine, other in zip(moe_blocks(ours), theirs.model.layers, strict=True):
        same_weights(mine, other.mlp)
    tokens = torch.randint(0, 320, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    generate = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.eval().generate(tokens, **generate), theirs.generate(tokens, **generate))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts_per_tok": 9}, "9 experts a token, but only 8 experts"),
        ({"intermediate_size": 0}, "expert width is 0"),
        ({"num_local_experts": -1}, "num experts is -1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_impossible_configs(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        check_config(family_of("mixtral", "config.json"), tiny_config(**changes), "config.json")
