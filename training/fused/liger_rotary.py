"""Rotary positions of transformers' modeling files by liger-kernel, in place of a dozen operators.

Shape suffixes: B sequences, S positions, H heads of queries and G of keys, A head width, T width of the tables.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...moe.util.step_parts import register_step_part
from .trial import takes_kernel, try_kernel

register_step_part(__name__, "rotary")


@dataclass(frozen=True)
class Rotation:
    """What liger's kernel rotates as a function of transformers does: the two values that lie half the width apart.

    is_half: whether tables have one entry for both of these, and not two. has_pairs: whether they lie side by side in
    what is given, though not in the result. takes_parts: what is beyond the tables passes. dtype: of queries and keys.
    table_dtypes: of the tables.
    """

    is_half: bool
    has_pairs: bool
    takes_parts: bool
    dtype: torch.dtype
    table_dtypes: tuple[torch.dtype, ...]

    def width(self, cos: Tensor) -> int:
        """How many leading values of each head are rotated."""
        return cos.shape[-1] * (2 if self.is_half else 1)


def use_liger_rotary(module: str, dtype: torch.dtype, device: torch.device) -> dict[str, bool]:
    """Have a Python module's functions that rotate by positions compute by liger's kernel where tensors take it, else
    as ever; by name, which do.

    They are replaced in the module itself, for all models of this process, as attention calls them by their names
    there.
    """
    verdicts = {}
    namespace = vars(sys.modules[module])
    for name, function in list(namespace.items()):
        if not inspect.isfunction(function) or "rotary" not in name:
            continue
        own = getattr(function, "by_transformers", function)
        parameters = list(inspect.signature(own).parameters)
        if parameters[:4] != ["q", "k", "cos", "sin"] or "unsqueeze_dim" not in parameters:
            continue
        rotation = try_rotary(own, dtype, device)
        namespace[name] = own if rotation is None else _by_liger(own, rotation)
        verdicts[f"{module.rpartition('.')[2]}.{name}"] = rotation is not None
    return verdicts


def try_rotary(function: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> Rotation | None:
    """What of a function (q, k, cos, sin, ..., unsqueeze_dim) liger computes too, by a trial; None: nothing."""
    generator = torch.Generator().manual_seed(0)
    width = 32
    inputs = [torch.randn(2, heads, 8, width, generator=generator).to(device, dtype) for heads in (4, 2)]

    def agrees(rotation: Rotation, table_width: int) -> bool:
        entries = torch.randn(2, 2, 8, table_width // 2, generator=generator)
        whole = entries if rotation.is_half else torch.cat([entries, entries], dim=-1)
        cos_BST, sin_BST = whole.to(device, rotation.table_dtypes[0])

        def own(q: Tensor, k: Tensor) -> Any:
            # the reference in fp32 has tables of the same numbers
            is_reference = q.dtype == torch.float32
            return function(q, k, *(table.float() if is_reference else table for table in (cos_BST, sin_BST)))

        def by_liger(q: Tensor, k: Tensor) -> Any:
            return rotate(q, k, cos_BST, sin_BST, rotation.width(cos_BST), rotation.has_pairs)

        return try_kernel(own, by_liger, inputs) is not None

    for kind in ((False, False), (True, False), (False, True)):
        tried = [Rotation(*kind, False, dtype, (each,)) for each in dict.fromkeys((dtype, torch.float32))]
        agreed = [rotation for rotation in tried if agrees(rotation, width)]
        if agreed:
            takes_parts = not any(kind) and all(agrees(rotation, width // 2) for rotation in agreed)
            return Rotation(*kind, takes_parts, dtype, tuple(rotation.table_dtypes[0] for rotation in agreed))
    return None


def _by_liger(function: Callable[..., Any], rotation: Rotation) -> Callable[..., Any]:
    signature = inspect.signature(function)
    fitting: dict[tuple[int, torch.dtype], bool] = {}

    def fit(cos: Tensor, sin: Tensor) -> bool:
        """Whether both values of a pair have the same entry, of which the kernel reads one. Looked at once for all
        tables of a width, which a model makes alike: it waits for the GPU."""
        if rotation.is_half:
            return True
        kind = cos.shape[-1], cos.dtype
        if kind not in fitting:
            fitting[kind] = all(map(has_equal_halves, (cos, sin)))
        return fitting[kind]

    @wraps(function)
    def rotary(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        rest = dict(bound.arguments)
        q, k, cos, sin, heads_dim = (rest.pop(name) for name in ("q", "k", "cos", "sin", "unsqueeze_dim"))
        is_known = all(value is None for value in rest.values()) and heads_dim in (1, 2)
        if not is_known or not _takes_kernel(q, k, cos, sin, heads_dim, rotation) or not fit(cos, sin):
            return function(*args, **kwargs)
        if heads_dim == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = rotate(q, k, cos, sin, rotation.width(cos), rotation.has_pairs)
        return (q, k) if heads_dim == 1 else (q.transpose(1, 2), k.transpose(1, 2))

    rotary.by_transformers = function  # type: ignore[attr-defined]
    return rotary


def has_equal_halves(table: Tensor) -> bool:
    return torch.equal(*table.chunk(2, dim=-1))


def _takes_kernel(q: Any, k: Any, cos: Any, sin: Any, heads_dim: int, rotation: Rotation) -> bool:
    if not (takes_kernel(q, rotation.dtype) and takes_kernel(k, rotation.dtype)):
        return False
    width, positions_dim = rotation.width(cos), 3 - heads_dim
    return (
        q.dim() == k.dim() == 4
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.dtype == sin.dtype
        and cos.dtype in rotation.table_dtypes
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1] == q.shape[positions_dim] == k.shape[positions_dim]
        and q.shape[-1] == k.shape[-1]
        and (width == q.shape[-1] or (rotation.takes_parts and width < q.shape[-1]))
        and not (cos.requires_grad or sin.requires_grad)
    )


def rotate(
    q_BHSA: Tensor, k_BGSA: Tensor, cos_BST: Tensor, sin_BST: Tensor, width: int, has_pairs: bool
) -> tuple[Tensor, Tensor]:
    """width: how many leading values of each head are rotated; all, where they lie in pairs."""
    q, k = _Rotate.apply(q_BHSA, k_BGSA, cos_BST, sin_BST, width, has_pairs)
    return q, k


class _Rotate(Function):
    """liger's `LigerRopeFunction`, of copies: its kernel writes to what it is given, which is others' too, as are the
    products that selective checkpointing keeps."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, width: int, has_pairs: bool
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.width, ctx.has_pairs = width, has_pairs
        return rotate_in_place(_copied(q, has_pairs), _copied(k, has_pairs), cos, sin, width, backwards=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grads = rotate_in_place(_copied(d_q), _copied(d_k), cos, sin, ctx.width, backwards=True)
        if ctx.has_pairs:
            grads = tuple(grad.unflatten(-1, (2, -1)).mT.flatten(-2) for grad in grads)
        return *grads, None, None, None, None


def _copied(x_BHSA: Tensor, has_pairs: bool = False) -> Tensor:
    """In the order in memory that the kernel takes; the first values of all pairs before the second ones."""
    x_BSHA = x_BHSA.transpose(1, 2)
    if has_pairs:
        return x_BSHA.unflatten(-1, (-1, 2)).mT.clone(memory_format=torch.contiguous_format).flatten(-2).transpose(1, 2)
    return x_BSHA.clone(memory_format=torch.contiguous_format).transpose(1, 2)


def rotate_in_place(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, width: int, backwards: bool
) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops import rope_backward, rope_forward

    q, k, *_ = (rope_backward if backwards else rope_forward)(q, k, cos, sin, rotary_dim=width)
    return q, k
