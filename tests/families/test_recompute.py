"""Selective checkpointing of every family: what is chosen in a layer, and its attention's output, are kept, and the
gradients are those without checkpointing, bit for bit."""

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
from expertmesh.training.micro_batch import token_loss_sum
from tests.distributed.reference import random_samples
from tests.families.configs import tiny_config, tiny_model
from tests.families.test_families import FAMILIES
from tests.tiny import loaded

KEPT = _ROUTING | _ATTENTION
BATCH = collate([[sample] for sample in random_samples([13, 27], vocabulary=290)])


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.name() in KEPT:
            self.number[operator.name()] += 1
        return operator(*args, **(kwargs or {}))


def gradients(model: Any) -> tuple[Counter[str], Counter[str], dict[str, Tensor]]:
    """Kept operators that forward calls, and backward, and the gradients."""
    torch.manual_seed(0)
    with Calls() as forward:
        loss = token_loss_sum(model.train(), BATCH)
    with Calls() as backward:
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return forward.number, backward.number, grads


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_chosen_or_attended_to_twice(family: str) -> None:
    config = tiny_config(family)
    theirs = tiny_model(family, seed=1)
    found = []
    for mode in ("none", "selective"):
        attention = choose_attention("auto", False, deepcopy(config))
        model: Any = loaded(build_model(deepcopy(config), attention), theirs)
        attach_loss_head(model, "full")
        checkpoint_layers(model, mode)
        found.append(gradients(model))
    (forward, backward, grads), (forward_again, backward_again, grads_again) = found
    assert forward == forward_again
    # one takes the largest twice instead
    chooses = any(calls(type(module), "topk") for layer in decoder_layers(model) for module in layer.modules())
    assert bool(forward["aten::topk"]) == chooses
    assert not backward
    assert not backward_again
    assert grads.keys() == grads_again.keys()
    assert not [name for name, grad in grads.items() if not torch.equal(grad, grads_again[name])]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, False), ({"attention_dropout": 0.1}, True), ({"router_jitter_noise": 0.1}, True)],
)
def test_what_draws_random_numbers_is_seen(changes: dict[str, Any], expected: bool) -> None:
    """Where nothing does, recomputation need not set the random state back."""
    for attention in ("sdpa", "eager"):
        assert _draws(build_model(tiny_config("mixtral", **changes), attention)) is expected
