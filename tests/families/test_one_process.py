"""Every causal MoE family in one process: its tiny model shows what it is there to show, and selective checkpointing
repeats no choice and no attention, and changes no bit."""

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.moe.experts.model_layers import decoder_layers
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.transformers_private import calls
from expertmesh.sharding.parallelize.recompute import _ATTENTION, _ROUTING, _draws, checkpoint_layers
from expertmesh.training.attention.packed_attention import choose_attention
from expertmesh.training.data.batch import collate
from expertmesh.training.loss.head import attach_loss_head
from expertmesh.training.steps.micro_batch import token_loss_sum
from tests.families.configs import EXPERTS, TEXT_IDS, persistent_buffers, tiny_config, tiny_model
from tests.families.test_families import FAMILIES
from tests.parity.case import random_samples
from tests.tiny import loaded

BATCH = collate([[sample] for sample in random_samples([13, 27], vocabulary=290)])


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    config, theirs = tiny_config(family), tiny_model(family, seed=1).train()
    assert_recomputed(family, theirs)
    text = config.get_text_config()
    assert text.num_hidden_layers in (3, 4)
    assert text.max_position_embeddings >= 128
    assert all(0 <= getattr(text, f"{name}_token_id") < text.vocab_size for name in ("pad", "bos", "eos"))
    assert 20_000 < sum(parameter.numel() for parameter in build_model(config).parameters()) < 200_000
    assert sum(parameter.numel() for parameter in theirs.parameters()) < 10_000_000, "towers included"
    for name, tensor in {**dict(theirs.named_parameters()), **persistent_buffers(theirs)}.items():
        assert torch.isfinite(tensor).all(), name
        if tensor.is_floating_point() and tensor.numel() > 1:
            assert tensor.unique().numel() > 1, f"{name} has one value throughout"

    ids = torch.randint(3, TEXT_IDS, (2, 24), generator=torch.Generator().manual_seed(1))
    chosen: dict[Any, Tensor] = {}
    experts = [module for module in theirs.modules() if hasattr(module, "is_concatenated")]
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: chosen.update({module: inputs[1]}))
        for module in experts
        if hasattr(module, "down_proj")
    ]
    loss = theirs(input_ids=ids, labels=ids).loss
    for hook in hooks:
        hook.remove()
    assert torch.isfinite(loss)
    assert torch.equal(theirs(input_ids=ids, labels=ids).loss, loss), "something is drawn"
    loss.backward()
    assert chosen
    for module, indices in chosen.items():
        assert module.down_proj.shape[0] == EXPERTS
        counts = indices.flatten().bincount(minlength=EXPERTS)
        assert counts.unique().numel() > 1, "every expert has as many tokens"
        assert (counts > 0).sum() >= 2
        assert all(len(set(row)) == len(row) for row in indices.tolist()), "a token has an expert twice"
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())


def assert_recomputed(family: str, theirs: Any) -> None:
    found = []
    for mode in ("none", "selective"):
        config = tiny_config(family)
        model: Any = loaded(build_model(deepcopy(config), choose_attention("auto", False, config)), theirs)
        attach_loss_head(model, "full")
        checkpoint_layers(model, mode)
        torch.manual_seed(0)
        with Calls() as forward:
            loss = token_loss_sum(model.train(), BATCH)
        with Calls() as backward:
            loss.backward()
        assert not backward.number, mode
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((forward.number, grads))
    (calls_once, grads), (calls_again, grads_again) = found
    assert calls_once == calls_again
    # one takes the largest twice instead
    chooses = any(calls(type(module), "topk") for layer in decoder_layers(model) for module in layer.modules())
    assert bool(calls_once["aten::topk"]) == chooses
    assert grads.keys() == grads_again.keys()
    assert not [name for name, grad in grads.items() if not torch.equal(grad, grads_again[name])]


class Calls(TorchDispatchMode):
    """Counts operators whose output is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.name() in _ROUTING | _ATTENTION:
            self.number[operator.name()] += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, False), ({"attention_dropout": 0.1}, True), ({"router_jitter_noise": 0.1}, True)],
)
def test_what_draws_random_numbers_is_seen(changes: dict[str, Any], expected: bool) -> None:
    """Where nothing does, recomputation need not set the random state back."""
    for attention in ("sdpa", "eager"):
        assert _draws(build_model(tiny_config("mixtral", **changes), attention)) is expected


def test_tiny_configs_take_changes_under_any_name_and_a_seed_decides_every_value() -> None:
    for name in ("num_local_experts", "num_experts"):
        assert tiny_config("mixtral", **{name: 6}).num_local_experts == 6
    assert tiny_config("gemma4", vocab_size=352).get_text_config().vocab_size == 352
    one, same, other = (tiny_model("mixtral", seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
