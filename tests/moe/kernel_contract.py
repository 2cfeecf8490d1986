"""What every expert kernel does, each by itself: `check_kernel` holds one against a plain matmul an expert, of which
autograd makes the backward. A kernel registered from outside can be held against it too."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.moe.kernels.expert_products import AddBias, Product
from expertmesh.moe.kernels.expert_rows import ExpertRows
from expertmesh.moe.kernels.kernel_entries import KernelEntry
from expertmesh.moe.kernels.kernel_registry import ExpertKernel
from expertmesh.moe.util.recompute_cache import for_backward_alone
from tests.rounding import OTHER_ORDER, assert_near
from tests.tiny import relative_error

COUNTS = {
    "even": [3, 3, 3, 3],
    "one has all": [0, 0, 12, 0],
    "first and last empty": [0, 5, 7, 0],
    "a single row": [0, 1, 0, 0],
    "no row": [0, 0, 0, 0],
    "one expert": [5],
}
"""Rows of each expert."""
RANK = 3
"""Of adapters: of no width that GEMMs like."""


def rows_of(counts: Sequence[int], device: str = "cpu", **how: Any) -> ExpertRows:
    """What a kernel is told of experts with so many rows each."""
    return ExpertRows(torch.tensor(counts, device=device), sum(counts), **how)


@dataclass(frozen=True)
class Form:
    """One of the functions of a kernel.

    Attributes:
        run: run(x, experts, *weights, needs_output=True), on weights of three dimensions, an expert each.
        plain: what it computes for one expert.
        widths: of rows, and of each weight: those of an expert's matrix.
        products: grouped GEMMs in its forward.
        keeps_layout: whether its weight's gradient lies in memory as the weight does, so that autograd adds it to the
            weight's own without a copy.
        weighs: whether its last operand are weights of rows, in fp32 or wider.
    """

    run: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    widths: tuple[int, list[tuple[int, int]]]
    products: int
    keeps_layout: bool = False
    weighs: bool = False


def forms_of(kernel: ExpertKernel, width: int, expert_width: int) -> dict[str, Form]:
    """All that the kernel has."""
    found: dict[str, Form] = {}
    swiglu = width, [(expert_width, width)] * 3
    if kernel.fused is not None:
        found["fused"] = Form(partial(_in_rows, kernel.fused), _swiglu, swiglu, 3)
    if kernel.joined is not None:
        found["joined"] = Form(partial(_side_by_side, kernel.joined), _swiglu, swiglu, 2)
    if kernel.weighs:
        for name, form in list(found.items()):
            weighed = partial(_weighed, form.run)
            found[f"{name}, weighed"] = replace(form, run=weighed, plain=_weighed_swiglu, weighs=True)
    if kernel.product is not None:
        there, back = (width, [(expert_width, width)]), (width, [(width, expert_width)])
        product, transposed = (partial(how, kernel.product) for how in (_single, _transposed))
        found["product"] = Form(product, _times, there, 1, keeps_layout=True)
        found["product, transposed"] = Form(transposed, torch.matmul, back, 1, keeps_layout=True)
    if kernel.low_rank is not None:
        low_rank = partial(_single, kernel.low_rank)
        found["low rank, A"] = Form(low_rank, _times, (width, [(RANK, width)]), 1)
        found["low rank, B"] = Form(low_rank, _times, (RANK, [(width, RANK)]), 1)
    return found


def _swiglu(x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
    return (F.silu(x @ w1.t()) * (x @ v1.t())) @ w2


def _weighed_swiglu(x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
    return weights.unsqueeze(1) * _swiglu(x, w1, v1, w2)


def _times(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def _in_rows(fused: Callable[..., Tensor], x: Tensor, experts: ExpertRows, *weights: Tensor, **options: bool) -> Tensor:
    return fused(x, experts, *(weight.flatten(0, 1) for weight in weights), **options)


def _side_by_side(
    joined: Callable[..., Tensor], x: Tensor, experts: ExpertRows, w1: Tensor, v1: Tensor, w2: Tensor, **options: bool
) -> Tensor:
    return joined(x, experts, torch.cat([w1, v1], dim=1), w2.flatten(0, 1), **options)


def _weighed(run: Callable[..., Tensor], x: Tensor, experts: ExpertRows, *operands: Tensor, **options: bool) -> Tensor:
    return run(x, replace(experts, weights_R=operands[-1]), *operands[:-1], **options)


def _single(product: Product, x: Tensor, experts: ExpertRows, weight: Tensor, needs_output: bool = True) -> Tensor:
    with for_backward_alone(not needs_output):
        return product(x, experts, weight)


def _transposed(product: Product, x: Tensor, experts: ExpertRows, weight: Tensor, **options: bool) -> Tensor:
    return _single(product, x, experts, weight.transpose(1, 2), **options)


class Calls(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[operator.name()] += 1
        return operator(*args, **(kwargs or {}))

    def products(self) -> int:
        return sum(self.count[name] for name in ("aten::mm", "aten::mm.out", "aten::_grouped_mm"))


def outcome(run: Callable[[], Tensor], inputs: Sequence[Tensor], grad: Tensor | None = None) -> list[Tensor | None]:
    """The output, and the gradients of those inputs that need one; by default of the output's sum."""
    out = run()
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    grads = iter(torch.autograd.grad(out.sum() if grad is None else out, wanted, grad))
    return [out.detach(), *(next(grads) if tensor.requires_grad else None for tensor in inputs)]


def check_kernel(
    kernel: KernelEntry,
    counts: Sequence[int],
    dtype: torch.dtype = torch.float32,
    tolerance: float = OTHER_ORDER,
    device: str = "cpu",
    widths: tuple[int, int] = (16, 24),
    is_frugal: bool = True,
) -> None:
    """Check every form of a kernel on rows divided so over experts.

    - Output and gradients are those of plain matmuls in fp64, but for a relative `tolerance`; of an expert without rows
      nothing but zeros; in `dtype`. So they are where the output's gradient lies in memory as one number.
    - What is frozen gets none, and the others keep every bit.
    - Where nobody reads its output (`needs_output`; of a product `for_backward_alone`) gradients keep every bit. A
      frugal kernel makes one GEMM less then, without memory for an output; and a product's gradient of a weight lies in
      memory as the weight does.
    """
    for name, form in forms_of(kernel.code, *widths).items():
        _check_form(f"{kernel.name}, {name}, rows {list(counts)}", form, counts, dtype, tolerance, device, is_frugal)


def _check_form(
    what: str, form: Form, counts: Sequence[int], dtype: torch.dtype, tolerance: float, device: str, is_frugal: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    width, matrices = form.widths
    shapes = [(sum(counts), width), *((len(counts), *matrix) for matrix in matrices)]
    inputs = [(0.5 * torch.randn(shape, generator=generator)).to(device, dtype).requires_grad_() for shape in shapes]
    if form.weighs:
        weights_R = torch.rand(sum(counts), generator=generator).to(device, torch.promote_types(dtype, torch.float32))
        inputs.append(weights_R.requires_grad_())
    experts = rows_of(counts, device)
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in inputs]

    def plain() -> Tensor:
        end = 1 + len(matrices)
        x, *weights = (tensor.split(list(counts)) for tensor in (exact[0], *exact[end:]))
        return torch.cat([form.plain(*operands) for operands in zip(x, *exact[1:end], *weights, strict=True)])

    def run(needs_output: bool = True) -> Tensor:
        return form.run(inputs[0], experts, *inputs[1:], needs_output=needs_output)

    grad = torch.randn(plain().shape, generator=generator).to(device, dtype)
    with Calls() as with_output:
        run()
    found = outcome(run, inputs, grad)
    dtypes = [dtype, *(tensor.dtype for tensor in inputs)]
    _assert_near(what, found, outcome(plain, exact, grad.cpu().double()), dtypes, tolerance)
    if form.keeps_layout and is_frugal:
        assert found[2] is not None
        assert found[2].stride() == inputs[1].stride(), what
    _assert_near(f"{what}, of a sum", outcome(run, inputs), outcome(plain, exact), dtypes, tolerance)

    for frozen in inputs:
        frozen.requires_grad_(False)
        for mine, before in zip(outcome(run, inputs, grad)[1:], found[1:], strict=True):
            assert mine is None or (before is not None and torch.equal(mine, before)), f"{what}, one frozen"
        frozen.requires_grad_()

    with Calls() as without_output:
        out = run(needs_output=False)
    less = outcome(lambda: out, inputs, grad)
    assert (out.shape, out.dtype) == (grad.shape, dtype), what
    for mine, before in zip(less[1:], found[1:], strict=True):
        assert mine is not None
        assert before is not None
        assert torch.equal(mine, before), f"{what}, without an output"
    if is_frugal:
        assert out.untyped_storage().nbytes() == out.element_size(), f"{what}: memory for an output"
        launches = with_output.products() // form.products
        assert without_output.products() == launches * (form.products - 1), f"{what}: GEMMs without an output"


def _assert_near(
    what: str, found: list[Tensor | None], expected: list[Tensor | None], dtypes: list[torch.dtype], tolerance: float
) -> None:
    for number, (mine, exact, dtype) in enumerate(zip(found, expected, dtypes, strict=True)):
        assert mine is not None
        assert exact is not None
        assert (mine.dtype, mine.shape) == (dtype, exact.shape), what
        error = relative_error(mine.cpu(), exact)
        # of a row's weight it is one sum, of which terms may cancel
        allowed = 2 * tolerance if exact.dim() == 1 else tolerance
        assert error <= allowed, f"{what}: {error} in {'the output' if number == 0 else f'gradient {number}'}"
        if exact.dim() > 2:
            unused = (exact == 0).flatten(1).all(dim=1)
            assert not mine.cpu()[unused].any(), f"{what}: a gradient of an expert without rows"


def check_bias(counts: Sequence[int], dtype: torch.dtype, device: str, width: int = 24) -> None:
    """`AddBias` against autograd's own of each row's bias, in fp32, and rounded once."""
    torch.manual_seed(0)
    counts_e = torch.tensor(counts, device=device)
    x_RO, grad_RO = torch.randn(2, sum(counts), width, device=device).to(dtype)
    bias_eO = torch.randn(len(counts), width, device=device).to(dtype)
    inputs = [tensor.clone().requires_grad_() for tensor in (x_RO, bias_eO)]
    out_RO = AddBias.apply(inputs[0], counts_e, inputs[1])
    out_RO.backward(grad_RO)
    of_row_R = torch.arange(len(counts), device=device).repeat_interleave(counts_e)
    assert torch.equal(out_RO, x_RO + bias_eO[of_row_R])
    assert inputs[0].grad is not None
    assert torch.equal(inputs[0].grad, grad_RO)
    sums_eO = torch.zeros(len(counts), width, device=device, dtype=torch.float64).index_add_(
        0, of_row_R, grad_RO.double()
    )
    assert_near(inputs[1].grad, sums_eO.to(dtype), OTHER_ORDER if dtype == torch.float32 else 2**-8)
