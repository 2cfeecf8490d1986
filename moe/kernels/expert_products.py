"""One matmul of all experts, each with its own rows ("product"): experts other than plain SwiGLU are composed of these.

    product(x_RI, experts, weight_eOI) -> x_RO

`experts` says which rows are whose (`moe.kernels.expert_rows`). The weight may be a transposed view of one stored as
(e, I, O); its gradient then has the same strides. Nothing need be multiplied within `for_backward_alone` (see
`moe.util.recompute_cache`).

Shape suffixes: R rows, e experts on this rank, I and O the widths of a product's input and output.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..util.gpu import computes_on_cpu
from ..util.recompute_cache import result_of
from ..util.step_parts import register_step_part
from .expert_rows import ExpertRows, runs
from .grouped import GroupedMatmul, for_any_rows
from .weight_gradients import deferral_of, now_or_later

register_step_part(__name__, "expert GEMMs")

Product = Callable[[Tensor, ExpertRows, Tensor], Tensor]


def grouped_product(x_RI: Tensor, experts: ExpertRows, weight_eOI: Tensor, gmm: GroupedMatmul) -> Tensor:
    """All experts in one call of `gmm` (see `moe.kernels.grouped`), two more in backward."""
    out_RO: Tensor = _GroupedProduct.apply(x_RI, weight_eOI, experts, for_any_rows(gmm, experts.num_experts))
    return out_RO


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_eOI: Tensor, experts: ExpertRows, gmm: GroupedMatmul) -> Tensor:
        ctx.save_for_backward(x_RI if ctx.needs_input_grad[1] else None, weight_eOI)
        ctx.gmm, ctx.deferral = gmm, deferral_of(experts.call, weight_eOI)
        is_as_it_lies = weight_eOI.is_contiguous()
        b = weight_eOI if is_as_it_lies else weight_eOI.transpose(1, 2)
        shape = x_RI.shape[0], weight_eOI.shape[1]
        multiply = partial(gmm, x_RI, b, trans_b=is_as_it_lies)
        return result_of(lambda: experts.kept_product(multiply), x_RI, *shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_RI, weight_eOI = ctx.saved_tensors
        gmm = ctx.gmm
        # a gradient may come expanded, as that of a sum does, which grouped GEMMs do not take
        grad_RO = grad_RO.contiguous()
        x_needs, weight_needs, *_ = ctx.needs_input_grad
        is_as_it_lies = weight_eOI.is_contiguous()
        grad_x_RI = grad_weight_eOI = None
        if x_needs:
            b = weight_eOI if is_as_it_lies else weight_eOI.transpose(1, 2)
            grad_x_RI = gmm(grad_RO, b, trans_b=not is_as_it_lies)
        if weight_needs:
            weight_gradient = partial(_grouped_weight_gradient, gmm, is_as_it_lies)
            (grad_weight_eOI,) = now_or_later(ctx.deferral, weight_gradient, grad_RO, x_RI)
        return grad_x_RI, grad_weight_eOI, None, None


def _grouped_weight_gradient(gmm: GroupedMatmul, is_as_it_lies: bool, grad_RO: Tensor, x_RI: Tensor) -> tuple[Tensor]:
    if is_as_it_lies:
        return (gmm(grad_RO, x_RI, trans_a=True),)
    return (gmm(x_RI, grad_RO, trans_a=True).transpose(1, 2),)


def padded(product: Product) -> Product:
    """`product` for matrices of any widths: the kernel's operands begin each row at a multiple of 16 bytes, for which
    zeros are added to a width, as to an adapter's rank; they change no result."""

    def multiply(x_RI: Tensor, experts: ExpertRows, weight_eOI: Tensor) -> Tensor:
        step = 16 // x_RI.element_size()
        num_out, num_in = weight_eOI.shape[1:]
        more_out, more_in = -num_out % step, -num_in % step
        if not (more_out or more_in):
            return product(x_RI, experts, weight_eOI)
        weight_eOI = F.pad(weight_eOI, (0, more_in, 0, more_out))
        return product(F.pad(x_RI, (0, more_in)), experts, weight_eOI)[:, :num_out]

    return multiply


class AddBias(torch.autograd.Function):
    """x_RO + bias_eO[expert of the row]. Backward sums each expert's rows in fp32: the same bits on each run."""

    @staticmethod
    def forward(ctx: Any, x_RO: Tensor, counts_e: Tensor, bias_eO: Tensor) -> Tensor:
        ctx.save_for_backward(counts_e)
        ctx.bias_dtype = bias_eO.dtype

        def added() -> Tensor:
            return x_RO + bias_eO.repeat_interleave(counts_e, dim=0, output_size=x_RO.shape[0])

        return result_of(added, x_RO, *x_RO.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, None, Tensor | None]:
        (counts_e,) = ctx.saved_tensors
        if not ctx.needs_input_grad[2]:
            return grad_RO, None, None
        if grad_RO.shape[0] == 0:
            zeros_eO = grad_RO.new_zeros((counts_e.numel(), *grad_RO.shape[1:]), dtype=ctx.bias_dtype)
            return grad_RO, None, zeros_eO
        is_half = grad_RO.dtype in (torch.bfloat16, torch.float16)
        sums = _sums_by_product if is_half and not computes_on_cpu(grad_RO) else _sums_by_segment
        return grad_RO, None, sums(grad_RO, counts_e).to(ctx.bias_dtype)


def _sums_by_segment(x_RO: Tensor, counts_e: Tensor) -> Tensor:
    """Each expert's rows, summed in order."""
    x_RO = x_RO.to(torch.promote_types(x_RO.dtype, torch.float32))
    return torch.segment_reduce(x_RO, "sum", lengths=counts_e, axis=0, unsafe=True, initial=0)


def _sums_by_product(x_RO: Tensor, counts_e: Tensor) -> Tensor:
    """The same of half precision on a GPU, where `segment_reduce` has few threads for few experts. Products with 1 and
    0 are exact, and summed in fp32; a value that is not finite makes all experts' sums so."""
    num_experts = counts_e.numel()
    expert_R = torch.repeat_interleave(counts_e, output_size=x_RO.shape[0])
    # so many columns that each row begins at a multiple of 16 bytes, as tensor cores like it
    columns = torch.arange(-(-num_experts // 8) * 8, device=x_RO.device)
    is_of_expert_Re = (expert_R.unsqueeze(1) == columns).to(x_RO.dtype)
    return torch.mm(is_of_expert_Re.t(), x_RO, out_dtype=torch.float32)[:num_experts]


def multiply_dtype(rows: Tensor) -> torch.dtype:
    """The dtype to multiply in: fp32 for half precision on a CPU without it, where torch's own matmuls are slow."""
    emulated = computes_on_cpu(rows) and rows.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if emulated and not torch.cpu._is_avx512_bf16_supported() else rows.dtype


def multiply_into(out_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """Write a · b, of any dtype, to where `out_MN` is; without a gradient."""
    if out_MN.dtype == a_MK.dtype:
        torch.mm(a_MK, b_KN, out=out_MN)
    else:
        out_MN.copy_(a_MK @ b_KN)


def looped(counts: list[int]) -> GroupedMatmul:
    """Expert by expert, in the dtype of `multiply_dtype`."""

    def multiply(a: Tensor, b: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        dtype, places = multiply_dtype(a), runs(counts)
        if trans_a:
            out_eKN = b.new_empty(len(counts), a.shape[1], b.shape[1])
            for rows, out_KN in zip(places, out_eKN, strict=True):
                if rows.stop > rows.start:
                    multiply_into(out_KN, a[rows].to(dtype).t(), b[rows].to(dtype))
                else:
                    out_KN.zero_()
            return out_eKN
        out_RN = a.new_empty(a.shape[0], b.shape[1 if trans_b else 2])
        for rows, matrix in zip(places, b, strict=True):
            if rows.stop > rows.start:
                b_KN = matrix.to(dtype)
                multiply_into(out_RN[rows], a[rows].to(dtype), b_KN.t() if trans_b else b_KN)
        return out_RN

    return GroupedMatmul(multiply)
