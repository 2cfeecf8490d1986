"""Kernels: experts' by their contract, Triton's against what a CPU computes, fp8 against its emulation there."""

from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.moe.kernels import megablocks_ops, quack
from expertmesh.moe.kernels.fp8 import FP8
from expertmesh.moe.kernels.fp8_casts import Scaled, cast_columns, cast_rows, cast_runs, padded_runs
from expertmesh.moe.kernels.kernel_entries import KERNELS
from expertmesh.moe.linear.quantized import Kind, Storage, dequantize, quantize
from tests.moe.kernel_contract import COUNTS, check_bias, check_kernel, rows_of
from tests.moe.test_fp8 import RAGGED
from tests.moe.test_fp8 import inputs as fp8_inputs
from tests.moe.test_fp8 import product as fp8_product
from tests.moe.test_fp8_linear import in_fp8
from tests.moe.test_megablocks import SIZES, check_joined_swiglu, check_swiglu, original_of
from tests.moe.test_permute import PADDING, SHAPES, order_of, results
from tests.moe.test_weighing import check_weighing
from tests.rounding import OTHER_ORDER
from tests.tiny import relative_error, tiny_block
from tests.training.test_fused import NORMS, ROTATIONS, check_norm, check_rotation
from tests.training.test_head import check_fused, check_halves
from tests.training.test_low_bit_compiled import EXACT, PARAMETERS, USUAL, both, check_matrices, check_usual

DTYPES = [torch.float32, torch.bfloat16]
LARGE = {"many rows": [700, 0, 0, 324], "more rows than a block has": [40_000, 0, 3]}


def is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize("counts", [*COUNTS.values(), *LARGE.values()], ids=[*COUNTS, *LARGE])
@pytest.mark.parametrize("kernel", ["loop", "torch-grouped"])
def test_contract(device: str, kernel: str, counts: list[int]) -> None:
    check_kernel(KERNELS.get(kernel), counts, torch.bfloat16, 1e-2, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [*COUNTS.values(), *LARGE.values()], ids=[*COUNTS, *LARGE])
def test_biases(device: str, counts: list[int], dtype: torch.dtype) -> None:
    check_bias(counts, dtype, device)


@pytest.mark.parametrize("counts", [*COUNTS.values(), *LARGE.values()], ids=[*COUNTS, *LARGE])
def test_contract_of_megablocks(counts: list[int]) -> None:
    pytest.importorskip("megablocks")
    check_kernel(KERNELS.get("megablocks-sparse"), counts, torch.bfloat16, 2e-2, "cuda", (128, 256))


@pytest.mark.parametrize("counts", [*COUNTS.values(), *LARGE.values()], ids=[*COUNTS, *LARGE])
def test_contract_of_quack(counts: list[int]) -> None:
    pytest.importorskip("quack")
    if torch.cuda.get_device_capability()[0] not in quack.CARDS:
        pytest.skip("it is for Hopper and Blackwell")
    check_kernel(KERNELS.get("quack"), counts, torch.bfloat16, 2e-2, "cuda", (128, 256))


@pytest.mark.parametrize("counts", [*COUNTS.values(), *LARGE.values()], ids=[*COUNTS, *LARGE])
def test_contract_of_fp8(device: str, counts: list[int]) -> None:
    if device == "cuda" and not is_hopper():
        pytest.skip("torch multiplies so on Hopper alone")
    check_kernel(FP8, counts, torch.bfloat16, 0.12, device, (32, 48))


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("counts", RAGGED.values(), ids=RAGGED)
def test_emulation_is_what_a_gpu_computes(counts: list[int], is_transposed: bool) -> None:
    """The same codes and scales, and products but for the order of sums."""
    if not is_hopper():
        pytest.skip("torch multiplies so on Hopper alone")
    results = []
    for device in ("cpu", "cuda"):
        x_RI, weight, grad_RO = fp8_inputs(counts, is_transposed, device)
        out_RO = fp8_product(x_RI, counts, weight.transpose(1, 2) if is_transposed else weight)
        padded = padded_runs(torch.tensor(counts, device=device), len(x_RI))
        casts = [cast_rows(x_RI.detach()), cast_columns(weight.detach())]
        if any(counts):
            used, runs = int(padded.padded_ends_e[-1]), cast_runs(x_RI.detach(), padded)
            casts.append(Scaled(runs.codes[:, :used], runs.scales))
        numbers = [part for cast in casts for part in (cast.codes.float(), cast.scales)]
        results.append((numbers, [out_RO, *torch.autograd.grad(out_RO, (x_RI, weight), grad_RO)]))
    (codes, products), (gpu_codes, gpu_products) = results
    for expected, found in zip(codes, gpu_codes, strict=True):
        assert torch.equal(found.cpu(), expected)
    for expected, found in zip(products, gpu_products, strict=True):
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(found.cpu(), expected, rtol=2.0**-7, atol=1e-3 * largest)


def test_linear_layer_in_fp8(device: str) -> None:
    layer, x = in_fp8(256, 128, True), torch.randn(100, 256).bfloat16()
    found = []
    for place in ("cpu", device):
        own = layer.to(place)
        own.zero_grad()
        given = x.clone().to(place).requires_grad_()
        out = own(given)
        out.square().sum().backward()
        assert given.grad is not None
        found.append([each.cpu().float() for each in (out.detach(), given.grad, own.weight.grad)])
    for here, there in zip(*found, strict=True):
        assert relative_error(there, here) < 4e-3


@pytest.mark.parametrize("kind", ["fp8", "nf4"])
def test_dequantizing(device: str, kind: Kind) -> None:
    storage = Storage(kind, 4160)
    codes, scales = quantize(torch.randn(64, 4160), storage)
    expected = dequantize(codes, scales, storage, torch.bfloat16)
    assert torch.equal(dequantize(codes.to(device), scales.to(device), storage, torch.bfloat16).cpu(), expected)


def test_multiprocessors_left_to_nccl_change_nothing() -> None:
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("needs a GPU with a kernel for grouped_mm")
    generator, sizes = torch.Generator("cuda").manual_seed(0), ((512, 256), (4, 128, 256))
    x, weight = (torch.randn(size, generator=generator, device="cuda").bfloat16() for size in sizes)
    counts, product = [100, 0, 300, 112], KERNELS.get("torch-grouped").code.product
    assert product is not None
    found = []
    for is_beside in (False, True):
        found.append(product(x, rows_of(counts, "cuda", is_beside=is_beside), weight))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
@pytest.mark.parametrize("shape", [*SHAPES.values(), (3000, 2, 4096), (1000, 22, 2880)], ids=str)
def test_permutations(device: str, shape: tuple[int, int, int], padding: float, dtype: torch.dtype) -> None:
    num_tokens, top_k, width = shape
    found, again = (results(order_of(num_tokens, top_k, padding, device), width, dtype, device) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    exact = results(order_of(num_tokens, top_k, padding, "cpu"), width, dtype, "cpu")
    for mine, plain in zip(found, exact, strict=True):
        assert relative_error(mine.cpu().float(), plain.float()) < (OTHER_ORDER if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("rows", [0, 1, 2100])
def test_swiglu(rows: int) -> None:
    check_swiglu(rows, torch.bfloat16, "cuda", 1e-2)
    check_joined_swiglu(rows, torch.bfloat16, "cuda", 1e-2)
    check_weighing(rows, torch.bfloat16, "cuda", 1e-2)


def test_megablocks_layer() -> None:
    pytest.importorskip("megablocks")
    ours = tiny_block(**SIZES).to("cuda", torch.bfloat16)
    x_BSD = torch.randn(2, 50, SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16)
    assert relative_error(original_of(ours)(x_BSD), ours(x_BSD)) < 2e-2


def test_megablocks_operators() -> None:
    """The compiled ones, where they are, and ours in their place."""
    compiled = pytest.importorskip("megablocks_ops")
    if compiled is megablocks_ops:
        pytest.skip("MegaBlocks' operators were not compiled")
    x = torch.randint(0, 50, (1000,), dtype=torch.int32, device="cuda")
    ends = megablocks_ops.histogram(x, 50).cumsum(0, dtype=torch.int32)
    calls: list[tuple[str, tuple[Any, ...], list[Tensor]]] = [
        ("inclusive_cumsum", (x.view(1, -1), 1), [torch.empty_like(x).view(1, -1)]),
        ("exclusive_cumsum", (x.view(1, -1), 1), [torch.empty_like(x).view(1, -1)]),
        ("sort", (x, 6), [torch.empty_like(x), torch.empty_like(x)]),
        ("indices", (ends * 128, 128, 1000, 3), [torch.empty(3000, dtype=torch.int16, device="cuda")]),
        ("replicate_forward", (x[:50].view(1, -1), ends), [torch.empty_like(x).view(1, -1)]),
    ]
    for name, arguments, outs in calls:
        getattr(compiled, name)(*arguments, *outs)
        expected = [out.clone() for out in outs]
        getattr(megablocks_ops, name)(*arguments, *outs)
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True)), name
    assert torch.equal(compiled.histogram(x, 50), megablocks_ops.histogram(x, 50))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 7168), (2, 500, 4096), (2, 900, 20, 128), (5, 8192)])
@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pytest.importorskip("liger_kernel")
    check_norm(kind, shape, dtype, torch.device("cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize(("heads", "width"), [(1, 64), (32, 128), (5, 80)])
@pytest.mark.parametrize("kind", ROTATIONS)
def test_rotations(
    monkeypatch: pytest.MonkeyPatch, kind: str, heads: int, width: int, heads_dim: int, dtype: torch.dtype
) -> None:
    pytest.importorskip("liger_kernel")
    check_rotation(kind, heads, width, heads_dim, dtype, torch.device("cuda"), monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(device: str, dtype: torch.dtype) -> None:
    num_rows, vocabulary = (100, 32000) if device == "cuda" else (3, 320)
    logits_CV = (torch.randn(num_rows, vocabulary) * 5).to(device, dtype)
    targets_C = torch.randint(0, vocabulary, (num_rows,), device=device)
    rtol = 2**-8 if dtype == torch.bfloat16 else OTHER_ORDER
    check_fused(logits_CV, targets_C, rtol)
    check_halves(logits_CV, targets_C, rtol)


@pytest.mark.parametrize("settings", [EXACT, USUAL], ids=["exact", "usual"])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_low_bit_optimizers(kind: str, settings: dict[str, Any]) -> None:
    """Compiled and by torch's operators, but for a last place here and there."""
    for size in PARAMETERS[kind]:
        check_usual(*both(kind, size, settings, "cuda"))


def test_updates_of_matrices() -> None:
    check_matrices("cuda")
