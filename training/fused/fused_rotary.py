"""Rotary positions of transformers' modeling files, each computed in one read of queries or keys and one write.

What a function computes is found out by running it on random values: families rotate values that lie half a head
apart or side by side, all of a head or its beginning.

Shape suffixes: B sequences, S positions, H heads, A head width, T width of the tables of cosines and sines.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...moe.util.gpu import takes_triton

_HALVES, _PAIRS = False, True
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Rotation:
    """What a function computes of queries or keys, cosines and sines.

    pairs_in, pairs_out: whether the two values that are rotated together lie side by side, or half the width apart.
    tables: "whole", each value has its own entry; "first", both of a pair that of the first one; "half", the tables
    have no more than these. takes_parts: what is beyond the tables passes. keeps_dtype: the result has the input's
    dtype also where the tables have another.
    """

    pairs_in: bool
    pairs_out: bool
    tables: str
    takes_parts: bool = False
    keeps_dtype: bool = False

    def width(self, cos: Tensor) -> int:
        """Width of what is rotated, in elements."""
        return cos.shape[-1] * (2 if self.tables == "half" else 1)


_KNOWN = [
    Rotation(_HALVES, _HALVES, "whole"),
    Rotation(_HALVES, _HALVES, "half"),
    Rotation(_PAIRS, _HALVES, "first"),
    Rotation(_PAIRS, _PAIRS, "first"),
]


def fuse_rotary(modules: set[str]) -> list[str]:
    """Have the functions of these Python modules that rotate by positions compute by Triton's kernels where tensors
    take them, else as ever; which do.

    They are replaced in the modules themselves, for all models of this process, as attention calls them by their names
    there. What replaces them computes the same of any tensors, and calls them where no kernel does.
    """
    fused = []
    for module in sorted(modules):
        namespace = vars(sys.modules[module])
        for name, function in list(namespace.items()):
            if not inspect.isfunction(function) or "rotary" not in name:
                continue
            if hasattr(function, "rotation"):
                fused.append(f"{module}.{name}")
            elif (rotation := try_rotary(function)) is not None:
                namespace[name] = _fused(function, rotation)
                fused.append(f"{module}.{name}")
    return fused


@torch.no_grad()
def try_rotary(function: Callable[..., Any]) -> Rotation | None:
    """What a function (q, k, cos, sin, ..., unsqueeze_dim) or (x, cos, sin, ..., unsqueeze_dim) computes; None if it is
    no rotation that we know."""
    names = list(inspect.signature(function).parameters)
    num_inputs = names.index("cos") if "cos" in names else 0
    is_like = names[num_inputs : num_inputs + 2] == ["cos", "sin"] and "unsqueeze_dim" in names
    if num_inputs not in (1, 2) or not is_like:
        return None
    generator = torch.Generator().manual_seed(0)
    inputs_BHSA = [torch.randn(2, heads, 5, 32, generator=generator) for heads in (3, 1)[:num_inputs]]

    def tables(width: int) -> list[Tensor]:
        return list(torch.randn(2, 2, 5, width, generator=torch.Generator().manual_seed(width)))

    def results(inputs: list[Tensor], tables: list[Tensor], heads_dim: int) -> list[Tensor]:
        try:
            result = function(*inputs, *tables, unsqueeze_dim=heads_dim)
        except Exception:
            return []
        return [result] if isinstance(result, Tensor) else list(result)

    def is_this(rotation: Rotation, width: int) -> bool:
        for heads_dim in (1, 2):
            inputs = [x_BHSA.movedim(1, heads_dim) for x_BHSA in inputs_BHSA]
            found = results(inputs, tables(width), heads_dim)
            cos, sin = (table.unsqueeze(heads_dim) for table in tables(width))
            expected = [plain_rotate(x, cos, sin, rotation) for x in inputs]
            if len(found) != len(expected) or not all(map(_close, found, expected)):
                return False
        return True

    for rotation in _KNOWN:
        width = 16 if rotation.tables == "half" else 32
        if is_this(rotation, width):
            rounded = results([x_BHSA.bfloat16() for x_BHSA in inputs_BHSA], tables(width), 1)
            keeps_dtype = all(x.dtype == torch.bfloat16 for x in rounded)
            return replace(rotation, takes_parts=is_this(rotation, width // 2), keeps_dtype=keeps_dtype)
    return None


def _close(found: Any, expected: Tensor) -> bool:
    return (
        isinstance(found, Tensor)
        and (found.dtype, found.shape) == (expected.dtype, expected.shape)
        and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    )


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation) -> Tensor:
    """What the kernel computes, in torch's own operations; in fp32, rounded once."""
    width = rotation.width(cos)
    rotated, rest = x[..., :width].float(), x[..., width:]
    x_1, x_2 = (rotated[..., 0::2], rotated[..., 1::2]) if rotation.pairs_in else rotated.chunk(2, dim=-1)
    half, second = width // 2, width // 2 if rotation.tables == "whole" else 0
    (cos_1, cos_2), (sin_1, sin_2) = (
        (table[..., :half].float(), table[..., second : second + half].float()) for table in (cos, sin)
    )
    both = x_1 * cos_1 - x_2 * sin_1, x_2 * cos_2 + x_1 * sin_2
    out = torch.stack(both, dim=-1).flatten(-2) if rotation.pairs_out else torch.cat(both, dim=-1)
    return torch.cat([out.to(_dtype(x, cos, rotation)), rest], dim=-1)


def _dtype(x: Tensor, cos: Tensor, rotation: Rotation) -> torch.dtype:
    return x.dtype if rotation.keeps_dtype or x.dtype == cos.dtype else torch.promote_types(x.dtype, cos.dtype)


def _fused(function: Callable[..., Any], rotation: Rotation) -> Callable[..., Any]:
    signature = inspect.signature(function)
    inputs = list(signature.parameters)[: list(signature.parameters).index("cos")]

    @wraps(function)
    def rotary(*args: Any, **kwargs: Any) -> Any:
        # the compiler makes better kernels of the function's own code, as it sees what comes before and after
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        rest = dict(bound.arguments)
        tensors = [rest.pop(name) for name in inputs]
        cos, sin, dim = rest.pop("cos"), rest.pop("sin"), rest.pop("unsqueeze_dim")
        is_known = all(value is None for value in rest.values()) and dim in (1, 2)
        if not is_known or not all(_takes_kernel(x, cos, sin, dim, rotation) for x in tensors):
            return function(*args, **kwargs)
        # some families transpose what their tables are made of; all layers share them, and they are small
        cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
        results = [FusedRotary.apply(x, cos, sin, dim, rotation) for x in tensors]
        return results[0] if len(results) == 1 else tuple(results)

    rotary.rotation = rotation  # type: ignore[attr-defined]
    return rotary


def _takes_kernel(x: Any, cos: Any, sin: Any, heads_dim: int, rotation: Rotation) -> bool:
    if not all(isinstance(t, Tensor) and t.dtype in _DTYPES and takes_triton(t) for t in (x, cos, sin)):
        return False
    width, positions_dim = rotation.width(cos), 3 - heads_dim
    return (
        x.dim() == 4
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1] in (1, x.shape[positions_dim])
        and (width == x.shape[-1] or (rotation.takes_parts and width < x.shape[-1]))
        and x.stride(-1) == 1
        and not (cos.requires_grad or sin.requires_grad)
    )


class FusedRotary(Function):
    """`plain_rotate` by Triton's kernel of x (B, H, S, A), or (B, S, H, A) if `heads_dim` is 2, in any strides; keeps
    the tables alone for backward. The result has the order of dimensions in memory that x has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads_dim: int, rotation: Rotation) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads_dim, ctx.rotation, ctx.dtype = heads_dim, rotation, x.dtype
        out = torch.empty_like(x, dtype=_dtype(x, cos, rotation))
        _rotate(x, cos, sin, out, heads_dim, rotation, backwards=False)
        ctx.strides = out.stride()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # a gradient may come in another order than the projection's own backward wants
        d_x = torch.empty_strided(grad.shape, ctx.strides, dtype=ctx.dtype, device=grad.device)
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        _rotate(grad, cos, sin, d_x, ctx.heads_dim, ctx.rotation, backwards=True)
        return d_x, None, None, None, None


def _rotate(
    x: Tensor, cos_BST: Tensor, sin_BST: Tensor, out: Tensor, heads_dim: int, rotation: Rotation, backwards: bool
) -> None:
    from .fused_rotary_triton import rotate

    x_BSHA, out_BSHA = x.movedim(heads_dim, 2), out.movedim(heads_dim, 2)
    width = rotation.width(cos_BST)
    cos_BST, sin_BST = (t.expand(*x_BSHA.shape[:2], -1) for t in (cos_BST, sin_BST))
    pairs = (rotation.pairs_in, rotation.pairs_out)
    pairs_in, pairs_out = pairs[::-1] if backwards else pairs
    rotate(x_BSHA, cos_BST, sin_BST, out_BSHA, width, rotation.tables, pairs_in, pairs_out, backwards)
