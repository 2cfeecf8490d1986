"""Files beside the weights, directories that appear whole or not at all, and clear errors when writing fails."""

import glob
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.encodings import quantization_of, without_quantization
from moe import ExpertMeshError
from moe.whole import PARTIAL

if TYPE_CHECKING:
    from checkpoints.source import ModelSource

CONFIG = "config.json"
CONFIG_FILES = (CONFIG, "generation_config.json")
# every name under which transformers' tokenizers save themselves or their chat template
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
)


def copy_side_files(source: "ModelSource", out: Path, tokenizer: Any = None) -> None:
    """Copy config, generation config and tokenizer as they are; or save `tokenizer` in place of the last. A config that
    says that tensors are stored in fewer bits no longer does; where positions are stretched, it says how."""
    for name in CONFIG_FILES + (TOKENIZER_FILES if tokenizer is None else ()):
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, out / name)
    config = found = json.loads((out / CONFIG).read_text(encoding="utf-8"))
    if quantization_of(config) is not None:
        config = without_quantization(config)
    if source.rope is not None:
        config = source.rope.apply(config)
    if config is not found:
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(out)


def temporary_beside(out: Path) -> Path:
    """A new, empty directory on the same file system as `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-", suffix=PARTIAL))


def sweep_beside(out: Path) -> None:
    """Delete the temporary directories of `out` that killed processes left."""
    for partial in out.parent.glob(f".{glob.escape(out.name)}-*{PARTIAL}"):
        shutil.rmtree(partial, ignore_errors=True)


def replace_directory(new: Path, out: Path) -> None:
    """Give the directory `new` the name `out`; what stood there is deleted only after."""
    new.chmod(0o755)  # mkdtemp lets only the user in
    if not out.exists():
        new.rename(out)
        return
    old = temporary_beside(out)
    out.rename(old / out.name)
    new.rename(out)
    shutil.rmtree(old)


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
