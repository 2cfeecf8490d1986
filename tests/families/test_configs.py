"""Every causal MoE family of the installed transformers has a tiny model, or a reason why not."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.hf_model.families import causal_families
from expertmesh.moe.hf_model.family_exceptions import UNSUPPORTED
from tests.families.configs import (
    EXPERTS,
    TEXT_IDS,
    UNSHRINKABLE,
    auto_class,
    persistent_buffers,
    tiny_config,
    tiny_model,
)

FAMILIES = causal_families()
SHRUNK = [family for family in FAMILIES if family not in UNSHRINKABLE]
# strictly: a reason that no longer holds fails too
every_family = pytest.mark.parametrize(
    "family",
    [
        *SHRUNK,
        *(
            pytest.param(family, marks=pytest.mark.xfail(strict=True, reason=UNSHRINKABLE[family]))
            for family in FAMILIES
            if family in UNSHRINKABLE
        ),
    ],
)


def experts_of(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "is_concatenated") and hasattr(module, "down_proj")]


@pytest.mark.sample(7)
@every_family
def test_config_is_small(family: str) -> None:
    config = tiny_config(family)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    text = config.get_text_config()
    assert text.num_hidden_layers in (3, 4)
    assert sum(parameter.numel() for parameter in model.parameters()) < 10_000_000, "towers included"
    if family not in UNSUPPORTED:
        assert 20_000 < sum(parameter.numel() for parameter in build_model(config).parameters()) < 200_000
    assert {module.down_proj.shape[0] for module in experts_of(model)} == {EXPERTS}
    assert text.max_position_embeddings >= 128
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert 0 <= getattr(text, name) < text.vocab_size


@pytest.mark.sample(9)
@pytest.mark.parametrize("family", [family for family in SHRUNK if family not in UNSUPPORTED])
def test_model_trains_without_chance(family: str) -> None:
    model = tiny_model(family, seed=0).train()
    state = {**dict(model.named_parameters()), **persistent_buffers(model)}
    for name, tensor in state.items():
        assert torch.isfinite(tensor).all(), name
        if tensor.is_floating_point() and tensor.numel() > 1:
            assert tensor.unique().numel() > 1, f"{name} has one value throughout"

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, TEXT_IDS, (2, 24), generator=generator)
    chosen: dict[Any, torch.Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: chosen.update({module: inputs[1]}))
        for module in experts_of(model)
    ]
    loss = model(input_ids=ids, labels=ids).loss
    for hook in hooks:
        hook.remove()
    assert torch.isfinite(loss)
    assert torch.equal(model(input_ids=ids, labels=ids).loss, loss)

    assert chosen
    for indices in chosen.values():
        counts = indices.flatten().bincount(minlength=EXPERTS)
        assert counts.unique().numel() > 1, "every expert has as many tokens"
        assert (counts > 0).sum() >= 2
        assert all(len(set(row)) == len(row) for row in indices.tolist()), "a token has an expert twice"

    loss.backward()
    for module in chosen:
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name


def test_seed_decides_every_value() -> None:
    family = SHRUNK[0]
    one, same, other = (tiny_model(family, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_changes_are_taken_under_any_name() -> None:
    for family in SHRUNK:
        assert tiny_config(family, vocab_size=352).get_text_config().vocab_size == 352
    for name in ("num_local_experts", "num_experts"):
        assert tiny_config("mixtral", **{name: 6}).num_local_experts == 6
