"""Output of commands, for whatever reads it: a terminal of some width, a file, a pipe, or no longer anything."""

import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from io import TextIOWrapper
from typing import Any, ParamSpec

from .errors import ExpertMeshError
from .process_place import process_place

UNREAD = 128 + signal.SIGPIPE
"""Exit code of a command whose reader went away: 141, which shells report for `cat` and all others that SIGPIPE
ends."""

P = ParamSpec("P")


class _ReaderGone(BaseException):
    """The reader of the output is gone. No Exception, so that nothing on the way takes it for an error: argparse passes
    over an OSError, and rich has an exit code of its own for it."""


def ends_with_reader(main: Callable[P, int]) -> Callable[P, int]:
    """A command's `main` that ends as Unix commands do when `| head` has read enough: at once, silently, with UNREAD.

    One of several ranks continues to its end, unread: the others wait for it. Characters that a stream cannot encode
    are escaped.
    """

    @wraps(main)
    def command(*args: P.args, **kwargs: P.kwargs) -> int:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        is_one_of_several = False
        with suppress(ExpertMeshError):  # told by main
            is_one_of_several = process_place().world_size > 1
        if is_one_of_several:
            with going_on_unread():
                return main(*args, **kwargs)
        try:
            with _watched(_end):
                return main(*args, **kwargs)
        except _ReaderGone:
            return UNREAD

    return command


@contextmanager
def going_on_unread(note: str = "") -> Iterator[None]:
    """Within it, output is discarded once its reader is gone, as after `| head`.

    For what is worth finishing without a reader, as training is: its results are files, and a closed `less` must not
    end it overnight.

    Args:
        note: printed on standard error when standard output is no longer read.
    """

    def tell(name: str) -> None:
        if note and name == "stdout":
            print(note, file=sys.stderr, flush=True)

    with _watched(tell):
        yield


def _end(_: str) -> None:
    raise _ReaderGone


@contextmanager
def _watched(when_gone: Callable[[str], None]) -> Iterator[None]:
    """Call `when_gone`, with the name of standard output or error, when a write finds that nobody reads it."""
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        if stream is not None:  # of a process started without it
            # in nested contexts, the inner one decides
            own = stream._stream if isinstance(stream, _Watched) else stream
            setattr(sys, name, _Watched(name, own, when_gone))
    try:
        yield
    except SystemExit:  # argparse's, after --help
        _flush()
        raise
    else:
        _flush()
    finally:
        for name, stream in streams.items():
            setattr(sys, name, stream)


def _flush() -> None:
    """Flush now: when the interpreter itself does it, at its end, it reports a failure."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


class _Watched:
    """A stream that discards its output once its reader is gone, like all others of its file descriptor."""

    def __init__(self, name: str, stream: Any, when_gone: Callable[[str], None]):
        self._name = name
        self._stream = stream
        self._when_gone = when_gone

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except BrokenPipeError:
            self._gone()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._gone()

    def _gone(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self._when_gone(self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def terminal_width() -> int | None:
    """Columns of the terminal that standard output goes to; None where it goes to a file or a pipe."""
    with suppress(AttributeError, ValueError):  # there is none, or it is closed
        if sys.stdout.isatty():
            return shutil.get_terminal_size().columns
    return None


def folded(text: str) -> str:
    """The text with lines that are too long for the terminal continued, indented, in the next: a terminal itself would
    break them in the middle of a number. Unchanged where standard output is no terminal."""
    width = terminal_width()
    if width is None:
        return text
    return "\n".join(folded_to(line, width) for line in text.split("\n"))


def folded_to(line: str, width: int) -> str:
    """A line in as many as this width takes, all but the first indented."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    pieces = textwrap.wrap(
        *(line, width),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return "\n".join(pieces)
