"""A lock on a directory, so that two runs never write into the same one."""

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from ..moe.util.errors import ExpertMeshError

FILE = ".lock"
_WAIT_SECONDS = 10.0
"""A process that was killed may take a while to end, and its lock with it."""
_POLL_SECONDS = 0.2
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


class DirectoryLock:
    """Held by one process from `acquire` to `release`, or to its end, however it ends.

    The kernel holds the lock, on a file of its own; over NFS the server does. The file also says who has it. Where a
    file system has no locks, that alone counts, as long as the process is on this host and alive.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.path = directory / FILE
        self.descriptor: int | None = None

    def acquire(self) -> None:
        """
        Raises:
            ExpertMeshError: another process holds it; the message says which.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        while not self._try():
            if time.monotonic() > deadline:
                raise ExpertMeshError(
                    f"--output-dir {self.directory}: another run writes there{_holder(self.path)}; wait for it, or "
                    f"choose another directory (if that machine is gone, delete {self.path})"
                )
            time.sleep(_POLL_SECONDS)

    def _try(self) -> bool:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _lock(descriptor, self.path) or not _is_at(descriptor, self.path):
                os.close(descriptor)
                return False
            record = {"host": socket.gethostname(), "pid": os.getpid(), "begun": _begun(os.getpid()), "at": time.time()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(record).encode(), 0)
            os.fsync(descriptor)  # to be read on other nodes too
        except BaseException:
            with suppress(OSError):
                os.close(descriptor)
            raise
        self.descriptor = descriptor
        # a process that tokenizes must not keep the lock when this one is killed
        os.register_at_fork(after_in_child=self._close)
        return True

    def release(self) -> None:
        """Delete the file, unless it is another's by now, and let go of it."""
        if self.descriptor is None:
            return
        with suppress(OSError):
            if _is_at(self.descriptor, self.path):
                self.path.unlink()
        self._close()

    def _close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return not _is_alive(_record(path))
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name: its holder deletes it at the end."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _record(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict):
            return record
    return {}


def _is_alive(record: dict[str, Any]) -> bool:
    """Whether the process that a record names is on this host, and still the same one."""
    pid, begun = record.get("pid"), record.get("begun")
    if record.get("host") != socket.gethostname() or not isinstance(pid, int) or pid == os.getpid():
        return False
    return begun is not None and _begun(pid) == begun


def _begun(pid: int) -> str | None:
    """When a process began, in ticks since the machine did, as a name for it that no later process has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _holder(path: Path) -> str:
    """Such as ": process 4711 on host a, since 2026-01-31 12:00:00"; empty where nobody says so."""
    record = _record(path)
    try:
        since = datetime.fromtimestamp(record["at"]).isoformat(sep=" ", timespec="seconds")
        return f": process {record['pid']} on host {record['host']}, since {since}"
    except (LookupError, TypeError, ValueError, OSError):
        return ""
