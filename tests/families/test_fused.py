"""Norms and rotary positions of every family by liger-kernel: what its trials take computes the same."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.moe.hf_model.families import causal_families
from expertmesh.moe.hf_model.family_exceptions import UNSUPPORTED
from expertmesh.moe.util.gpu import rehearsing_gpu
from expertmesh.training.fused import liger_norm, liger_rotary
from expertmesh.training.fused.liger import use_liger
from expertmesh.training.planning.rehearsal.liger_stand_in import computed_by_torch
from tests.families.configs import TEXT_IDS, UNSHRINKABLE, tiny_model
from tests.rounding import OTHER_ORDER, gradient_errors
from tests.training.test_fused import counted

FAMILIES = [family for family in causal_families() if family not in UNSHRINKABLE and family not in UNSUPPORTED]
NO_NORMS = {"cohere2_moe", "phimoe"}
"""They subtract a mean."""
NO_ROTATION = {
    # pairs that stay so, complex numbers, the end of a head, queries and keys apart, trained tables
    *("cohere2_moe", "deepseek_v2", "deepseek_v4", "ernie4_5_moe", "ernie4_5_vl_moe", "gemma4", "gemma4_text"),
    *("hy_v4_vl", "mistral_large4"),
    # no rotary positions
    *("glm5_next", "granitemoehybrid", "inkling2_text", "inkling_text", "jamba", "kimi_linear", "nemo_speechlm"),
    *("nemotron_h", "nemotron_h_omni"),
}
"""Families whose rotary positions stay transformers' code."""


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Logits and gradients to 1e-5 with what is taken, by liger's formulas in torch's operators (with which
    `tests/training/test_fused.py` compares its kernels); bit for bit on a CPU."""
    model: Any = tiny_model(family, seed=1)
    for name in {type(module).__module__ for module in model.modules()}:
        for function in [function for function in vars(sys.modules[name]) if "rotary" in function]:
            # set back after the test, as it is replaced for the whole process
            monkeypatch.setattr(sys.modules[name], function, getattr(sys.modules[name], function))
    tokens_BS = torch.randint(3, TEXT_IDS, (2, 10), generator=torch.Generator().manual_seed(0))
    expected = figures(model, tokens_BS)
    with computed_by_torch(), counted(liger_norm, "rms_norm") as norms, counted(liger_rotary, "rotate") as rotations:
        use_liger(model, torch.float32)
        norms.clear()
        rotations.clear()
        assert all(torch.equal(x, expected[name]) for name, x in figures(model, tokens_BS).items())
        assert not norms
        assert not rotations
        with rehearsing_gpu():
            found = figures(model, tokens_BS)
    assert found.keys() == expected.keys()
    assert bool(norms) == (family not in NO_NORMS)
    assert bool(rotations) == (family not in NO_ROTATION)
    errors = gradient_errors(found, expected)
    assert max(errors.values()) <= OTHER_ORDER, errors


def figures(model: Any, tokens_BS: Tensor) -> dict[str, Tensor]:
    """Logits, and a gradient for each parameter that has one."""
    model.zero_grad()
    logits = model(input_ids=tokens_BS, use_cache=False).logits
    logits.float().pow(2).mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}
