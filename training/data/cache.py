"""Where tokenized samples are kept between runs: a directory of our own in the cache of `datasets`."""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...moe.util.errors import ExpertMeshError


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
