"""Context parallelism: the ranks of a group share sequences, each holding a range of positions (Ulysses, arXiv
2309.14509).

Everything in a layer but attention looks at each position by itself. Around attention, all-to-alls bring every rank
complete sequences for some of the heads, and the results back to the ranks of their positions. All ranks do the same
work: with causal attention a range at a sequence's end attends to more positions than one at its beginning, but all
heads to equally many.

Shape suffixes: B sequences, S positions, L = S/c of them on this rank, H heads, h = H/c of them, A head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.moe.base.declared import StepPart
from expertmesh.moe.dispatch.exchange import UnderWay

STEP_PART: StepPart = None


@dataclass(frozen=True)
class CPGroup:
    """The ranks of a context-parallel group.

    size: how many. index: of this one, and of its range of each sequence. ranks: None where nothing is to be sent, as
    only the shapes of results are needed.
    """

    size: int
    index: int
    ranks: dist.ProcessGroup | None

    def to_heads(self, *parts_BHLA: Tensor) -> list[Tensor]:
        """Returns, for each tensor with all heads at this rank's positions, this rank's heads at all positions, (B, h,
        S, A).

        The number of heads must be a multiple of the ranks; it may differ between tensors, as may the width.
        """
        brought_SBhA = _ToHeads.apply(self, *(x.transpose(1, 2) for x in parts_BHLA))
        return [x.permute(1, 2, 0, 3) for x in brought_SBhA]

    def to_positions(self, out_BShA: Tensor) -> Tensor:
        """The inverse of `to_heads` for attention's output: (B, L, H, A)."""
        out_BLHA: Tensor = _ToPositions.apply(self, out_BShA.transpose(0, 1))
        return out_BLHA

    def send_heads(self, parts_BLHA: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank its heads; (S, B, h, A), in which a single sequence is laid out as it is read."""
        begun = []
        for x_BLHA in parts_BLHA:
            x_cLBhA = x_BLHA.unflatten(2, (self.size, -1)).permute(2, 1, 0, 3, 4)
            begun.append(self._exchange(x_cLBhA.flatten(0, 1)))
        return [_wait(x) for x in begun]

    def send_positions(self, parts_SBhA: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank its positions; (B, L, H, A)."""
        begun = [self._exchange(x_SBhA) for x_SBhA in parts_SBhA]
        return [_wait(x).unflatten(0, (self.size, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3) for x in begun]

    def _exchange(self, x: Tensor) -> "UnderWay | Tensor":
        """Begin to send each rank its part of dim 0, which is split evenly."""
        out = x.new_empty(x.shape)
        if self.ranks is None:
            return out
        parts = [len(x) // self.size] * self.size
        return UnderWay(out, x, parts, parts, self.ranks)


def _wait(begun: "UnderWay | Tensor") -> Tensor:
    return begun if isinstance(begun, Tensor) else begun.wait()


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: CPGroup, *parts_BLHA: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(group.send_heads(parts_BLHA))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_SBhA: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.group.send_positions(grads_SBhA)


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: CPGroup, out_SBhA: Tensor) -> Tensor:
        ctx.group = group
        (out_BLHA,) = group.send_positions([out_SBhA])
        return out_BLHA

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLHA: Tensor) -> tuple[None, Tensor]:
        (grad_SBhA,) = ctx.group.send_heads([grad_BLHA])
        return None, grad_SBhA
