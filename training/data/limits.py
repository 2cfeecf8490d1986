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
_HEADROOM = 2**30


@contextmanager
def bounded() -> Iterator[None]:
    """Let what is inside take SECONDS, and 1 GiB of address space more than there is. Linux, and the main thread, which
    is the one that can be interrupted; elsewhere without bounds.

    Raises:
        TimeoutError, MemoryError: it took more.
    """
    if threading.current_thread() is not threading.main_thread() or not Path("/proc/self/statm").exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    most = pages * resource.getpagesize() + _HEADROOM
    handler = signal.signal(signal.SIGALRM, _out_of_time)
    # again each second: what is inside may catch the first
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 1)
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, handler)


def _out_of_time(*_: Any) -> None:
    raise TimeoutError(f"it took more than {SECONDS} seconds")


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
