"""What is recomputed for its backward alone: no result and no work for it, but the same gradients to the bit. Of expert
kernels that is part of their contract (`kernel_contract.py`)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from expertmesh.moe.dispatch.permute import PermuteRows, TokensToRows, count_experts, expert_order
from expertmesh.moe.kernels.expert_products import AddBias
from expertmesh.moe.kernels.kernel_entries import KERNELS
from expertmesh.moe.linear.quantized import Storage, quantize, stored_product
from expertmesh.moe.util.recompute_cache import for_backward_alone
from tests.moe.kernel_contract import Calls, rows_of
from tests.moe.test_experts import EXPERTS, KINDS, adapted, experts_of, inputs
from tests.moe.test_kernels import CPU_KERNELS


def check(operator: str, calls: int, run: Callable[[], Tensor], inputs: list[Tensor]) -> None:
    """That `run` calls an operator so often with its result, and not at all without."""
    found = []
    for needs_output in (True, False):
        with Calls() as counted, for_backward_alone(not needs_output):
            out = run()
        assert counted.count[operator] == (calls if needs_output else 0)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        found.append((out.shape, torch.autograd.grad(out, inputs, grad)))
    assert out.untyped_storage().nbytes() == out.element_size()
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_stored_product(is_transposed: bool) -> None:
    torch.manual_seed(0)
    storage = Storage("fp8", 16)
    codes, scales = quantize(torch.randn(3 * 24, 16), storage)
    x_RI = torch.randn(7, 24 if is_transposed else 16, requires_grad=True)
    product, rows = KERNELS.get("loop").code.product, rows_of([4, 0, 3])
    assert product is not None
    how = (storage, product, is_transposed)
    check("aten::mm.out", 2, lambda: stored_product(x_RI, rows, codes, scales, *how), [x_RI])


def test_bias() -> None:
    x_RO, bias_eO = torch.randn(5, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    counts_e = torch.tensor([2, 3])
    check("aten::add.Tensor", 1, lambda: AddBias.apply(x_RO, counts_e, bias_eO), [x_RO, bias_eO])


def test_permutations() -> None:
    x_TD, index = torch.randn(5, 8, requires_grad=True), torch.tensor([3, 0, 4, 1, 2])
    order = expert_order(torch.randint(4, (5, 2), generator=torch.Generator().manual_seed(0)), 4, has_padding=False)
    check("aten::index_select", 1, lambda: TokensToRows.apply(x_TD, order), [x_TD])
    check("aten::index_select", 1, lambda: PermuteRows.apply(x_TD, index, index.argsort()), [x_TD])


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize(
    ("kind", "saved"), [("plain", 1), ("adapted", 2), *((kind, 1) for kind in KINDS if "," in kind)]
)
def test_experts(kind: str, saved: int, kernel: str) -> None:
    """The last matrix is not multiplied by: of an adapter neither the frozen one nor B, but A, of which the gradient of
    B is made."""
    experts = adapted(experts_of("plain", kernel)) if kind == "adapted" else experts_of(kind, kernel)
    x_TD, experts_TK, weights_TK = inputs()
    counts_E = count_experts(experts_TK, EXPERTS)
    sent = experts.dispatcher.send(x_TD, experts_TK, weights_TK, counts_E, has_padding=False)
    (rows,) = sent.rows
    calls, grads = [], []
    for needs_output in (True, False):
        with Calls() as counted:
            (out,) = experts.mlp([rows], sent.parts, lambda needs_output=needs_output: needs_output)
        calls.append(counted.products())
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        grads.append(torch.autograd.grad(out, [x_TD, *experts.parameters()], grad, retain_graph=True))
    each = 1 if kernel == "torch-grouped" else int((counts_E > 0).sum())
    assert calls[0] - calls[1] == saved * each
    torch.testing.assert_close(*grads, rtol=0, atol=0)
