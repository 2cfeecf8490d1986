"""Bytes at any place of files that stay open: what is read of weights, of any form, is read here."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np

from ...moe.util.errors import ExpertMeshError
from .dtypes import ARRAY_TYPES, Array, as_bytes
from .paths import check_regular
from .tensors import StoredTensor

_MOST_OPEN = 16
"""Files that a thread has open at once: those that a layer lies in, with some to spare."""


class OpenFiles(threading.local):
    """Files that stay open from one read to the next, the last few. Each thread has its own, closed when it ends."""

    def __init__(self) -> None:
        self.opened: dict[Path, _Opened] = {}

    def fill(self, path: Path, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes of a file from `offset` on.

        Raises:
            ExpertMeshError: it cannot be read, or ends before.
        """
        file = self._open(path)
        while len(buffer):
            try:
                count = os.preadv(file, [buffer], offset)
            except OSError as error:
                raise ExpertMeshError(f"{path}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise ExpertMeshError(f"{path}: became shorter after it was opened")
            buffer, offset = buffer[count:], offset + count

    def array(self, stored: StoredTensor, rows: range | None = None) -> Array:
        """A tensor, or some of its rows, as its file has it.

        Raises:
            ExpertMeshError: the file cannot be read.
        """
        shape = stored.shape if rows is None else (len(rows), *stored.shape[1:])
        data = np.empty(shape, ARRAY_TYPES[stored.dtype])
        skipped = rows.start * (data.nbytes // len(rows)) if rows else 0
        self.fill(stored.file, as_bytes(data), stored.offset + skipped)
        return data

    def expect(self, path: Path, offset: int, size: int) -> None:
        """Tell the kernel, which foresees no strides, what of a file is about to be read."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._open(path), offset, size, os.POSIX_FADV_WILLNEED)

    def _open(self, path: Path) -> int:
        found = self.opened.pop(path, None)
        if found is None:
            found = self._opened(path)
            if len(self.opened) >= _MOST_OPEN:
                del self.opened[next(iter(self.opened))]
        self.opened[path] = found  # the last read comes last
        return found.descriptor

    def _opened(self, path: Path) -> _Opened:
        check_regular(path)
        try:
            try:
                return _Opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                self.close()  # many threads may have as many as the process is allowed
                return _Opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise ExpertMeshError(f"{path}: cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Close this thread's."""
        self.opened.clear()


class _Opened:
    """A file that is closed when nobody has it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)
