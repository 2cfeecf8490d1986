"""An export in its source's own encoding: blocks that training has left as they were keep the source's bytes, others
are quantized anew (see `checkpoints.files.codes`).

What is quantized is what an export in bfloat16 holds, so that both are of one model.

Shape suffixes: R rows, C columns of a matrix of codes; r, c of its blocks.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...moe.util.errors import ExpertMeshError
from ..files.codes import by_blocks, spread
from ..files.dtype_names import DTYPE_BYTES
from ..files.dtypes import ARRAY_TYPES, Array, as_tensor, contiguous
from ..files.encodings import WIDE, Encoding, StoredForm, dequantize, encode, pack, scale_values
from ..files.file_layout import DiskTensor, OutputTensor, Region
from .reader import SafetensorsReader

if TYPE_CHECKING:
    from .source import Checkpoint

_STRIP_ELEMENTS = 2**20


@dataclass
class Errors:
    """What encoding has changed, of tensors of one kind.

    Attributes:
        blocks: all of them. encoded: those that were quantized anew, of which alone the others speak.
        largest: error, relative to the largest value of its block.
        squares_of_errors, squares: sums over values.
    """

    blocks: int = 0
    encoded: int = 0
    largest: float = 0.0
    squares_of_errors: float = 0.0
    squares: float = 0.0

    def add(self, other: Errors) -> None:
        self.blocks += other.blocks
        self.encoded += other.encoded
        self.largest = max(self.largest, other.largest)
        self.squares_of_errors += other.squares_of_errors
        self.squares += other.squares

    def __str__(self) -> str:
        if self.encoded == 0:
            return "as in the source, bit for bit"
        share = "all" if self.encoded == self.blocks else f"{self.encoded:,} of {self.blocks:,}"
        root = sqrt(self.squares_of_errors / self.squares) if self.squares else 0.0
        return (
            f"{share} blocks quantized anew: error at most {self.largest:.2%} of a block's largest value, "
            f"root mean square {root:.2%} of the values'"
        )


def error_lines(errors: dict[str, Errors]) -> list[str]:
    """What to tell of an export: a line for each kind of tensor."""
    return [f"{kind}: {found}" for kind, found in errors.items()]


def kind_of(name: str) -> str:
    """A tensor's name without the numbers of its layer and expert."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def check_encodable(origin: Checkpoint) -> None:
    """
    Raises:
        ExpertMeshError: an export cannot have the encoding of this checkpoint.
    """
    for name, form in origin.stored_forms.items():
        encoding, _ = form.info.encoded
        if not encoding.has_encoder:
            raise ExpertMeshError(
                f"--export-encoding source: {origin.source.path} has {name} as {encoding}, for which no encoder is "
                "published; export in bfloat16 (leave the flag out), and quantize the export"
            )
    said = origin.source.quantization
    if isinstance(said, dict) and said.get("activation_scheme") == "static" and not origin.activation_scales:
        raise ExpertMeshError(
            f"--export-encoding source: config.json of {origin.source.path} says that it has scales of activations "
            "(activation_scheme static), and it has none, as EP shards have none: take the Hugging Face form as source"
        )


@dataclass(frozen=True)
class Strip:
    """Rows of one matrix of codes, and where their values are.

    Attributes:
        index: of the matrix in the tensor. rows: of the matrix of codes.
        parts: regions of the tensor, and which rows of each parameter.
        is_run: whether these follow one another as the rows do.
    """

    index: tuple[int, ...]
    rows: range
    parts: tuple[tuple[Region, range], ...]
    is_run: bool


def strips_of(tensor: DiskTensor, encoding: Encoding) -> Iterator[Strip]:
    """A tensor's matrices of codes, in the order of their bytes, each in strips of complete rows of blocks where that
    is possible without the others.

    Args:
        tensor: as the model knows it.
    """
    height = encoding.block[0]
    for index, group in groupby(tensor.regions, key=lambda region: region.index):
        regions = tuple(group)
        rows, columns = tensor.matrix(regions[0])
        aligned = all(region.is_run and region.first % height == 0 for region in regions)
        if encoding.transposed or not aligned:
            whole = range(columns if encoding.transposed else rows)
            yield Strip(index, whole, tuple((region, region.rows) for region in regions), is_run=False)
            continue
        step = max(1, _STRIP_ELEMENTS // (height * columns)) * height
        for region in sorted(regions, key=lambda region: region.first):
            for start in range(region.rows.start, region.rows.stop, step):
                part = range(start, min(start + step, region.rows.stop))
                place = region.on_disk(part)
                yield Strip(index, range(place.start, place.stop), ((region, part),), is_run=True)


class Originals:
    """Codes and scales as a checkpoint has them. For several threads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.local = threading.local()

    @property
    def reader(self) -> SafetensorsReader:
        if not hasattr(self.local, "reader"):
            self.local.reader = self.checkpoint.reader()
        reader: SafetensorsReader = self.local.reader
        return reader

    def of(self, name: str, form: StoredForm, strip: Strip) -> tuple[Array, Array] | None:
        """(codes, one per byte; bytes of the scales) of a strip; None where the checkpoint no longer has them."""
        info, (region, _) = self.checkpoint.infos.get(name), strip.parts[0]
        # of a tensor beside experts', in the layer's own layout too the name is its own, and it may lie the other way
        turned = any(
            tensor.name == name and own.transposed != region.transposed
            for own, tensor in self.reader.places.get(region.parameter, [])
        )
        if info is not None and not turned:
            return self.reader.stored(info, strip.index, strip.rows)
        return self._by_parameters(form, strip)

    def _by_parameters(self, form: StoredForm, strip: Strip) -> tuple[Array, Array] | None:
        """The same where they lie in the layer's own layout."""
        encoding, _ = form.info.encoded
        if not all(self.reader.is_encoded(region.parameter) for region, _ in strip.parts):
            return None
        item, width = DTYPE_BYTES[encoding.scale_dtype], form.info.code_matrix()[1]
        counts = encoding.num_scales((len(strip.rows), width))
        codes = np.empty((len(strip.rows), width), np.uint8)
        scales = np.empty((*counts, item), np.uint8)
        for region, rows in strip.parts:
            own, own_scales = self.reader.codes(region.parameter, rows), self.reader.scales(region.parameter, rows)
            own_scales = own_scales.reshape(len(own_scales), -1, item)
            axis = int(region.transposed != encoding.transposed)
            place = slice(0, len(rows)) if strip.is_run else region.on_disk(rows)
            size = encoding.block[axis]
            block = slice(place.start // size, -(-place.stop // size), place.step)
            if axis == 0:
                codes[place], scales[block] = own, own_scales
            else:
                codes[:, place], scales[:, block] = own.T, own_scales.swapaxes(0, 1)
        return codes, scales.reshape(counts[0], -1)


def assembled(tensor: DiskTensor, encoding: Encoding, strip: Strip, parts: Sequence[Array]) -> Array:
    """The values of a strip, as its codes lie, out of the rows of its parts."""
    if strip.is_run:
        return parts[0]
    whole = np.empty(tensor.matrix(strip.parts[0][0]), ARRAY_TYPES[WIDE])
    for (region, rows), part in zip(strip.parts, parts, strict=True):
        (whole.T if region.transposed else whole)[region.on_disk(rows)] = part
    return contiguous(whole.T) if encoding.transposed else whole


@dataclass
class Requantized:
    """A tensor of an export as its source stores it: its codes are made once, and its scales with them.

    Attributes:
        tensor: as the model knows it. form: how it is stored.
        quantization: `quantization_config` of the source.
        scales: bytes of them, from when the codes are written until they are.
    """

    tensor: DiskTensor
    form: StoredForm
    originals: Originals
    quantization: Any
    scales: list[Array] = field(default_factory=list)
    errors: Errors = field(default_factory=Errors)

    def strips(self) -> Iterator[Strip]:
        return strips_of(self.tensor, self.form.info.encoded[0])

    def codes(self, strip: Strip, parts: Sequence[Array]) -> Iterator[Array]:
        """The bytes of a strip's codes.

        Args:
            parts: values of the strip's parts, in bfloat16's bits.
        """
        encoding, _ = self.form.info.encoded
        values = assembled(self.tensor, encoding, strip, parts)
        originals = self.originals.of(self.tensor.name, self.form, strip)
        height = encoding.block[0]
        step = max(1, _STRIP_ELEMENTS // (height * values.shape[1])) * height
        for start in range(0, len(values), step):
            part = slice(start, start + step)
            blocks = slice(start // height, -(-min(start + step, len(values)) // height))
            original = None if originals is None else (originals[0][part], originals[1][blocks])
            codes, scales, errors = requantize(values[part], original, encoding, self.quantization)
            self.errors.add(errors)
            self.scales.append(scales)
            yield contiguous(pack(codes, encoding))

    def outputs(self) -> tuple[OutputTensor, OutputTensor]:
        """Codes and scales as a file has them."""
        encoding, _ = self.form.info.encoded
        (codes_name, codes), (scales_name, scales) = self.form.parts.items()
        regions = self.tensor.regions
        return (
            OutputTensor(DiskTensor(codes_name, codes.shape, regions), codes.dtype, encoding, "codes", made_by=self),
            OutputTensor(
                DiskTensor(scales_name, scales.shape, ()), scales.dtype, encoding, "scales", self._take_scales
            ),
        )

    def _take_scales(self) -> Iterator[Array]:
        made, self.scales = self.scales, []
        yield from made


def requantize(
    values: Array, original: tuple[Array, Array] | None, encoding: Encoding, quantization: Any
) -> tuple[Array, Array, Errors]:
    """(codes, one per byte; bytes of the scales; what that changes) of complete blocks.

    Args:
        values: bfloat16's bits.
        original: codes and scales in the source.
    """
    values_RC = as_tensor(np.ascontiguousarray(values), WIDE).float()
    rows, columns = encoding.num_scales(values.shape)
    kept_rc = torch.zeros(rows, columns, dtype=torch.bool)
    if original is not None:
        stood_for = dequantize(original[0], scale_values(original[1], encoding.scale_dtype), encoding, (0, 0))
        differs_RC = as_tensor(stood_for, WIDE).float() != values_RC
        kept_rc = ~by_blocks(differs_RC, encoding.block).any(dim=3).any(dim=1)
        if kept_rc.all():
            return *original, Errors(rows * columns)
    codes, scales = encode(values_RC, encoding, quantization)
    if original is not None:
        codes = np.where(spread(kept_rc, encoding.block, values.shape).numpy(), original[0], codes)
        shape = (rows, columns, -1)
        scales = np.where(kept_rc.numpy()[..., None], original[1].reshape(shape), scales.reshape(shape))
        scales = np.ascontiguousarray(scales.reshape(rows, -1))
    return codes, scales, _errors(values_RC, codes, scales, encoding, ~kept_rc)


def _errors(
    values_RC: torch.Tensor, codes: Array, scales: Array, encoding: Encoding, encoded_rc: torch.Tensor
) -> Errors:
    found = as_tensor(dequantize(codes, scale_values(scales, encoding.scale_dtype), encoding, (0, 0)), WIDE).float()
    encoded_RC = spread(encoded_rc, encoding.block, values_RC.shape)
    off_RC, values_RC = (found - values_RC).abs() * encoded_RC, values_RC.abs() * encoded_RC
    largest_rc = by_blocks(values_RC, encoding.block).amax(dim=(1, 3))
    relative_rc = by_blocks(off_RC, encoding.block).amax(dim=(1, 3)) / largest_rc.clamp(
        min=torch.finfo(torch.float32).tiny
    )
    return Errors(
        encoded_rc.numel(),
        int(encoded_rc.sum()),
        float(relative_rc.max()),
        float(off_RC.double().square().sum()),
        float(values_RC.double().square().sum()),
    )


def outputs_as_in(origin: Checkpoint, exported: Iterable[OutputTensor]) -> Iterator[OutputTensor]:
    """What an export holds of these tensors in the encoding of `origin`; those that are not encoded there are as they
    are.

    Raises:
        ExpertMeshError: `origin` has one of them in another shape.
    """
    originals, quantization = Originals(origin), origin.source.quantization
    for output in exported:
        name = output.tensor.name
        form = origin.stored_forms.get(name)
        if form is None:
            yield output
            continue
        if form.info.shape != output.tensor.shape:
            raise ExpertMeshError(
                f"{origin.source.path}: {name} has shape {list(form.info.shape)}, and {list(output.tensor.shape)} in "
                "the model to be exported: it is another model"
            )
        yield from Requantized(output.tensor, form, originals, quantization).outputs()


def errors_of(outputs: Iterable[OutputTensor]) -> dict[str, Errors]:
    """By kind of tensor, what encoding has changed in tensors that have been written."""
    found: dict[str, Errors] = {}
    for output in outputs:
        if output.made_by is not None:
            found.setdefault(kind_of(output.made_by.tensor.name), Errors()).add(output.made_by.errors)
    return found


Values = Callable[[Region, range], Array]
"""Gives rows of a region's parameter, in bfloat16's bits."""


def codes_of(made: Requantized, values: Values) -> Iterator[Array]:
    """The bytes of all codes of a tensor."""
    for strip in made.strips():
        yield from made.codes(strip, [values(region, rows) for region, rows in strip.parts])
