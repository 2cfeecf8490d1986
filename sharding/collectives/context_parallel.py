"""Context parallelism: the ranks of a group share sequences, each holding a range of positions (Ulysses, arXiv
2309.14509).

Everything in a layer but attention looks at each position by itself. Around attention, all-to-alls bring every rank
complete sequences for some of the heads, and the results back to the ranks of their positions. All ranks do the same
work: with causal attention a range at a sequence's end attends to more positions than one at its beginning, but all
heads to equally many.

A layer that mixes positions otherwise gets all of some sequences instead, by `to_sequences`. With fewer sequences than
ranks, several ranks get the same one, and each of them sends its results to some of the ranks alone: so every position
has one result, and gradients of parameters are still plain sums over ranks.

Shape suffixes: B sequences, n of them complete on this rank, S positions, L = S/c of them on this rank, H heads, h =
H/c of them, A head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...moe.dispatch.exchange import UnderWay
from .differentiable import exchanged
from .tensor_parallel import TPGroup


@dataclass(frozen=True)
class CPGroup:
    """The ranks that share sequences: those of a context-parallel group; with tensor parallelism those of all the
    tensor-parallel groups in it.

    Attributes:
        size: how many.
        index: of this one, and of its range of each sequence.
        ranks: None where nothing is to be sent, as only the shapes of results are needed.
        tp: the tensor-parallel group, neighbours among these ranks, if there is one.
        within_tp: with one, the ranks of a context-parallel group for what is in a region of tensor parallelism, where
            each rank has the positions of all its `tp` group; None: that is all of them.
    """

    size: int
    index: int
    ranks: dist.ProcessGroup | None
    tp: TPGroup | None = None
    within_tp: "CPGroup | None" = None

    def process_groups(self) -> list[dist.ProcessGroup]:
        """Its own, and those of its parts."""
        parts = (self.ranks, None if self.tp is None else self.tp.ranks)
        inner = [] if self.within_tp is None else self.within_tp.process_groups()
        return [group for group in parts if group is not None] + inner

    def summing_groups(self) -> list[dist.ProcessGroup]:
        """Those of its process groups that gather and sum too: the tensor-parallel one's."""
        return [] if self.tp is None or self.tp.ranks is None else [self.tp.ranks]

    def to_heads(self, *parts_BHLA: Tensor) -> list[Tensor]:
        """Returns, for each tensor with all heads at this rank's positions, this rank's heads at all positions, (B, h,
        S, A).

        The number of heads must be a multiple of the ranks; it may differ between tensors, as may the width.
        """
        parts_BLHA = [x.transpose(1, 2) for x in parts_BHLA]
        return [x.permute(1, 2, 0, 3) for x in exchanged(parts_BLHA, self._send_heads, self._send_positions)]

    def to_positions(self, out_BShA: Tensor) -> Tensor:
        """The inverse of `to_heads` for attention's output: (B, L, H, A)."""
        (out_BLHA,) = exchanged([out_BShA.transpose(0, 1)], self._send_positions, self._send_heads)
        return out_BLHA

    def to_sequences(self, *parts_BL: Tensor) -> list[Tensor]:
        """Returns, for each tensor (B, L, ...) of all sequences at this rank's positions, this rank's sequences at all
        positions, (n, S, ...). Gradients of a sequence that several ranks get are added up."""
        return exchanged(parts_BL, self._send_sequences, partial(self._return_sequences, len(parts_BL[0])))

    def to_ranges(self, number: int, *parts_nS: Tensor) -> list[Tensor]:
        """The inverse of `to_sequences`, for results: (B, L, ...).

        Args:
            number: of sequences, B.
        """
        return exchanged(parts_nS, partial(self._send_ranges, number), self._return_ranges)

    def sequences_of(self, rank: int, number: int) -> range:
        """Which of so many sequences a rank of the group gets complete: one at least."""
        first = rank * number // self.size
        return range(first, max((rank + 1) * number // self.size, first + 1))

    def _send_heads(self, parts_BLHA: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank its heads; (S, B, h, A), in which a single sequence is laid out as it is read."""
        begun = []
        for x_BLHA in parts_BLHA:
            x_cLBhA = x_BLHA.unflatten(2, (self.size, -1)).permute(2, 1, 0, 3, 4)
            begun.append(self._exchange(x_cLBhA.flatten(0, 1)))
        return [_wait(x) for x in begun]

    def _send_positions(self, parts_SBhA: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank its positions; (B, L, H, A)."""
        begun = [self._exchange(x_SBhA) for x_SBhA in parts_SBhA]
        return [_wait(x).unflatten(0, (self.size, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3) for x in begun]

    def _exchange(self, x: Tensor) -> "UnderWay | Tensor":
        """Begin to send each rank its part of dim 0, which is split evenly."""
        parts = [len(x) // self.size] * self.size
        return self._exchange_parts(x, parts, parts)

    def _exchange_parts(self, x: Tensor, sent: list[int], received: list[int]) -> "UnderWay | Tensor":
        """Begin to send each rank its part of dim 0, of so many entries."""
        out = x.new_empty(sum(received), *x.shape[1:])
        if self.ranks is None:
            return out
        return UnderWay(out, x, received, sent, self.ranks)

    def _destinations(self, rank: int, number: int) -> range:
        """The ranks to which a rank sends the results of its sequences: all, or where several ranks have the same
        sequence, every so-manyth."""
        if number >= self.size:
            return range(self.size)
        sequence = self.sequences_of(rank, number)
        holders = [other for other in range(self.size) if self.sequences_of(other, number) == sequence]
        return range(holders.index(rank), self.size, len(holders))

    def _send_sequences(self, parts_BL: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank its sequences; (n, S, ...)."""
        begun = []
        for x_BL in parts_BL:
            all_sequences = [self.sequences_of(rank, len(x_BL)) for rank in range(self.size)]
            sent = [len(sequences) for sequences in all_sequences]
            if sum(sent) > len(x_BL):
                x_BL = torch.cat([x_BL[sequences.start : sequences.stop] for sequences in all_sequences])
            begun.append(self._exchange_parts(x_BL, sent, [sent[self.index]] * self.size))
        return [_wait(x).unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2) for x in begun]

    def _send_ranges(self, number: int, parts_nS: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank its positions of this rank's sequences, if it gets them from this rank; (B, L, ...)."""
        to = [self._destinations(rank, number) for rank in range(self.size)]
        here = len(self.sequences_of(self.index, number))
        mine = to[self.index]
        sent = [here * (rank in mine) for rank in range(self.size)]
        received = [len(self.sequences_of(rank, number)) * (self.index in to[rank]) for rank in range(self.size)]
        begun = []
        for x_nS in parts_nS:
            x_cnL = x_nS.unflatten(1, (self.size, -1)).transpose(0, 1)
            begun.append(self._exchange_parts(x_cnL[mine.start :: mine.step].flatten(0, 1), sent, received))
        return [_wait(x) for x in begun]

    def _return_sequences(self, number: int, grads_nS: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank the gradients at its positions, and add up those of one sequence; (B, L, ...)."""
        received = [len(self.sequences_of(rank, number)) for rank in range(self.size)]
        here = received[self.index]
        begun = []
        for x_nS in grads_nS:
            x_cnL = x_nS.unflatten(1, (self.size, -1)).transpose(0, 1)
            begun.append(self._exchange_parts(x_cnL.flatten(0, 1), [here] * self.size, received))
        returned = [_wait(x) for x in begun]
        if number >= self.size:
            return returned
        copies = [0] * number
        for rank in range(self.size):
            copies[self.sequences_of(rank, number).start] += 1
        return [torch.stack([part.sum(dim=0) for part in x.split(copies)]) for x in returned]

    def _return_ranges(self, grads_BL: Sequence[Tensor]) -> list[Tensor]:
        """Send the gradients of results to where these were computed; (n, S, ...), 0 at positions whose results were
        sent by other ranks."""
        begun, number = [], len(grads_BL[0])
        to = [self._destinations(rank, number) for rank in range(self.size)]
        here = len(self.sequences_of(self.index, number))
        sent = [len(self.sequences_of(rank, number)) * (self.index in to[rank]) for rank in range(self.size)]
        mine = to[self.index]
        received = [here * (rank in mine) for rank in range(self.size)]
        for x_BL in grads_BL:
            begun.append(self._exchange_parts(x_BL, sent, received))
        grads = []
        for x in begun:
            x_dnL = _wait(x).unflatten(0, (-1, here))
            x_cnL = x_dnL.new_zeros(self.size, *x_dnL.shape[1:])
            x_cnL[mine.start :: mine.step] = x_dnL
            grads.append(x_cnL.transpose(0, 1).flatten(1, 2))
        return grads


def _wait(begun: "UnderWay | Tensor") -> Tensor:
    return begun if isinstance(begun, Tensor) else begun.wait()
