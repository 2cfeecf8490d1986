"""Files beside the weights, directories that appear complete or not at all, and clear errors when writing fails."""

import glob
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...moe.util.atomic_write import PARTIAL
from ...moe.util.errors import ExpertMeshError
from ..hf.source import GENERATION_CONFIG, ModelSource, read_json
from ..hf.untrained_parts import without_untrained
from .encodings import with_quantization, without_quantization
from .paths import check_regular, named_file

CONFIG = "config.json"
# every name under which transformers' tokenizers save themselves or their chat template, or others theirs
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
    "tiktoken.model",
    "*.tiktoken",
    "additional_chat_templates/*",
)
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""How images, sounds and videos become a model's input."""
SIDE_FILES = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*"),
    "additional_chat_templates/*.jinja",
)
"""What goes along with the weights: all that config.json and its like name, code included, which is only copied; and
what must come with every copy. Not a model card: it describes the weights that the model came from."""
# tables of weights in this or another form, and what would have a directory taken for that of an adapter
_NOT_ALONG = ("*.index.json", "manifest.json", "checkpoint.json", "adapter_config.json")
_OF_CODES = "*quant*_config.json"
"""What some say of codes beside config.json."""
_MOST_BYTES = 2**30


def side_files(directory: Path, quantized: bool = False) -> list[str]:
    """Names of the files beside a model's weights that go along with them; of `quantized` ones, also those that say how
    they are.

    Raises:
        ExpertMeshError: one is no regular file, is a link out of the directory, or has more than 1 GiB.
    """
    found = {path.relative_to(directory).as_posix() for pattern in SIDE_FILES for path in directory.glob(pattern)}
    not_along = _NOT_ALONG if quantized else (*_NOT_ALONG, _OF_CODES)
    names = sorted(name for name in found if not _matches(name, not_along) and not (directory / name).is_dir())
    for name in names:
        if name == CONFIG or _matches(name, TOKENIZER_FILES):  # which may be links to anywhere
            check_regular(directory / name)
        else:
            named_file(directory, name, "it", depth=2)
        if (size := (directory / name).stat().st_size) > _MOST_BYTES:
            raise ExpertMeshError(
                f"{directory / name}: has {size:,} bytes; files beside the weights are copied with them, up to "
                f"{_MOST_BYTES:,} bytes: if it is none of the model's, move it elsewhere"
            )
    return names


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def copy_side_files(
    source: ModelSource,
    out: Path,
    tokenizer: Any = None,
    drop_untrained: bool = False,
    quantized_as: Path | None = None,
) -> None:
    """Copy what goes along with the weights as it is; with `tokenizer`, this is saved in place of the source's own. A
    config that says that tensors are quantized no longer does; with RoPE scaling, it says which;
    where embedding and output projection are no longer tied, it says so. Tokens that end answers end generation.

    Args:
        drop_untrained: whether the config is no longer to claim what is not trained (see `untrained_parts`).
        quantized_as: directory whose config.json says how the tensors beside the config are quantized.

    Raises:
        ExpertMeshError: a file cannot be taken along (see `side_files`).
    """
    found = read_json(source.path / CONFIG)
    config = without_quantization(found)
    if source.rope is not None:
        config = source.rope.apply(config)
    if drop_untrained:
        config = without_untrained(config, source.config)
    if source.is_untied:
        config = _untied(config, source.config)
    if quantized_as is not None:
        config = with_quantization(config, read_json(quantized_as / CONFIG))
    not_along = (*(() if tokenizer is None else TOKENIZER_FILES),)
    if config.get("model_type") != found.get("model_type"):
        not_along += PROCESSOR_FILES
    for name in side_files(source.path, quantized_as is not None):
        if not _matches(name, not_along):
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source.path / name, out / name)
    if config != found:
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_generation_config(source, out)
    if tokenizer is not None:
        save_tokenizer(tokenizer, out)


def write_tokenizer(source: ModelSource, tokenizer: Any, directory: Path) -> None:
    """Write a tokenizer of transformers with its chat template or, where it is None, copy the source's own.

    Raises:
        ExpertMeshError: a file cannot be taken along (see `side_files`).
        OSError: one cannot be written.
    """
    if tokenizer is not None:
        save_tokenizer(tokenizer, directory)
        return
    for name in side_files(source.path):
        if _matches(name, TOKENIZER_FILES):
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source.path / name, directory / name)


def write_generation_config(source: ModelSource, directory: Path) -> None:
    """Write generation_config.json, if it is to say something else than the source's own."""
    if source.generation_config is not None:
        said = json.dumps(source.generation_config, indent=2)
        (directory / GENERATION_CONFIG).write_text(said + "\n", encoding="utf-8")


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Save a tokenizer of transformers.

    Raises:
        OSError: a file cannot be written.
    """
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        if type(error) is not Exception:
            raise
        # what the tokenizers package makes of an OSError
        raise OSError(str(error)) from error


def _untied(raw: dict[str, Any], config: Any) -> dict[str, Any]:
    """A config.json, and the part of it that describes the language model, without ties; `config` is transformers' own.
    Not to speak of them would leave it to the family's default."""
    text, untied = config.get_text_config(), {"tie_word_embeddings": False}
    parts = [part for part in config.sub_configs if part in raw and getattr(config, part, None) is text]
    return {**raw, **{part: {**raw[part], **untied} for part in parts}, **untied}


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
                    f"{out}: contains {path}, which is to be read; choose another directory to write to"
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
    """Give the directory `new`, which is complete, the name `out`; what stood there is deleted only after. Killed at
    any instant, it leaves one of the two under its name, or both where `finish_replacement` finds them.

    Raises:
        OSError: it cannot be done; `out` and `new` are then as they were, unless only what was replaced could not be
            deleted.
    """
    new.chmod(stat.S_IMODE(out.stat().st_mode) if out.is_dir() else 0o755)  # mkdtemp lets only the user in
    finish_replacement(out)
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
    if ready.exists():
        if os.path.lexists(out):
            delete(old)
            out.rename(old)
        ready.rename(out)
    elif os.path.lexists(old) and not os.path.lexists(out):
        old.rename(out)
    delete(old)


def finish_replacement_of_missing(out: Path) -> None:
    """As `finish_replacement`, of what is to be read and is not there; a link to it is followed."""
    if not out.exists():
        finish_replacement(Path(os.path.realpath(out)))


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
