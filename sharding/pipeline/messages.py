"""What stages on different ranks exchange: lists of tensors whose shapes both sides know, in asynchronous batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Under:
    """An exchange under way. sent: stays in memory until it has gone."""

    works: list[Any]
    sent: list[Tensor]


class Messages:
    """The exchanges of one rank in one direction, at most one of them under way.

    Args:
        group: of the direction.
        device: that tensors are received on.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self._under: Under | None = None

    def begin(self, send: Sequence[Tensor], to: int, shapes: Shapes, source: int) -> list[Tensor]:
        """Begin to send and to receive, in one batch, once the exchange before it is over.

        Args:
            send: tensors for the rank `to`; those without elements are left out, as are those to be received.
            shapes: of the tensors from the rank `source`.

        Returns:
            The tensors that are received, to be read after `wait`.
        """
        self.wait()
        sent = [tensor.contiguous() for tensor in send if tensor.numel() > 0]
        received = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]
        batch = [dist.P2POp(dist.isend, tensor, to, self.group) for tensor in sent]
        batch += [dist.P2POp(dist.irecv, tensor, source, self.group) for tensor in received if tensor.numel() > 0]
        self._under = Under(dist.batch_isend_irecv(batch) if batch else [], sent)
        return received

    def wait(self) -> None:
        """Wait until the exchange under way, if any, is over."""
        if self._under is not None:
            for work in self._under.works:
                work.wait()
            self._under = None
