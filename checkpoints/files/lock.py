"""A lock on a directory, so that two runs never write into the same one."""

import errno
import json
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from ...moe.util.errors import ExpertMeshError

FILE, HOLDER = ".lock", ".lock.json"
_WITHOUT_KERNEL = ".lock.soft"
"""Its being there is the lock, where a file system has none."""
_WAIT_SECONDS = 10.0
"""A process that was killed may take a while to end, and its lock with it."""
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


class DirectoryLock:
    """Held by one process from `acquire` to `release`, or to its end, however it ends.

    The kernel holds the lock, on a file of its own; over NFS the server does. Where a file system has no locks, a
    file that names the process counts, unless that is known to be dead. Another one says who has it.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.path, self.holder = directory / FILE, directory / HOLDER
        self._lock: BaseFileLock | None = None

    def acquire(self) -> None:
        """
        Raises:
            ExpertMeshError: another process holds it; the message says which.
        """
        # where no file can be made, filelock may wait for one
        os.close(os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o644))
        # what it would fall back to on some file systems is below, for all, and without a warning
        lock: BaseFileLock = FileLock(self.path, timeout=_WAIT_SECONDS, mode=0o644, fallback_to_soft=False)
        try:
            try:
                lock.acquire()
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:  # as is that of a time-out
                    raise
                self.path = self.directory / _WITHOUT_KERNEL
                lock = SoftFileLock(self.path, timeout=_WAIT_SECONDS)
                lock.acquire()
        except Timeout:
            raise ExpertMeshError(
                f"--output-dir {self.directory}: another run writes to it{self._in_words()}; wait for "
                "that run, or choose another directory (if its machine no longer exists, delete "
                f"{self.path})"
            ) from None
        self._lock = lock
        self._record = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "at": datetime.now().timestamp()})
        self.holder.write_text(self._record, encoding="utf-8")

    def release(self) -> None:
        """Delete its files, unless they are another's by now, and let go of it."""
        if self._lock is not None:
            with suppress(OSError):
                if self.holder.read_text(encoding="utf-8") == self._record:
                    self.holder.unlink()
                    # whoever opened it meanwhile sees that it has no name any more, and opens the next one
                    (self.directory / FILE).unlink()
            self._lock.release()
            self._lock = None

    def is_held(self) -> bool:
        """Whether a run writes to the directory now. A look at it takes nothing from a run."""
        if not self.holder.exists():
            return False
        if (self.directory / _WITHOUT_KERNEL).exists():
            return True
        try:
            with FileLock(self.path, timeout=0, mode=0o644, fallback_to_soft=False):
                return False
        except (Timeout, OSError):  # not one's own directory: its holder's word counts
            return True

    def _in_words(self) -> str:
        """Such as ": process 4711 on host a, since 2026-01-31 12:00:00"; empty where nobody says so."""
        try:
            record = json.loads(self.holder.read_text(encoding="utf-8"))
            since = datetime.fromtimestamp(record["at"]).isoformat(sep=" ", timespec="seconds")
            return f": process {record['pid']} on host {record['host']}, since {since}"
        except (LookupError, TypeError, ValueError, OSError):
            return ""
