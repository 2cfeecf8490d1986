"""What becomes of output that nobody reads, and of lines longer than the terminal."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress

import pytest

from expertmesh.moe.util.terminal import UNREAD, ends_with_reader, folded, going_on_unread


@contextmanager
def unread() -> Iterator[None]:
    """Inside, standard output is a pipe whose reader is gone."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w")
    with redirect_stdout(stream):
        yield
    with suppress(BrokenPipeError):
        stream.close()


def test_a_command_ends_with_its_reader() -> None:
    """At once; or, where a pipe gets what is printed once a buffer is full, at its end; argparse ends by SystemExit."""
    reached = []

    def says(text: str, flush: bool, ends: int | SystemExit = 0) -> Callable[[], int]:
        @ends_with_reader
        def command() -> int:
            print(text, flush=flush)
            reached.append(text)
            if isinstance(ends, SystemExit):
                raise ends
            return ends

        return command

    before = sys.stdout
    for main in (says("flushed", True), says("said", False), says("usage", False, SystemExit(0))):
        with unread():
            assert main() == UNREAD == 141
        assert sys.stdout is before
    assert reached == ["said", "usage"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_a_stream_cannot_encode_is_escaped(encoding: str) -> None:
    """As under PYTHONIOENCODING=ascii:strict: answers of a model hold any character, and half of one."""
    said, complaints = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2))

    @ends_with_reader
    def command() -> int:
        print("\u20ac 5 \ud83d")
        print("\u20ac 6", file=sys.stderr)
        return 0

    with redirect_stdout(said), redirect_stderr(complaints):
        assert command() == 0
    assert said.buffer.getvalue() == b"\\u20ac 5 \\ud83d\n"
    assert complaints.buffer.getvalue() == b"\\u20ac 6\n"


def test_other_pipes_and_errors_are_not_taken_for_it() -> None:
    @ends_with_reader
    def command(error: Exception) -> int:
        raise error

    for error in (BrokenPipeError("of a worker"), ValueError("wrong")):
        with pytest.raises(type(error), match=str(error)):
            command(error)


def test_an_error_is_not_hidden_by_what_was_left_to_print() -> None:
    @ends_with_reader
    def command() -> int:
        print("said")
        raise ValueError("wrong")

    with unread(), pytest.raises(ValueError, match="wrong"):
        command()


def test_going_on_unread(capfd: pytest.CaptureFixture[str]) -> None:
    with unread(), going_on_unread("nobody reads"):
        for _ in range(3):
            print("said", flush=True)
        os.write(sys.stdout.fileno(), b"said by a library, past Python")
    assert capfd.readouterr().err == "nobody reads\n"


def test_what_goes_on_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within another context, that decides; and one of several ranks, for which the others wait."""

    @ends_with_reader
    def command(context: Callable[[], AbstractContextManager[None]]) -> int:
        with context():
            print("said", flush=True)
        return 3

    with unread():
        assert command(going_on_unread) == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    with unread():
        assert command(nullcontext) == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "per rank    46,702,792,704 at ep 1, 24,155,230,208 at ep 2, /a/path/longer/than/forty/columns/is/whole"
    assert folded(line) == line, "a file or a pipe gets lines as they are"
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    assert folded(f"{line}\n\n  short").split("\n") == [
        "per rank    46,702,792,704 at ep 1,",
        "    24,155,230,208 at ep 2,",
        "    /a/path/longer/than/forty/columns/is/whole",
        "",
        "  short",
    ]
