"""Quantized frozen weights, in 8 or 4 bits, each row by itself, so that rows may be sharded, read and stored in any
way.

    fp8   a code of 8 bits (float8_e4m3), and one scale per row
    nf4   a code of 4 bits (a quantile of the normal distribution; QLoRA, arXiv 2305.14314), and one scale per 64 values
    mxfp4 a code of 4 bits (E2M1), and one exponent per 32 values, as checkpoints have them: of experts alone, and never
          quantized here

Codes and scales are bytes. FSDP gets them as a view in the compute dtype, since it casts every parameter of another
dtype (before torch 2.13 integers, too). Matmuls dequantize a weight temporarily, in forward and again in backward; of
experts, a few at a time.

Shape suffixes: M tokens, O and I the output and input widths of a matrix, e experts on this rank, R rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..kernels.expert_products import Product
from ..kernels.expert_rows import ExpertRows
from ..util.gpu import computes_on_cpu, takes_triton
from ..util.recompute_cache import kept, result_of
from ..util.step_parts import register_step_part

register_step_part(__name__, "dequantization")

Kind = Literal["fp8", "nf4", "mxfp4"]

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of bitsandbytes' table."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of MXFP4's codes (OCP Microscaling Formats 1.0)."""
LARGE_EXPONENT = 253
"""From this byte of a scale on a value of mxfp4 may be larger than any bfloat16: 6 times 2^(253 - 127)."""
BLOCK = 64
MX_BLOCK = 32
"""Values per scale, of nf4 and of mxfp4."""
SCALES = "_scales"
"""Suffix of the name of the parameter with a weight's scales."""
WORD = 4
"""A row of codes fills complete words of this many bytes, so that it can be viewed in any compute dtype."""

_FP8_MAX = 448.0
_STRIP = 2**20
_WIDENED_BYTES = 64 * 2**20
_WIDENED_BYTES_ON_GPU = 2**30
"""Of dequantized experts' weights at a time. On a GPU the host has to wait for the counts where this takes several."""


@dataclass(frozen=True)
class Storage:
    """How a weight (rows, columns) is stored: codes (rows, code_bytes) and scales (rows, scale_bytes), uint8 or these
    bytes viewed in another dtype. Both are padded to full words.

    is_turned: whether its rows are the columns of the matrix that other dtypes hold, since scales are of the others.
    """

    kind: Kind
    columns: int
    is_turned: bool = False

    @property
    def code_bytes(self) -> int:
        own = self.columns if self.kind == "fp8" else -(-self.columns // 2)
        return -(-own // WORD) * WORD

    @property
    def num_scales(self) -> int:
        return 1 if self.kind == "fp8" else -(-self.columns // (BLOCK if self.kind == "nf4" else MX_BLOCK))

    @property
    def scale_bytes(self) -> int:
        return -(-self.num_scales // WORD) * WORD if self.kind == "mxfp4" else 4 * self.num_scales


def store(module: nn.Module, name: str, kind: Kind, turned: tuple[int, int] | None = None) -> None:
    """Have a module store its frozen weight `name` as codes and scales, uninitialised; before it is sharded.

    Args:
        turned: (rows, columns) of what is stored in place of the weight, where that is the transpose of each of its
            matrices.
    """
    weight = module._parameters[name]
    assert weight is not None
    assert not weight.requires_grad
    num_rows, columns = turned or weight.shape
    storage = Storage(kind, columns, turned is not None)
    for part, width in ((name, storage.code_bytes), (name + SCALES, storage.scale_bytes)):
        empty = torch.empty(num_rows, width, dtype=torch.uint8, device=weight.device)
        module.register_parameter(part, nn.Parameter(empty, requires_grad=False))
    stored: Any = module
    stored.storages = {**storages_of(module), name: storage}


def storages_of(module: nn.Module) -> dict[str, Storage]:
    """How a module's quantized weights are stored, by name."""
    storages: dict[str, Storage] = getattr(module, "storages", {})
    return storages


def view_codes(model: nn.Module, dtype: torch.dtype) -> None:
    """View all codes and scales of a model as tensors of `dtype`, in place, before it is sharded: what already has the
    compute dtype is not cast."""
    for module in model.modules():
        for name in storages_of(module):
            for part in (name, name + SCALES):
                codes = module.get_parameter(part).detach()
                module.register_parameter(part, nn.Parameter(codes.view(dtype), requires_grad=False))


@torch.no_grad()
def fill(codes: Tensor, scales: Tensor, rows: Tensor, storage: Storage) -> None:
    """Write rows of a weight, of any dtype, as codes and scales; some at a time."""
    codes, scales = codes.view(torch.uint8), scales.view(torch.uint8)
    step = max(1, _STRIP // storage.columns)
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        new_codes, new_scales = quantize(rows[part].to(codes.device), storage)
        codes[part], scales[part] = new_codes, new_scales


def quantize(rows: Tensor, storage: Storage) -> tuple[Tensor, Tensor]:
    """Quantize rows: (codes, scales)."""
    values = rows.float()
    if storage.kind == "fp8":
        scales = values.abs().amax(dim=1, keepdim=True) / _FP8_MAX
        codes = (values / scales.clamp(min=torch.finfo(torch.float32).tiny)).to(torch.float8_e4m3fn).view(torch.uint8)
        return F.pad(codes, (0, storage.code_bytes - storage.columns)), scales.view(torch.uint8)
    blocks = F.pad(values, (0, storage.num_scales * BLOCK - storage.columns)).unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(dim=2)
    share = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)).flatten(1)[:, : storage.columns]
    table = torch.tensor(NF4, device=rows.device)
    nearest = torch.bucketize(share.contiguous(), (table[1:] + table[:-1]) / 2).to(torch.uint8)
    nearest = F.pad(nearest, (0, 2 * storage.code_bytes - storage.columns))
    return nearest[:, 0::2] | (nearest[:, 1::2] << 4), scales.contiguous().view(torch.uint8)


def dequantize(codes: Tensor, scales: Tensor, storage: Storage, dtype: torch.dtype) -> Tensor:
    """Dequantize: the rows that codes and scales stand for, multiplied in fp32, rounded once. In one Triton kernel on a
    GPU; some at a time on a CPU."""
    codes = codes.view(torch.uint8)
    if storage.kind == "fp8":
        codes = codes[:, : storage.columns]
    if takes_triton(codes):
        from .dequantize_triton import fused_fp8, fused_mxfp4, fused_nf4

        if storage.kind == "mxfp4":
            own = codes.contiguous(), scales.contiguous().view(torch.uint8), mxfp4_pairs(codes.device)
            return fused_mxfp4(*own, storage.columns, dtype)
        factors = scales.contiguous().view(torch.float32)
        if storage.kind == "fp8":
            return fused_fp8(codes.contiguous(), factors, dtype)
        return fused_nf4(codes.contiguous(), factors, nf4_pairs(codes.device), storage.columns, dtype)
    num_rows = codes.shape[0]
    wide = torch.empty(num_rows, storage.columns, dtype=dtype, device=codes.device)
    # intermediate results take several times the memory of the values
    step = max(1, _STRIP // storage.columns) if computes_on_cpu(codes) else max(1, num_rows)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        if storage.kind == "mxfp4":
            values = F.embedding(codes[rows].int(), mxfp4_pairs(codes.device)).flatten(1)[:, : storage.columns]
            factors = exponents(scales[rows], storage).repeat_interleave(MX_BLOCK, dim=1)[:, : storage.columns]
            wide[rows] = values.mul(factors)
            continue
        factors = scales[rows].contiguous().view(torch.float32)
        if storage.kind == "fp8":
            wide[rows] = codes[rows].view(torch.float8_e4m3fn).float().mul_(factors)
            continue
        values = F.embedding(codes[rows].int(), nf4_pairs(codes.device)).flatten(1)[:, : storage.columns]
        wide[rows] = values.mul(factors.repeat_interleave(BLOCK, dim=1)[:, : storage.columns])
    return wide


@cache
def nf4_pairs(device: torch.device) -> Tensor:
    """The two values of each byte, (256, 2)."""
    return _pairs(NF4).to(device)


@cache
def mxfp4_pairs(device: torch.device) -> Tensor:
    """As `nf4_pairs`."""
    return _pairs(E2M1).to(device)


def _pairs(table: tuple[float, ...]) -> Tensor:
    byte = torch.arange(256)
    return torch.tensor(table)[torch.stack([byte & 0xF, byte >> 4], dim=1)]


def exponents(scales: Tensor, storage: Storage) -> Tensor:
    """What bytes of mxfp4's scales stand for, in fp32; 255, which stands for no number, is infinite."""
    return (scales.view(torch.uint8)[:, : storage.num_scales].float() - 127.0).exp2()


def stored_linear(x: Tensor, codes: Tensor, scales: Tensor, storage: Storage, is_transposed: bool = False) -> Tensor:
    """x · Wᵀ with a quantized weight; x · W with one that is held transposed."""
    out_MO: Tensor = _StoredLinear.apply(x.flatten(0, -2), codes, scales, storage, is_transposed)
    return out_MO.unflatten(0, x.shape[:-1])


class _StoredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, codes: Tensor, scales: Tensor, storage: Storage, is_transposed: bool) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.storage, ctx.is_transposed = storage, is_transposed
        weight = dequantize(codes, scales, storage, x_MI.dtype)
        return x_MI @ (weight if is_transposed else weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        weight = dequantize(codes, scales, ctx.storage, grad_MO.dtype)
        return grad_MO @ (weight.t() if ctx.is_transposed else weight), *(None,) * 4


def stored_product(
    x_RI: Tensor,
    experts: ExpertRows,
    codes: Tensor,
    scales: Tensor,
    storage: Storage,
    product: Product,
    is_transposed: bool,
) -> Tensor:
    """`product` (see `moe.kernels.expert_products`) of experts whose weights (e · rows, columns) are quantized.

    Args:
        experts: from `rows_for_few`.
        is_transposed: whether an expert multiplies by the transpose of its rows.
    """
    out_RO: Tensor = _StoredProduct.apply(x_RI, experts, codes, scales, storage, product, is_transposed)
    return out_RO


def rows_for_few(
    x_RD: Tensor, experts: ExpertRows, weights: Mapping[str, Tensor], storages: Mapping[str, Storage]
) -> ExpertRows:
    """`experts`, with their counts on the host where the matrices of a few are dequantized at a time: it waits for them
    once, for all matrices of a layer and for backward.

    Args:
        weights: codes, by name.
    """
    num_experts = experts.num_experts
    if all(_few(weights[name], num_experts, storage, x_RD) >= num_experts for name, storage in storages.items()):
        return experts
    return replace(experts, on_host=kept("experts' rows", experts.counts))


def _few(codes: Tensor, num_experts: int, storage: Storage, x: Tensor) -> int:
    """As many experts as may be dequantized at once."""
    room = _WIDENED_BYTES if computes_on_cpu(x) else _WIDENED_BYTES_ON_GPU
    return max(1, room // (codes.shape[0] // num_experts * storage.columns * x.dtype.itemsize))


class _StoredProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        experts: ExpertRows,
        codes: Tensor,
        scales: Tensor,
        storage: Storage,
        product: Product,
        is_transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        # what is kept is the complete product
        parts = replace(experts, keeps_products=False)
        ctx.how = (parts, storage, product, not is_transposed)
        shape = x_RI.shape[0], storage.columns if is_transposed else codes.shape[0] // experts.num_experts
        multiply = partial(_by_few, x_RI, codes, scales, parts, storage, product, is_transposed)
        return result_of(lambda: experts.kept_product(multiply), x_RI, *shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        # with interleaved gate and up it is not contiguous, which grouped_mm does not take
        return _by_few(grad_RO.contiguous(), *ctx.saved_tensors, *ctx.how), *(None,) * 6


@torch.no_grad()
def _by_few(
    x_RI: Tensor,
    codes: Tensor,
    scales: Tensor,
    experts: ExpertRows,
    storage: Storage,
    product: Product,
    is_transposed: bool,
) -> Tensor:
    """The product, of as many experts at a time as may be dequantized at once."""
    few = _few(codes, experts.num_experts, storage, x_RI)
    rows = few * (codes.shape[0] // experts.num_experts)
    parts = experts.parts(few)
    by_part = zip(
        parts, x_RI.split([part.num_rows for part in parts]), codes.split(rows), scales.split(rows), strict=True
    )
    outputs = []
    for part, x, few_codes, few_scales in by_part:
        weight = dequantize(few_codes, few_scales, storage, x.dtype).unflatten(0, (part.num_experts, -1))
        if storage.is_turned:  # to where the same values lie unquantized: GEMMs may sum up in another order elsewhere
            weight = weight.mT.contiguous().mT
        outputs.append(product(x, part, weight.transpose(1, 2) if is_transposed else weight))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
