"""Where tokenized samples are kept between runs: a directory of our own in the cache of `datasets`; and the progress of
filling it."""

import fcntl
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from ...moe.util.errors import ExpertMeshError

SECONDS_AT_TERMINAL = 0.5
SECONDS_IN_LOG = 15.0


def cache_directory() -> Path:
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "expertmesh"


def cached_bytes() -> int:
    """Size of all samples that are kept, of other runs too."""
    size = 0
    # other runs may remove and rename what is there: os.walk passes over folders that are gone
    for folder, _, names in os.walk(cache_directory()):
        for name in names:
            with suppress(OSError):
                size += os.stat(os.path.join(folder, name)).st_size
    return size


@contextmanager
def filling_cache() -> Iterator[Path]:
    """The directory, while something is written to it; what runs that ended meanwhile left unfinished is removed first.

    Raises:
        ExpertMeshError: it cannot be written, or the disk is full.
    """
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
        lock = open(directory / "lock", "a")  # noqa: SIM115 - closed below
    except OSError as error:
        raise cache_error(error) from error
    with lock:
        # whoever fills the cache holds the lock along with others; alone, all that is unfinished is left over
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_leftovers(directory)
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield directory


def cache_error(error: OSError) -> ExpertMeshError:
    return ExpertMeshError(
        f"{cache_directory()}: tokenized samples cannot be written there: {error.strerror or error}; the environment "
        "variable HF_DATASETS_CACHE names another directory"
    )


def _remove_leftovers(directory: Path) -> None:
    """Files and directories that `datasets` writes under these names, and renames when they are complete."""
    found = [path for pattern in ("**/*.incomplete", "**/tmp*") for path in directory.glob(pattern)]
    removed = 0
    for path in found:
        with suppress(OSError):
            removed += sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if removed:
        message = f"removed {removed / 1e6:,.1f} MB of unfinished samples that an ended run left in {directory}"
        print(message, file=sys.stderr, flush=True)


class TokenizingProgress:
    """Tells on standard error how many records are done: at a terminal in one line, which is then erased; elsewhere in
    a new line every 15 seconds.

    Records are counted by the bytes of a file in `directory`, which any process may add to.

    Attributes:
        counter: the file's path, for `count`.
    """

    def __init__(self, doing: str, total: int | None, tells: bool, directory: Path):
        self._doing, self._total, self._tells, self._directory = doing, total, tells, directory
        self._began = time.monotonic()
        self._at_terminal = os.isatty(2)
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        descriptor, self.counter = tempfile.mkstemp(dir=self._directory)
        os.close(descriptor)
        if self._tells:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._finished.set()
        if self._tells:
            self._thread.join()
        os.unlink(self.counter)

    def line(self) -> str:
        """What is told now."""
        done = f"{os.stat(self.counter).st_size:,}" + ("" if self._total is None else f" of {self._total:,}")
        return f"{self._doing}: {done} records, {time.monotonic() - self._began:.0f} s"

    def _follow(self) -> None:
        # by its descriptor: a process that is forked meanwhile must not inherit a stream that is locked
        erase, end = ("\r\x1b[K", "") if self._at_terminal else ("", "\n")
        told = False
        while not self._finished.wait(SECONDS_AT_TERMINAL if self._at_terminal else SECONDS_IN_LOG):
            _write(f"{erase}{self.line()}{end}")
            told = True
        if told:
            _write(erase)


def count(counter: str, number: int) -> None:
    """Add to what `Progress` counts, from any process."""
    descriptor = os.open(counter, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, b"." * number)
    finally:
        os.close(descriptor)


def _write(text: str) -> None:
    with suppress(OSError):  # nobody reads it
        os.write(2, text.encode(errors="backslashreplace"))
