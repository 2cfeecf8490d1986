"""Which files a checkpoint's own tables can have us open: regular ones inside its directory."""

import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...moe.util.errors import ExpertMeshError


def check_regular(file: Path) -> None:
    """Before a file is opened: to open a named pipe or a device could wait, or give data, without end.

    Raises:
        ExpertMeshError: there is no such file, or it is a directory, pipe, socket or device.
    """
    try:
        mode = file.stat().st_mode
    except FileNotFoundError as error:
        raise ExpertMeshError(f"{file}: no such file") from error
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL in it
        raise ExpertMeshError(f"{file}: cannot be opened: {error}") from error
    if not stat.S_ISREG(mode):
        raise ExpertMeshError(f"{file}: is a directory, pipe or device, not a file")


def named_file(directory: Path, name: Any, named_by: str, depth: int = 1, entry: str = "") -> Path:
    """The file that a table in a checkpoint calls `name`.

    A link is followed within the directory; and out of a snapshot in the hub's cache, `snapshots/REVISION`, to the
    `blobs` beside it, where the cache keeps what its links stand for.

    Args:
        named_by: the table's file, for the error.
        depth: the most parts that the name may have.
        entry: what in the table has the name, for the error, as in "tensor x".

    Raises:
        ExpertMeshError: the name or a link leads out of the directory, or there is no regular file.
    """
    parts = name.split("/") if isinstance(name, str) else []
    if not 1 <= len(parts) <= depth or any(part in ("", ".", "..") for part in parts):
        raise ExpertMeshError(
            f"{directory / named_by}: {entry or 'it'} names {name!r:.200}; only files in its directory are read"
        )
    file = directory / name
    try:
        check_regular(file)
    except ExpertMeshError as error:
        raise ExpertMeshError(f"{error} (named in {named_by}{f' for {entry}' * bool(entry)})") from error
    root, target = Path(os.path.realpath(directory)), Path(os.path.realpath(file))
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(target.is_relative_to(inside) for inside in roots):
        raise ExpertMeshError(
            f"{file}: is a link to {target}, outside of {directory}; replace the link with the file, "
            "or give the directory that has all files"
        )
    return file


_READ_AHEAD_STEP = 128 * 2**10
"""The least that kernels read ahead at a time; of more they may take but the beginning."""


def read_ahead(directory: Path, most_bytes: int) -> None:
    """Have the kernel begin to read a directory's weights, in the background: transformers takes seconds to import, in
    which a disk could be at work. No more than `most_bytes`; what cannot be read is told by whoever needs it."""
    if hasattr(os, "posix_fadvise"):
        threading.Thread(target=_advise, args=(directory, most_bytes), daemon=True).start()


def _advise(directory: Path, most_bytes: int) -> None:
    left = most_bytes
    for name in sorted(path.name for path in directory.glob("*.safetensors")):
        with suppress(ExpertMeshError, OSError), open(named_file(directory, name, str(directory)), "rb") as file:
            size = min(os.fstat(file.fileno()).st_size, left)
            for offset in range(0, size, _READ_AHEAD_STEP):
                os.posix_fadvise(file.fileno(), offset, _READ_AHEAD_STEP, os.POSIX_FADV_WILLNEED)
            left -= size
