"""Which GPUs a process's threads would make a context on, counted on a CPU."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

SetCapability = Callable[[tuple[int, int]], None]


class Gpus(threading.local):
    """A node's GPUs as a thread sees them: its current one is the first until it sets another."""

    used: set[tuple[str, int]]
    """Those that were used, by the name of the thread. A thread's first use of a GPU makes a context there."""

    def __init__(self, used: set[tuple[str, int]]) -> None:
        self.used = used
        self.current = 0

    def set_device(self, device: Any) -> None:
        self.current = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index

    def use(self, *_: Any, **__: Any) -> mock.MagicMock:
        self.used.add((threading.current_thread().name, self.current))
        return mock.MagicMock()

    def current_device(self) -> int:
        self.use()
        return self.current


@contextmanager
def two_gpus(mine: int = 1) -> Iterator[Gpus]:
    """Within it this process seems to have GPUs, of which this thread's is `mine`."""
    gpus = Gpus(set())
    gpus.set_device(mine)
    stand_ins = {
        "is_available": lambda: True,
        "set_device": gpus.set_device,
        "current_device": gpus.current_device,
        "get_rng_state": lambda: torch.full((16,), gpus.current_device(), dtype=torch.uint8),
        **dict.fromkeys(("current_stream", "synchronize", "Stream", "Event", "stream", "device"), gpus.use),
    }
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        yield gpus
