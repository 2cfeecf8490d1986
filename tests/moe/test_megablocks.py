"""MegaBlocks' kernels, helper operators and layer, by Triton's interpreter on a CPU; and the fused SwiGLU."""

import importlib.util
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.original_megablocks import original_dmoe
from expertmesh.moe.experts.shape import MoEShape
from expertmesh.moe.kernels import megablocks_ops
from expertmesh.moe.kernels.kernel_entries import MEGABLOCKS_SPARSE_ENTRY
from expertmesh.moe.kernels.megablocks import _topology, load_megablocks
from expertmesh.moe.kernels.swiglu import plain_backward, plain_forward, swiglu_joined_backward
from expertmesh.moe.util.errors import ExpertMeshError
from tests.interpreter import interpreted, prepare_megablocks
from tests.moe.kernel_contract import check_kernel, rows_of
from tests.moe.test_kernels import fused
from tests.rounding import OTHER_ORDER, assert_near
from tests.tiny import our_block, relative_error, tiny_block, tiny_mixtral

D = WIDTH = 128
SIZES: dict[str, Any] = dict(hidden_size=D, intermediate_size=WIDTH, num_local_experts=4)


def original_of(block: Any) -> torch.nn.Module:
    """MegaBlocks' layer on the weights of a block with our experts."""
    mlp = block.experts.mlp
    return original_dmoe(block.experts.shape, block.gate.weight, mlp.w1, mlp.v1, mlp.w2)


@interpreted
@pytest.mark.parametrize(
    ("counts", "width"),
    [([2, 0, 1], WIDTH), ([0, 0], WIDTH), pytest.param([0, 130, 0], 2 * WIDTH, marks=pytest.mark.slow)],
    ids=["within a block", "no row", "two blocks by two"],
)
def test_contract(counts: list[int], width: int) -> None:
    prepare_megablocks()
    check_kernel(MEGABLOCKS_SPARSE_ENTRY, counts, tolerance=OTHER_ORDER, widths=(D, width))


@interpreted
def test_more_blocks_than_sixteen_bits_hold() -> None:
    """A block's index times 128 must not wrap around. Here columns are as many; as many rows would take minutes."""
    prepare_megablocks()
    experts = rows_of([0] * 256 + [2, 0, 1])
    torch.manual_seed(0)
    weights = 0.2 * torch.randn(3, 259 * WIDTH, D)
    x, grad = torch.randn(2, 3, D)
    figures = {}
    for kernel in ("loop", "megablocks-sparse"):
        rows = x.clone().requires_grad_()
        out = fused(kernel)(rows, experts, *weights)
        figures[kernel] = (out.detach(), *torch.autograd.grad(out, rows, grad))
    for mine, theirs in zip(figures["megablocks-sparse"], figures["loop"], strict=True):
        assert relative_error(mine, theirs) < OTHER_ORDER
    topology = _topology(torch.tensor([128, 384], dtype=torch.int32), 384, WIDTH)
    assert topology.row_indices.dtype == topology.column_indices_t.dtype == torch.int32
    assert topology.row_indices.tolist() == [0, 1, 2]


@interpreted
def test_original_layer_of_many_experts() -> None:
    """As above: only the experts from 256 on are chosen."""
    prepare_megablocks()
    ours = tiny_block(**{**SIZES, "num_local_experts": 260})
    ours.gate.weight.data[:256] = 0.0
    ours.gate.weight.data[256:] = torch.arange(1, 5).unsqueeze(1) / D
    original = original_of(ours)
    x_BSD = 1.0 + torch.rand(1, 3, D)
    with torch.no_grad():
        assert relative_error(original(x_BSD), ours(x_BSD)) < OTHER_ORDER


@interpreted
def test_original_layer_equals_ours_and_hf() -> None:
    prepare_megablocks()
    hf = tiny_mixtral(**SIZES).model.layers[0].mlp
    ours = our_block(hf)
    original = original_of(ours)
    x_BSD, grad_BSD = torch.randn(2, 1, 6, D)
    outs, x_grads = [], []
    for layer in (original, ours, hf):
        x = x_BSD.clone().requires_grad_()
        out = layer(x)
        out.backward(grad_BSD)
        assert x.grad is not None
        outs.append(out.detach())
        x_grads.append(x.grad)
    for other in (1, 2):
        assert relative_error(outs[0], outs[other]) < OTHER_ORDER
        assert relative_error(x_grads[0], x_grads[other]) < OTHER_ORDER
    found: Any = original
    for name in ("w1", "v1", "w2"):
        assert relative_error(getattr(found.experts.mlp, name).grad, getattr(ours.experts.mlp, name).grad) < OTHER_ORDER
    assert relative_error(found.router.layer.weight.grad, ours.gate.weight.grad) < OTHER_ORDER


def triton() -> ModuleType:
    return importlib.import_module("expertmesh.moe.kernels.swiglu_triton")


def check_swiglu(rows: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    """Over more than one block of the kernel, the last one not full, where there are many rows."""
    torch.manual_seed(0)
    grad, gate, up = (3 * torch.randn(3, rows, 104, device=device)).to(dtype)
    assert relative_error(triton().fused_forward(gate, up), plain_forward(gate, up)) < tolerance
    (*found, no_gradient), (*expected, _) = triton().fused_backward(grad, gate, up), plain_backward(grad, gate, up)
    assert no_gradient is None
    for mine, plain in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        assert relative_error(mine, plain) < tolerance


@interpreted
@pytest.mark.parametrize("rows", [0, 1, 21])
def test_fused_swiglu_equals_plain(rows: int) -> None:
    check_swiglu(rows, torch.float32, "cpu", OTHER_ORDER)
    check_joined_swiglu(rows, torch.float32, "cpu", OTHER_ORDER)


def check_joined_swiglu(rows: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    """Gate and up in one tensor: narrower than a block, of a block's width, and of several."""
    torch.manual_seed(0)
    for width, is_weighed in product((104, 1024, 2500), (False, True)):
        gate_up, grad = ((3 * torch.randn(rows, n, device=device)).to(dtype) for n in (2 * width, width))
        weights = torch.rand(rows, device=device) if is_weighed else None
        gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=1))
        forward = triton().fused_forward(*gate_up.chunk(2, dim=1), weights)
        assert relative_error(forward, plain_forward(gate, up, weights)) < tolerance
        d_gate_up, hidden, d_weights = triton().fused_joined_backward(grad, gate_up, weights)
        *d_halves, plain_hidden, plain_d_weights = plain_backward(grad, gate, up, weights)
        assert d_gate_up.dtype == hidden.dtype == dtype
        assert relative_error(d_gate_up, torch.cat(d_halves, dim=1)) < tolerance
        assert relative_error(hidden, plain_hidden) < tolerance
        if weights is None:
            assert d_weights is plain_d_weights is None
            continue
        assert plain_d_weights is not None
        assert relative_error(d_weights, plain_d_weights) < tolerance
        apart = triton().fused_backward(grad, gate, up, weights)
        for mine, joined in zip(apart, (*d_gate_up.chunk(2, dim=1), hidden, d_weights), strict=True):
            assert relative_error(mine, joined) < tolerance


@pytest.mark.parametrize("is_weighed", [False, True])
def test_plain_swiglu_is_what_autograd_says(is_weighed: bool) -> None:
    torch.manual_seed(0)
    grad, gate, up = 3 * torch.randn(3, 5, 8)
    inputs = [gate.requires_grad_(), up.requires_grad_()]
    hidden, weights = F.silu(gate) * up, None
    if is_weighed:
        inputs.append(weights := torch.rand(5, requires_grad=True))
        hidden = hidden * weights.unsqueeze(1)
    d_gate, d_up, *d_weights = torch.autograd.grad(hidden, inputs, grad)
    assert_near(plain_forward(gate, up, weights), hidden)
    *found, found_d_weights = plain_backward(grad, gate, up, weights)
    assert_near(tuple(found), (d_gate, d_up, hidden))
    d_gate_up, joined_hidden, joined_d_weights = swiglu_joined_backward(grad, torch.cat([gate, up], dim=1), weights)
    assert_near((*d_gate_up.chunk(2, dim=1), joined_hidden), (d_gate, d_up, hidden))
    if not is_weighed:
        assert found_d_weights is joined_d_weights is None
    else:
        assert_near((found_d_weights, joined_d_weights), (*d_weights, *d_weights))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_helper_operators(dtype: torch.dtype) -> None:
    """By hand: MegaBlocks' compiled ones run on GPUs only."""
    x = torch.tensor([2, 0, 2, 5], dtype=dtype)
    out, order = torch.empty_like(x), torch.empty_like(x)
    megablocks_ops.inclusive_cumsum(x.view(1, -1), 1, out.view(1, -1))
    assert out.tolist() == [2, 2, 4, 9]
    megablocks_ops.exclusive_cumsum(x.view(1, -1), 1, out.view(1, -1))
    assert out.tolist() == [0, 2, 2, 4]
    megablocks_ops.sort(x, 3, out, order)
    assert (out.tolist(), order.tolist()) == ([0, 2, 2, 5], [1, 0, 2, 3])
    counts = megablocks_ops.histogram(x, 6)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [1, 0, 2, 0, 0, 1]
    assert megablocks_ops.histogram(torch.stack([x, x]), 6).tolist() == [[1, 0, 2, 0, 0, 1]] * 2


def test_helper_operators_on_bins() -> None:
    """Three bins, the second one empty."""
    columns = torch.empty(6, dtype=torch.int16)
    megablocks_ops.indices(torch.tensor([256, 256, 384], dtype=torch.int32), 128, 3, 2, columns)
    assert columns.tolist() == [0, 1, 0, 1, 4, 5]
    ends, out = torch.tensor([2, 2, 5], dtype=torch.int32), torch.empty(1, 5)
    megablocks_ops.replicate_forward(torch.tensor([[7.0, 8.0, 9.0]]), ends, out)
    assert out.tolist() == [[7, 7, 9, 9, 9]]
    summed = torch.empty(1, 3)
    megablocks_ops.replicate_backward(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]), ends, summed)
    assert summed.tolist() == [[3, 0, 12]]


def test_sparse_refuses_broken_blocks() -> None:
    weight = torch.zeros(2 * 100, D)
    with pytest.raises(ExpertMeshError, match="multiples of 128; this model has 128 and 100"):
        fused("megablocks-sparse")(torch.zeros(2, D), rows_of([1, 1]), weight, weight, weight)
    with pytest.raises(ExpertMeshError, match="multiples of 128"):
        original_dmoe(MoEShape(D, 100, 2, 1), torch.zeros(2, D), weight, weight, weight)


def test_sparse_refuses_tensors_past_its_offsets() -> None:
    """On the meta device: 150 000 rows of Mixtral 8x7B have 2^31 hidden activations."""
    rows = torch.empty(150_000, 4096, device="meta")
    experts, weight = rows_of([18_750] * 8, "meta"), torch.empty(8 * 14336, 4096, device="meta")
    with pytest.raises(ExpertMeshError, match=r"151016 tokens and weights \(114688, 4096\) on this rank"):
        fused("megablocks-sparse")(rows, experts, weight, weight, weight)


def test_missing_packages_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertmesh.moe.kernels.megablocks.find_spec", lambda name: None)
    load_megablocks.cache_clear()  # other tests have loaded it
    weight = torch.zeros(D, D)
    with pytest.raises(ExpertMeshError, match="needs megablocks and stk and triton, not installed here; run make"):
        fused("megablocks-sparse")(torch.zeros(2, D), rows_of([2]), weight, weight, weight)
    with pytest.raises(ExpertMeshError, match="dMoE needs megablocks"):
        original_dmoe(MoEShape(D, D, 1, 1), torch.zeros(1, D), weight, weight, weight)
