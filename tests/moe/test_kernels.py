"""Each kernel by itself, by the contract of all (`kernel_contract.py`); on a CPU by which library, on a GPU what it
refuses; biases; and which kernel a run takes."""

import math
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.moe.kernels import expert_products
from expertmesh.moe.kernels.expert_kernels import choose_kernel
from expertmesh.moe.kernels.expert_products import AddBias
from expertmesh.moe.kernels.expert_rows import ExpertRows
from expertmesh.moe.kernels.fp8 import FP8
from expertmesh.moe.kernels.kernel_entries import KERNELS, LOOP_ENTRY, KernelEntry
from expertmesh.moe.kernels.kernel_registry import FusedSwiGLU, KernelNeeds
from expertmesh.moe.kernels.loop import LOOP
from expertmesh.moe.kernels.torch_grouped import _leaves_empty_groups
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.gpu import computing_values, is_gpu, rehearsing_gpu
from tests.gpus import SetCapability
from tests.moe.kernel_contract import COUNTS, Calls, check_bias, check_kernel, forms_of, outcome, rows_of

D, WIDTH = 16, 24
CPU_KERNELS = ["loop", "torch-grouped"]
GROUPED = KERNELS.get("torch-grouped")


def fused(kernel: str) -> FusedSwiGLU:
    function = KERNELS.get(kernel).code.fused
    assert function is not None
    return function


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_contract(kernel: str, counts: list[int]) -> None:
    check_kernel(KERNELS.get(kernel), counts)
    check_kernel(KERNELS.get(kernel), counts, torch.bfloat16, 8e-3)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_contract_of_fp8(counts: list[int]) -> None:
    """Near what fp64 makes of the same numbers, and no nearer than fp8 is."""
    check_kernel(FP8, counts, torch.bfloat16, 0.12, widths=(32, 48))
    if sum(counts) > 1:
        with pytest.raises(AssertionError, match=r"fp8, fused, rows .*: 0\.0.* in the output"):
            check_kernel(FP8, counts, torch.bfloat16, 0.01, widths=(32, 48))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_contract_on_gpus_that_leave_empty_groups(monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> None:
    """`grouped_mm` writes nothing to an expert without rows there; and is not called where there are none at all."""
    grouped_mm = F.grouped_mm

    def leaving(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        assert a.numel() > 0
        out = grouped_mm(a, b, offs=offs)
        if out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = math.nan
        return out

    monkeypatch.setattr(F, "grouped_mm", leaving)
    monkeypatch.setattr("expertmesh.moe.kernels.torch_grouped._leaves_empty_groups", lambda device: True)
    check_kernel(GROUPED, counts)


def test_the_contract_is_not_met_by_all() -> None:
    """Of `loop`, changed: what each fault is told as."""

    def changed(spoil: Callable[[Tensor], Tensor], tensor: str) -> KernelEntry:
        def run(
            rows_RD: Tensor, experts: ExpertRows, w1: Tensor, v1: Tensor, w2: Tensor, *, needs_output: bool = True
        ) -> Tensor:
            if tensor == "weight":
                w1 = spoil(w1)
            out = fused("loop")(rows_RD, experts, w1, v1, w2, needs_output=needs_output)
            return spoil(out) if tensor == "output" else out

        return replace(LOOP_ENTRY, implementation=replace(LOOP, fused=run, product=None))

    def off(weight: Tensor) -> Tensor:
        """The same weight, of which the first expert's gradient is a bit more."""
        other = weight.clone()
        if other.requires_grad:
            other.register_hook(lambda grad: torch.cat([grad[:WIDTH] + 1e-3, grad[WIDTH:]]))
        return other

    for spoil, tensor, said in (
        (off, "weight", "in gradient 2|without rows"),
        (lambda out: out * 1.001, "output", "in the output"),
        (lambda out: out.clone(), "output", "memory for an output"),
        (lambda weight: weight.detach(), "weight", "not have been used in the graph"),
    ):
        with pytest.raises((AssertionError, RuntimeError), match=said):
            check_kernel(changed(spoil, tensor), [0, 5])


def test_grouped_refuses_widths_and_dtypes() -> None:
    function, joined, product, experts = fused("torch-grouped"), GROUPED.code.joined, GROUPED.code.product, rows_of([2])
    assert joined is not None
    assert product is not None
    narrow, double = torch.zeros(2, 6), torch.zeros(2, 8).double()
    for x, weight, said in (
        (narrow, torch.zeros(10, 6), "multiples of 4 .* this model has"),
        (double, double, "float64"),
    ):
        with pytest.raises(ExpertMeshError, match=said):
            function(x, experts, weight, weight, weight)
        with pytest.raises(ExpertMeshError, match=said):
            joined(x, experts, torch.cat([weight, weight]).unsqueeze(0), weight)
        with pytest.raises(ExpertMeshError, match=said):
            product(x, experts, weight.unsqueeze(0))


def test_grouped_refuses_2_to_the_31_elements() -> None:
    """On the meta device, which stands for a GPU's: the rows of Mixtral 8x7B, one too many; and a product's."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    weight, wide = empty(14336, 4096), empty(1, 16, 1024)
    function, joined, product = fused("torch-grouped"), GROUPED.code.joined, GROUPED.code.product
    assert joined is not None
    assert product is not None
    calls: list[tuple[int, int, Callable[[Tensor, ExpertRows], Tensor], str]] = [
        (149_797, 4096, lambda x, n: function(x, n, weight, weight, weight), "149797 tokens .* have 2147489792"),
        (149_797, 4096, lambda x, n: joined(x, n, empty(1, 2 * 14336, 4096), weight), "149797 tokens .* 2147489792"),
        (2**21, 16, lambda x, n: product(x, n, empty(1, 1024, 16)), "2097152 tokens on this rank, 16 and 1024 wide"),
        (2**21, 16, lambda x, n: product(x, n, wide.transpose(1, 2)), "2097152 tokens on this rank, 16 and 1024 wide"),
    ]
    for rows, width, call, said in calls:
        with pytest.raises(ExpertMeshError, match=f"{said}.*; use a smaller --per-device-train-batch"):
            call(empty(rows, width), rows_of([rows], "meta"))
        assert len(call(empty(rows - 1, width), rows_of([rows - 1], "meta"))) == rows - 1


@pytest.mark.parametrize(("counts", "products"), [([1, 0, 3], 6), ([2, 0, 3], 9)])
def test_gate_and_up_are_two_gemms_where_one_is_too_large(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], products: int
) -> None:
    monkeypatch.setattr("expertmesh.moe.kernels.torch_grouped.MOST_ELEMENTS", 5 * 2 * WIDTH)
    assert GROUPED.code.joined is not None
    gate_up, w2 = torch.randn(3, 2 * WIDTH, D, requires_grad=True), torch.randn(3 * WIDTH, D, requires_grad=True)
    rows = torch.randn(sum(counts), D, requires_grad=True)
    with mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as grouped_mm:
        GROUPED.code.joined(rows, rows_of(counts), gate_up, w2).sum().backward()
    assert grouped_mm.call_count == products
    joined = replace(GROUPED.code, fused=None, product=None, low_rank=None)
    check_kernel(replace(GROUPED, implementation=joined), counts, is_frugal=False)


@pytest.mark.parametrize("name", ["fused", "joined", "product", "product, transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_expert_goes_by_ordinary_matmuls(name: str, dtype: torch.dtype) -> None:
    """With the bits of `grouped_mm`, which multiplies two experts here, the second of them without rows; and gradients
    that lie in memory as those do."""
    form = forms_of(GROUPED.code, D, WIDTH)[name]
    x = torch.randn(37, D, dtype=dtype, requires_grad=True)
    weights = [torch.randn(2, *matrix, dtype=dtype, requires_grad=True) for matrix in form.widths[1]]
    alone = [weight[:1].detach().requires_grad_() for weight in weights]
    grad = torch.randn(37, *form.run(x, rows_of([37, 0]), *weights).shape[1:]).to(dtype)
    with Calls() as of_two:
        expected = outcome(lambda: form.run(x, rows_of([37, 0]), *weights), [x, *weights], grad)
    with Calls() as of_one:
        found = outcome(lambda: form.run(x, rows_of([37]), *alone), [x, *alone], grad)
    assert of_two.count["aten::_grouped_mm"] == of_one.count["aten::mm"] == of_one.products() == 3 * form.products
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs[: len(mine)])
        assert mine.dim() == 2 or mine.stride()[1:] == theirs.stride()[1:]


@pytest.mark.parametrize(("capability", "leaves"), [((8, 0), False), ((9, 0), False), ((10, 0), True), ((10, 3), True)])
def test_which_gpus_leave_empty_groups(
    set_capability: SetCapability, capability: tuple[int, int], leaves: bool
) -> None:
    set_capability(capability)
    assert _leaves_empty_groups(torch.device("cuda", 0)) == leaves
    assert not _leaves_empty_groups(torch.device("cpu"))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_bias(counts: list[int]) -> None:
    check_bias(counts, torch.float32, "cpu")


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_bias_as_on_a_gpu(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of half precision: the sums are a product, whose result is in fp32, which torch has on GPUs alone."""
    products: list[torch.Size] = []

    def multiply(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16
        products.append(a.shape)
        return a.to(out_dtype) @ b.to(out_dtype)

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(expert_products, "computes_on_cpu", lambda tensor: False)
    check_bias(counts, torch.bfloat16, "cpu")
    assert products == [(8, sum(counts))] * (sum(counts) > 0)


def test_bias_in_a_dry_run_of_a_gpu() -> None:
    x_RO, bias_eO = (torch.zeros(n, 6, device="meta", dtype=torch.bfloat16, requires_grad=True) for n in (9, 3))
    with rehearsing_gpu(), Calls() as calls:
        AddBias.apply(x_RO, torch.zeros(3, dtype=torch.int64, device="meta"), bias_eO).sum().backward()
    assert calls.count["aten::mm.dtype"] == 1
    assert not any("segment_reduce" in name for name in calls.count)
    assert bias_eO.grad is not None
    assert bias_eO.grad.shape == (3, 6)


def test_gradient_of_a_bias_in_bf16_is_summed_in_fp32() -> None:
    """1 + 1,000 times 2^-9 is 2.953; each of them added to 1 in bf16 would be lost."""
    bias_eO = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    grad_RO = torch.full((1001, 1), 2.0**-9, dtype=torch.bfloat16)
    grad_RO[0] = 1.0
    AddBias.apply(torch.zeros(1001, 1, dtype=torch.bfloat16), torch.tensor([1001, 0]), bias_eO).backward(grad_RO)
    assert bias_eO.grad is not None
    assert bias_eO.grad.dtype == torch.bfloat16
    assert bias_eO.grad.flatten().tolist() == pytest.approx([1 + 1000 * 2.0**-9, 0], rel=2**-8)


def needs(device: str, *widths: int, dtype: torch.dtype = torch.bfloat16, is_swiglu: bool = True) -> KernelNeeds:
    return KernelNeeds(device, dtype, tuple(zip(widths[::2], widths[1::2], strict=True)), is_swiglu)


SPARSE, TWO_WIDTHS = "megablocks-sparse", (128, 256, 128, 60)


@pytest.mark.parametrize(
    ("name", "wanted", "capability", "found"),
    [
        ("auto", needs("cpu", 128, 128), (9, 0), "loop"),
        ("auto", needs("cuda", 64, 64), (9, 0), "torch-grouped"),
        ("auto", needs("cuda", 64, 64, dtype=torch.float32), (9, 0), "loop"),
        ("auto", needs("cuda", 64, 60), (9, 0), "loop"),
        *(("auto", needs("cuda", 128, 256), capability, "torch-grouped") for capability in ((9, 0), (10, 0), (10, 3))),
        *(("auto", needs("cuda", 128, 256), capability, SPARSE) for capability in ((8, 0), (8, 9), (12, 0))),
        ("auto", needs("cuda", 128, 64), (8, 0), "torch-grouped"),
        # biases or another activation: a kernel that has a product; of several widths, one that suits all
        ("auto", needs("cuda", 128, 256, is_swiglu=False), (8, 0), "torch-grouped"),
        ("auto", needs("cuda", *TWO_WIDTHS), (8, 0), "loop"),
        ("torch-grouped", needs("cpu", 64, 64), (9, 0), "torch-grouped"),
        (SPARSE, needs("cuda", 128, 128), (8, 0), SPARSE),
    ],
)
def test_choice(
    set_capability: SetCapability,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    wanted: KernelNeeds,
    capability: tuple[int, int],
    found: str,
) -> None:
    set_capability(capability)
    monkeypatch.setattr("expertmesh.moe.kernels.megablocks.find_spec", lambda name: name)
    choice = choose_kernel(name, wanted)
    assert choice.name == found
    assert choice.kernel is KERNELS.get(found)


def test_why_it_is_chosen(set_capability: SetCapability, monkeypatch: pytest.MonkeyPatch) -> None:
    set_capability((8, 0))
    monkeypatch.setattr("expertmesh.moe.kernels.megablocks.find_spec", lambda name: name)
    assert choose_kernel("torch-grouped", needs("cpu", 64, 64)).why == "asked for"
    assert "in grouped_mm this GPU would launch one matmul per" in choose_kernel("auto", needs("cuda", 128, 256)).why
    assert "TF32" in choose_kernel(SPARSE, needs("cuda", 128, 128, dtype=torch.float32)).why


@pytest.mark.parametrize(
    ("name", "wanted", "said"),
    [
        ("torch-grouped", needs("cuda", 64, 60), "multiples of 8"),
        ("torch-grouped", needs("cuda", *TWO_WIDTHS), "this model has 128 and 60"),
        ("magic", needs("cpu", 64, 64), "magic is unknown; use auto, loop"),
        (
            "megablocks-grouped",
            needs("cpu", 64, 64),
            "--expert-kernel megablocks-grouped was removed; use torch-grouped",
        ),
        (SPARSE, needs("cpu", 128, 128), "needs a GPU; this run is on cpu"),
        (SPARSE, needs("cuda", 128, 64), "multiples of 128; this model has 128 and 64"),
        (SPARSE, needs("cuda", 128, 128, is_swiglu=False), "megablocks-sparse computes plain SwiGLU only"),
    ],
)
def test_refused(
    set_capability: SetCapability, monkeypatch: pytest.MonkeyPatch, name: str, wanted: KernelNeeds, said: str
) -> None:
    set_capability((8, 0))
    monkeypatch.setattr("expertmesh.moe.kernels.megablocks.find_spec", lambda name: name)
    with pytest.raises(ExpertMeshError, match=said):
        choose_kernel(name, wanted)


def test_without_megablocks(set_capability: SetCapability, monkeypatch: pytest.MonkeyPatch) -> None:
    set_capability((8, 0))
    monkeypatch.setattr("expertmesh.moe.kernels.megablocks.find_spec", lambda name: None)
    for capability in ((8, 0), (9, 0)):
        set_capability(capability)
        chosen = choose_kernel("auto", needs("cuda", 128, 256))
        assert chosen.name == "torch-grouped"
        assert ("needs megablocks and stk and triton, not installed here" in chosen.lost) == (capability == (8, 0))
    # what would not change with it
    set_capability((8, 0))
    for unsuited in (needs("cuda", 128, 64), needs("cuda", 128, 256, is_swiglu=False), needs("cpu", 128, 256)):
        assert choose_kernel("auto", unsuited).lost == ""
    with pytest.raises(ExpertMeshError, match="needs megablocks and stk and triton, not installed here; run make"):
        choose_kernel(SPARSE, needs("cuda", 128, 128))


def test_a_dry_run_within_another_does_not_end_it() -> None:
    with rehearsing_gpu():
        with rehearsing_gpu():
            assert is_gpu("cpu")
        assert is_gpu("cpu")
        with computing_values():
            assert not is_gpu("cpu")
            with rehearsing_gpu():
                assert is_gpu("cpu")
            assert not is_gpu("cpu")
        assert is_gpu("cpu")
    assert not is_gpu("cpu")
