"""Bounds on what a chat template may take: it is a program of whoever made the tokenizer."""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment

SECONDS = 10
"""Seconds of CPU time for a conversation of a few messages."""
_HEADROOM = 2**30


class TooMuch(BaseException):
    """Ends what is inside `bounded`: nothing in there may take it for a template's refusal. Says what was exceeded."""


@contextmanager
def bounded(num_messages: int = 1) -> Iterator[None]:
    """Let what is inside take SECONDS of CPU time, and a twentieth of one for each message, and 1 GiB of address space
    more than there is. Linux, and the main thread, which is the one that can be interrupted; elsewhere without bounds.

    Raises:
        ValueError: it took more.
    """
    seconds = SECONDS + num_messages / 20
    try:
        with _limits(seconds):
            yield
    except (TooMuch, MemoryError) as error:
        what = "1 GiB of memory" if isinstance(error, MemoryError) else error
        raise ValueError(f"the chat template takes more than {what}") from error


@contextmanager
def _limits(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not Path("/proc/self/statm").exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    most = pages * resource.getpagesize() + _HEADROOM

    def out_of_time(*_: Any) -> None:
        raise TooMuch(f"{seconds:.0f} seconds of CPU time")

    handler = signal.signal(signal.SIGPROF, out_of_time)
    # again each second: the first may fall where an exception is of no effect, as in a finalizer
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, handler)


def check_template(template: Any) -> None:
    """
    Raises:
        ValueError: the template raises a number to a power, which nothing can interrupt.
    """
    if isinstance(template, dict):  # templates for several purposes, by their names
        for one in template.values():
            check_template(one)
    if not isinstance(template, str) or "**" not in template:
        return
    tokens = [(kind, text) for _, kind, text in Environment().lex(template) if kind != "whitespace"]
    for before, token in pairwise(tokens):
        # after a bracket or comma it hands on arguments by name
        if token == ("operator", "**") and before not in (("operator", "("), ("operator", ",")):
            raise ValueError("it raises a number to a power (**), which no conversation needs")
