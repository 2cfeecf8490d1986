"""Norms and rotary positions by liger-kernel, and the trials that take or refuse it, by Triton's interpreter."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe
from transformers.models.flex_olmo import modeling_flex_olmo
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.gpu import rehearsing_gpu
from expertmesh.training.attention.packed_attention import OWN
from expertmesh.training.fused import liger, liger_norm, liger_rotary
from expertmesh.training.fused.liger import use_liger
from expertmesh.training.fused.liger_norm import Norm, may_be_norm, try_norm, use_liger_norm
from expertmesh.training.fused.liger_rotary import try_rotary, use_liger_rotary
from expertmesh.training.model_setup.compiling import compile_layers
from expertmesh.training.planning.rehearsal import liger_stand_in
from expertmesh.training.planning.rehearsal.liger_stand_in import computed_by_torch, plain_norm, plain_rotate
from tests.families.configs import tiny_config as tiny_family
from tests.interpreter import interpret_liger, with_liger
from tests.rounding import OTHER_ORDER, assert_near
from tests.tiny import relative_error

EPS = 1e-3
"""Large enough to show."""
INTERPRETED = [torch.float32, torch.float16]
"""Triton's interpreter does not compute in bf16."""
CPU = torch.device("cpu")

NORMS: dict[str, tuple[Callable[[int], nn.Module], str, float]] = {
    "rounded": (lambda width: modeling_mixtral.MixtralRMSNorm(width, EPS), "llama", 0.0),
    "exact": (lambda width: modeling_gpt_oss.GptOssRMSNorm(width, EPS), "gemma", 0.0),
    "one more": (lambda width: Qwen3NextRMSNorm(width, EPS), "gemma", 1.0),
    "none": (lambda width: Gemma4RMSNorm(width, EPS, with_scale=False), "gemma", 0.0),
}
"""With liger's casting mode and offset."""
ROTATIONS: dict[str, tuple[Any, bool, bool]] = {
    "whole heads": (modeling_mixtral.apply_rotary_pos_emb, False, False),
    "their beginning": (modeling_glm4_moe.apply_rotary_pos_emb, False, True),
    "tables in fp32": (modeling_flex_olmo.apply_rotary_pos_emb, False, False),
    "half tables": (modeling_gpt_oss.apply_rotary_pos_emb, True, False),
    "pairs": (modeling_deepseek_v3.apply_rotary_pos_emb_interleave, False, False),
}
"""Whether tables are half as wide, and whether what is beyond them passes."""


@contextmanager
def counted(module: Any, name: str) -> Iterator[list[str]]:
    """Within it, a function of a module adds its name to a list with each call."""
    function, calls = getattr(module, name), list[str]()

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    with mock.patch.object(module, name, counting):
        yield calls


@pytest.mark.sample(2)
@with_liger
@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_norms(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype) -> None:
    interpret_liger(monkeypatch)
    check_norm(kind, (3, 5, 48), dtype, CPU)


@pytest.mark.slow
@with_liger
def test_norms_of_many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another of liger's kernels, from so many rows on."""
    interpret_liger(monkeypatch)
    check_norm("rounded", (liger_norm.ROWS_AT_ONCE, 16), torch.float32, CPU)


def check_norm(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """A trial finds it; then forward is as the module's own, and gradients as the module's in fp32."""
    torch.manual_seed(0)
    make, casting, offset = NORMS[kind]
    theirs = make(shape[-1]).to(device)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    theirs.to(dtype)
    ours = deepcopy(theirs)
    norm = try_norm(ours, dtype, device)
    assert norm is not None
    assert (norm.eps, norm.offset, norm.weight) == (EPS, offset, None if kind == "none" else "weight")
    assert dtype == torch.float32 or norm.casting == casting
    assert use_liger_norm(ours, dtype, device, {})
    x, grad = torch.randn(2, *shape, device=device).to(dtype)
    with rehearsing_gpu():
        found, (d_x, *d_weight) = both(ours, x, grad)
    expected, _ = both(theirs, x, grad)
    assert found.dtype == expected.dtype
    assert relative_error(found, expected) < (OTHER_ORDER if dtype == torch.float32 else 1e-3)
    _, (want_x, *want_weight) = both(theirs.float(), x.float(), grad.float())
    tolerance = OTHER_ORDER if dtype == torch.float32 else 5e-3
    for mine, want in zip((d_x, *d_weight), (want_x, *want_weight), strict=True):
        assert mine.dtype == dtype
        assert relative_error(mine, want) < tolerance


def both(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What a module gives, and the gradients of its input and parameters."""
    x = x.detach().requires_grad_()
    out = module(x)
    return out.detach(), torch.autograd.grad(out, [x, *module.parameters()], grad)


@with_liger
def test_norms_of_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that lie between others, a gradient that is one number throughout, a frozen weight; clamped in place."""
    interpret_liger(monkeypatch)
    theirs: Any = NORMS["rounded"][0](16)
    ours = deepcopy(theirs)
    use_liger_norm(ours, torch.float32, CPU, {})
    wide = torch.randn(2, 5, 6, 48, requires_grad=True)
    for module in (ours, theirs):
        module.weight.requires_grad_(False)
    for x in (wide[:, :, 1:4, 16:32], wide.transpose(1, 3)[..., :16, :, :].transpose(1, 3)):
        with rehearsing_gpu():
            (found,) = torch.autograd.grad(ours(x).clamp_(min=0).sum(), wide)
        (want,) = torch.autograd.grad(theirs(x).clamp_(min=0).sum(), wide)
        assert relative_error(found, want) < OTHER_ORDER


def test_what_is_no_norm_is_left() -> None:
    modules = [nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU(), nn.Dropout(0.5), nn.Embedding(4, 8)]
    assert not any(map(may_be_norm, (*modules, nn.Sequential(Qwen3NextRMSNorm(8)))))
    with computed_by_torch():
        assert not use_liger_norm(Qwen3NextRMSNormGated(8), torch.float32, CPU, {})


def faulty_forward(x: Tensor, *rest: Any) -> Any:
    out, *others = NORM_FORWARD(x, *rest)
    out[-1, -1] += 0.01 * out[-1].norm()
    return out, *others


def faulty_backward(*args: Any) -> Any:
    d_x, d_weight = NORM_BACKWARD(*args)
    assert d_weight is not None
    return d_x, d_weight * 1.01


def not_finite(*args: Any) -> Any:
    d_x, d_weight = NORM_BACKWARD(*args)
    return d_x.fill_(torch.nan), d_weight


def failing(*args: Any) -> Any:
    raise RuntimeError("no such instruction")


NORM_FORWARD, NORM_BACKWARD, ROTATE = liger_norm.norm_forward, liger_norm.norm_backward, liger_rotary.rotate_in_place


@with_liger
@pytest.mark.parametrize(
    ("name", "faulty"),
    [
        ("norm_forward", faulty_forward),
        ("norm_backward", faulty_backward),
        ("norm_backward", not_finite),
        ("norm_forward", failing),
    ],
)
def test_faulty_norms_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, faulty: Any) -> None:
    """One value of a row, a weight's gradient a percent off, and no numbers: the module computes by itself."""
    interpret_liger(monkeypatch)
    monkeypatch.setattr(liger_norm, name, faulty)
    module = NORMS["exact"][0](16)
    assert not use_liger_norm(module, torch.float32, CPU, {})
    assert "forward" not in vars(module)


@with_liger
@pytest.mark.parametrize("backwards", [False, True])
def test_faulty_rotation_is_refused(monkeypatch: pytest.MonkeyPatch, backwards: bool) -> None:
    def faulty(q: Tensor, k: Tensor, *rest: Any, **kinds: Any) -> tuple[Tensor, Tensor]:
        q, k = ROTATE(q, k, *rest, **kinds)
        return q, k * 1.01 if kinds["backwards"] == backwards else k

    monkeypatch.setattr(liger_rotary, "rotate_in_place", faulty)
    assert try_rotary(modeling_mixtral.apply_rotary_pos_emb, torch.float32, CPU) is None


def test_a_formula_of_another_family_is_refused() -> None:
    """A norm of a slightly other length, around a mean, of another dtype; rotations that leave pairs, or are none."""
    with computed_by_torch():
        module: Any = NORMS["exact"][0](16)
        forward = type(module).forward
        for changed in (
            lambda self, x: forward(self, x) * (1 + 1e-4),
            lambda self, x: forward(self, x - x.mean(-1, keepdim=True)),
            lambda self, x: forward(self, x).double(),
        ):
            module.forward = changed.__get__(module)
            assert try_norm(module, torch.float32, CPU) is None
        assert try_rotary(modeling_ernie4_5_moe.apply_rotary_pos_emb, torch.float32, CPU) is None
        assert try_rotary(lambda q, k, cos, sin, unsqueeze_dim=1: (q * cos, k * sin), torch.float32, CPU) is None


@with_liger
def test_module_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, class, copies, the bits on a CPU; and what is left to its own code."""
    interpret_liger(monkeypatch)
    ours: Any = NORMS["exact"][0](16)
    before, x = deepcopy(ours), torch.randn(3, 16)
    use_liger_norm(ours, torch.float32, CPU, {})
    assert type(ours) is type(before)
    assert list(ours.state_dict()) == ["weight"]
    assert torch.equal(ours(x), before(x))
    copied = deepcopy(ours)
    with torch.no_grad():
        copied.weight.mul_(2)
    with counted(liger_norm, "norm_forward") as calls, rehearsing_gpu():
        assert_near(copied(x), 2 * before(x))
        assert len(calls) == 1
        ours(hidden_states=x)
        ours(x.double())
        ours(x.half())
        ours(torch.randn(0, 16))
        ours(torch.randn(3, 1))
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        ours(x)
    assert len(calls) == 1


@pytest.mark.sample(8)
@with_liger
@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("kind", ROTATIONS)
def test_rotations(kind: str, heads_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check_rotation(kind, 3, 12, heads_dim, dtype, CPU, monkeypatch)


def check_rotation(
    kind: str,
    heads: int,
    width: int,
    heads_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A projection's heads, as attention turns them: forward and gradients by the function itself, in fp32."""
    torch.manual_seed(0)
    function, is_half, takes_parts = ROTATIONS[kind]
    module = function.__module__
    name = function.__name__
    monkeypatch.setattr(f"{module}.{name}", function)
    rotation = try_rotary(function, dtype, device)
    assert rotation is not None
    assert (rotation.is_half, rotation.has_pairs, rotation.takes_parts) == (is_half, kind == "pairs", takes_parts)
    assert (kind == "tables in fp32" or dtype == torch.float32) == (torch.float32 in rotation.table_dtypes)
    use_liger_rotary(module, dtype, device)
    ours = vars(sys.modules[module])[name]
    half = (width // 2 if takes_parts else width) // 2
    entries = torch.randn(2, 2, 5, half, device=device)
    cos_BST, sin_BST = (entries if is_half else torch.cat([entries, entries], dim=-1)).to(rotation.table_dtypes[-1])
    q_BSHA, k_BSGA = (torch.randn(2, 5, n, width, device=device).to(dtype).requires_grad_() for n in (heads, 1))
    q, k = (x.transpose(1, 2) if heads_dim == 1 else x for x in (q_BSHA, k_BSGA))
    before = q_BSHA.detach().clone()
    with counted(liger_rotary, "rotate_in_place") as calls, rehearsing_gpu():
        found = ours(q, k, cos_BST, sin_BST, unsqueeze_dim=heads_dim)
        grads = [torch.randn_like(x) for x in found]
        copies = [grad.clone() for grad in grads]
        gradients = torch.autograd.grad(found, (q_BSHA, k_BSGA), grads)
    assert len(calls) == 2
    # the kernel writes to what it is given
    assert torch.equal(q_BSHA, before)
    assert all(map(torch.equal, grads, copies))
    wide = [x.detach().float().requires_grad_() for x in (q, k)]
    expected = function(*wide, cos_BST.float(), sin_BST.float(), unsqueeze_dim=heads_dim)
    want = torch.autograd.grad(expected, wide, [grad.float() for grad in grads])
    for mine, exact in zip((*found, *gradients), (*expected, *want), strict=True):
        assert mine.dtype == dtype
        mine = mine if mine.shape == exact.shape else mine.transpose(1, 2)
        assert relative_error(mine.detach(), exact.detach()) < (OTHER_ORDER if dtype == torch.float32 else 5e-3)


@with_liger
def test_replaced_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its module, once; by the kernel for what it takes, and by itself for all else."""
    name = modeling_glm4_moe.__name__
    original: Any = modeling_glm4_moe.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_glm4_moe, "apply_rotary_pos_emb", original)
    for _ in range(2):
        assert use_liger_rotary(name, torch.float32, CPU) == {"modeling_glm4_moe.apply_rotary_pos_emb": True}
    assert not use_liger_rotary(torch.nn.__name__, torch.float32, CPU)
    ours: Any = modeling_glm4_moe.apply_rotary_pos_emb
    assert ours.by_transformers is original
    q_BHSA, k_BGSA = torch.randn(2, 4, 5, 16), torch.randn(2, 1, 5, 16)
    cos_BST, sin_BST = torch.randn(2, 1, 5, 4).repeat(1, 1, 1, 2)
    expected = original(q_BHSA, k_BGSA, cos_BST, sin_BST)
    with counted(liger_rotary, "rotate_in_place") as calls:
        assert all(map(torch.equal, ours(q_BHSA, k_BGSA, cos_BST, sin_BST), expected))
        assert not calls
        # as on a GPU, where tables are looked at
        monkeypatch.setattr("expertmesh.training.fused.trial.takes_triton", lambda x: not x.is_meta)
        for found, want in zip(ours(q_BHSA, k_BGSA, cos_BST, sin=sin_BST), expected, strict=True):
            assert_near(found, want)
        assert len(calls) == 1
        ours(q_BHSA.double(), k_BGSA, cos_BST, sin_BST)
        ours(*(x.to("meta") for x in (q_BHSA, k_BGSA, cos_BST, sin_BST)))
        ours(q_BHSA, k_BGSA, cos_BST.clone().requires_grad_(), sin_BST)
        ours(q_BHSA[:, 0], k_BGSA[:, 0], cos_BST[0], sin_BST[0], unsqueeze_dim=0)
        # tables whose halves differ
        cos_BST, sin_BST = torch.randn(2, 1, 5, 16)
        monkeypatch.setattr(modeling_glm4_moe, "apply_rotary_pos_emb", original)
        use_liger_rotary(name, torch.float32, CPU)
        calls.clear()
        found = modeling_glm4_moe.apply_rotary_pos_emb(q_BHSA, k_BGSA, cos_BST, sin_BST)
        assert all(map(torch.equal, found, original(q_BHSA, k_BGSA, cos_BST, sin_BST)))
    assert not calls


@pytest.mark.sample(2)
@with_liger
@pytest.mark.parametrize("casting", ["llama", "gemma"])
def test_dry_runs_try_the_same_formulas(monkeypatch: pytest.MonkeyPatch, casting: str) -> None:
    interpret_liger(monkeypatch)
    x, weight = torch.randn(4, 16), torch.randn(16)
    for given, offset in ((weight, 0.0), (weight, 1.0), (None, 0.0)):
        norm = Norm(EPS, offset, casting, "weight", torch.float32)
        assert_near(plain_norm(x, given, norm), liger_norm.rms_norm(x, given, norm))
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    for width, has_pairs in ((8, False), (16, True)):
        cos, sin = torch.randn(2, 1, 3, width // 2)
        rotating = (q, k, cos, sin, width, has_pairs)
        for found, want in zip(liger_rotary.rotate(*rotating), plain_rotate(*rotating), strict=True):
            assert_near(found, want)


def test_dry_runs_try_a_norm_once_however_many_models_they_build() -> None:
    counts = []
    with mock.patch.object(liger_stand_in, "_TRIED", {}), computed_by_torch():
        for _ in range(2):
            with mock.patch.object(liger_stand_in, "_try_norm", side_effect=try_norm) as tried:
                use_liger(build_model(tiny_family("ernie4_5_moe"), "sdpa"), torch.float32)
            counts.append(tried.call_count)
    assert counts == [1, 0]


def test_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken, what is not; and without liger-kernel, how to get it."""
    model = build_model(tiny_family("ernie4_5_moe"), "sdpa")
    with computed_by_torch():
        line = use_liger(model, torch.float32)
    assert line.startswith("norms and rotary positions by liger-kernel: Ernie4_5_MoeRMSNorm")
    assert line.endswith("because liger's differ or do not run: modeling_ernie4_5_moe.apply_rotary_pos_emb")
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    assert use_liger(model, torch.float32).endswith("faster ones: pip install 'expertmesh[gpu]'")


def test_compiler_keeps_what_it_has() -> None:
    """In a compiled model only what is not compiled is replaced: with packed sequences, the inside of attention."""
    config = tiny_family("qwen3_moe")
    of_layer = ["input_layernorm", "post_attention_layernorm"]
    of_attention = ["self_attn.q_norm", "self_attn.k_norm"]
    for attention, is_compiled, expected in (
        ("sdpa", False, of_layer + of_attention),
        ("sdpa", True, []),
        (OWN, True, of_attention),
    ):
        model = build_model(config, attention)
        if is_compiled:
            compile_layers(model)
        with computed_by_torch():
            use_liger(model, torch.float32)
        replaced = [name for name, module in model.named_modules() if "forward" in vars(module) and may_be_norm(module)]
        names = {re.sub(r"layers\.\d+\.", "", name) for name in replaced}
        assert names == {"model.norm", *(f"model.{name}" for name in expected)}
