"""Files beside a model's weights: which go along with them, and what config.json says in a copy."""

import json
import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...moe.util.errors import ExpertMeshError
from ..files.encodings import with_quantization, without_quantization
from ..files.paths import check_regular, named_file
from .source import GENERATION_CONFIG, SIDE_FILES, Checkpoint, ModelSource, read_json
from .untrained_parts import without_missing_predictors, without_untrained

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
                f"{directory / name}: has {size:,} bytes; files next to the weights are copied too, up to "
                f"{_MOST_BYTES:,} bytes; if it does not belong to the model, move it elsewhere"
            )
    return names


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def export_side_files(checkpoint: Checkpoint, out: Path, tokenizer: Any = None) -> list[str]:
    """`copy_side_files` for an export of a checkpoint, whose config claims no layers that it has not.

    Returns:
        What of the config that has changed, in lines.
    """
    origin = None if checkpoint.origin is None else checkpoint.origin.source.path
    copy_side_files(checkpoint.source, out, tokenizer, checkpoint.drops_untrained, origin)
    config, told = without_missing_predictors(read_json(out / CONFIG), checkpoint)
    if told:
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return told


def copy_side_files(
    source: ModelSource,
    out: Path,
    tokenizer: Any = None,
    drop_untrained: bool = False,
    quantized_as: Path | None = None,
) -> None:
    """Copy what goes along with the weights as it is; with `tokenizer`, this is saved in place of the source's own. A
    config that says that tensors are quantized no longer does; with RoPE scaling, it says which; where embedding and
    output projection are no longer tied, or have more rows, it says so. Tokens that end answers end generation.

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
        config = without_untrained(config, source.config, keeps_predictors=source.mtp is not None)
    if source.is_untied:
        config = _with(config, source.config, tie_word_embeddings=False)
    if source.vocab_size is not None:
        config = _with(config, source.config, vocab_size=source.vocab_size)
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


def _with(raw: dict[str, Any], config: Any, **settings: Any) -> dict[str, Any]:
    """A config.json with settings of the language model, there and in the part that describes it; `config` is
    transformers' own. Not to speak of them would leave it to the family's default."""
    text = config.get_text_config()
    parts = [part for part in config.sub_configs if part in raw and getattr(config, part, None) is text]
    return {**raw, **{part: {**raw[part], **settings} for part in parts}, **settings}
