"""Norms and rotary positions in Triton kernels, against transformers' own modules and functions."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
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
from expertmesh.training.fused.fuse import fuse_layers
from expertmesh.training.fused.fused_norm import FusedNorm, Norm, fuse_norm, try_norm
from expertmesh.training.fused.fused_rotary import FusedRotary, Rotation, fuse_rotary, plain_rotate, try_rotary
from expertmesh.training.model_setup.compiling import compile_layers
from tests.families.configs import tiny_config as tiny_family
from tests.interpreter import interpreted
from tests.tiny import relative_error

EPS = 1e-3
"""Large enough to show."""
INTERPRETED = [torch.float32, torch.float16]
"""Triton's interpreter cuts off what it should round to bf16."""

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "rounded": lambda width: modeling_mixtral.MixtralRMSNorm(width, EPS),
    "exact": lambda width: modeling_gpt_oss.GptOssRMSNorm(width, EPS),
    "one more": lambda width: Qwen3NextRMSNorm(width, EPS),
    "none": lambda width: Gemma4RMSNorm(width, EPS, with_scale=False),
}
ROTATIONS: dict[str, tuple[Any, Rotation]] = {
    "whole heads": (modeling_mixtral.apply_rotary_pos_emb, Rotation(False, False, "whole")),
    "their beginning": (modeling_glm4_moe.apply_rotary_pos_emb, Rotation(False, False, "whole", takes_parts=True)),
    "tables in fp32": (modeling_flex_olmo.apply_rotary_pos_emb, Rotation(False, False, "whole", keeps_dtype=True)),
    "half tables": (modeling_gpt_oss.apply_rotary_pos_emb, Rotation(False, False, "half")),
    "pairs": (modeling_deepseek_v3.apply_rotary_pos_emb_interleave, Rotation(True, False, "first")),
    "pairs, left so": (
        modeling_ernie4_5_moe.apply_rotary_pos_emb, Rotation(True, True, "first", keeps_dtype=True),
    ),
}  # fmt: skip


def counting_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often our functions will have been called by the end of the test, by their names."""
    calls: Counter[str] = Counter()

    def counted(kernel: type[Function]) -> Any:
        apply: Any = kernel.apply

        def counting(*args: Any) -> Any:
            calls[kernel.__name__] += 1
            return apply(*args)

        return counting

    for kernel in (FusedNorm, FusedRotary):
        monkeypatch.setattr(kernel, "apply", counted(kernel))
    return calls


@pytest.fixture
def _on_a_gpu() -> Iterator[None]:
    """Triton's kernels, by its interpreter."""
    with rehearsing_gpu():
        yield


@pytest.mark.parametrize("scale", NORMS)
def test_norms_are_known(scale: str) -> None:
    for width in (8, 4096):
        with torch.device("meta"):
            module = NORMS[scale](width)
        assert try_norm(module) == Norm(EPS, scale, None if scale == "none" else "weight")


def test_what_is_no_norm_is_left() -> None:
    modules = [nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU(), nn.Dropout(0.5), nn.Embedding(4, 8)]
    assert not any(map(fuse_norm, (*modules, Qwen3NextRMSNormGated(8), nn.Sequential(Qwen3NextRMSNorm(8)))))
    assert all("forward" not in vars(module) for module in modules)


@pytest.mark.sample(4)
@interpreted
@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 64), (2, 3, 20, 128), (3, 100), (1, 1, 3000), (0, 64), (300, 16), (70, 1)])
@pytest.mark.parametrize("scale", NORMS)
def test_norms(scale: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_norm(scale, shape, dtype, "cpu")


def check_norm(scale: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Forward to the bit but for a few roundings; gradients by the same module in fp32, the weight's over more rows
    than one program has."""
    torch.manual_seed(0)
    theirs = NORMS[scale](shape[-1]).to(device)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    theirs.to(dtype)
    ours = deepcopy(theirs)
    assert fuse_norm(ours)
    x, grad = torch.randn(2, *shape, device=device).to(dtype)
    found, (d_x, *d_weight) = both(ours, x, grad)
    expected, _ = both(theirs, x, grad)
    assert found.dtype == expected.dtype
    assert relative_error(found, expected) < (1e-6 if dtype == torch.float32 else 1e-3)
    _, (want_x, *want_weight) = both(theirs.float(), x.float(), grad.float())
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    assert d_x.dtype == dtype
    assert relative_error(d_x, want_x) < tolerance or shape[-1] == 1
    assert len(d_weight) == len(want_weight) == (scale != "none")
    for mine, want in zip(d_weight, want_weight, strict=True):
        assert mine.dtype == dtype
        assert relative_error(mine, want) < tolerance


def both(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What a module gives, and the gradients of its input and parameters."""
    x = x.detach().requires_grad_()
    out = module(x)
    return out.detach(), torch.autograd.grad(out, [x, *module.parameters()], grad)


@interpreted
@pytest.mark.usefixtures("_on_a_gpu")
def test_norms_of_any_strides() -> None:
    """Heads that lie between others, a gradient that is one number throughout, a frozen weight."""
    torch.manual_seed(0)
    theirs: Any = NORMS["rounded"](16)
    ours = deepcopy(theirs)
    fuse_norm(ours)
    wide = torch.randn(2, 5, 6, 48, requires_grad=True)
    for module in (ours, theirs):
        module.weight.requires_grad_(False)
    for x in (wide[:, :, 1:4, 16:32], wide.transpose(1, 3)[..., :16, :, :].transpose(1, 3)):
        (found,), (want,) = (torch.autograd.grad(module(x).sum(), wide) for module in (ours, theirs))
        assert relative_error(found, want) < 1e-5


@interpreted
def test_module_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, class, copies, the bits on a CPU; and what is left to its own code."""
    torch.manual_seed(0)
    ours: Any = NORMS["exact"](16)
    before, x = deepcopy(ours), torch.randn(3, 16)
    fuse_norm(ours)
    assert type(ours) is type(before)
    assert list(ours.state_dict()) == ["weight"]
    assert torch.equal(ours(x), before(x))
    copied = deepcopy(ours)
    with torch.no_grad():
        copied.weight.mul_(2)
    calls = counting_calls(monkeypatch)
    with rehearsing_gpu():
        torch.testing.assert_close(copied(x), 2 * before(x))
        assert calls["FusedNorm"] == 1
        ours(hidden_states=x)
        ours(x.double())
        ours(torch.randn(3, 1))
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        ours(x)
    assert calls["FusedNorm"] == 1


@pytest.mark.parametrize("kind", ROTATIONS)
def test_rotations_are_known(kind: str) -> None:
    function, rotation = ROTATIONS[kind]
    assert try_rotary(function) == rotation


def test_what_is_no_rotation_is_left() -> None:
    assert try_rotary(modeling_gpt_oss._apply_rotary_emb) is None
    assert try_rotary(lambda q, k, cos, sin, unsqueeze_dim=1: (q * cos, k * sin)) is None
    # of heads in the second dimension alone
    first = modeling_mixtral.apply_rotary_pos_emb
    assert try_rotary(lambda q, k, cos, sin, unsqueeze_dim=1: first(q, k, cos, sin)) is None
    assert try_rotary(lambda hidden, position_ids, cos: hidden) is None


@pytest.mark.sample(8)
@interpreted
@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize(("heads", "width"), [(4, 16), (1, 12), (40, 128)])
@pytest.mark.parametrize("kind", ROTATIONS)
def test_rotations(kind: str, heads: int, width: int, heads_dim: int, dtype: torch.dtype) -> None:
    check_rotation(kind, heads, width, heads_dim, dtype, "cpu")


def check_rotation(kind: str, heads: int, width: int, heads_dim: int, dtype: torch.dtype, device: str) -> None:
    """A projection's heads, as attention turns them: forward and gradients by the function itself, in fp32."""
    torch.manual_seed(0)
    function, rotation = ROTATIONS[kind]
    rotated = width // 2 if rotation.takes_parts else width
    table_width = rotated // 2 if rotation.tables == "half" else rotated
    x_BSHA = torch.randn(2, 5, heads, width, device=device).to(dtype).requires_grad_()
    x = x_BSHA.transpose(1, 2) if heads_dim == 1 else x_BSHA
    cos_BST, sin_BST = torch.randn(2, 2, 5, table_width, device=device)
    if not rotation.keeps_dtype:
        cos_BST, sin_BST = cos_BST.to(dtype), sin_BST.to(dtype)
    found = FusedRotary.apply(x, cos_BST, sin_BST, heads_dim, rotation)
    grad = torch.randn_like(found)
    (d_x,) = torch.autograd.grad(found, x_BSHA, grad)
    assert found.stride() == x.stride()
    assert found.dtype == d_x.dtype == dtype
    plain = plain_rotate(x, cos_BST.unsqueeze(heads_dim), sin_BST.unsqueeze(heads_dim), rotation)
    found = found.detach()
    assert relative_error(found, plain.detach()) < (1e-6 if dtype == torch.float32 else 1e-3)

    wide = x.detach().float().requires_grad_()
    expected, _ = function(wide, wide, cos_BST.float(), sin_BST.float(), unsqueeze_dim=heads_dim)
    (want,) = torch.autograd.grad(expected, wide, grad.float())
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    assert relative_error(found, expected.detach()) < tolerance
    assert relative_error(d_x if heads_dim == 2 else d_x.transpose(1, 2), want) < tolerance


@interpreted
def test_replaced_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its module, once; by kernels for what they take, and by itself for all else."""
    name = modeling_glm4_moe.__name__
    original: Any = modeling_glm4_moe.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_glm4_moe, "apply_rotary_pos_emb", original)
    assert fuse_rotary({name, torch.nn.__name__}) == fuse_rotary({name}) == [f"{name}.apply_rotary_pos_emb"]
    ours: Any = modeling_glm4_moe.apply_rotary_pos_emb
    assert ours.__wrapped__ is original
    torch.manual_seed(0)
    q_BHSA, k_BGSA = torch.randn(2, 4, 5, 16), torch.randn(2, 1, 5, 16)
    cos_BST, sin_BST = torch.randn(2, 1, 5, 8)
    expected = original(q_BHSA, k_BGSA, cos_BST, sin_BST)
    calls = counting_calls(monkeypatch)
    assert all(map(torch.equal, ours(q_BHSA, k_BGSA, cos_BST, sin_BST), expected))
    assert not calls
    with rehearsing_gpu():
        for found, want in zip(ours(q_BHSA, k_BGSA, cos_BST, sin=sin_BST), expected, strict=True):
            torch.testing.assert_close(found, want)
        assert calls["FusedRotary"] == 2
        ours(q_BHSA.double(), k_BGSA, cos_BST, sin_BST)
        ours(*(x.to("meta") for x in (q_BHSA, k_BGSA, cos_BST, sin_BST)))
        ours(q_BHSA, k_BGSA, cos_BST.clone().requires_grad_(), sin_BST)
        ours(q_BHSA[:, 0], k_BGSA[:, 0], cos_BST[0], sin_BST[0], unsqueeze_dim=0)
    assert calls["FusedRotary"] == 2


def test_compiler_keeps_what_it_has() -> None:
    """In a compiled model only what is not compiled is fused: with packed sequences, the inside of attention."""
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
        fused = {re.sub(r"layers\.\d+\.", "", name) for name in fuse_layers(model) if name.startswith("model.")}
        assert fused == {"model.norm", *(f"model.{name}" for name in expected)}
