"""Files beside a model's weights: which go along with them, and what config.json says in a copy."""

import json
import shutil
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...moe.hf_model.family_exceptions import LLAMA_CPP_NORMALISES
from ...moe.util.errors import ExpertMeshError
from ..files.encodings import with_quantization, without_quantization
from ..files.paths import check_regular, named_file
from .checkpoint import Checkpoint
from .hub import LICENCES, SIDE_FILES
from .json_files import read_json
from .source import GENERATION_CONFIG, ModelSource
from .untrained_parts import Unfilled, describes_language_model, language_model_alone, unfilled, without_predictors

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


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has any file of a tokenizer's."""
    return any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def export_side_files(checkpoint: Checkpoint, out: Path, tokenizer: Any = None) -> list[str]:
    """`copy_side_files` for an export of a checkpoint, whose config claims nothing that the files have not.

    Returns:
        What of the config that has changed, or is still wrong, in lines.
    """
    source, lines, lacking = checkpoint.source, [*_served_otherwise(checkpoint.source)], Unfilled()
    if not checkpoint.drops_untrained:
        try:
            lacking = unfilled(read_json(source.path / CONFIG), checkpoint)
        except ExpertMeshError as error:  # of another class than the trained one
            lines.append(f"config.json is copied as it is: {error}")
    drops_parts = lacking.has_none and not describes_language_model(source.config)
    if lacking.parts:
        instead = "the export is of the language model alone" if drops_parts else "transformers draws them at random"
        lines.append(f"{lacking.parts}; {instead}")
    if lacking.predictors:
        lines.append(
            f"config.json no longer has {lacking.predictors}: the model's files have no layer for multi-token "
            "prediction"
        )
    copy_side_files(
        *(source, out, tokenizer),
        drop_parts=checkpoint.drops_untrained or drops_parts,
        drop_predictors=checkpoint.drops_untrained or bool(lacking.predictors),
        quantized_as=None if checkpoint.origin is None else checkpoint.origin.source.path,
    )
    return lines


def _served_otherwise(source: ModelSource) -> Iterator[str]:
    config = source.text_config
    fixed = LLAMA_CPP_NORMALISES.get(config.model_type)
    if fixed is not None and config.norm_topk_prob is not fixed:
        said, there = json.dumps(config.norm_topk_prob), json.dumps(fixed)
        yield f"note: norm_topk_prob is {said}, which llama.cpp takes for {there} in a {config.model_type}"


def copy_side_files(
    source: ModelSource,
    out: Path,
    tokenizer: Any = None,
    drop_parts: bool = False,
    drop_predictors: bool = False,
    quantized_as: Path | None = None,
) -> None:
    """Copy what goes along with the weights as it is; with `tokenizer`, this is saved in place of the source's own. A
    config that says that tensors are quantized no longer does; with RoPE scaling, it says which; where embedding and
    output projection are no longer tied, or have more rows, it says so. Tokens that end answers end generation.

    Args:
        drop_parts: whether the config is to claim only the language model. drop_predictors: whether it is to claim no
            layers for multi-token prediction, but for one that is trained.
        quantized_as: directory whose config.json says how the tensors beside the config are quantized.

    Raises:
        ExpertMeshError: a file cannot be taken along (see `side_files`).
    """
    found = read_json(source.path / CONFIG)
    config = without_quantization(found)
    if source.rope is not None:
        config = source.rope.apply(config)
    if drop_parts:
        config = language_model_alone(config, source.config)
    if drop_predictors and source.mtp is None:
        config = without_predictors(config)
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


def write_beside_adapter(source: ModelSource, tokenizer: Any, directory: Path) -> None:
    """Write a tokenizer of transformers with its chat template or, where it is None, copy the source's own; and copy
    its licence.

    Raises:
        ExpertMeshError: a file cannot be taken along (see `side_files`).
        OSError: one cannot be written.
    """
    along = LICENCES if tokenizer is not None else (*LICENCES, *TOKENIZER_FILES)
    for name in side_files(source.path):
        if _matches(name, along):
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source.path / name, directory / name)
    if tokenizer is not None:
        save_tokenizer(tokenizer, directory)


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
