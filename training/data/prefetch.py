"""What a loop needs next, made by a thread while the loop is at work."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_SECONDS = 0.1


@contextmanager
def made_ahead(
    make: Callable[[int], T], numbers: Iterable[int], prepare: Callable[[], object] = lambda: None
) -> Iterator[Iterator[T]]:
    """Within it, `make` of each number, in their order, up to two ahead of what was taken.

    An error in the thread is raised where its result would have been taken, with its own traceback. The thread ends
    with the context, whatever was not taken.

    Args:
        prepare: is called once, in the thread.
    """
    made: queue.Queue[tuple[T, None] | tuple[None, BaseException]] = queue.Queue(maxsize=1)
    ended = threading.Event()

    def put(result: tuple[T, None] | tuple[None, BaseException]) -> None:
        while not ended.is_set():
            try:
                made.put(result, timeout=_SECONDS)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            prepare()
            for number in numbers:
                if ended.is_set():
                    return
                put((make(number), None))
            put((None, StopIteration()))
        except BaseException as error:  # the loop is to end with it, whatever it is
            put((None, error))

    def take() -> Iterator[T]:
        while True:
            result, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield result  # type: ignore[misc]

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        ended.set()
        thread.join()
