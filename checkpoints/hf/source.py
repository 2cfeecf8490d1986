"""Opening a model directory: its config, its safetensors files, and the names, shapes and dtypes in them.

Only JSON and safetensors are read; nothing is unpickled, and no path from an index leads out of the directory.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from ...moe.hf_model.config import check_config
from ...moe.hf_model.rope import RopeScaling
from ...moe.util.errors import ExpertMeshError
from ..files.dtype_names import DTYPE_BYTES, DTYPE_NAMES, FLOATS
from ..files.dtypes import wider
from ..files.encodings import check_quantization, decoded, encodings_in, quantization_of
from ..files.file_layout import INDEX_NAME, SINGLE_NAME
from ..files.paths import check_regular, named_file
from ..files.tensors import DiskTensor, StoredTensor
from ..model_card import CARD
from .reader import ParameterReader, SafetensorsReader
from .untrained_tensors import summary

if TYPE_CHECKING:
    from ...moe.hf_model.mtp import PublishedMTP
    from ...moe.hf_model.rope import RopeChange
    from .names import Names

GENERATION_CONFIG = "generation_config.json"
LICENCES = ("LICENSE*", "NOTICE*")
SIDE_FILES = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", *LICENCES),
    "additional_chat_templates/*.jinja",
)
"""What goes along with the weights: all that config.json and its like name, code included, which is only copied; and
what must come with every copy. Not a model card: it describes the weights that the model came from, and of it an
export's own takes the licence (`checkpoints.model_card`)."""
# parsed it takes some twenty times as much memory; the largest index and manifest of today have a few MB
_MOST_JSON_BYTES = 64 * 2**20


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
        added = [end for end in self.answer_ends if end not in self.generation_ends]
        if not added:
            return None
        file = self.path / GENERATION_CONFIG
        found = read_json(file) if file.exists() else {}
        return {**found, "eos_token_id": [*self.generation_ends, *added]}

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
            found = changed_config(read_json(self.path / "config.json"), self.rope)
        if self.vocab_size is not None:
            found = deepcopy(found)
            found.get_text_config().vocab_size = self.vocab_size
        return found if self.mtp is None else self.mtp.with_layer(found)

    @property
    def said(self) -> dict[str, Any]:
        """All that its config says: as config.json has it, where the run changes nothing in it."""
        is_as_on_disk = self.rope is None and self.vocab_size is None and self.mtp is None
        found: dict[str, Any] = read_json(self.path / "config.json") if is_as_on_disk else self.config.to_dict()
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
        config = load_config(self.path, read_json(file), str(file))
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
            model = build_model(self.config, attn_implementation)
            if self.rope_scaling is not None:
                check_rope(model, self.rope_scaling)
            if self.mtp is not None:
                add_mtp(model, self.mtp)
            return model
        except ExpertMeshError as error:
            file = self.path / "config.json"
            raise ExpertMeshError(str(error) if str(file) in str(error) else f"{file}: {error}") from error

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


@dataclass(frozen=True)
class Checkpoint:
    """A directory of safetensors files whose tensors have been matched with a model's parameters.

    Attributes:
        path: the directory.
        source: its config, and what lies beside that.
        names: of the model's tensors.
        tensors: what it holds, in the model's order.
        exported: what a Hugging Face directory of this model holds, in this order; of tensors that are encoded there,
            how.
        tied_copies: tensors that repeat one of these, as an output projection stored beside the tied embedding does.
        carried: those that belong to no trained module (see `checkpoints.hf.names`), and go along as they are.
        drops_untrained: whether, instead, they do not go along, and an export's config does not claim them.
        activation_scales: tensors that only say how activations were rounded, which are left out where codes are
            dequantized.
        row_sums: of each tensor, where the directory has them (see `checkpoints.files.checksums`).
        files: that hold the weights.
        problems: what does not match, where the caller asked to be told instead of stopped.
        origin: the checkpoint in whose encoding an export is; None: nothing is encoded.
        make_reader: of its parameters, where these are not what its tensors in safetensors files hold.
    """

    path: Path
    source: ModelSource
    names: Names
    tensors: list[DiskTensor]
    exported: list[DiskTensor]
    tied_copies: list[DiskTensor] = field(default_factory=list)
    carried: list[DiskTensor] = field(default_factory=list)
    drops_untrained: bool = False
    activation_scales: list[DiskTensor] = field(default_factory=list)
    row_sums: dict[str, int] | None = None
    files: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    origin: Checkpoint | None = None
    make_reader: Callable[[], ParameterReader] | None = None

    def reader(self) -> ParameterReader:
        """A reader of its parameters; one a thread."""
        return self.file_reader() if self.make_reader is None else self.make_reader()

    def file_reader(self) -> SafetensorsReader:
        """A reader of its safetensors files; one a thread."""
        return SafetensorsReader(self.tensors)

    @property
    def encodings(self) -> str:
        """How many tensors of a Hugging Face directory have which encoding, in words; empty where none has any."""
        return encodings_in(self.exported)

    @property
    def encoded_parameters(self) -> set[str]:
        """Parameters with quantized rows."""
        return {region.parameter for tensor in self.tensors if tensor.encoding is not None for region in tensor.regions}

    @property
    def parameter_dtypes(self) -> dict[str, str]:
        """The dtype in which each parameter lies on disk; of mixed ones, that which holds all."""
        dtypes: dict[str, str] = {}
        for tensor in self.tensors:
            for region in tensor.regions:
                dtypes[region.parameter] = wider(dtypes.get(region.parameter, tensor.dtype), tensor.dtype)
        return dtypes

    @property
    def rows_in_files(self) -> dict[str, int]:
        """How many rows the files have of each parameter."""
        found: dict[str, int] = {}
        for region in (region for tensor in self.tensors for region in tensor.regions):
            found[region.parameter] = max(found.get(region.parameter, 0), region.rows.stop)
        return found

    @property
    def carried_summary(self) -> str:
        """What is carried, in a few words; empty where nothing is."""
        return summary(self.carried, [tensor.name for tensor in self.exported]) if self.carried else ""

    @property
    def all_files(self) -> list[Path]:
        """Those that hold the weights, and those that hold what is carried."""
        return sorted({*self.files, *(part.file for tensor in self.carried for part in tensor.parts)})

    # ---- the same, but for what an export is to be ----

    def encoded_as(self, origin: Checkpoint) -> Checkpoint:
        """The same, but that an export has the encoding that `origin` has in Hugging Face form.

        Raises:
            ExpertMeshError: it cannot be made.
        """
        for tensor in origin.exported:
            if tensor.encoding is not None and not tensor.encoding.has_encoder:
                raise ExpertMeshError(
                    f"--export-encoding source: {origin.source.path} has {tensor.name} as {tensor.encoding}, "
                    "which has no public encoder; export in bfloat16 (leave the flag out), and quantize the "
                    "export"
                )
        said = origin.source.quantization
        if isinstance(said, dict) and said.get("activation_scheme") == "static" and not origin.activation_scales:
            raise ExpertMeshError(
                f"--export-encoding source: config.json of {origin.source.path} asks for activation "
                "scales (activation_scheme static), which EP shards do not have: use the model in "
                "Hugging Face form"
            )
        return replace(self, origin=origin)

    def exporting(self, parameters: Collection[str], dtype: str) -> Checkpoint:
        """The same, but that an export has these parameters or buffers in another dtype."""
        exported = [
            replace(tensor, dtype=dtype) if tensor.regions[0].parameter in parameters else tensor
            for tensor in self.exported
        ]
        return replace(self, exported=exported)

    def dropping_untrained(self) -> Checkpoint:
        """The same, but that what is not trained does not go along.

        Raises:
            ExpertMeshError: a config.json without it would describe no model.
        """
        from ...moe.hf_model.build import model_class

        config = self.source.config
        if isinstance(config, model_class(config).config_class) and config.get_text_config() is not config:
            raise ExpertMeshError(
                "--drop-untrained: transformers has no class for just the language model of a "
                f"{config.model_type}, so config.json would still claim the other parts; leave out the "
                "flag"
            )
        return replace(self, carried=[], drops_untrained=True)

    def ending_in(self, tokens: Iterable[int]) -> Checkpoint:
        """The same, but that in what is written these tokens, with which answers end, end generation, too."""
        return replace(self, source=replace(self.source, answer_ends=tuple(tokens)))

    def grown(self, names: Names) -> Checkpoint:
        """The same for a model with more tokens, of these names, whose further rows no file has."""
        exported = []
        for tensor in self.exported:
            shape = names.parameters[tensor.regions[0].parameter]
            if shape != self.names.parameters[tensor.regions[0].parameter]:
                region = replace(tensor.regions[0], rows=range(shape[0]))
                tensor = replace(tensor, shape=shape, regions=(region,), parts=(), encoding=None)
            exported.append(tensor)
        return replace(self, names=names, exported=exported)

    def check_carried_tokens(self) -> None:
        """
        Raises:
            ExpertMeshError: the model has more tokens than its files, but for what is carried.
        """
        parameters = self.names.parameters
        sizes = {rows for name, rows in self.rows_in_files.items() if parameters[name] and rows < parameters[name][0]}
        if bound := next((tensor for tensor in self.carried if {*tensor.shape[:1]} & sizes), None):
            raise ExpertMeshError(
                f"--add-tokens, --resize-vocab: {bound.name} is not trained, and is for {bound.shape[0]:,} tokens; "
                "leave it out with --drop-untrained"
            )

    def stretched(self, scaling: RopeScaling) -> Checkpoint:
        """The same with RoPE scaling. Frequencies that the files have are not carried over: they follow
        from the config, and would no longer be right."""
        carried = [tensor for tensor in self.carried if not self.names.is_computed(tensor.name)]
        return replace(self, source=replace(self.source, rope_scaling=scaling), carried=carried)


def resolve_model(model: str, flag: str = "--model", weights: bool = True) -> Path:
    """The directory of `model`: itself, or the local copy of a hub id, downloaded if need be.

    Args:
        flag: how the user gave it, for the error.
        weights: whether they are downloaded, too.

    Raises:
        ExpertMeshError: it is neither, or cannot be fetched.
    """
    if not check_model(model, flag):
        return Path(model)
    try:
        return _download(model, weights)
    except ExpertMeshError:
        raise
    except Exception as error:
        raise ExpertMeshError(
            f"{flag} {model}: no such directory, and not available from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def _download(model: str, weights: bool) -> Path:
    """The local copy of a hub id: what goes along with the weights, and then those that the index names, as some
    repositories hold them a second time in another form."""
    from huggingface_hub import snapshot_download

    path = Path(snapshot_download(model, allow_patterns=[*SIDE_FILES, CARD]))
    if not weights:
        return path
    files = {SINGLE_NAME, *(_weight_map(path) or {}).values()}
    # of the same revision, should there be a newer one by now
    return Path(snapshot_download(model, revision=path.name, allow_patterns=sorted(map(glob.escape, files))))


def check_model(model: str, flag: str = "--model") -> bool:
    """Whether `model` is to be looked for on the hub, being no directory.

    Raises:
        ExpertMeshError: it is neither a directory nor what a hub id can be.
    """
    path = Path(model)
    try:
        if path.is_dir():
            return False
        exists = path.exists()
    except OSError as error:  # a name too long for any file
        raise ExpertMeshError(f"{flag} {model:.80}...: {error.strerror}") from error
    if exists:
        raise ExpertMeshError(f"{flag} {model}: is a file; {_beside(path)}")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ExpertMeshError(f"{flag} {model}: no such directory")
    return True


def _beside(file: Path) -> str:
    """What to give in place of a file, where a directory was expected."""
    checkpoints = sorted(path.parent for path in file.parent.glob("step-*/checkpoint.json"))
    if checkpoints:
        return f"give one of its training checkpoints, such as {checkpoints[-1]}"
    of_model = any((file.parent / name).exists() for name in ("config.json", "adapter_config.json", "checkpoint.json"))
    return f"give a directory, as {file.parent}" if of_model else "give a directory"


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


def found_instead(file: Path) -> str:
    """What the directory of a missing config.json or adapter_config.json is, if it is of another kind: a training
    checkpoint, an adapter, a model, or one that such directories lie in, as they do in that of a run; else empty."""
    directory, adapter, model, marker = file.parent, "adapter_config.json", "config.json", "checkpoint.json"
    if file.name not in (adapter, model):
        return ""
    if (directory / marker).exists():
        is_training = f"{directory} is a training checkpoint"
        if file.name == adapter:
            return f"{is_training}; give the adapter that its run exports to OUTPUT_DIR/adapter"
        return f"{is_training}; `expertmesh-checkpoints export` makes a model of it"
    if file.name == model and (directory / adapter).exists():
        return f"{directory} is an adapter; `expertmesh-checkpoints merge` makes a model of its base and it"
    if file.name == adapter and (directory / model).exists():
        return f"{directory} is a model, not an adapter"
    inside = sorted(str(path) for path in directory.glob(f"*/{file.name}"))
    if not inside:
        others = [
            path for name in (model, adapter, marker) for at in ("*", "*/*") for path in directory.glob(f"{at}/{name}")
        ]
        inside = sorted(str(path.parent) for path in others)
    return f"there is {', '.join(inside):.400}" if inside else ""


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ExpertMeshError: the file is missing, unreadable, too large, no JSON, or no object.
    """
    if not file.exists() and (found := found_instead(file)):
        raise ExpertMeshError(f"{file}: no such file; {found}")
    check_regular(file)
    if file.stat().st_size > _MOST_JSON_BYTES:
        raise ExpertMeshError(f"{file}: has {file.stat().st_size:,} bytes; more than {_MOST_JSON_BYTES:,} are not read")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, or a number without end
        raise ExpertMeshError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ExpertMeshError(f"{file}: contains a {type(content).__name__}, not an object")
    return content


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


def check_fields(table: Any, wanted: dict[str, type], file: Path) -> None:
    """
    Raises:
        ExpertMeshError: a table read from `file` lacks a field, or has something else in its place.
    """
    for name, kind in wanted.items():
        found = table.get(name) if isinstance(table, dict) else None
        if type(found) is not kind:
            raise ExpertMeshError(f"{file}: {name} is {found!r:.80} where a {kind.__name__} should be")


@contextmanager
def well_formed(file: Path) -> Iterator[None]:
    """Around picking apart a table that was read from `file`.

    Raises:
        ExpertMeshError: it is not built as this version builds it: an entry is missing, or is something else.
    """
    try:
        yield
    except ExpertMeshError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ExpertMeshError(f"{file}: does not have the expected form: {type(error).__name__}: {error}") from error


def open_hf(source: ModelSource, names: Names, strict: bool = True) -> Checkpoint:
    """Read the headers of all files of a Hugging Face directory and match them with the model's parameters.

    Args:
        strict: stop at what does not match; else list it in `problems` and leave it out of `tensors`.

    Raises:
        ExpertMeshError: a file is missing, truncated or outside the directory; a tensor is missing, unused,
            mis-shaped or of an unsupported dtype. The message names it.
    """
    found = decoded(read_headers(source.path), source.quantization, names.experts_transposed)
    matched = names.match({name: tensor.shape for name, tensor in found.tensors.items()})
    wrong = dict(found.problems)
    for name, problem in matched.problems.items():
        known = found.tensors.get(name)
        wrong.setdefault(name, problem if known is None else f"{problem} ({known.file.name})")
    tensors, copies = (
        [replace(found.tensors[name], regions=regions) for name, regions in each.items()]
        for each in (matched.tensors, matched.tied_copies)
    )
    for tensor in tensors + copies:
        supported = DTYPE_NAMES if tensor.regions[0].parameter in names.buffers else FLOATS
        if tensor.dtype not in supported:
            wrong[tensor.name] = (
                f"tensor {tensor.name} in {tensor.file.name} has dtype {tensor.dtype}; it must be one of "
                f"{', '.join(supported)}"
            )
    if strict and wrong:
        raise ExpertMeshError(f"{source.path}: {next(iter(wrong.values()))}")
    tensors = [tensor for tensor in tensors if tensor.name not in wrong]
    return Checkpoint(
        source.path,
        source,
        names,
        tensors,
        tensors + copies,
        copies,
        [found.tensors[name] for name in matched.untrained],
        activation_scales=found.left_out,
        files=sorted({part.file for tensor in found.tensors.values() for part in tensor.parts}),
        problems=list(wrong.values()),
    )


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Every tensor in the files of a Hugging Face directory.

    Raises:
        ExpertMeshError: a file is missing, damaged or outside the directory, or not as the index has it.
    """
    stored: dict[str, StoredTensor] = {}
    weight_map = _weight_map(path)
    for file in _files(path, weight_map):
        for name, part in read_header(path / file).items():
            if weight_map is not None and weight_map.get(name) != file:
                raise ExpertMeshError(f"{path / file}: tensor {name} is not where {INDEX_NAME} says")
            stored[name] = part
    for name, file in (weight_map or {}).items():
        if name not in stored:
            raise ExpertMeshError(
                f"{path / INDEX_NAME}: says that tensor {name} is in {file}, which does not contain it"
            )
    return stored


def _weight_map(path: Path) -> dict[str, str] | None:
    """The index's table from tensor to file; None when there is a single file and no index."""
    if not (path / INDEX_NAME).exists():
        return None
    weight_map = read_json(path / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ExpertMeshError(f"{path / INDEX_NAME}: weight_map must be a table from tensor names to file names")
    return weight_map


def weight_files(path: Path) -> list[Path]:
    """The files of a Hugging Face directory that hold tensors.

    Raises:
        ExpertMeshError: one is missing or outside the directory, or the index is damaged.
    """
    return [path / file for file in _files(path, _weight_map(path))]


def _files(path: Path, weight_map: dict[str, str] | None) -> list[str]:
    if weight_map is None:
        if not (path / SINGLE_NAME).exists():
            raise ExpertMeshError(f"{path}: has neither {SINGLE_NAME} nor {INDEX_NAME}")
        return [SINGLE_NAME]
    some_tensor = {file: name for name, file in weight_map.items()}
    for file, name in some_tensor.items():
        named_file(path, file, INDEX_NAME, entry=f"tensor {name:.200}")
    return sorted(some_tensor)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor in a safetensors file.

    Raises:
        ExpertMeshError: the file is missing, truncated or no safetensors file, or has a tensor of a dtype that is not
            known.
    """
    check_regular(file)
    stored = {}
    try:
        with open(file, "rb") as stream:
            offset = 8 + int.from_bytes(stream.read(8), "little")
        with safe_open(file, framework="np") as handle:
            # the library has checked that they follow one another without a gap, to the end of the file
            for name in handle.offset_keys():
                part = handle.get_slice(name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                if dtype not in DTYPE_BYTES:
                    raise ExpertMeshError(
                        f"{file}: tensor {name} has dtype {dtype}; it must be one of {', '.join(DTYPE_BYTES)}"
                    )
                stored[name] = StoredTensor(name, shape, dtype, file, offset)
                offset += stored[name].num_bytes
    except (SafetensorError, OSError) as error:
        raise ExpertMeshError(f"{file}: not a complete safetensors file: {error}") from error
    return stored
