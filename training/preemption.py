"""Being asked to stop: SIGTERM or SIGUSR1, as a cluster sends before it takes a node away."""

import signal
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Use as a context manager: inside, these signals only set a mark, so that the step under way can be finished."""

    def __init__(self) -> None:
        self.received = False
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in SIGNALS:
            self.before[number] = signal.signal(number, self._mark)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _mark(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def is_asked(self) -> bool:
        """Whether this rank has received one."""
        return self.received

    def on_any_rank(self) -> bool:
        """Whether any rank has received one. All ranks call it together and get the same result."""
        mark = torch.tensor(int(self.received))
        dist.all_reduce(mark, op=dist.ReduceOp.MAX)
        return bool(mark)
