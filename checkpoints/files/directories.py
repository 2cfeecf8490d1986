"""Files beside the weights, directories that appear complete or not at all, and clear errors when writing fails."""

import glob
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...moe.util.atomic_write import PARTIAL, sync, sync_tree
from ...moe.util.errors import ExpertMeshError


def check_apart(out: Path, read: Iterable[Path]) -> None:
    """
    Args:
        read: files and directories that are read while `out` is written; of a directory, its files.

    Raises:
        ExpertMeshError: one of them is `out` or lies in it, or is reached through a link that lies in it.
    """
    within = out.resolve()
    for path in read:
        entries = [entry for entry in path.iterdir() if entry.is_file()] if path.is_dir() else []
        for each in (path, *entries):
            if any(place.is_relative_to(within) for place in _places(each)):
                raise ExpertMeshError(
                    f"{out}: contains {path}, which this command reads; choose another output directory"
                )


def _places(path: Path) -> Iterator[Path]:
    """Where a file lies, and where the links on the way to it lie."""
    yield path.resolve()
    path = path.absolute()
    for step in (path, *path.parents):
        if step.is_symlink():
            yield step.parent.resolve() / step.name


def empty_directory(directory: Path) -> None:
    """Delete all that it holds. It stays, as it may be a link, or where a disk is mounted."""
    for path in list(directory.iterdir()):
        delete(path)


def temporary_beside(out: Path) -> Path:
    """A new, empty directory on the same file system as `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-", suffix=PARTIAL))


def continued_beside(out: Path) -> Path:
    """Where a directory that is to replace `out`, or what it is a link to, is written so that a later process goes on
    with it, should this one be killed."""
    place = out.resolve()
    return place.with_name(f".{place.name}-next{PARTIAL}")


def can_be_replaced(out: Path) -> bool:
    """Whether another directory can take the place of `out`, or of what it is a link to: not of one where a disk is
    mounted, that this process is in, or that lies where nothing can be written. One that is not there can."""
    place = out.resolve()
    if not place.exists():
        return True
    is_mounted, is_open = os.path.ismount(place), Path.cwd().is_relative_to(place)
    return not is_mounted and not is_open and os.access(place.parent, os.W_OK)


def sweep_beside(out: Path) -> None:
    """Finish a replacement of `out` that a killed process had begun, and delete the temporary directories that killed
    processes left."""
    finish_replacement(out)
    for partial in out.parent.glob(f".{glob.escape(out.name)}-*{PARTIAL}"):
        # mkdtemp's names: what is beside another directory, whose name begins like this one, is not touched
        if re.fullmatch(rf"[a-z0-9_]+{re.escape(PARTIAL)}", partial.name.removeprefix(f".{out.name}-")):
            shutil.rmtree(partial, ignore_errors=True)


def replace_directory(new: Path, out: Path) -> None:
    """Give the directory `new`, which is complete, the name `out`; what stood there is deleted only after. If the
    process is killed or the machine crashes, one of the two is left under its name, or both where
    `finish_replacement` finds them. Once this returns, `out` survives a crash.

    Raises:
        OSError: it cannot be done; `out` and `new` are then as they were, unless only what was replaced could not be
            deleted.
    """
    new.chmod(stat.S_IMODE(out.stat().st_mode) if out.is_dir() else 0o755)  # mkdtemp lets only the user in
    finish_replacement(out)
    sync_tree(new)
    ready, old = _replacing(out)
    new.rename(ready)
    try:
        finish_replacement(out)
    except OSError:
        if ready.exists():
            if os.path.lexists(old) and not os.path.lexists(out):
                old.rename(out)
            ready.rename(new)
        raise


def finish_replacement(out: Path) -> None:
    """Do what is left of a replacement of `out`, be it all of it; nothing where none was begun."""
    ready, old = _replacing(out)
    if not ready.exists() and not os.path.lexists(old):
        return
    if ready.exists():
        if os.path.lexists(out):
            delete(old)
            out.rename(old)
        ready.rename(out)
    elif not os.path.lexists(out):
        old.rename(out)
    sync(out.parent)  # a crash of the machine could keep the deletions and undo the renames
    delete(old)


def finish_replacement_of_missing(out: Path) -> None:
    """As `finish_replacement`, of what is to be read and is not there; a link to it is followed."""
    if not out.exists():
        finish_replacement(Path(os.path.realpath(out)))


def is_there(out: Path) -> bool:
    """Whether there is something at `out`, or `finish_replacement_of_missing` will put it there."""
    return out.exists() or any(map(os.path.lexists, _replacing(Path(os.path.realpath(out)))))


def _replacing(out: Path) -> tuple[Path, Path]:
    """Where the complete new directory waits for its name, and where the old one is put."""
    return out.with_name(f".{out.name}-new{PARTIAL}"), out.with_name(f".{out.name}-old{PARTIAL}")


def delete(path: Path) -> None:
    """Delete a file, a link, or a directory with all that it holds; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """
    Raises:
        ExpertMeshError: an OSError inside, with the file it is about, or else `path`.
    """
    try:
        yield
    except OSError as error:
        raise ExpertMeshError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from error
