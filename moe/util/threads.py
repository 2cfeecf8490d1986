"""How many threads compute what torch is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Here, and in threads that begin within: torch computes each product, each sum in the thread that asks for it.

    Small ones take longer on several threads, where others compute beside them many times as long: these wait for one
    another in loops.
    """
    import torch  # which a command's mistakes need not wait for

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
