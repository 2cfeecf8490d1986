"""What runs on this machine: ports that nobody listens at, and processes by what they were started as."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A running process; words: its command line. settings: its environment, as NAME=VALUE."""

    number: int
    words: list[str]
    settings: list[str]


def processes() -> Iterator[Process]:
    """Those of this machine that this user may look at."""
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit():
                words, settings = (
                    (directory / name).read_bytes().decode(errors="replace").split("\0")
                    for name in ("cmdline", "environ")
                )
                yield Process(int(directory.name), words, settings)
        except OSError:  # it has ended, or is another user's
            continue


def free_ports(number: int) -> list[int]:
    """So many, all at once."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
