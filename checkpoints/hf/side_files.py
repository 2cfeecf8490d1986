"""Files beside a model's weights: which go along with them, and what config.json says in a copy."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...moe.hf_model.family_exceptions import LLAMA_CPP_NORMALISES
from ...moe.util.errors import ExpertMeshError
from ..files.dtype_names import DTYPE_NAMES
from ..files.encodings import with_quantization, without_quantization
from ..files.paths import check_regular, named_file
from .checkpoint import Checkpoint
from .hub import LICENCES, SIDE_FILES
from .json_files import read_json
from .source import GENERATION_CONFIG, ModelSource
from .tokenizer_files import Files, is_of_tokenizer, pieces, tokenizer_files, write_beside
from .untrained_parts import Unfilled, describes_language_model, language_model_alone, unfilled, without_predictors

CONFIG = "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")
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
        if name == CONFIG or is_of_tokenizer(name):  # which may be links to anywhere
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


@dataclass(frozen=True)
class SideFiles:
    """What is to lie beside weights: by name, a file that is copied or what is written. lines: what to say of it."""

    files: Files = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(
            len(content) if isinstance(content, bytes) else content.stat().st_size for content in self.files.values()
        )

    def write(self, directory: Path) -> None:
        """
        Raises:
            ExpertMeshError: a file that is copied cannot be read.
            OSError: one cannot be written.
        """
        write_beside(self.files, directory)


def plan_export_files(checkpoint: Checkpoint, tokenizer: Any = None) -> SideFiles:
    """`plan_side_files` for an export of a checkpoint, whose config claims nothing that the files have not. Its
    lines: what of the config that has changed, or is still wrong.

    Raises:
        ExpertMeshError, OSError: see `plan_side_files`.
    """
    source, lines, lacking = checkpoint.source, [*_served_otherwise(checkpoint.source)], Unfilled()
    if not checkpoint.drops_untrained:
        try:
            lacking = unfilled(source.raw, checkpoint)
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
    planned = plan_side_files(
        *(source, tokenizer),
        drop_parts=checkpoint.drops_untrained or drops_parts,
        drop_predictors=checkpoint.drops_untrained or bool(lacking.predictors),
        quantized_as=None if checkpoint.origin is None else checkpoint.origin.source.path,
    )
    return replace(planned, lines=lines)


def _served_otherwise(source: ModelSource) -> Iterator[str]:
    config = source.text_config
    fixed = LLAMA_CPP_NORMALISES.get(config.model_type)
    if fixed is not None and config.norm_topk_prob is not fixed:
        said, there = json.dumps(config.norm_topk_prob), json.dumps(fixed)
        yield f"note: norm_topk_prob is {said}, which llama.cpp takes for {there} in a {config.model_type}"


def plan_side_files(
    source: ModelSource,
    tokenizer: Any = None,
    drop_parts: bool = False,
    drop_predictors: bool = False,
    quantized_as: Path | None = None,
) -> SideFiles:
    """What goes along with the weights as it is; of `tokenizer`, its files (see `tokenizer_files`) in place of the
    source's own. A config that says that tensors are quantized no longer does; with RoPE scaling, it says which; where
    embedding and output projection are no longer tied, or have more rows, or another dtype, it says so. Tokens that end
    answers end generation: one new one is the EOS of config and tokenizer, too.

    Args:
        drop_parts: whether the config is to claim only the language model. drop_predictors: whether it is to claim no
            layers for multi-token prediction, but for one that is trained.
        quantized_as: directory whose config.json says how the tensors beside the config are quantized.

    Raises:
        ExpertMeshError: a file cannot be taken along (see `side_files`), or not be read.
        OSError: the tokenizer's files cannot be made.
    """
    found = read_json(source.path / CONFIG)
    config = without_quantization(source.raw)
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
    if source.answer_end is not None:
        config = _with(config, source.config, eos_token_id=source.answer_end)
    if source.dtype is not None:
        config = {**_in_dtype(config, DTYPE_NAMES[source.dtype]), "dtype": DTYPE_NAMES[source.dtype]}
    if quantized_as is not None:
        config = with_quantization(config, read_json(quantized_as / CONFIG))
    not_along = PROCESSOR_FILES if config.get("model_type") != found.get("model_type") else ()
    along = side_files(source.path, quantized_as is not None)
    files = _copied(source, tokenizer, (name for name in along if not _matches(name, not_along)))
    if config != found:
        files[CONFIG] = _text(config)
    return SideFiles(files | _generation_config(source))


def plan_beside_adapter(source: ModelSource, tokenizer: Any) -> SideFiles:
    """A tokenizer's files (see `tokenizer_files`) or, where it is None, the source's own; the source's licence; and
    tokens that end answers.

    Raises:
        ExpertMeshError, OSError: see `plan_side_files`.
    """
    along = (name for name in side_files(source.path) if is_of_tokenizer(name) or _matches(name, LICENCES))
    return SideFiles(_copied(source, tokenizer, along) | _generation_config(source))


def _copied(source: ModelSource, tokenizer: Any, along: Iterable[str]) -> Files:
    """Files of a model's directory, the tokenizer's in place of its own; each can be read.

    Raises:
        ExpertMeshError: one cannot.
    """
    files: Files = {name: source.path / name for name in along if tokenizer is None or not is_of_tokenizer(name)}
    if tokenizer is not None:
        files |= tokenizer_files(tokenizer, source.path / CONFIG, source.answer_end)
    for content in files.values():
        if isinstance(content, Path):
            next(pieces(content), b"")
    return files


def _generation_config(source: ModelSource) -> Files:
    """generation_config.json, if it is to say something else than the source's own."""
    return {} if source.generation_config is None else {GENERATION_CONFIG: _text(source.generation_config)}


def _text(table: Mapping[str, Any]) -> bytes:
    return (json.dumps(table, indent=2) + "\n").encode()


def _with(raw: dict[str, Any], config: Any, **settings: Any) -> dict[str, Any]:
    """A config.json with settings of the language model, there and in the part that describes it; `config` is
    transformers' own. Not to speak of them would leave it to the family's default."""
    text = config.get_text_config()
    parts = [part for part in config.sub_configs if part in raw and getattr(config, part, None) is text]
    return {**raw, **{part: {**raw[part], **settings} for part in parts}, **settings}


def _in_dtype(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """A config.json by which weights are loaded in a dtype: in that, transformers loads them where it is not told."""
    return {
        key: _in_dtype(value, name) if isinstance(value, dict) else name if key in _DTYPE_KEYS else value
        for key, value in raw.items()
    }
