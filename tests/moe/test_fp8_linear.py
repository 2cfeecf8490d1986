"""Linear layers in fp8, against products of the rounded values in fp32, and with Triton's kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from expertmesh.moe import Lora, add_adapters, use_fp8
from expertmesh.moe.kernels.fp8_linear import FP8Linear, FP8RowwiseLinear, suits_fp8
from expertmesh.moe.model.rowwise import hold_transposed
from tests.tiny import relative_error


def rounded(x: Tensor, dim: int) -> Tensor:
    """Values as fp8 has them, with a power of two for all along `dim`."""
    largest = x.float().abs().amax(dim=dim, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def in_fp8(num_in: int, num_out: int, bias: bool, rowwise: bool = False) -> Any:
    torch.manual_seed(0)
    layer: Any = nn.Linear(num_in, num_out, bias=bias).bfloat16()
    layer.__class__ = FP8RowwiseLinear if rowwise else FP8Linear
    if rowwise:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(3, 7), (32,), (1, 1)])
def test_products_of_rounded_values(bias: bool, rows: tuple[int, ...]) -> None:
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
    assert relative_error(layer(x.float()), nn.functional.linear(x.float(), layer.weight.t(), layer.bias)) < 1e-6


def test_without_rows() -> None:
    assert in_fp8(48, 32, False)(torch.empty(0, 48, dtype=torch.bfloat16)).shape == (0, 32)


@pytest.mark.parametrize(
    ("widths", "suits"), [((48, 32), True), ((40, 32), False), ((48, 8), False), ((2**16, 16), False)]
)
def test_widths(widths: tuple[int, int], suits: bool) -> None:
    assert suits_fp8(torch.empty(widths, device="meta")) == suits


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
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
    out = adapted(given)
    out.backward(grad)
    delta = nn.functional.linear(nn.functional.linear(expected_x, adapted.lora_A.bfloat16()), adapted.lora_B.bfloat16())
    expected = torch.add(frozen(expected_x), delta, alpha=2.0)
    expected.backward(grad)
    assert torch.equal(out, expected)
    assert given.grad is not None
    assert expected_x.grad is not None
    assert torch.equal(given.grad, expected_x.grad)
    assert adapted.weight.grad is None
    assert adapted.lora_A.grad.abs().sum() > 0
    assert adapted.lora_B.grad.abs().sum() > 0


@pytest.mark.gpu
def test_on_a_gpu_as_on_a_cpu() -> None:
    layer = in_fp8(256, 128, True)
    x = torch.randn(100, 256).bfloat16()
    found = []
    for device in ("cpu", "cuda"):
        own = layer.to(device)
        own.zero_grad()
        given = x.to(device).requires_grad_()
        out = own(given)
        out.square().sum().backward()
        assert given.grad is not None
        found.append([each.cpu().float() for each in (out.detach(), given.grad, own.weight.grad)])
    for here, there in zip(*found, strict=True):
        assert relative_error(there, here) < 4e-3
