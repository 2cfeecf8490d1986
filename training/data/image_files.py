"""Files of images: found where records say, fetched, or written beside the cached samples.

A path stays as it was given: a link is followed when the image is read. What is cheap to ask of a file tells whether
it is the one that was looked at (`identity`); when it is read for its pixels, its checksum is compared.
"""

import base64
import binascii
import errno
import io
import os
import re
import stat
import string
import time
import urllib.request
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit

import xxhash

from ...moe.util.atomic_write import whole
from ...moe.util.errors import ExpertMeshError
from .data_files import RowError

Source = str | bytes
"""A path or URL, or what a file would hold."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Those that Pillow reads by itself: for some others it starts programs."""
_TRIES, _PAUSE, _SECONDS, _MOST_BYTES = 3, 1.0, 60.0, 100 * 2**20
"""Of a download: how often it is tried, seconds before the second try, seconds for each, and the most it may be."""
_BUSY = (408, 425, 429)
"""Answers of a server, beside those from 500 on, after which it is asked again."""
_THREADS, _AT_ONCE = 16, 1000


def samples_cache() -> Path:
    """The directory of what is kept of data between runs."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "expertmesh"


def kept_images() -> Path:
    """The directory of images that came without a file: each is named by a checksum of its bytes."""
    return samples_cache() / "images"


def kept_file(source: Source, folder: Path, fetches: bool) -> str:
    """The file of an image, written if there is none.

    Args:
        folder: to which paths are relative.
        fetches: whether images are taken from the web.

    Raises:
        RowError: there is no such image, or it cannot be read.
        ExpertMeshError: an image cannot be written.
    """
    content = source if isinstance(source, bytes) else None
    if isinstance(source, str):
        scheme = source[:8].partition(":")[0].lower()
        if scheme == "data":
            content = _decoded(source)
        elif scheme in ("http", "https"):
            content = _fetched(source, fetches)
        else:
            path = (folder / (unquote(urlsplit(source).path) if scheme == "file" else source)).absolute()
            if _is_file(path):
                return str(path)
            content = _from_bare_base64(source)
            if content is None:
                raise RowError(f"has the image {str(path)!r:.200}, and there is no such file")
    assert content is not None
    path = kept_images() / xxhash.xxh3_128_hexdigest(content)
    if not path.exists():
        _write(path, content)
    return str(path)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return False
        raise RowError(f"has the image {str(path)!r:.200}, which cannot be read: {error.strerror}") from error
    except ValueError:  # with a character that no path has
        return False


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path, writer=str(os.getpid())) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise ExpertMeshError(
            f"{path.parent}: images of the data cannot be written there: {error.strerror or error}; choose another "
            "directory with the environment variable HF_DATASETS_CACHE"
        ) from error


def _decoded(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RowError(f"has the image {url!r:.80}, which is no base64; give data:image/png;base64,...")
    try:
        return base64.b64decode(re.sub(r"\s", "", body), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"has the image {url!r:.80}, whose base64 is damaged: {error}") from error


def _from_bare_base64(text: str) -> bytes | None:
    """An image's bytes; None where the text is no base64 of one."""
    try:
        content = base64.b64decode(re.sub(r"\s", "", text), validate=True)
    except (binascii.Error, ValueError):
        return None
    return None if problem_of(content, only_header=True) else content


def problem_of(content: bytes, only_header: bool = False) -> str:
    """Why bytes are no image that can be read, in words; empty: they are one."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            if not only_header:
                image.load()
    except UnidentifiedImageError:
        return f"it is none of {', '.join(_FORMATS)}; it begins with {content[:20]!r}"
    except Exception as error:  # whatever a decoder raises of damaged bytes
        return str(error)
    return ""


def opened(content: bytes) -> Any:
    """An image, to be closed.

    Raises:
        ValueError: it is none that can be read.
    """
    from PIL import Image

    if problem := problem_of(content, only_header=True):
        raise ValueError(problem)
    return Image.open(io.BytesIO(content), formats=_FORMATS)


def _fetched(url: str, fetches: bool) -> bytes:
    """What is behind a URL, which is fetched once; a copy that is no image counts for none."""
    copy = kept_images() / f"url-{xxhash.xxh3_128_hexdigest(url.encode())}"
    if copy.exists():
        content = copy.read_bytes()
        if not problem_of(content, only_header=True):
            return content
    if not fetches:
        raise RowError(f"has the image {url!r:.200}, which only --prepare-only fetches; run that first")
    content = _download(url)
    _write(copy, content)
    return content


class _Unready(Exception):
    """What a server may answer otherwise if it is asked again."""


def _download(url: str) -> bytes:
    """
    Raises:
        RowError: there is no image behind the URL, or none that comes within the limits.
    """
    said: Exception | None = None
    for tried in range(_TRIES):
        time.sleep(_PAUSE * (2**tried - 1))
        try:
            content = _answer(quote(url, safe=string.punctuation))
            if problem := problem_of(content):
                raise _Unready(f"it is no image: {problem}")
            return content
        except _Unready as error:
            said = error
        except (OSError, HTTPException, ValueError, OverflowError) as error:
            if not _may_pass(error):
                raise RowError(f"has the image {url!r:.200}, which cannot be fetched: {error}") from error
            said = error
    raise RowError(f"has the image {url!r:.200}, which cannot be fetched, tried {_TRIES} times: {said}") from said


def _answer(url: str) -> bytes:
    """What a server sends.

    Raises:
        _Unready: less than it said, or not within the time.
        ValueError: more than an image may be.
    """
    end, content = time.monotonic() + _SECONDS, bytearray()
    with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
        while part := answer.read1(2**16):
            content += part
            if len(content) > _MOST_BYTES:
                raise ValueError(f"it is larger than {_MOST_BYTES / 2**20:,.0f} MiB")
            if time.monotonic() > end:
                raise _Unready(f"{len(content):,} bytes came in {_SECONDS:.0f} s, and not all")
        # of which an answer that is read in parts does not tell
        if answer.length:
            raise _Unready(f"{len(content):,} bytes came, and {answer.length:,} more were announced")
    return bytes(content)


def _may_pass(error: Exception) -> bool:
    """Whether a server or the network may do otherwise if it is asked again."""
    if isinstance(error, HTTPError):
        return error.code in _BUSY or error.code >= 500
    if isinstance(error, URLError):
        return isinstance(error.reason, OSError)
    return isinstance(error, OSError | IncompleteRead)


def identity(path: str) -> str:
    """What is cheap to ask of the file that a path, or a link, leads to: another for each change of any kind. Empty:
    there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}-{found.st_ino}"


def read_image(path: str) -> tuple[str, bytes]:
    """(a checksum of an image's file, its bytes).

    Raises:
        ValueError: it cannot be read, or is kept here and damaged.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"the image {path} cannot be read: {error.strerror or error}") from error
    if Path(path).parent == kept_images() and Path(path).name != xxhash.xxh3_128_hexdigest(content):
        raise ValueError(f"the image {path} is damaged; delete {samples_cache()}, and it is made again")
    return xxhash.xxh3_64_hexdigest(content), content


def record_of(path: str, digest: str, known_by: str) -> str:
    """What the cache of samples has of an image that was looked at: a checksum, its identity, and where it is."""
    return f"{digest}:{known_by}:{path}"


def parts_of_record(record: str) -> tuple[str, str, str]:
    """(path, checksum, identity)"""
    digest, known_by, path = record.split(":", 2)
    return path, digest, known_by


def changed_images(records: Collection[str], reads: bool) -> list[str]:
    """The paths of images that are others than when they were looked at, or not there any more.

    Args:
        records: from `record_of`.
        reads: whether checksums are compared, too.
    """

    def changed_of(some: list[str]) -> list[str]:
        found = [parts_of_record(each) for each in some]
        return [
            path for path, digest, known_by in found if identity(path) != known_by or (reads and not _has(path, digest))
        ]

    known = sorted(records)
    size = 1 if reads else _AT_ONCE
    with ThreadPoolExecutor(_THREADS) as pool:  # on a network file system each is a round trip
        parts = pool.map(changed_of, [known[start : start + size] for start in range(0, len(known), size)])
        return [path for part in parts for path in part]


def _has(path: str, digest: str) -> bool:
    try:
        return read_image(path)[0] == digest
    except ValueError:
        return False
