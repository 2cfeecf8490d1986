"""Images of records: where their bytes are, which tokens stand for each, and its pixels.

The cache of samples has no pixels: of each image it has the file, what that is known by, and a checksum of its bytes
(see `image_files`). What tokens an image takes, and its pixels, the family's own processor says.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...moe.util.errors import ExpertMeshError
from ...moe.util.versions import installed_version
from .data_files import RowError
from .image_files import Source, opened, read_image

IMAGE = "\ue002"
"""Stands for an image in a message's text, until a chat template writes it."""
TAG = "<image>"
"""Stands for an image in texts of records that have a column of them: LLaMA-Factory's, ms-swift's."""
COLUMNS = ("images", "image")
FILE_NAME = "file_name"
MORE_COLUMNS = ("image_path", "image_url", FILE_NAME)
"""Those that are read with --images where there is none of the others: often they say where one of the others is from.
A file's name is an image's by its ending, as in the metadata of an imagefolder."""
_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
_PERHAPS = re.compile(r"(image|img|picture|pic|photo|jpe?g|png)s?(_?(path|file|url|uri|src|name|file_?name)s?)?", re.I)
"""Names of columns that may well have images."""
PARTS = ("image", "image_url")
"""Types of parts of a message."""
PLACES = "images are read as parts of a message's content, or in a column beside messages or questions"
_KEYS = ("bytes", "base64", "path", "url", "image", "image_url")
_NO_SOURCE = ("type", "detail")
Mark = Source | int | None
"""What a part of a message says of its image: where it is, its index in the record's column, or that it is the next."""


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


def mark_of(part: Mapping[str, Any], place: str) -> Mark:
    """Which image a part of a message stands for.

    Raises:
        RowError: it does not say so, or in two ways.
    """
    index = part.get("index")
    source = source_of({key: value for key, value in part.items() if key != "index"}, place)
    if index is None:
        return source
    if source is not None or not isinstance(index, int) or index < 0:
        raise RowError(f"{place} has index {index!r:.80}; give the number of an image in the column, from 0, alone")
    return index


def column_of_images(row: Mapping[str, Any], columns: Sequence[str]) -> str | None:
    """The column that has a record's images.

    Raises:
        RowError: several have some.
    """
    found = [name for name in columns if row.get(name) and (name != FILE_NAME or _is_named_as_image(row[name]))]
    found = [name for name in found if name in COLUMNS] or found
    if len(found) > 1:
        raise RowError(f"has {' and '.join(found)}; leave one out")
    return found[0] if found else None


def _is_named_as_image(name: Any) -> bool:
    return isinstance(name, str) and name.lower().endswith(_ENDINGS)


def check_unread(
    row: Mapping[str, Any], texts: Iterable[str], images: int, columns: Sequence[str], read: Collection[str]
) -> None:
    """Of a record as it was read with --images.

    Args:
        texts: its messages'. images: that were found. columns: those in which images are looked for. read: those that
            were read as something else.

    Raises:
        RowError: it seems to have images that were not read.
    """
    if any(TAG in text for text in texts):
        raise RowError(
            f"has {TAG} in its text, which stands for an image, and {'parts with' if images else 'no'} images; "
            + ("leave it out" if images else f"give them in one of the columns {', '.join(columns)}, or leave it out")
        )
    if images:
        return
    if name := column_of_images(row, columns):
        raise RowError(f"has {name}; {PLACES}")
    likely = (name for name, value in row.items() if value and isinstance(value, str | bytes | list | dict))
    if name := next((each for each in likely if _PERHAPS.fullmatch(each) and each not in read), None):
        raise RowError(
            f"has the column {name}, in which no images are looked for: rename it to one of {', '.join(columns)}, or "
            "leave it out"
        )


def sources_in(row: Mapping[str, Any], columns: Sequence[str]) -> list[Source]:
    """The images in a record's column of them.

    Raises:
        RowError: one is none.
    """
    name = column_of_images(row, columns)
    found = {} if name is None else {name: row[name]}
    sources = []
    for column, value in found.items():
        each = value if isinstance(value, list | tuple) else [value]
        for number, one in enumerate(each, start=1):
            source = source_of(one, f"{column}, image {number}")
            if source is None:
                raise RowError(f"{column}, image {number}: is empty; give a path, a URL or bytes")
            sources.append(source)
    return sources


def placed(messages: list[dict[str, Any]], own: list[Mark], column: list[Source]) -> list[Source]:
    """The images of a conversation in the order of its marks, which are put into its messages where tags stand or, as
    trl has it, at the beginning of the first question where nothing says where they belong.

    Args:
        messages: changed in place.
        own: what parts of messages say of each mark in them.
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
    if numbers := {mark for mark in own if isinstance(mark, int)}:
        if None in own or numbers != set(range(len(column))):
            raise RowError(
                f"has {len(column)} images in its column, and parts with the indices {sorted(numbers)}"
                f"{' and without any' * (None in own)}; give a part with its index for each, from 0"
            )
    elif own.count(None) != len(column):
        raise RowError(
            f"has {len(column)} images in its column, and {own.count(None)} places for them in its messages; give as "
            "many"
        )
    rest = iter(column)
    sources = [next(rest) if mark is None else column[mark] if isinstance(mark, int) else mark for mark in own]
    if sum(message["content"].count(IMAGE) for message in messages) != len(sources):
        raise RowError(f"has the character {IMAGE!r} in its text, which stands for an image; leave it out")
    return sources


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
        from ...moe.hf_model.images import image_token, other_tokens, token_ids_of_media
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
        self.others = {number: name for name, number in other_tokens(config).items()}
        self._of_media = token_ids_of_media(config)

    @property
    def facts(self) -> list[Any]:
        """By what it may give something else."""
        return [self.processor.to_json_string(), *self.versions.values()]

    @property
    def settings(self) -> dict[str, Any]:
        """What its files say, and its image token."""
        said: dict[str, Any] = json.loads(self.processor.to_json_string())
        return {name: value for name, value in said.items() if value is not None} | {
            "image_token": f"{self.placeholder} ({self.token})"
        }

    @property
    def versions(self) -> dict[str, str | None]:
        """Of the libraries that read images."""
        return {name: installed_version(name) for name in ("transformers", "pillow", "torchvision")}

    def check_tokenizer(self, tokenizer: Any, where: str) -> None:
        """
        Raises:
            ExpertMeshError: a tokenizer that is not the processor's own has other tokens than that for images.
        """
        from PIL import Image

        written = self._processed(Image.new("RGB", (64, 64)))["input_ids"][0].tolist()
        for number in dict.fromkeys([self.token, *written, *self._of_media.values()]):
            own, other = (each.convert_ids_to_tokens(number) for each in (self.processor.tokenizer, tokenizer))
            if own is not None and own != other:
                raise ExpertMeshError(
                    f"--tokenizer {where}: its token {number} is {other or 'none'}, and the model's image processor "
                    f"writes {own} with that number; give a tokenizer that has the model's tokens for images, or none "
                    "to take the model's own"
                )

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
        digest, content = read_image(path)
        return digest, self._read(path, content)["input_ids"][0].tolist()

    def pixels(self, picture: Picture) -> Mapping[str, Any]:
        """What the model takes for an image.

        Raises:
            ExpertMeshError: its file has changed.
        """
        try:
            digest, content = read_image(picture.path)
            if digest == picture.digest:
                return self._read(picture.path, content)
        except ValueError as error:
            raise ExpertMeshError(str(error)) from error
        raise ExpertMeshError(
            f"{picture.path}: is another image than when the data were tokenized: it has changed since the run "
            "started; put that one back, or start again to train on this one"
        )

    def _read(self, path: str, content: bytes) -> Any:
        try:
            with opened(content) as image:
                return self._processed(image)
        except Exception as error:
            raise ValueError(f"the image {path} cannot be read: {error}") from error

    def _processed(self, image: Any) -> Any:
        from transformers.image_utils import load_image

        # turned as its EXIF data say
        images = [load_image(image)]
        return self.processor(images=images, text=[self.placeholder], return_tensors="pt", add_special_tokens=False)
