"""Steps of low-bit AdamW in one kernel against torch's operators, by Triton's interpreter on a CPU."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from expertmesh.training.optim.low_bit import AdamW8bit, AdamWBf16, dynamic_map, takes_kernel
from tests.interpreter import interpreted, round_to_nearest
from tests.tiny import relative_error

EXACT: dict[str, Any] = {"lr": 2.0**-10, "betas": (0.75, 0.5), "eps": 1e-8}
"""Powers of two: that torch rounds a product and a sum once, which it does not on every CPU, makes no difference."""
USUAL: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
DECAY = 0.25
SEED = 2**31 + 5
BF16_CASES: list[tuple[tuple[int, ...], int, int]] = [
    ((9, 520), 0, 7),
    ((3, 1100), 2**20, 2**32 - 1),
    ((20, 24), 3, 2**31),
    ((700,), 1000, 0),
    ((5, 2, 3), 11, 1),
    ((0, 16), 4, 9),
    ((1, 1), 0, 2),
]
"""Shape of this rank's part, the row at which it begins, and the parameter's number."""


@pytest.fixture(autouse=True)
def _as_gpus_round(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        round_to_nearest(monkeypatch)


def both(
    monkeypatch: pytest.MonkeyPatch, start: Tensor, grads: list[Tensor], settings: dict[str, Any], **bf16: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weight and state after steps of the kernel, and after steps in torch's operators."""
    results = []
    for kernel in (True, False):
        monkeypatch.setattr("expertmesh.training.optim.low_bit.takes_kernel", lambda *tensors, kernel=kernel: kernel)
        parameter = torch.nn.Parameter(start.clone())
        # as FSDP does where it reduces in another dtype than the parameter's
        parameter.grad_dtype = grads[0].dtype
        groups: list[dict[str, Any]] = [{"params": [parameter], "weight_decay": DECAY}]
        if start.dtype == torch.bfloat16:
            rows = range(bf16["first_row"], bf16["first_row"] + len(start))
            number = bf16["number"]
            optimizer: Any = AdamWBf16(groups, **settings, rows={parameter: (number, rows)}, seed=SEED)
        else:
            optimizer = AdamW8bit(groups, **settings)
        for grad in grads:
            parameter.grad = grad.clone()
            optimizer.step()
        results.append({"weight": parameter.detach(), **optimizer.state[parameter]})
    return results[0], results[1]


def gradients(size: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    # blocks of all magnitudes, and one of zeros
    return [
        (torch.randn(size, generator=generator) * 10.0 ** (step - 2)).where(torch.tensor(step > 0), 0).to(device, dtype)
        for step in range(4)
    ]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """All state to the bit. Weights on a CPU to the last one, since roots of torch's there are not always rounded to
    nearest; which stochastic rounding makes a bf16 weight's last place now and then."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        if name != "weight" or tensor.is_cuda:
            assert torch.equal(found[name], tensor), name
        elif tensor.dtype == torch.float32:
            torch.testing.assert_close(found[name], tensor, rtol=3e-7, atol=1e-9)
        else:
            torch.testing.assert_close(found[name], tensor, rtol=2**-7, atol=1e-9)
            assert int((found[name] != tensor).sum()) <= tensor.numel() / 1000


@interpreted
@pytest.mark.parametrize("size", [(6, 512), (1, 256), (0, 256), (3, 2880), (6, 100), (6, 60), (37,), (0,), (3, 2, 5)])
def test_8bit_is_torchs(monkeypatch: pytest.MonkeyPatch, size: tuple[int, ...]) -> None:
    """To the bit, where rows are blocks, of 256 or fewer values, and where they are not."""
    torch.manual_seed(0)
    assert_equal(*both(monkeypatch, torch.randn(size), gradients(size), EXACT))


@pytest.mark.sample(3)
@interpreted
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("size", "first_row", "number"), BF16_CASES)
def test_bf16_is_torchs(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, ...], first_row: int, number: int, grad_dtype: torch.dtype
) -> None:
    """To the bit: the same random numbers at the same rows and columns."""
    torch.manual_seed(0)
    start, grads = torch.randn(size).bfloat16(), gradients(size, grad_dtype)
    assert_equal(*both(monkeypatch, start, grads, EXACT, first_row=first_row, number=number))


@interpreted
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.4, 0.95), (0.0, 0.0)])
def test_usual_settings(monkeypatch: pytest.MonkeyPatch, betas: tuple[float, float]) -> None:
    """A CPU that rounds products and sums apart is a last bit off, which takes a value at a border across now and then.
    A beta below a half makes lerp go from its other end."""
    torch.manual_seed(0)
    start, grads = torch.randn(4, 512), gradients((4, 512))
    found, expected = both(monkeypatch, start, grads, {**USUAL, "betas": betas})
    assert relative_error(found["weight"] - start, expected["weight"] - start) < 1e-4
    for name in ("exp_avg", "exp_avg_sq"):
        assert (found[f"{name}_codes"] != expected[f"{name}_codes"]).float().mean() < 1e-3
        assert relative_error(found[f"{name}_scales"], expected[f"{name}_scales"]) < 1e-6
    found, expected = both(
        monkeypatch, start.bfloat16(), [g.bfloat16() for g in grads], {**USUAL, "betas": betas}, first_row=0, number=1
    )
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert (found[name] != expected[name]).float().mean() < 1e-3


def around_borders(signed: bool) -> Tensor:
    """Every border of the map, every start of a decade, and the four floats on either side of each."""
    borders = dynamic_map(signed, torch.device("cpu"))[1]
    decades = torch.tensor([10.0**-d for d in range(8)])
    around = [torch.cat([borders, decades, -decades, torch.zeros(1)])]
    if not signed:
        around[0] = around[0].abs()
    for end in (-2.0, 2.0):
        value = around[0]
        for _ in range(4):
            value = value.nextafter(torch.tensor(end))
            around.append(value)
    return torch.cat(around).clamp(-1 if signed else 0, 1)


@interpreted
@pytest.mark.parametrize("signed", [True, False])
def test_every_border(monkeypatch: pytest.MonkeyPatch, signed: bool) -> None:
    """With betas of 0 the moments are the gradient and its square, exactly. The first of each block is 1, and so its
    scale. The kernel's guess rises with the magnitude: where it is right at both ends of what has one code, it is right
    in between."""
    values = around_borders(signed)
    if not signed:
        # the squares of these are within a few floats of the borders
        root = values.sqrt()
        values = torch.cat([root, root.nextafter(torch.tensor(2.0)), root.nextafter(torch.tensor(0.0))]).clamp(0, 1)
    values = torch.cat([values, values.new_zeros(-len(values) % 255)]).view(-1, 255)
    grad = torch.cat([torch.ones(len(values), 1), values], dim=1)
    found, expected = both(monkeypatch, torch.zeros_like(grad), [grad], {**EXACT, "betas": (0.0, 0.0)})
    assert (found["exp_avg_scales"] == 1).all()
    assert_equal(found, expected)
    codes = found["exp_avg_codes" if signed else "exp_avg_sq_codes"]
    assert codes.unique().numel() == 256


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_block_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scale is NaN, as torch makes it: nothing hides it. Its neighbours are untouched."""
    start, grad = torch.ones(1, 512), torch.ones(1, 512)
    grad[0, 3] = torch.nan
    found, expected = both(monkeypatch, start, [grad], EXACT)
    for name in ("weight", "exp_avg_scales", "exp_avg_sq_scales"):
        assert torch.equal(found[name].nan_to_num(7.0), expected[name].nan_to_num(7.0))
    assert found["exp_avg_scales"].isnan().tolist() == [[True, False]]


@interpreted
def test_who_takes_a_kernel() -> None:
    on_gpu = mock.Mock(is_cuda=True, is_contiguous=lambda: True)
    assert takes_kernel(on_gpu, on_gpu)
    assert not takes_kernel(on_gpu, torch.empty(4, 8))
    assert not takes_kernel(on_gpu, mock.Mock(is_cuda=True, is_contiguous=lambda: False))
