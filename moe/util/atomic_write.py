"""Atomic writes: files are complete or absent, as they are written beside their place, then renamed into it."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".part"
"""Suffix of a file's name while it is written. A process that is killed leaves it behind; the next one to
write the same file replaces it."""


@contextmanager
def whole(path: Path, durable: bool = False, writer: str = "") -> Iterator[Path]:
    """Yields the path to write to; what the block has written there atomically becomes `path` when it ends.

    If the process is killed, or the block raises, `path` is as it was.

    Args:
        path: keeps its permissions where it is there already. What a symbolic link leads to is replaced, not the link;
            what is no file, like a pipe or /dev/null, is written to as it is.
        durable: let it survive a crash of the machine too: the bytes and the name are on disk when this returns.
        writer: where several processes may write `path` at the same time, a name for this one. The last to end counts.
    """
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    with _renamed(path.with_name(path.name + (f".{writer}" if writer else "") + PARTIAL), path) as partial:
        yield partial
        if path.exists() and (mode := _mode(path)) != _mode(partial):
            partial.chmod(mode)
        if durable:
            sync(partial)
    if durable:
        sync(path.parent)


def place_link(link: Path, target: Path) -> None:
    """Atomically let the symbolic link `link` point to `target`, wherever it pointed before."""
    with _renamed(link.with_name(link.name + PARTIAL), link) as partial:
        partial.symlink_to(target)


@contextmanager
def _renamed(partial: Path, path: Path) -> Iterator[Path]:
    partial.unlink(missing_ok=True)
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        # the first error is reported, not that this failed too
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def sync(path: Path) -> None:
    """Flush a file's bytes, or a directory's names, to disk: what a crash of the machine is not to undo."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Flush all that a directory holds to disk, and the names of it."""
    for folder, _, names in os.walk(directory):
        for path in (*(Path(folder, name) for name in names), Path(folder)):
            if not path.is_symlink():
                sync(path)
