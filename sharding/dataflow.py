"""What a model's forward passes from layer to layer, in shapes that follow from a batch's, and where it can be cut.

Found by `pipeline.survey`.

Shape suffixes: B sequences, S positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from ..moe.hf_model.trial import counts_tokens
from ..moe.util.step_parts import register_step_part

register_step_part(__name__, "pipeline")

BEFORE = -1
"""The place before the first layer, as origin of a tensor."""


@dataclass(frozen=True)
class Dim:
    """A dimension of a tensor: `factor`, times B and S where it grows with them, but `most` at most."""

    factor: int
    by_b: bool = False
    by_s: bool = False
    most: int | None = None

    def of(self, size: tuple[int, int]) -> int:
        """Its length for a batch of this (B, S)."""
        length = self.factor * (size[0] if self.by_b else 1) * (size[1] if self.by_s else 1)
        return length if self.most is None else min(length, self.most)


@dataclass(frozen=True)
class Size:
    """Of a micro-batch, as one rank sees it: (B, S).

    here: of its part of the sequences, where a group shares them. complete: of those that it computes at all positions.
    """

    here: tuple[int, int]
    complete: tuple[int, int]


@dataclass(frozen=True)
class Leaf:
    """A tensor that a module gives."""

    dims: tuple[Dim, ...]
    dtype: torch.dtype

    def shape(self, size: Size) -> tuple[int, ...]:
        # indices of chosen tokens stay with the sequences that they were chosen in
        is_complete = counts_tokens(self.dtype, len(self.dims))
        return tuple(dim.of(size.complete if is_complete else size.here) for dim in self.dims)

    def filled(self, x: Tensor, size: Size) -> Tensor:
        """What was given, with as many indices of chosen tokens as are awaited: there are fewer where samples that are
        packed into a sequence have fewer tokens than it has. A token that is chosen twice is no other choice."""
        if not counts_tokens(x.dtype, x.dim()) or x.dim() != len(self.dims):
            return x
        missing = self.shape(size)[-1] - x.shape[-1]
        return x if missing <= 0 else torch.cat([x, x[..., :1].expand(*x.shape[:-1], missing)], dim=-1)


@dataclass(frozen=True)
class Given:
    """What a module gives for any batch: a pytree of tensors and constants.

    constants: of each leaf what it is, where it is no tensor.
    """

    leaves: tuple[Leaf | None, ...]
    constants: tuple[Any, ...]
    spec: TreeSpec

    @property
    def tensors(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf is not None]

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """The pytree with these tensors in it."""
        following = iter(tensors)
        leaves = [c if leaf is None else next(following) for leaf, c in zip(self.leaves, self.constants, strict=True)]
        return tree_unflatten(leaves, self.spec)

    def blank(self, size: Size, device: torch.device, made: dict[Leaf, Tensor]) -> Any:
        """The pytree for a batch of this size with NaN for every number, so that none is used unnoticed.

        made: blank tensors of such a batch, which are taken again, and to which others are added.
        """
        for leaf in self.tensors:
            if leaf not in made:
                made[leaf] = _blank(leaf.shape(size), leaf.dtype, device)
        return self.tree([made[leaf] for leaf in self.tensors])


def _blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)


@dataclass(frozen=True)
class Survey:
    """What a model's forward shows.

    Attributes:
        name: of the model's class.
        layers: path of the list of decoder layers. num_layers: how many there are.
        uses: of each parameter by name, the places where it is used: the number of a decoder layer, which also stands
            for what comes between it and the one before; `num_layers` for what comes after the last. All of them for
            one that is used before the first layer by a module that the layers are in.
        skips: (from, to) where layer `to` uses what layer `from` gave, other than the layer before it; and with the
            layer after it as `to` where any uses what `from` made and did not give, as keys and values in a table that
            layers share. `BEFORE` and `num_layers` as above.
        given: what each layer gives.
        given_outside: what each module outside the layers that has parameters of its own gives, by path.
        flops: of a token's forward in each layer, then after the last.
    """

    name: str
    layers: str
    num_layers: int
    uses: dict[str, frozenset[int]]
    skips: frozenset[tuple[int, int]]
    given: tuple[Given, ...]
    given_outside: dict[str, Given]
    flops: tuple[float, ...]

    @property
    def repeats_beginning(self) -> bool:
        """Whether what is computed before the first layer is needed in later ones, and so on every stage."""
        return any(start == BEFORE for start, _ in self.skips)
