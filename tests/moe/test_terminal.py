"""What becomes of output that nobody reads, and of lines longer than the terminal."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress

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
    reached = []

    @ends_with_reader
    def command() -> int:
        print("said", flush=True)
        reached.append("what follows")
        return 0

    with unread():
        before = sys.stdout
        assert command() == UNREAD == 141
        assert sys.stdout is before
    assert not reached


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


def test_also_where_it_is_found_out_at_the_end() -> None:
    """A pipe gets what is printed once a buffer is full, or at the end; argparse ends by SystemExit."""

    @ends_with_reader
    def command() -> int:
        print("said")
        return 0

    @ends_with_reader
    def help_of_a_command() -> int:
        print("usage")
        raise SystemExit(0)

    for main in (command, help_of_a_command):
        with unread():
            assert main() == UNREAD


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


def test_one_of_several_ranks_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    @ends_with_reader
    def command() -> int:
        print("said", flush=True)
        return 3

    with unread():
        assert command() == 3


def test_the_inner_context_decides() -> None:
    @ends_with_reader
    def command() -> int:
        with going_on_unread():
            print("said", flush=True)
        return 0

    with unread():
        assert command() == 0


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
