"""Linear layers in fp8, against products of the rounded values in fp32, and with Triton's kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from expertmesh.moe.experts.lora import Lora, add_adapters
from expertmesh.moe.linear import fp8 as fp8_linear
from expertmesh.moe.linear.division import Division
from expertmesh.moe.linear.fp8 import suits_fp8
from expertmesh.moe.linear.linear import hold_transposed, use_fp8
from tests.rounding import OTHER_ORDER
from tests.tiny import relative_error


def rounded(x: Tensor, dim: int) -> Tensor:
    """Values as fp8 has them, with a power of two for all along `dim`."""
    largest = x.float().abs().amax(dim=dim, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def in_fp8(num_in: int, num_out: int, bias: bool, rowwise: bool = False) -> Any:
    torch.manual_seed(0)
    layer: Any = nn.Linear(num_in, num_out, bias=bias).bfloat16()
    use_fp8(layer)
    layer.is_transposed = rowwise
    if rowwise:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())
    return layer


@pytest.mark.parametrize(("rows", "bias"), [((3, 7), True), ((32,), False), ((1, 1), False)])
def test_products_of_rounded_values(rows: tuple[int, ...], bias: bool) -> None:
    layer = in_fp8(48, 32, bias)
    x = (torch.randn(*rows, 48) * 3).bfloat16().requires_grad_()
    grad = torch.randn(*rows, 32).bfloat16()
    out = layer(x)
    out.backward(grad)
    x_MK, grad_MN, weight = x.detach().flatten(0, -2), grad.flatten(0, -2), layer.weight.detach()
    expected = rounded(x_MK, 1) @ rounded(weight, 1).T
    expected = expected.bfloat16() + layer.bias.detach() if bias else expected
    assert relative_error(out.detach().flatten(0, -2).float(), expected.float()) < 4e-3
    assert x.grad is not None
    assert relative_error(x.grad.flatten(0, -2).float(), rounded(grad_MN, 1) @ rounded(weight, 0)) < 4e-3
    assert relative_error(layer.weight.grad.float(), rounded(grad_MN, 0).T @ rounded(x_MK, 0)) < 4e-3
    # and no nearer than that to what is not rounded
    exact = nn.functional.linear(x_MK, weight, layer.bias)
    assert relative_error(out.detach().flatten(0, -2).float(), exact.detach().float()) > 1e-2


def test_in_another_dtype_as_any_linear_layer() -> None:
    layer = in_fp8(48, 32, True).float()
    x = torch.randn(5, 48)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("bias", [False, True])
def test_held_transposed_with_the_same_bits(bias: bool) -> None:
    """Each value of the weight has the scale, forward and backward, that it has where it is not transposed."""
    x, grad = ((torch.randn(3, 7, width) * 3).bfloat16() for width in (48, 32))
    found = []
    for rowwise in (False, True):
        layer, given = in_fp8(48, 32, bias, rowwise), x.clone().requires_grad_()
        out = layer(given)
        out.backward(grad)
        found.append((out, given.grad, layer.weight.grad.t() if rowwise else layer.weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    layer = in_fp8(48, 32, bias, rowwise=True).float()
    assert relative_error(layer(x.float()), nn.functional.linear(x.float(), layer.weight.t(), layer.bias)) < OTHER_ORDER


class Meeting:
    """Stands in for the ranks of a group, each of which calls what all call, one after the other: first to leave what
    it has, then again to be given what has come of all."""

    def __init__(self, size: int):
        self.size, self.index, self.is_over = size, 0, False
        self.left: list[list[Tensor]] = [[] for _ in range(size)]
        self.number = 0

    def run(self, call: Any) -> list[Any]:
        for is_over in (False, True):
            found = []
            for index in range(self.size):
                self.is_over, self.index, self.number = is_over, index, 0
                found.append(call(index))
        return found

    def _all(self, x: Tensor) -> list[Tensor]:
        if not self.is_over:
            self.left[self.index].append(x)
        self.number += 1
        return [left[self.number - 1] for left in self.left] if self.is_over else [x]

    def all_reduce_max(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.int32, "as many bytes as in fp32"
        return torch.stack(self._all(x)).amax(dim=0)

    def sum_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.mine(torch.stack(self._all(x)).sum(dim=0), dim)

    def mine(self, x: Tensor, dim: int = 0) -> Tensor:
        return x.chunk(self.size, dim)[self.index]


@pytest.mark.parametrize(("size", "rowwise"), [(2, False), (4, True)])
def test_divided_by_ranks_the_same_is_rounded(size: int, rowwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what sums over a divided width, each rank's codes are its part of one process', by the same scales, though the
    parts' values are of unlike size; and nothing is exchanged for any other matmul."""
    calls: list[tuple[Any, Any]] = []
    multiply = fp8_linear._multiply

    def noting(a: Any, b: Any) -> Tensor:
        calls.append((a, b))
        return multiply(a, b)

    monkeypatch.setattr(fp8_linear, "_multiply", noting)
    layer = in_fp8(128, 64, False, rowwise)
    layer.weight.data *= torch.logspace(0, -6, len(layer.weight)).bfloat16().unsqueeze(1)
    x, grad = (torch.randn(24, width) * torch.logspace(-6, 0, width) for width in (128, 64))

    def products(layer: Any, x: Tensor, grad: Tensor) -> list[Any]:
        calls.clear()
        x = x.bfloat16().requires_grad_()
        out = layer(x)
        out.backward(grad.bfloat16())
        return [out.detach(), x.grad, layer.weight.grad, *calls[0], *calls[1], *calls[2]]

    def of_rank(index: int) -> list[Any]:
        part: Any = nn.Linear(1, 1, bias=False)
        use_fp8(part)
        part.is_transposed = rowwise
        part.weight = nn.Parameter(layer.weight.detach().chunk(size)[index])
        part.division = Division("inputs" if rowwise else "outputs", group)
        given = (x.chunk(size, 1)[index], grad) if rowwise else (x, grad.chunk(size, 1)[index])
        return products(part, *given)

    group = Meeting(size)
    out, grad_x, grad_weight, *casts = products(layer, x, grad)
    found = list(zip(*group.run(of_rank), strict=True))
    assert [len(left) for left in group.left] == [1] * size
    summed, joined = (found[0], found[1]) if rowwise else (found[1], found[0])
    assert relative_error(sum(part.float() for part in summed), (out if rowwise else grad_x).float()) < 4e-3
    assert torch.equal(torch.cat(joined, dim=1), grad_x if rowwise else out)
    assert torch.equal(torch.cat(found[2]), grad_weight)
    # the operands of the matmul over what is divided
    first = 0 if rowwise else 2
    for number in (first, first + 1):
        parts, expected = found[3 + number], casts[number]
        assert torch.equal(torch.cat([part.codes.float() for part in parts], dim=1), expected.codes.float())
        assert all(torch.equal(part.scales, expected.scales) for part in parts)
        # of itself alone, each part's largest would be above 224
        assert min(float(part.codes.float().abs().amax(dim=1).min()) for part in parts) < 4


def test_alike_on_all_ranks_a_summand_each() -> None:
    """Of an output's gradient, whose summands the ranks have, the sum is rounded: each rank's rows of it."""
    layer = in_fp8(48, 32, False)
    x, grads = torch.randn(4, 6, 48).bfloat16(), torch.randn(2, 4, 6, 32).bfloat16()

    def gradients(grad: Tensor) -> tuple[Tensor, Tensor]:
        layer.weight.grad, given = None, x.clone().requires_grad_()
        layer(given).backward(grad)
        assert given.grad is not None
        return given.grad, layer.weight.grad

    grad_x, grad_weight = gradients(grads.sum(dim=0))
    group = Meeting(2)
    layer.division = Division("nothing", group)
    (first_x, first_weight), (second_x, second_weight) = group.run(lambda index: gradients(grads[index]))
    assert torch.equal(first_x + second_x, grad_x)
    assert torch.equal(first_x[2:], torch.zeros_like(first_x[2:]))
    assert relative_error((first_weight + second_weight).float(), grad_weight.float()) < 4e-3


def test_without_rows() -> None:
    assert in_fp8(48, 32, False)(torch.empty(0, 48, dtype=torch.bfloat16)).shape == (0, 32)


@pytest.mark.parametrize(
    ("widths", "suits"), [((48, 32), True), ((40, 32), False), ((48, 8), False), ((2**16, 16), False)]
)
def test_widths(widths: tuple[int, int], suits: bool) -> None:
    assert suits_fp8(torch.empty(widths, device="meta")) == suits


@pytest.mark.parametrize(("is_transposed", "bias"), [(False, True), (True, False)])
def test_beside_an_adapter(is_transposed: bool, bias: bool) -> None:
    """The frozen weight is multiplied in fp8, forward and for the input's gradient; A and B in bf16."""
    torch.manual_seed(0)
    layers = [nn.Linear(48, 32, bias=bias, device="meta", dtype=torch.bfloat16) for _ in range(2)]
    for layer in layers:
        if is_transposed:
            hold_transposed(layer)
        layer.to_empty(device="cpu")
    for own, other in zip(*(layer.parameters() for layer in layers), strict=True):
        own.data.normal_()
        other.data.copy_(own)
    model: Any = nn.ModuleDict({"adapted": layers[0]})
    add_adapters(model, Lora(4, 8.0), ["adapted"], [], experts=False)
    adapted, frozen = model["adapted"], layers[1].requires_grad_(False)
    adapted.lora_A, adapted.lora_B = (nn.Parameter(torch.randn(shape)) for shape in ((4, 48), (32, 4)))
    use_fp8(adapted)
    use_fp8(frozen)
    x = torch.randn(3, 7, 48).bfloat16()
    grad = torch.randn(3, 7, 32).bfloat16()
    given, expected_x = (x.clone().requires_grad_() for _ in range(2))
    delta = nn.functional.linear(nn.functional.linear(expected_x, adapted.lora_A.bfloat16()), adapted.lora_B.bfloat16())
    out, expected = adapted(given), torch.add(frozen(expected_x), delta, alpha=2.0)
    out.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close((out, given.grad), (expected, expected_x.grad), rtol=0, atol=0)
    assert adapted.weight.grad is None
    assert adapted.lora_A.grad.abs().sum() > 0
    assert adapted.lora_B.grad.abs().sum() > 0
