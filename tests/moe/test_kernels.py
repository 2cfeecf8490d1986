"""Expert kernels against a plain matmul an expert, with autograd's own backward."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.moe.cpu import matmul
from expertmesh.moe.kernels.expert_kernels import _leaves_empty_groups, choose_kernel
from expertmesh.moe.kernels.kernel_entries import KERNEL_ENTRIES
from expertmesh.moe.kernels.kernel_registry import KERNELS, FusedSwiGLU, Needs
from expertmesh.moe.util.errors import ExpertMeshError

D, WIDTH = 16, 24
CPU_KERNELS = ["loop", "torch-grouped"]
JOINED = "torch-grouped, joined"
COUNTS = {
    "even": [3, 3, 3, 3],
    "one has all": [0, 0, 12, 0],
    "first and last empty": [0, 5, 7, 0],
    "a single row": [0, 1, 0, 0],
    "no row": [0, 0, 0, 0],
    "one expert": [5],
}


def fused(kernel: str) -> FusedSwiGLU:
    if kernel == JOINED:
        return joined
    function = KERNELS.get(kernel).fused
    assert function is not None
    return function


def joined(
    rows_RD: Tensor, counts_e: Tensor, w1: Tensor, v1: Tensor, w2: Tensor, *, needs_output: bool = True
) -> Tensor:
    """`torch-grouped` with gate and up in one GEMM, as on a GPU."""
    function, num_experts = KERNELS.get("torch-grouped").joined, counts_e.numel()
    assert function is not None
    by_expert = [weight.view(num_experts, -1, weight.shape[1]) for weight in (w1, v1)]
    return function(rows_RD, counts_e, torch.cat(by_expert, dim=1), w2, needs_output=needs_output)


def plain(rows: Tensor, counts: list[int], w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
    outs = []
    for n, x in enumerate(rows.split(counts)):
        w1_n, v1_n, w2_n = (w[n * WIDTH : (n + 1) * WIDTH] for w in (w1, v1, w2))
        outs.append((F.silu(x @ w1_n.t()) * (x @ v1_n.t())) @ w2_n)
    return torch.cat(outs)


def inputs(counts: list[int], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(sum(counts), D)] + [(len(counts) * WIDTH, D)] * 3
    return [(0.5 * torch.randn(shape)).to(device, dtype).requires_grad_() for shape in shapes]


def check(kernel: str, counts: list[int], dtype: torch.dtype, device: str, tolerance: float) -> None:
    mine, theirs = inputs(counts, dtype, device), inputs(counts, torch.float64)
    out = fused(kernel)(mine[0], torch.tensor(counts, device=device), *mine[1:])
    expected = plain(theirs[0], counts, *theirs[1:])
    assert out.dtype == dtype
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad.to(device, dtype))
    expected.backward(grad.double())
    torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    for found, want in zip(mine, theirs, strict=True):
        assert found.grad is not None
        assert want.grad is not None
        torch.testing.assert_close(found.grad.cpu().double(), want.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kernel", [*CPU_KERNELS, JOINED])
def test_fp32(kernel: str, counts: list[int]) -> None:
    check(kernel, counts, torch.float32, "cpu", 1e-5)


@pytest.fixture(params=["blas", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> matmul.Library:
    """The library for all matmuls, the smallest included."""
    monkeypatch.setattr(matmul, "SMALL", 0)
    monkeypatch.setattr(matmul, "_libraries", dict.fromkeys(matmul.libraries_in_use(), request.param))
    chosen: matmul.Library = request.param
    return chosen


@pytest.mark.parametrize("counts", [*COUNTS.values(), [70, 0, 33]])
def test_libraries(library: matmul.Library, counts: list[int]) -> None:
    with mock.patch.object(torch.ops.mkldnn, "_linear_pointwise", wraps=torch.ops.mkldnn._linear_pointwise) as product:
        check("loop", counts, torch.float32, "cpu", 1e-5)
    assert product.call_count == (9 * sum(count > 0 for count in counts) if library == "onednn" else 0)


@pytest.mark.parametrize(("product", "calls"), [("forward", 3), ("input-gradient", 3), ("weight-gradient", 3)])
def test_each_product_has_its_library(monkeypatch: pytest.MonkeyPatch, product: matmul.Product, calls: int) -> None:
    monkeypatch.setattr(matmul, "SMALL", 0)
    monkeypatch.setattr(matmul, "_libraries", dict.fromkeys(matmul.libraries_in_use(), "blas"))
    matmul.use_libraries({product: "onednn"})
    with mock.patch.object(torch.ops.mkldnn, "_linear_pointwise", wraps=torch.ops.mkldnn._linear_pointwise) as onednn:
        check("loop", [40], torch.float32, "cpu", 1e-5)
    assert onednn.call_count == calls


@pytest.mark.parametrize(("m", "n"), [(96, 8), (8, 96), (16, 16)])
def test_the_smaller_operand_of_a_weights_gradient_is_copied(library: matmul.Library, m: int, n: int) -> None:
    """oneDNN makes a copy of its left operand where that is transposed, as a process's memory shows."""
    torch.manual_seed(0)
    grad_TM, x_TN, place_MN = torch.randn(40, m), torch.randn(40, n), torch.empty(m, n)
    with mock.patch.object(torch.ops.mkldnn, "_linear_pointwise", wraps=torch.ops.mkldnn._linear_pointwise) as product:
        matmul.matmul(grad_TM.t(), x_TN, place_MN)
    torch.testing.assert_close(place_MN, grad_TM.t() @ x_TN, rtol=1e-5, atol=1e-5)
    copied = [call.args[0].numel() for call in product.call_args_list]
    assert copied == ([40 * min(m, n)] if library == "onednn" else [])


def test_probe() -> None:
    ratios = matmul.probe_libraries()
    assert set(ratios) == set(matmul.libraries_in_use())
    assert all(0 < ratio < math.inf for ratio in ratios.values())
    found = matmul.faster_libraries({"forward": 1.9, "input-gradient": 1.0, "weight-gradient": 0.8})
    assert found == {"forward": "onednn", "input-gradient": "blas", "weight-gradient": "blas"}
    assert 0 < matmul.peak_of_products() < 1e13


@pytest.mark.parametrize("shape", [(2, 35, D), (40, D), (1, 1, D)])
def test_linear(library: matmul.Library, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, with_bias = torch.nn.Linear(D, WIDTH, bias=False), torch.nn.Linear(D, WIDTH)
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], WIDTH)
    expected = (layer(x), *torch.autograd.grad(layer(x), (x, layer.weight), grad))
    matmul.use_linear(torch.nn.Sequential(layer, with_bias))
    assert (type(layer), type(with_bias)) == (matmul.Linear, torch.nn.Linear)
    assert list(layer.state_dict()) == ["weight"]
    with mock.patch.object(torch.ops.mkldnn, "_linear_pointwise", wraps=torch.ops.mkldnn._linear_pointwise) as product:
        found = (layer(x), *torch.autograd.grad(layer(x), (x, layer.weight), grad))
    assert product.call_count == (4 if library == "onednn" else 0)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert layer(x).shape == (*shape[:-1], WIDTH)


def test_rows_are_padded_to_few_lengths() -> None:
    lengths = {n: len(matmul.pad_rows(torch.empty(n, 1))) for n in range(1, 20_000)}
    assert all(0 <= padded - n < max(32, n / 16) for n, padded in lengths.items())
    assert len({padded for padded in lengths.values() if padded >= 512}) < 200
    assert matmul.pad_rows(torch.ones(40, 2)).sum() == 80


@pytest.mark.parametrize("kernel", [*CPU_KERNELS, JOINED])
def test_bf16(kernel: str) -> None:
    check(kernel, COUNTS["first and last empty"], torch.bfloat16, "cpu", 6e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_one_gemm_of_gate_and_up_or_two(counts: list[int], dtype: torch.dtype, tolerance: float) -> None:
    """Only the order of one sum differs, that over gate and up of the tokens' gradient: in bf16 by roundings."""
    found = []
    for kernel in ("torch-grouped", JOINED):
        tensors = inputs(counts, dtype)
        out = fused(kernel)(tensors[0], torch.tensor(counts), *tensors[1:])
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
        found.append([out, *(tensor.grad for tensor in tensors)])
    for two, one in zip(*found, strict=True):
        assert two is not None
        assert one is not None
        assert (one - two).abs().max() <= tolerance * two.abs().max() if two.numel() else one.shape == two.shape


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kernel", [*CPU_KERNELS, JOINED])
def test_bf16_on_gpu(kernel: str, counts: list[int]) -> None:
    check(kernel, counts, torch.bfloat16, "cuda", 6e-2)


def test_loop_backward_in_fp64() -> None:
    """The backward written by hand, against finite differences."""
    counts = torch.tensor([2, 0, 1])
    arguments = [t.detach()[:, :4].clone().requires_grad_() for t in inputs([2, 0, 1], torch.float64)]
    assert torch.autograd.gradcheck(lambda *a: fused("loop")(a[0], counts, *a[1:]), arguments)


@pytest.mark.parametrize("kernel", ["torch-grouped", JOINED])
def test_expanded_gradient(kernel: str) -> None:
    rows, w1, v1, w2 = inputs([2, 2], torch.float32)
    fused(kernel)(rows, torch.tensor([2, 2]), w1, v1, w2).sum().backward()
    assert rows.grad is not None


@pytest.mark.parametrize("kernel", ["torch-grouped", JOINED])
def test_grouped_refuses_what_it_cannot_do(kernel: str) -> None:
    weight = torch.zeros(10, 6)
    with pytest.raises(ExpertMeshError, match=r"multiples of 4 .* this model has 6 and 10"):
        fused(kernel)(torch.zeros(2, 6), torch.tensor([2]), weight, weight, weight)
    with pytest.raises(ExpertMeshError, match="float64"):
        fused(kernel)(torch.zeros(2, 6).double(), torch.tensor([2]), weight, weight, weight)


@pytest.mark.parametrize("kernel", ["torch-grouped", JOINED])
def test_grouped_refuses_2_to_the_31_elements(kernel: str) -> None:
    """On the meta device, which stands for a GPU's: the rows of Mixtral 8x7B, one too many."""
    rows, fits = 149_797, 149_796
    weights = [torch.empty(14336, 4096, dtype=torch.bfloat16, device="meta") for _ in range(3)]

    def run(num_rows: int) -> Tensor:
        rows_RD = torch.empty(num_rows, 4096, dtype=torch.bfloat16, device="meta")
        return fused(kernel)(rows_RD, torch.tensor([num_rows], device="meta"), *weights)

    with pytest.raises(
        ExpertMeshError, match=r"149797 tokens .* have 2147489792; use a smaller --per-device-train-batch"
    ):
        run(rows)
    assert run(fits).shape == (fits, 4096)


@pytest.mark.parametrize(("counts", "products"), [([1, 0, 3], 6), ([2, 0, 3], 9)])
def test_gate_and_up_are_two_gemms_where_one_is_too_large(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], products: int
) -> None:
    monkeypatch.setattr("expertmesh.moe.kernels.expert_kernels._MOST_ELEMENTS", 5 * 2 * WIDTH)
    with mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as grouped_mm:
        check(JOINED, counts, torch.float32, "cpu", 1e-5)
    assert grouped_mm.call_count == products


def garbage_for_empty_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the GPUs that do not write to them."""
    grouped_mm = F.grouped_mm

    def leaving(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        out = grouped_mm(a, b, offs=offs)
        if out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = math.nan
        return out

    monkeypatch.setattr(F, "grouped_mm", leaving)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kernel", ["torch-grouped", JOINED])
def test_weight_gradients_of_empty_groups_are_zero(
    monkeypatch: pytest.MonkeyPatch, kernel: str, counts: list[int]
) -> None:
    garbage_for_empty_groups(monkeypatch)
    monkeypatch.setattr("expertmesh.moe.kernels.expert_kernels._leaves_empty_groups", lambda device: True)
    check(kernel, counts, torch.float32, "cpu", 1e-5)


@pytest.mark.parametrize(("capability", "leaves"), [((8, 0), False), ((9, 0), False), ((10, 0), True), ((10, 3), True)])
def test_which_gpus_leave_empty_groups(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], leaves: bool
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert _leaves_empty_groups(torch.device("cuda", 0)) == leaves
    assert not _leaves_empty_groups(torch.device("cpu"))


def no_kernel_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped_mm = F.grouped_mm

    def refusing(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        assert a.numel() > 0
        return grouped_mm(a, b, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", refusing)


@pytest.mark.parametrize("counts", [[0], [0, 0, 0]])
@pytest.mark.parametrize("kernel", ["torch-grouped", JOINED])
def test_no_kernel_is_called_without_rows(monkeypatch: pytest.MonkeyPatch, kernel: str, counts: list[int]) -> None:
    no_kernel_without_rows(monkeypatch)
    check(kernel, counts, torch.float32, "cpu", 1e-5)


def needs(device: str, width: int, expert_width: int, dtype: torch.dtype = torch.bfloat16) -> Needs:
    return Needs(device, dtype, ((width, expert_width),))


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    assert choose_kernel("auto", needs("cpu", 128, 128)).name == "loop"
    assert choose_kernel("auto", needs("cuda", 64, 64)).name == "torch-grouped"
    assert choose_kernel("auto", needs("cuda", 64, 64, torch.float32)).name == "loop"
    assert choose_kernel("auto", needs("cuda", 64, 60)).name == "loop"
    assert choose_kernel("torch-grouped", needs("cpu", 64, 64)).why == "asked for"
    with pytest.raises(ExpertMeshError, match="multiples of 8"):
        choose_kernel("torch-grouped", needs("cuda", 64, 60))
    with pytest.raises(ExpertMeshError, match="magic is unknown; use auto, loop"):
        choose_kernel("magic", needs("cpu", 64, 64))
    with pytest.raises(ExpertMeshError, match="--expert-kernel megablocks-grouped is gone: use torch-grouped"):
        choose_kernel("megablocks-grouped", needs("cpu", 64, 64))


@pytest.mark.parametrize(
    ("capability", "is_grouped"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((10, 3), True), ((12, 0), False)],
)
def test_choice_by_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_grouped: bool
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("expertmesh.moe.kernels.megablocks.find_spec", lambda name: name)
    expected = "torch-grouped" if is_grouped else "megablocks-sparse"
    assert choose_kernel("auto", needs("cuda", 128, 256)).name == expected


def test_choice_of_megablocks(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"megablocks", "stk", "triton"}
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    monkeypatch.setattr("expertmesh.moe.kernels.megablocks.find_spec", lambda name: name if name in installed else None)
    choice = choose_kernel("auto", needs("cuda", 128, 256))
    assert choice.name == "megablocks-sparse"
    assert choice.why == "auto: in grouped_mm this GPU would launch one matmul per expert"
    assert choose_kernel("auto", needs("cuda", 128, 64)).name == "torch-grouped"
    assert choose_kernel("megablocks-sparse", needs("cuda", 128, 128)).kernel is KERNELS.get("megablocks-sparse")
    assert "TF32" in choose_kernel("megablocks-sparse", needs("cuda", 128, 128, torch.float32)).why
    with pytest.raises(ExpertMeshError, match="needs a GPU, and this run is on cpu"):
        choose_kernel("megablocks-sparse", needs("cpu", 128, 128))
    with pytest.raises(ExpertMeshError, match="multiples of 128; this model has 128 and 64"):
        choose_kernel("megablocks-sparse", needs("cuda", 128, 64))
    installed.clear()
    assert choose_kernel("auto", needs("cuda", 128, 256)).name == "torch-grouped"
    with pytest.raises(ExpertMeshError, match="needs megablocks and stk and triton, not installed here; run make"):
        choose_kernel("megablocks-sparse", needs("cuda", 128, 128))


def test_choice_for_experts_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases or another activation: a kernel that has a product. Of several widths, one that suits all."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    monkeypatch.setattr("expertmesh.moe.kernels.megablocks.find_spec", lambda name: name)
    no_swiglu = replace(needs("cuda", 128, 256), is_swiglu=False)
    assert choose_kernel("auto", needs("cuda", 128, 256)).name == "megablocks-sparse"
    assert choose_kernel("auto", no_swiglu).name == "torch-grouped"
    with pytest.raises(ExpertMeshError, match="megablocks-sparse computes plain SwiGLU only"):
        choose_kernel("megablocks-sparse", no_swiglu)
    two_widths = Needs("cuda", torch.bfloat16, ((128, 256), (128, 60)))
    assert choose_kernel("auto", two_widths).name == "loop"
    with pytest.raises(ExpertMeshError, match="this model has 128 and 60"):
        choose_kernel("torch-grouped", two_widths)


def test_names() -> None:
    assert tuple(kernel.entry for kernel in KERNELS.entries()) == KERNEL_ENTRIES.entries()
    assert all(kernel.product is not None or kernel.fused is not None for kernel in KERNELS.entries())
