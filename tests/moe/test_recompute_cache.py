"""What is recomputed for its backward alone: no result and no work for it, but the same gradients to the bit."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.moe.dispatch.permute import PermuteRows, TokensToRows, expert_order
from expertmesh.moe.kernels.expert_kernels import FP8
from expertmesh.moe.kernels.expert_products import AddBias
from expertmesh.moe.kernels.kernel_registry import KERNELS
from expertmesh.moe.linear.quantized import Storage, quantize, stored_product
from tests.interpreter import interpreted, prepare_megablocks
from tests.moe.test_kernels import COUNTS, CPU_KERNELS, JOINED, fused
from tests.moe.test_kernels import inputs as swiglu_inputs
from tests.moe.test_products import ORDERS, product_of
from tests.moe.test_products import inputs as product_inputs


class Calls(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[operator.name()] += 1
        return operator(*args, **(kwargs or {}))

    def products(self) -> int:
        return self.count["aten::mm"] + self.count["aten::_grouped_mm"]


def check(run: Callable[[bool], Tensor], inputs: list[Tensor]) -> tuple[Calls, Calls]:
    """The calls of `run` with its result and without."""
    calls, grads = [], []
    for needs_output in (True, False):
        with Calls() as counted:
            out = run(needs_output)
        calls.append(counted)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        grads.append((grad.dtype, out.shape, *torch.autograd.grad(out, inputs, grad)))
        if not needs_output:
            assert out.untyped_storage().nbytes() == out.element_size()
    for mine, other in zip(*grads, strict=True):
        assert torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other
    return calls[0], calls[1]


def number_of_launches(kernel: str, counts: list[int]) -> int:
    """For one product of all experts: of a grouped kernel one, if there are rows."""
    experts = sum(count > 0 for count in counts)
    return experts if kernel == "loop" else min(experts, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kernel", [*CPU_KERNELS, JOINED])
def test_fused(kernel: str, counts: list[int], dtype: torch.dtype) -> None:
    tensors, counts_e = swiglu_inputs(counts, dtype), torch.tensor(counts)
    all_of_it, less = check(
        lambda needed: fused(kernel)(tensors[0], counts_e, *tensors[1:], needs_output=needed), tensors
    )
    launches = number_of_launches(kernel, counts)
    products = 2 if kernel == JOINED else 3
    assert (all_of_it.products(), less.products()) == (products * launches, (products - 1) * launches)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_fp8(counts: list[int]) -> None:
    tensors, counts_e = swiglu_inputs(counts, torch.bfloat16), torch.tensor(counts)
    run, experts = FP8.fused, len(counts) if any(counts) else 0
    assert run is not None
    all_of_it, less = check(lambda needed: run(tensors[0], counts_e, *tensors[1:], needs_output=needed), tensors)
    assert (all_of_it.products(), less.products()) == (3 * experts, 2 * experts)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("counts", [[3, 0, 130], [0, 0]], ids=str)
def test_megablocks(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_megablocks()
    from stk.backend import triton_kernels

    counters = []
    for name in ("dsd", "sdd"):
        counters.append(mock.Mock(wraps=getattr(triton_kernels, name)))
        monkeypatch.setattr(triton_kernels, name, counters[-1])
    torch.manual_seed(0)
    shapes = [(sum(counts), 128)] + [(len(counts) * 128, 128)] * 3
    tensors = [(0.2 * torch.randn(shape)).requires_grad_() for shape in shapes]
    products: list[int] = []

    def run(needs_output: bool) -> Tensor:
        before = sum(counter.call_count for counter in counters)
        out_RD = fused("megablocks-sparse")(tensors[0], torch.tensor(counts), *tensors[1:], needs_output=needs_output)
        products.append(sum(counter.call_count for counter in counters) - before)
        return out_RD

    check(run, tensors)
    assert products == [3, 2]


@pytest.mark.parametrize("is_transposed", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_product(kernel: str, counts: list[int], is_transposed: bool) -> None:
    x_RI, weight = product_inputs(counts, is_transposed, torch.float32)
    counts_e = torch.tensor(counts)

    def run(needs_output: bool) -> Tensor:
        weight_eOI = weight.transpose(1, 2) if is_transposed else weight
        return product_of(kernel)(x_RI, counts_e, weight_eOI, needs_output=needs_output)

    all_of_it, less = check(run, [x_RI, weight])
    assert all_of_it.products() == number_of_launches(kernel, counts)
    assert less.products() == 0


@pytest.mark.parametrize("is_transposed", ORDERS.values(), ids=ORDERS)
def test_stored_product(is_transposed: bool) -> None:
    torch.manual_seed(0)
    storage = Storage("fp8", 16)
    codes, scales = quantize(torch.randn(3 * 24, 16), storage)
    x_RI = torch.randn(7, 24 if is_transposed else 16, requires_grad=True)
    product, counts_e = KERNELS.get("loop").product, torch.tensor([4, 0, 3])
    assert product is not None
    all_of_it, less = check(
        lambda needed: stored_product(x_RI, counts_e, codes, scales, storage, product, is_transposed, needed), [x_RI]
    )
    assert (all_of_it.products(), less.products()) == (2, 0)


def test_bias() -> None:
    x_RO, bias_eO = torch.randn(5, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    all_of_it, less = check(lambda needed: AddBias.apply(x_RO, torch.tensor([2, 3]), bias_eO, needed), [x_RO, bias_eO])
    assert (all_of_it.count["aten::add.Tensor"], less.count["aten::add.Tensor"]) == (1, 0)


def test_permutations() -> None:
    x_TD = torch.randn(5, 8, requires_grad=True)
    order = expert_order(torch.randint(4, (5, 2), generator=torch.Generator().manual_seed(0)), 4, has_padding=False)
    to_rows = check(lambda needed: TokensToRows.apply(x_TD, order, needed), [x_TD])
    index = torch.tensor([3, 0, 4, 1, 2])
    permuted = check(lambda needed: PermuteRows.apply(x_TD, index, index.argsort(), needed), [x_TD])
    for all_of_it, less in (to_rows, permuted):
        assert (all_of_it.count["aten::index_select"], less.count["aten::index_select"]) == (1, 0)
