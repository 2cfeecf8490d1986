"""Frozen weights in 8 and 4 bits."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.experts.lora import store_frozen
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.kernels import expert_rows
from expertmesh.moe.kernels.expert_rows import ExpertRows
from expertmesh.moe.kernels.kernel_entries import KERNELS
from expertmesh.moe.kernels.loop import looped_product
from expertmesh.moe.linear.quantized import (
    BLOCK,
    E2M1,
    NF4,
    Kind,
    Storage,
    dequantize,
    fill,
    mxfp4_pairs,
    nf4_pairs,
    quantize,
    rows_for_few,
    stored_linear,
    stored_product,
)
from expertmesh.moe.util.gpu import rehearsing_gpu
from expertmesh.sharding.parallelize.recompute import checkpoint_layers
from tests.interpreter import interpreted
from tests.moe.kernel_contract import rows_of
from tests.rounding import assert_near
from tests.tiny import in_memory, tiny_config

KINDS: list[Any] = ["fp8", "nf4"]
SOME = [0, 3, 4, 0, 2]
"""Rows of experts."""


def stored(weight: torch.Tensor, kind: Any) -> tuple[torch.Tensor, torch.Tensor, Storage]:
    storage = Storage(kind, weight.shape[1])
    if kind == "mxfp4":  # of which there are codes alone: any, with scales from 1/8 to 4
        generator, num_rows = torch.Generator().manual_seed(0), weight.shape[0]
        codes = torch.randint(256, (num_rows, storage.code_bytes), generator=generator)
        scales = torch.randint(124, 130, (num_rows, storage.scale_bytes), generator=generator)
        return codes.to(torch.uint8), scales.to(torch.uint8), storage
    return *quantize(weight, storage), storage


@pytest.mark.parametrize("columns", [64, 40, 73])
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_bounded(kind: Any, columns: int) -> None:
    """By half a step of the codes, of the largest of the row or block."""
    weight = torch.randn(7, columns, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 7).unsqueeze(1)
    codes, scales, storage = stored(weight, kind)
    assert (codes.shape, scales.shape) == ((7, storage.code_bytes), (7, storage.scale_bytes))
    wide = dequantize(codes, scales, storage, torch.float32)
    assert wide.shape == weight.shape
    if kind == "fp8":
        largest, step = weight.abs().amax(dim=1, keepdim=True), 2**-4
        assert ((wide - weight).abs() <= weight.abs() * step + largest * 2**-17).all()
        return
    for start in range(0, columns, BLOCK):
        part = slice(start, start + BLOCK)
        largest = weight[:, part].abs().amax(dim=1, keepdim=True)
        steps = torch.tensor(NF4).diff().max() / 2
        assert ((wide - weight)[:, part].abs() <= largest * (steps + 1e-6)).all()


def test_fp8_bytes_are_those_of_transformers_quantizer() -> None:
    """Of a block as long as a row. It multiplies by a reciprocal, so that a value between two codes may become the
    other one."""
    settings = SimpleNamespace(weight_block_size=(1, 96), scale_fmt="float")
    quantize_with: Any = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 64).unsqueeze(1)
    weight[3] = 0
    found = quantize_with({"m.weight": weight})
    codes, scales, _ = stored(weight, "fp8")
    assert (codes.int() - found["m.weight"].view(torch.uint8).int()).abs().max() <= 1
    assert (codes == found["m.weight"].view(torch.uint8)).float().mean() > 0.999
    scales, theirs = scales.view(torch.float32), found["m.weight_scale_inv"]
    torch.testing.assert_close(scales[weight.any(dim=1)], theirs[weight.any(dim=1)], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_nearest_and_the_largest_value_is_exact(kind: Any) -> None:
    """Of all that there are, by the formats' definitions: a row or block uses their whole range."""
    # in fp8 the smallest of a row are lost first
    size = torch.logspace(-6, 3, 8).unsqueeze(1) * torch.logspace(-5, 0, 2 * BLOCK)
    weight = torch.randn(size.shape, generator=torch.Generator().manual_seed(0)) * size
    values = torch.tensor(NF4).double()
    if kind == "fp8":  # a sign, 4 bits of exponent with a bias of 7, 3 of fraction; the last code is no number
        byte = torch.arange(127)
        exponent, fraction = byte >> 3, (byte & 7).double() / 8
        magnitude = torch.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - 7), fraction * 2.0**-6)
        values = torch.cat([magnitude, -magnitude])
    blocks = weight.double().unflatten(1, (-1, 2 * BLOCK if kind == "fp8" else BLOCK))
    largest = blocks.abs().amax(dim=2, keepdim=True)
    possible = largest.unsqueeze(3) / values.max() * values
    least = (blocks.unsqueeze(3) - possible).abs().amin(dim=3)
    wide = dequantize(*stored(weight, kind), torch.float32).double().view_as(blocks)
    assert ((wide - blocks).abs() <= least + 1e-6 * largest).all()
    torch.testing.assert_close(wide.abs().amax(dim=2, keepdim=True), largest, rtol=1e-6, atol=0)


def test_nf4_keeps_its_own_values() -> None:
    weight = torch.tensor(NF4).repeat(3, 4) * torch.tensor([[1.0], [0.5], [3.0]])
    assert torch.equal(dequantize(*stored(weight, "nf4"), torch.float32), weight)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_rows_by_themselves(kind: Any) -> None:
    """A row of zeros stays one, and what a row becomes does not depend on the others."""
    weight = torch.randn(9, 72, generator=torch.Generator().manual_seed(0))
    weight[4] = 0
    codes, scales, storage = stored(weight, kind)
    assert not dequantize(codes, scales, storage, torch.float32)[4].any()
    for rows in (slice(0, 2), slice(3, 8)):
        alone = quantize(weight[rows], storage)
        assert torch.equal(alone[0], codes[rows])
        assert torch.equal(alone[1], scales[rows])
    filled = torch.empty_like(codes), torch.empty_like(scales)
    fill(*filled, weight.double(), storage)
    assert torch.equal(filled[0], codes)
    assert torch.equal(filled[1], scales)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dequantized_weight(kind: Any, is_transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 72, generator=generator), torch.randn(2, 5, 72, generator=generator)
    if is_transposed:
        x = x[..., :24].contiguous()
    codes, scales, storage = stored(weight, kind)
    wide = dequantize(codes, scales, storage, torch.float32)
    x_1, x_2 = (x.clone().requires_grad_() for _ in range(2))
    out = stored_linear(x_1, codes, scales, storage, is_transposed)
    want = torch.nn.functional.linear(x_2, wide.t() if is_transposed else wide)
    assert_near(out, want)
    grad = torch.randn(out.shape, generator=generator)
    out.backward(grad)
    want.backward(grad)
    assert_near(x_1.grad, x_2.grad)


@pytest.mark.parametrize(
    ("kind", "is_transposed", "kernel", "few"),
    [
        ("fp8", False, "loop", 1),
        ("fp8", True, "torch-grouped", 2),
        ("nf4", True, "loop", 5),
        ("nf4", False, "torch-grouped", 1),
        ("nf4", True, "loop", 2),
        ("fp8", False, "torch-grouped", 5),
        ("mxfp4", False, "loop", 2),
        ("mxfp4", True, "torch-grouped", 1),
    ],
)
@pytest.mark.parametrize("how", [{}, {"on_host": SOME}, {"on_host": SOME, "most_apart": 4}], ids=["", "told", "apart"])
def test_experts_a_few_at_a_time(
    kind: Any,
    is_transposed: bool,
    kernel: str,
    few: int,
    how: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five experts of which two get no row, with room for so many at once. The host has been told of their rows, as
    with expert parallelism, or reads them once for forward and backward."""
    monkeypatch.setattr("expertmesh.moe.linear.quantized._WIDENED_BYTES", few * 16 * 64 * 4)
    generator = torch.Generator().manual_seed(0)
    read = mock.Mock(side_effect=expert_rows.read_counts)
    monkeypatch.setattr(expert_rows, "read_counts", read)
    weight = torch.randn(5 * 16, 64, generator=generator)
    codes, scales, storage = stored(weight, kind)
    weight_eOI = dequantize(codes, scales, storage, torch.float32).unflatten(0, (5, -1))
    if is_transposed:
        weight_eOI = weight_eOI.transpose(1, 2)
    x = torch.randn(9, weight_eOI.shape[2], generator=generator)
    x_1, x_2 = (x.clone().requires_grad_() for _ in range(2))
    product = KERNELS.get(kernel).code.product
    assert product is not None
    experts = rows_for_few(x, rows_of(SOME, **how), {"w": codes}, {"w": storage})
    out = stored_product(x_1, experts, codes, scales, storage, product, is_transposed)
    want = looped_product(x_2, rows_of(SOME, on_host=SOME), weight_eOI)
    assert_near(out, want)
    grad = torch.randn(out.shape, generator=generator)
    out.backward(grad)
    want.backward(grad)
    assert_near(x_1.grad, x_2.grad)
    assert few == 5 or read.call_count == (0 if how else 1)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_the_host_waits_once_a_layer(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a few experts at a time are dequantized: for three matrices, forward and backward; selective checkpointing
    keeps what was read."""
    waits = []

    def read(counts_e: torch.Tensor, num_rows: int) -> list[int]:
        waits.append(num_rows)
        counts: list[int] = counts_e.tolist()
        return counts

    monkeypatch.setattr("expertmesh.moe.linear.quantized._WIDENED_BYTES", 1)
    monkeypatch.setattr(expert_rows, "read_counts", read)
    model: Any = build_model(tiny_config(), "eager")
    model.requires_grad_(False)
    store_frozen(model, "nf4")
    in_memory(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    model.get_input_embeddings().requires_grad_(True)
    checkpoint_layers(model, mode)
    model.train()
    with Forward():
        loss = model(input_ids=torch.arange(6).view(1, 6)).logits.sum()
    layers = len(list(moe_layers(model)))
    assert len(waits) == layers
    loss.backward()
    assert len(waits) == layers * (1 if mode == "selective" else 2)


def test_on_a_gpu_more_experts_are_dequantized_at_once() -> None:
    storage = Storage("nf4", 2**12)
    codes, x = torch.empty(2**15, 1, device="meta"), torch.empty(3, 2**12, dtype=torch.bfloat16)
    assert rows_for_few(x, rows_of([1, 2]), {"w": codes}, {"w": storage}).on_host == [1, 2]
    with rehearsing_gpu():
        assert rows_for_few(x, rows_of([1, 2]), {"w": codes}, {"w": storage}).on_host is None


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_gradient_with_gaps(is_transposed: bool) -> None:
    """As that of interleaved gate and up has: `grouped_mm` takes none on a GPU, which a CPU would not tell."""
    codes, scales, storage = stored(torch.randn(2 * 64, 64), "nf4")

    def product(x_RI: torch.Tensor, experts: ExpertRows, weight_eOI: torch.Tensor) -> torch.Tensor:
        assert x_RI.is_contiguous()
        return looped_product(x_RI, experts, weight_eOI)

    x_RI, experts = torch.randn(5, 64, requires_grad=True), rows_of([2, 3])
    grad_RO = torch.randn(5, 128)[:, ::2]
    found: list[torch.Tensor] = []
    for grad in (grad_RO, grad_RO.contiguous()):
        out = stored_product(x_RI, experts, codes, scales, storage, product, is_transposed)
        found += torch.autograd.grad(out, x_RI, grad)
    assert torch.equal(*found)


@interpreted
@pytest.mark.parametrize("kind", ["fp8", "nf4"])
@pytest.mark.parametrize(
    ("num_rows", "columns", "dtype"),
    [(3, 64, torch.float32), (2, 100, torch.float16), (5, 4160, torch.float32), (1, 9001, torch.float16)],
)
def test_dequantizing_kernels(kind: Kind, num_rows: int, columns: int, dtype: torch.dtype) -> None:
    """Every number as torch's own operators make it, also the smallest, and of rows of zeros."""
    from expertmesh.moe.linear.dequantize_triton import fused_fp8, fused_nf4

    torch.manual_seed(0)
    storage = Storage(kind, columns)
    values = torch.randn(num_rows, columns) * torch.logspace(-3, 0, columns)
    values[1:2] = 0
    codes, scales = quantize(values, storage)
    factors = scales.contiguous().view(torch.float32)
    if kind == "fp8":
        found = fused_fp8(codes[:, :columns].contiguous(), factors, dtype)
    else:
        found = fused_nf4(codes.contiguous(), factors, nf4_pairs(codes.device), columns, dtype)
    expected = dequantize(codes, scales, storage, dtype)
    # the interpreter cuts off what half precision has no room for
    rtol = 0.0 if dtype == torch.float32 else 2**-10
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0.0 if dtype == torch.float32 else 1e-7)


@interpreted
def test_mxfp4_kernel_and_every_code_at_every_scale() -> None:
    """What the kernel, and torch's own operators, make of them, is what checkpoints' codes are dequantized to."""
    from expertmesh.moe.linear.dequantize_triton import fused_mxfp4

    # the first scale of all is that of numbers which fp32 holds without an exponent; two values overflow
    byte, scale = torch.arange(256).to(torch.uint8), torch.arange(256).to(torch.uint8)[:-1]
    packed = byte.repeat(255, 1)
    storage, wide_scales = Storage("mxfp4", 512), scale.unsqueeze(1).repeat(1, 16)
    pairs = mxfp4_pairs(packed.device)
    for dtype in (torch.float32, torch.bfloat16):
        expected = torch.tensor([*E2M1])[torch.stack([byte & 15, byte >> 4], 1).int()].flatten() * 2.0 ** (
            scale.double().unsqueeze(1) - 127
        )
        expected = expected.float().to(dtype)
        assert torch.equal(dequantize(packed, wide_scales, storage, dtype), expected)
        if dtype == torch.float32:
            assert torch.equal(fused_mxfp4(packed, wide_scales, pairs, 512, dtype), expected)
    odd = packed[:3, :36].contiguous(), wide_scales[120:123, :4].contiguous()
    found = fused_mxfp4(*odd, pairs, 70, torch.float32)
    assert torch.equal(found, dequantize(*odd, Storage("mxfp4", 70), torch.float32))


@interpreted
def test_every_code_of_fp8() -> None:
    from expertmesh.moe.linear.dequantize_triton import fused_fp8

    codes = torch.arange(256, dtype=torch.uint8).unsqueeze(0)
    found = fused_fp8(codes, torch.ones(1, 1), torch.float32)
    expected = codes.view(torch.float8_e4m3fn).float()
    is_number = ~expected.isnan()  # of which quantising makes none
    assert torch.equal(found[is_number], expected[is_number])
    assert fused_fp8(codes[:0], torch.ones(0, 1), torch.float32).shape == (0, 256)
