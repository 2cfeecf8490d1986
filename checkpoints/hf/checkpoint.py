"""A directory of safetensors files whose tensors have been matched with a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ...moe.hf_model.rope import RopeScaling
from ...moe.util.errors import ExpertMeshError
from ..files.dtype_names import DTYPE_NAMES, FLOATS
from ..files.dtypes import wider
from ..files.encodings import decoded, encodings_in
from ..files.tensors import DiskTensor
from .headers import read_headers
from .reader import ParameterReader, Places, SafetensorsReader, places_of
from .source import ModelSource
from .untrained_tensors import summarize

if TYPE_CHECKING:
    from .names import Names


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
        make_reader: of its parameters, where these are not what its tensors in safetensors files hold. made_by: what
            else these depend on, beside the files.
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
    made_by: str = ""

    def reader(self) -> ParameterReader:
        """A reader of its parameters; one a thread."""
        return self.file_reader() if self.make_reader is None else self.make_reader()

    def file_reader(self) -> SafetensorsReader:
        """A reader of its safetensors files; one a thread."""
        return SafetensorsReader(self.places)

    @cached_property
    def places(self) -> Places:
        """Where its files have which parameter."""
        return places_of(self.tensors)

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
        return summarize(self.carried, [tensor.name for tensor in self.exported]) if self.carried else ""

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


def open_hf(source: ModelSource, names: Names, strict: bool = True) -> Checkpoint:
    """Read the headers of all files of a Hugging Face directory and match them with the model's parameters.

    Args:
        strict: stop at what does not match; else list it in `problems` and leave it out of `tensors`.

    Raises:
        ExpertMeshError: a file is missing, truncated or outside the directory; a tensor is missing, unused,
            mis-shaped or of an unsupported dtype. The message names it.
    """
    stored = decoded(read_headers(source.path), source.quantization, names.experts_transposed)
    matched = names.match({name: tensor.shape for name, tensor in stored.tensors.items()})
    wrong = dict(stored.problems)
    for name, problem in matched.problems.items():
        known = stored.tensors.get(name)
        wrong.setdefault(name, problem if known is None else f"{problem} ({known.file.name})")
    tensors, copies = (
        [replace(stored.tensors[name], regions=regions) for name, regions in each.items()]
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
        [stored.tensors[name] for name in matched.untrained],
        activation_scales=stored.left_out,
        files=sorted({part.file for tensor in stored.tensors.values() for part in tensor.parts}),
        problems=list(wrong.values()),
    )
