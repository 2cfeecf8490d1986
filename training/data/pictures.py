"""Images of records: where their bytes are, which tokens stand for each, and its pixels.

The cache of samples has no pixels. It names the file of each image and a checksum of its bytes; bytes that a record
holds itself, or that --prepare-only has fetched, are written to a file beside the cache. What tokens an image takes,
and its pixels, the family's own processor says.
"""

import base64
import binascii
import io
import os
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import xxhash

from ...moe.util.atomic_write import whole
from ...moe.util.errors import ExpertMeshError
from ...moe.util.versions import installed_version
from .data_files import RowError

IMAGE = "\ue002"
"""Stands for an image in a message's text, until a chat template writes it."""
TAG = "<image>"
"""Stands for an image in texts of records that have a column of them: LLaMA-Factory's, ms-swift's."""
COLUMNS = ("images", "image")
PARTS = ("image", "image_url")
"""Types of parts of a message."""
_KEYS = ("bytes", "base64", "path", "url", "image", "image_url")
_NO_SOURCE = ("type", "detail")
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Those that Pillow reads by itself: for some others it starts programs."""
_SECONDS = 60

Source = str | bytes
"""A path or URL, or what a file would hold."""


def source_of(value: Any, place: str) -> Source | None:
    """Where a record says that an image is, by itself or in an object: OpenAI's, that of `datasets`. None: nowhere.

    Raises:
        RowError: it says nothing of the kind.
    """
    if isinstance(value, bytes | str):
        return value
    if not isinstance(value, Mapping):
        raise RowError(f"{place} is {value!r:.80}; give a path, a URL, bytes, or an object with one of them")
    if value.get("detail") not in (None, "auto"):
        raise RowError(f"{place} has detail {value['detail']!r}: the model's processor chooses sizes; leave it out")
    given = {key: each for key, each in value.items() if each is not None and key not in _NO_SOURCE}
    if unknown := next((key for key in given if key not in _KEYS), None):
        raise RowError(f"{place} has {unknown}; an image has one of {', '.join(_KEYS)}")
    if isinstance(given.get("bytes"), bytes):  # of an Image feature, whose path is where they were
        given.pop("path", None)
    if len(given) > 1:
        raise RowError(f"{place} has {' and '.join(given)}; leave out all but one")
    for key, each in given.items():
        return f"data:;base64,{each}" if key == "base64" else source_of(each, place)
    return None


def sources_in(row: Mapping[str, Any]) -> list[Source]:
    """The images in a record's columns of them.

    Raises:
        RowError: one is none.
    """
    found = {column: row[column] for column in COLUMNS if row.get(column)}
    if len(found) > 1:
        raise RowError(f"has {' and '.join(found)}; leave one out")
    sources = []
    for column, value in found.items():
        each = value if isinstance(value, list | tuple) else [value]
        for number, one in enumerate(each, start=1):
            source = source_of(one, f"{column}, image {number}")
            if source is None:
                raise RowError(f"{column}, image {number}: is empty; give a path, a URL or bytes")
            sources.append(source)
    return sources


def placed(messages: list[dict[str, Any]], own: list[Source | None], column: list[Source]) -> list[Source]:
    """The images of a conversation in the order of its marks, which are put into its messages where tags stand or, as
    trl has it, at the beginning of the first question where nothing says where they belong.

    Args:
        messages: changed in place.
        own: what parts of messages say of each mark in them; None: that it is the next one of the column.
        column: the images of the record's column.

    Raises:
        RowError: there are more or fewer images than places for them.
    """
    tags = sum(message["content"].count(TAG) for message in messages) if column else 0
    if column and tags and not own:
        for message in messages:
            message["content"] = message["content"].replace(TAG, IMAGE)
        own = [None] * tags
    elif column and not own:
        first = next((message for message in messages if message["role"] == "user"), None)
        if first is None:
            raise RowError("has images and no message of a user; say where they belong by parts of messages")
        first["content"] = IMAGE * len(column) + first["content"]
        own = [None] * len(column)
    if own.count(None) != len(column):
        raise RowError(
            f"has {len(column)} images in its column, and {own.count(None)} places for them in its messages; give as "
            "many"
        )
    rest = iter(column)
    sources = [next(rest) if source is None else source for source in own]
    if sum(message["content"].count(IMAGE) for message in messages) != len(sources):
        raise RowError(f"has the character {IMAGE!r} in its text, which stands for an image; leave it out")
    return sources


def kept_file(source: Source, folder: Path, kept: Path, fetches: bool) -> str:
    """The file of an image, written if there is none.

    Args:
        folder: to which paths are relative.
        kept: directory for files of images that come without one.
        fetches: whether images are taken from the web.

    Raises:
        RowError: there is no such image.
    """
    content = source if isinstance(source, bytes) else None
    if isinstance(source, str):
        scheme = source[:8].partition(":")[0].lower()
        if scheme == "data":
            content = _decoded(source)
        elif scheme in ("http", "https"):
            content = _fetched(source, kept, fetches)
        else:
            path = folder / (unquote(urlsplit(source).path) if scheme == "file" else source)
            if not path.is_file():
                raise RowError(f"has the image {str(path)!r:.200}, and there is no such file")
            return str(path.resolve())
    assert content is not None
    path = kept / xxhash.xxh3_128_hexdigest(content)
    if not path.exists():
        _write(path, content)
    return str(path)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path, writer=str(os.getpid())) as partial:
        partial.write_bytes(content)


def _decoded(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RowError(f"has the image {url!r:.80}, which is no base64; give data:image/png;base64,...")
    try:
        return base64.b64decode(re.sub(r"\s", "", body), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"has the image {url!r:.80}, whose base64 is damaged: {error}") from error


def _fetched(url: str, kept: Path, fetches: bool) -> bytes:
    """What is behind a URL, which is fetched once."""
    copy = kept / f"url-{xxhash.xxh3_128_hexdigest(url.encode())}"
    if not copy.exists():
        if not fetches:
            raise RowError(f"has the image {url!r:.200}, which only --prepare-only fetches; run that first")
        try:
            with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
                _write(copy, answer.read())
        except (OSError, ValueError) as error:
            raise RowError(f"has the image {url!r:.200}, which cannot be fetched: {error}") from error
    return copy.read_bytes()


@dataclass(frozen=True)
class Picture:
    """An image of a sample: its file, a checksum of that, and the (begin, end) of its tokens in the sample."""

    path: str
    digest: str
    begin: int
    end: int


class ImageProcessor:
    """A family's own processor.

    Args:
        directory: of a checkpoint.
        config: its own.

    Raises:
        ExpertMeshError: Pillow is missing, or the processor, or it is for other tokens.
    """

    def __init__(self, directory: str, config: Any):
        # both import torch, and flags are read before it is loaded
        from ...moe.hf_model.images import image_token
        from ...moe.transformers_private import processor_of_images

        if not installed_version("pillow"):
            raise ExpertMeshError(
                "--images: images are read by Pillow, which is missing: pip install 'expertmesh[images]'"
            )
        try:
            self.processor = processor_of_images(directory, config)
        except Exception as error:
            raise ExpertMeshError(f"--images: {directory}: its processor cannot be loaded: {error}") from error
        placeholder = getattr(self.processor, "image_token", None)
        if not hasattr(self.processor, "image_processor") or not isinstance(placeholder, str):
            raise ExpertMeshError(f"--images: {directory}: its processor reads no images")
        self.placeholder = placeholder
        self.token = self.processor.tokenizer.convert_tokens_to_ids(self.placeholder)
        if self.token != (token := image_token(config)):
            raise ExpertMeshError(
                f"--images: {directory}: its processor writes {self.placeholder} for an image, token {self.token}, and "
                f"its config has {token}; give the tokenizer that belongs to the model"
            )

    @property
    def facts(self) -> list[Any]:
        """By what it may give something else."""
        return [self.processor.to_json_string(), *map(installed_version, ("transformers", "pillow", "torchvision"))]

    def check(self, text: str, number: int) -> None:
        """Of a text as a chat template writes it.

        Raises:
            ValueError: it has places for other images than so many.
        """
        if (found := text.count(self.placeholder)) != number:
            raise ValueError(
                f"the chat template writes {self.placeholder} {found} times for {number} images; use another "
                "--chat-template, or leave that out of the texts"
            )

    def tokens(self, path: str) -> tuple[str, list[int]]:
        """(a checksum of an image's file, the tokens that stand for it).

        Raises:
            ValueError: it cannot be read.
        """
        content = _content(path)
        return xxhash.xxh3_64_hexdigest(content), self._read(path, content)["input_ids"][0].tolist()

    def pixels(self, picture: Picture) -> Mapping[str, Any]:
        """What the model takes for an image.

        Raises:
            ExpertMeshError: its file has changed.
        """
        try:
            content = _content(picture.path)
            if xxhash.xxh3_64_hexdigest(content) == picture.digest:
                return self._read(picture.path, content)
        except ValueError as error:
            raise ExpertMeshError(str(error)) from error
        raise ExpertMeshError(f"{picture.path}: is another image than when the data were tokenized; put that back")

    def _read(self, path: str, content: bytes) -> Any:
        from PIL import Image
        from transformers.image_utils import load_image

        try:
            with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
                return self.processor(
                    images=[load_image(image)], text=[self.placeholder], return_tensors="pt", add_special_tokens=False
                )
        except Exception as error:
            raise ValueError(f"the image {path} cannot be read: {error}") from error


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"the image {path} cannot be read: {error.strerror or error}") from error
