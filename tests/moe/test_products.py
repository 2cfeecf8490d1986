"""One grouped GEMM of all experts against a plain matmul per expert, with autograd's own backward; and biases."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.moe.kernels.expert_products import AddBias, Product
from expertmesh.moe.kernels.kernel_registry import KERNELS
from expertmesh.moe.util.errors import ExpertMeshError
from tests.moe.test_kernels import (
    COUNTS,
    CPU_KERNELS,
    fused,
    garbage_for_empty_groups,
    library,  # noqa: F401
    no_kernel_without_rows,
)
from tests.moe.test_kernels import inputs as swiglu_inputs
from tests.tiny import relative_error

I, O = 16, 24  # noqa: E741
ORDERS = {"as rows are": False, "transposed": True}


def product_of(kernel: str) -> Product:
    product = KERNELS.get(kernel).product
    assert product is not None
    return product


def inputs(counts: list[int], is_transposed: bool, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """x_RI, and a weight that is (e, O, I) or, transposed, lies in memory as (e, I, O)."""
    generator = torch.Generator().manual_seed(0)
    x_RI = torch.randn(sum(counts), I, generator=generator)
    weight = torch.randn(len(counts), I if is_transposed else O, O if is_transposed else I, generator=generator)
    return x_RI.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_()


def plain(x_RI: Tensor, counts: list[int], weight_eOI: Tensor) -> Tensor:
    return torch.cat([x @ weight_OI.t() for x, weight_OI in zip(x_RI.split(counts), weight_eOI, strict=True)])


def check(
    kernel: str, counts: list[int], is_transposed: bool, dtype: torch.dtype, device: str, tolerance: float
) -> None:
    results = []
    for function, numbers, place in ((product_of(kernel), dtype, device), (plain, torch.float64, "cpu")):
        x_RI, weight = inputs(counts, is_transposed, numbers, place)
        sizes = torch.tensor(counts, device=place) if function is not plain else counts
        out_RO = function(x_RI, sizes, weight.transpose(1, 2) if is_transposed else weight)  # type: ignore[arg-type]
        assert out_RO.dtype == numbers
        grad_RO = torch.randn(out_RO.shape, generator=torch.Generator().manual_seed(1)).to(place, numbers)
        results.append([out_RO.detach(), *torch.autograd.grad(out_RO, (x_RI, weight), grad_RO)])
    for found, expected in zip(*results, strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 4, 12])
def test_adapters_of_any_rank(dtype: torch.dtype, rank: int) -> None:
    """A and B in one grouped GEMM each, padded; by torch's, which refuses such widths as they are."""
    low_rank = KERNELS.get("torch-grouped").low_rank
    assert low_rank is not None
    counts, results = [3, 0, 5], []
    for product, numbers in ((low_rank, dtype), (plain, torch.float64)):
        generator = torch.Generator().manual_seed(0)
        sizes = [(sum(counts), I), (len(counts), rank, I), (len(counts), O, rank)]
        tensors = [torch.randn(size, generator=generator).to(dtype).to(numbers).requires_grad_() for size in sizes]
        x_RI, a_erI, b_eOr = tensors
        split = counts if product is plain else torch.tensor(counts)
        out_RO = product(product(x_RI, split, a_erI), split, b_eOr)  # type: ignore[arg-type]
        grad_RO = torch.randn(out_RO.shape, generator=generator).to(dtype).to(numbers)
        results.append([out_RO.detach(), *torch.autograd.grad(out_RO, tensors, grad_RO)])
    for found, expected in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert relative_error(found.double(), expected) < (1e-6 if dtype == torch.float32 else 2e-2)
    if rank % (16 // dtype.itemsize):
        with pytest.raises(ExpertMeshError, match="hidden and expert width to be multiples of"):
            product_of("torch-grouped")(x_RI.to(dtype), torch.tensor(counts), a_erI.to(dtype))


@pytest.mark.parametrize("is_transposed", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_fp32(kernel: str, counts: list[int], is_transposed: bool) -> None:
    check(kernel, counts, is_transposed, torch.float32, "cpu", 1e-5)


@pytest.mark.parametrize("is_transposed", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("counts", [[70, 0, 33], [5]])
@pytest.mark.usefixtures("library")
def test_libraries(counts: list[int], is_transposed: bool) -> None:
    check("loop", counts, is_transposed, torch.float32, "cpu", 1e-5)


@pytest.mark.parametrize("is_transposed", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_bf16(kernel: str, is_transposed: bool) -> None:
    check(kernel, COUNTS["first and last empty"], is_transposed, torch.bfloat16, "cpu", 6e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("is_transposed", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_bf16_on_gpu(kernel: str, counts: list[int], is_transposed: bool) -> None:
    check(kernel, counts, is_transposed, torch.bfloat16, "cuda", 6e-2)


@pytest.mark.parametrize("is_transposed", ORDERS.values(), ids=ORDERS)
def test_by_finite_differences(is_transposed: bool) -> None:
    x_RI, weight = (t.detach()[..., :4].clone().requires_grad_() for t in inputs([2, 0, 1], True, torch.float64))
    weight = weight.detach()[:, :4].contiguous().requires_grad_()
    counts = torch.tensor([2, 0, 1])

    def product(x_RI: Tensor, weight: Tensor) -> Tensor:
        return product_of("loop")(x_RI, counts, weight.transpose(1, 2) if is_transposed else weight)

    assert torch.autograd.gradcheck(product, (x_RI, weight))


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("is_transposed", ORDERS.values(), ids=ORDERS)
def test_a_gradient_lies_as_its_weight_does(kernel: str, is_transposed: bool) -> None:
    """So that autograd adds it to that weight's own without a copy."""
    x_RI, weight = inputs([3, 0, 2], is_transposed, torch.float32)
    view = (weight.transpose(1, 2) if is_transposed else weight).detach().requires_grad_()
    (grad,) = torch.autograd.grad(product_of(kernel)(x_RI, torch.tensor([3, 0, 2]), view).sum(), view)
    assert grad.stride() == view.stride()


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_gets_no_gradient(kernel: str, frozen: str) -> None:
    x_RI, weight_eOI = inputs([3, 2], False, torch.float32)
    (x_RI if frozen == "x" else weight_eOI).requires_grad_(False)
    product_of(kernel)(x_RI, torch.tensor([3, 2]), weight_eOI).sum().backward()
    assert (x_RI.grad is None) == (frozen == "x")
    assert (weight_eOI.grad is None) == (frozen == "weight")


def test_grouped_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ExpertMeshError, match="multiples of 4"):
        product_of("torch-grouped")(torch.zeros(2, 6), torch.tensor([2]), torch.zeros(1, 8, 6))
    with pytest.raises(ExpertMeshError, match="float64"):
        product_of("torch-grouped")(torch.zeros(2, 8).double(), torch.tensor([2]), torch.zeros(1, 8, 8).double())


@pytest.mark.parametrize("is_transposed", ORDERS.values(), ids=ORDERS)
def test_grouped_refuses_2_to_the_31_elements(is_transposed: bool) -> None:
    weight = torch.empty(1, *((16, 1024) if is_transposed else (1024, 16)), dtype=torch.bfloat16, device="meta")
    weight_eOI = weight.transpose(1, 2) if is_transposed else weight
    x_RI = torch.empty(2**21, 16, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ExpertMeshError, match="2097152 tokens on this rank, 16 and 1024 wide"):
        product_of("torch-grouped")(x_RI, torch.tensor([2**21], device="meta"), weight_eOI)
    assert product_of("torch-grouped")(x_RI[1:], torch.tensor([2**21 - 1], device="meta"), weight_eOI).shape[1] == 1024


@pytest.mark.parametrize("is_transposed", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_weight_gradients_of_empty_groups_are_zero(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], is_transposed: bool
) -> None:
    garbage_for_empty_groups(monkeypatch)
    monkeypatch.setattr("expertmesh.moe.kernels.expert_kernels._leaves_empty_groups", lambda device: True)
    check("torch-grouped", counts, is_transposed, torch.float32, "cpu", 1e-5)


@pytest.mark.parametrize("is_transposed", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("counts", [[0], [0, 0, 0]])
def test_no_kernel_is_called_without_rows(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], is_transposed: bool
) -> None:
    no_kernel_without_rows(monkeypatch)
    check("torch-grouped", counts, is_transposed, torch.float32, "cpu", 1e-5)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_bias(counts: list[int]) -> None:
    torch.manual_seed(0)
    x_RO, bias_eO = torch.randn(sum(counts), O, requires_grad=True), torch.randn(len(counts), O, requires_grad=True)
    of_row = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    grad_RO = torch.randn(sum(counts), O)
    found = AddBias.apply(x_RO, torch.tensor(counts), bias_eO)
    expected = x_RO + bias_eO[of_row]
    assert torch.equal(found, expected)
    found_grads = torch.autograd.grad(found, (x_RO, bias_eO), grad_RO)
    for mine, theirs in zip(found_grads, torch.autograd.grad(expected, (x_RO, bias_eO), grad_RO), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gradient_of_a_bias_in_bf16_is_summed_in_fp32() -> None:
    """1 + 1,000 times 2^-9 is 2.953; each of them added to 1 in bf16 would be lost."""
    bias_eO = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    grad_RO = torch.full((1001, 1), 2.0**-9, dtype=torch.bfloat16)
    grad_RO[0] = 1.0
    AddBias.apply(torch.zeros(1001, 1, dtype=torch.bfloat16), torch.tensor([1001, 0]), bias_eO).backward(grad_RO)
    assert bias_eO.grad is not None
    assert bias_eO.grad.dtype == torch.bfloat16
    assert bias_eO.grad.flatten().tolist() == pytest.approx([1 + 1000 * 2.0**-9, 0], rel=2**-8)


def test_bias_by_finite_differences() -> None:
    torch.manual_seed(0)
    x_RO, bias_eO = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, b: AddBias.apply(x, torch.tensor([2, 0, 1]), b), (x_RO, bias_eO))


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_composed_products_are_the_fused_mlp(kernel: str) -> None:
    counts = torch.tensor([3, 0, 4])
    results = []
    for is_fused in (True, False):
        rows_RD, *weights = swiglu_inputs(counts.tolist(), torch.float32)
        if is_fused:
            out_RD = fused(kernel)(rows_RD, counts, *weights)
        else:
            w1_eFD, v1_eFD, w2_eFD = (w.unflatten(0, (3, -1)) for w in weights)
            product = product_of(kernel)
            hidden_RF = F.silu(product(rows_RD, counts, w1_eFD)) * product(rows_RD, counts, v1_eFD)
            out_RD = product(hidden_RF, counts, w2_eFD.transpose(1, 2))
        results.append([out_RD.detach(), *torch.autograd.grad(out_RD.square().sum(), (rows_RD, *weights))])
    for mine, theirs in zip(*results, strict=True):
        assert relative_error(mine, theirs) < 1e-5
