"""Norms and rotary positions of every family in Triton kernels: what is known of them computes the same."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.moe.hf_model.families import causal_families
from expertmesh.moe.hf_model.family_exceptions import UNSUPPORTED
from expertmesh.moe.util.gpu import rehearsing_gpu
from expertmesh.training.fused.fuse import fuse_layers
from tests.families.configs import TEXT_IDS, UNSHRINKABLE, tiny_model
from tests.interpreter import interpreted
from tests.tiny import relative_error
from tests.training.test_fused import counting_calls

FAMILIES = [family for family in causal_families() if family not in UNSHRINKABLE and family not in UNSUPPORTED]
NO_NORMS = {"cohere2_moe", "phimoe"}
"""They subtract a mean."""
NO_ROTATION = {
    # numbers side by side, each with an entry of its own; complex numbers; the end of a head
    *("cohere2_moe", "deepseek_v2", "deepseek_v4", "ernie4_5_vl_moe"),
    # what a convolution gives, which lies the other way round in memory
    "zaya",
    # no rotary positions
    *("glm5_next", "granitemoehybrid", "inkling2_text", "inkling_text", "jamba", "kimi_linear", "nemo_speechlm"),
    *("nemotron_h", "nemotron_h_omni"),
}
"""Families of which nothing is rotated by kernels."""


@pytest.mark.sample(6)
@interpreted
@pytest.mark.parametrize("family", FAMILIES)
def test_family(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Logits and gradients to 1e-5 with what is fused; bit for bit without Triton."""
    model: Any = tiny_model(family, seed=1)
    for name in {type(module).__module__ for module in model.modules()}:
        for function in [function for function in vars(sys.modules[name]) if "rotary" in function]:
            # set back after the test, as it is replaced for the whole process
            monkeypatch.setattr(sys.modules[name], function, getattr(sys.modules[name], function))
    calls = counting_calls(monkeypatch)
    tokens_BS = torch.randint(3, TEXT_IDS, (2, 10), generator=torch.Generator().manual_seed(0))
    expected = figures(model, tokens_BS)
    fuse_layers(model)
    assert all(torch.equal(x, expected[name]) for name, x in figures(model, tokens_BS).items())
    assert not calls
    with rehearsing_gpu():
        found = figures(model, tokens_BS)
    assert found.keys() == expected.keys()
    assert ("FusedNorm" in calls) == (family not in NO_NORMS)
    has_trained_tables = any("rotary" in name for name, _ in model.named_parameters())
    assert ("FusedRotary" in calls) == (family not in NO_ROTATION and not has_trained_tables)
    floor = 1e-3 * torch.stack([x.norm() for x in expected.values()]).norm().item()
    errors = {name: relative_error(x, expected[name], floor) for name, x in found.items()}
    assert max(errors.values()) < 1e-5, errors


def figures(model: Any, tokens_BS: Tensor) -> dict[str, Tensor]:
    """Logits, and a gradient for each parameter that has one."""
    model.zero_grad()
    logits = model(input_ids=tokens_BS, use_cache=False).logits
    logits.float().pow(2).mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}
