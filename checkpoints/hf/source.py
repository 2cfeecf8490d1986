"""Opening a model directory: its config, and what is to be made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...moe.hf_model.config import check_config
from ...moe.hf_model.rope import RopeScaling
from ...moe.util.errors import ExpertMeshError
from ..files.encodings import check_quantization, quantization_of
from ..files.file_layout import INDEX_NAME, SINGLE_NAME
from .headers import read_headers
from .json_files import read_json

if TYPE_CHECKING:
    from ...moe.hf_model.mtp import PublishedMTP
    from ...moe.hf_model.rope import RopeChange
    from .names import Names

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class ModelSource:
    """A model directory whose config.json has been read.

    Attributes:
        model_type: what the family calls itself.
        quantization: what the config says of how its tensors are stored; None if as they are.
        rope_scaling: None leaves positions as the config has them.
        is_untied: whether what is written has a weight each for the embedding and the output projection.
        vocab_size: tokens of the model where they are to be more than in config.json. new_tokens: ids of those that the
            model's own tokenizer lacks.
        answer_ends: tokens with which the model has learned to end an answer, which are to end generation where it is
            written.
        mtp: the layer for multi-token prediction that is trained along; None: there is none, or it is carried over.
        images: whether the parts that images pass are in the model, and not carried over.
        made: the config.json of a model that is made of the directory's (see `checkpoints.upcycle`); None: its own.
        dtype: of the parameters where the model is written, by its code, if that is another than in the directory.
    """

    path: Path
    model_type: str
    quantization: Any = None
    rope_scaling: RopeScaling | None = None
    is_untied: bool = False
    answer_ends: tuple[int, ...] = ()
    vocab_size: int | None = None
    new_tokens: tuple[int, ...] = ()
    mtp: PublishedMTP | None = None
    images: bool = False
    made: Mapping[str, Any] | None = None
    dtype: str | None = None

    @cached_property
    def generation_ends(self) -> list[int]:
        """Tokens that end generation, by the directory's generation_config.json or, without one, its config.

        Raises:
            ExpertMeshError: the file is damaged.
        """
        file = self.path / GENERATION_CONFIG
        if file.exists():
            return read_ends(file)
        return _token_list(getattr(self.config.get_text_config(), "eos_token_id", None), file)

    @property
    def generation_config(self) -> dict[str, Any] | None:
        """What generation_config.json is to say where the model is written, if that is something else than in the
        directory: that `answer_ends` end generation, too."""
        if not self.new_ends:
            return None
        file = self.path / GENERATION_CONFIG
        found = read_json(file) if file.exists() else {}
        return {**found, "eos_token_id": [*self.generation_ends, *self.new_ends]}

    @property
    def new_ends(self) -> list[int]:
        """Those of `answer_ends` that do not end generation in the directory."""
        return [end for end in self.answer_ends if end not in self.generation_ends]

    @property
    def answer_end(self) -> int | None:
        """The one token that whoever knows of no generation_config.json is to end generation at where the model is
        written; None: the one in the directory, also where there are several new ones."""
        return self.new_ends[0] if len(self.new_ends) == 1 else None

    @cached_property
    def config(self) -> Any:
        """transformers' own config object, read when it is first asked for: transformers takes seconds to import.

        Raises:
            ExpertMeshError: transformers cannot read config.json, or has no causal language model for it; or it says
                that tensors are stored in a way that cannot be read; or the RoPE scaling asked for is not possible.
        """
        from ...moe.hf_model.rope import changed_config

        found = self._config_on_disk
        if self.rope is not None:
            found = changed_config(self.raw, self.rope)
        if self.vocab_size is not None:
            found = deepcopy(found)
            found.get_text_config().vocab_size = self.vocab_size
        return found if self.mtp is None else self.mtp.with_layer(found)

    @property
    def raw(self) -> dict[str, Any]:
        """The config.json: the directory's, or that of the model that is made of it."""
        return read_json(self.path / "config.json") if self.made is None else dict(self.made)

    @property
    def said(self) -> dict[str, Any]:
        """All that its config says: as config.json has it, where the run changes nothing in it."""
        is_as_on_disk = self.rope is None and self.vocab_size is None and self.mtp is None
        found: dict[str, Any] = self.raw if is_as_on_disk else self.config.to_dict()
        return found

    @cached_property
    def rope(self) -> RopeChange | None:
        """What RoPE scaling changes in config.json."""
        from ...moe.hf_model.rope import rope_change

        return None if self.rope_scaling is None else rope_change(self._config_on_disk, self.rope_scaling)

    @cached_property
    def _config_on_disk(self) -> Any:
        from ...moe.hf_model.build import model_class
        from ...moe.hf_model.config import load_config

        file = self.path / "config.json"
        check_quantization(self.quantization, file)
        config = load_config(self.path if self.made is None else None, self.raw, str(file))
        try:
            model_class(config)
        except ExpertMeshError as error:
            raise ExpertMeshError(f"{file}: {error}") from error
        return config

    @property
    def text_config(self) -> Any:
        """The part of it that describes the language model."""
        return self.config.get_text_config()

    @property
    def text_config_on_disk(self) -> Any:
        """The same as the file has it."""
        return self._config_on_disk.get_text_config()

    def build(self, attn_implementation: str = "auto") -> Any:
        """The model that it describes, on the meta device (see `build_model`).

        Raises:
            ExpertMeshError: it cannot be built; the message names config.json.
        """
        from ...moe.hf_model.build import build_model
        from ...moe.hf_model.mtp import add_mtp
        from ...moe.hf_model.rope import check_rope

        try:
            model = build_model(self.config, attn_implementation, self.images)
            if self.rope_scaling is not None:
                check_rope(model, self.rope_scaling)
            if self.mtp is not None:
                add_mtp(model, self.mtp)
            return model
        except ExpertMeshError as error:
            file = self.path / "config.json"
            raise ExpertMeshError(str(error) if str(file) in str(error) else f"{file}: {error}") from error

    def seeing_images(self) -> ModelSource:
        """The same, with the parts that images pass in the model.

        Raises:
            ExpertMeshError: they are only carried over there.
        """
        if not any((self.path / name).exists() for name in (INDEX_NAME, SINGLE_NAME)):
            raise ExpertMeshError(
                f"--images: {self.path} is not in Hugging Face form, and EP shards only carry the vision tower over; "
                "give the model that they were made of"
            )
        return replace(self, images=True)

    def training_mtp(self, names: Iterable[str] | None = None) -> ModelSource:
        """The same, with the checkpoint's layer for multi-token prediction in the model.

        Args:
            names: of all tensors in Hugging Face form; None: those in the directory's files.

        Raises:
            ExpertMeshError: there is no such layer, or it cannot be trained (see `find_mtp`).
        """
        from ...moe.hf_model.mtp import find_mtp

        if self.vocab_size is not None:
            raise ExpertMeshError(
                "--train-mtp: does not work with --add-tokens or --resize-vocab where the model gets new rows, which "
                "the layer's copies of embedding and head would lack; leave out one of them"
            )
        if names is None:
            if not any((self.path / name).exists() for name in (INDEX_NAME, SINGLE_NAME)):
                raise ExpertMeshError(
                    f"--train-mtp: {self.path} is not in Hugging Face form, and EP shards only carry the layer over; "
                    "give the model that they were made of"
                )
            names = read_headers(self.path)
        try:
            mtp = find_mtp(names, replace(self, mtp=None).text_config.num_hidden_layers)
        except ExpertMeshError as error:
            raise ExpertMeshError(f"{self.path}: {error}") from error
        return replace(self, mtp=mtp)

    @cached_property
    def names(self) -> Names:
        """Names of that model's tensors; for those who do not build it themselves."""
        from .names import Names

        return Names(self.build())


def open_source(path: Path, rope_scaling: RopeScaling | None = None) -> ModelSource:
    """Read and check config.json, without transformers.

    Args:
        rope_scaling: to be applied to the model's positions.

    Raises:
        ExpertMeshError: it is missing, no JSON, or has impossible sizes.
    """
    file = path / "config.json"
    raw = read_json(file)
    return ModelSource(path, check_config(raw, str(file)), quantization_of(raw), rope_scaling)


def read_ends(file: Path) -> list[int]:
    """The tokens that end generation, of a generation_config.json.

    Raises:
        ExpertMeshError: the file is damaged.
    """
    return _token_list(read_json(file).get("eos_token_id"), file)


def _token_list(said: Any, file: Path) -> list[int]:
    tokens = said if isinstance(said, list) else [] if said is None else [said]
    if not all(isinstance(token, int) for token in tokens):
        raise ExpertMeshError(f"{file}: eos_token_id is {said!r:.80}, neither a token's id nor a list of them")
    return tokens
