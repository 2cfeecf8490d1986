"""An export in its source's own encoding: blocks that training has left as they were keep the source's bytes, others
are quantized anew (see `checkpoints.files.codes`).

What is quantized is what an export in bfloat16 holds, so that both are of one model.

Shape suffixes: R rows, C columns of a matrix of codes; r, c of its blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...moe.util.errors import ExpertMeshError
from ..files.checksums import row_sum
from ..files.codes import by_blocks, spread
from ..files.dtype_names import DTYPE_BYTES
from ..files.dtypes import Array, as_tensor, contiguous
from ..files.encodings import WIDE, Errors, dequantize_array, encode, kind_of, pack_codes, scale_values
from ..files.file_layout import OutputTensor, Strip, assembled, at_once, plain_output, strips_of
from ..files.tensors import DiskTensor, Encoding
from .reader import SafetensorsReader
from .untrained_tensors import carried_as_stored, carried_outputs

if TYPE_CHECKING:
    from torch import Tensor

    from .checkpoint import Checkpoint

_RUN_ELEMENTS = 2**20


def hf_outputs(checkpoint: Checkpoint) -> Iterator[OutputTensor]:
    """All that a Hugging Face directory of a checkpoint's model holds; what is carried over comes last.

    Raises:
        ExpertMeshError: it is to be encoded as another checkpoint is, which has a tensor in another shape.
    """
    origin = checkpoint.origin
    if origin is None:
        yield from map(plain_output, checkpoint.exported)
        yield from carried_outputs(checkpoint.carried)
        return
    originals = Originals(origin)
    forms = {tensor.name: tensor for tensor in origin.exported if tensor.encoding is not None}
    for tensor in checkpoint.exported:
        form = forms.get(tensor.name)
        if form is None:
            yield plain_output(tensor)
        elif form.shape == tensor.shape:
            yield from _requantized(replace(form, regions=tensor.regions), originals)
        else:
            raise ExpertMeshError(
                f"{origin.source.path}: {tensor.name} has shape {list(form.shape)}, but "
                f"{list(tensor.shape)} in the model to export: they are different models"
            )
    yield from carried_as_stored(checkpoint.carried)
    yield from carried_outputs(origin.activation_scales)


def kept_outputs(tensor: DiskTensor, originals: Originals) -> Iterator[OutputTensor]:
    """Codes and scales of rows of a parameter as a checkpoint has them, whose encoding is one of `kept_encodings`."""
    encoding, codes_part, scales_part = tensor.coded
    (region,) = tensor.regions

    def strips() -> Iterator[Strip]:
        return (replace(strip, parts=()) for strip in strips_of(tensor, encoding.block[0]))

    def rows_of(strip: Strip) -> range:
        first = region.rows.start
        return range(first + strip.rows.start, first + strip.rows.stop)

    def codes(strip: Strip, _: Sequence[Array]) -> Iterator[tuple[Array, int]]:
        data, scales = originals.reader.stored_rows(region.parameter, rows_of(strip))
        wide = dequantize_array(data, scale_values(scales, encoding.scale_dtype), encoding, (0, 0))
        yield contiguous(pack_codes(data, encoding)), row_sum(wide, strip.rows.start)

    def scales(strip: Strip, _: Sequence[Array]) -> Iterator[tuple[Array, int]]:
        yield contiguous(originals.reader.stored_scales(region.parameter, rows_of(strip))), 0

    yield OutputTensor(codes_part, tensor, strips, codes, "rows")
    yield OutputTensor(scales_part, tensor, strips, scales)


class Originals:
    """Codes and scales as a checkpoint has them. For several threads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.quantization = checkpoint.source.quantization
        self.tensors = {tensor.name: tensor for tensor in (*checkpoint.tied_copies, *checkpoint.tensors)}
        plain = {r.parameter for tensor in checkpoint.tensors if tensor.encoding is None for r in tensor.regions}
        self.encoded = checkpoint.encoded_parameters - plain
        self.local = threading.local()

    @property
    def reader(self) -> SafetensorsReader:
        """This thread's."""
        if not hasattr(self.local, "reader"):
            self.local.reader = self.checkpoint.file_reader()
        reader: SafetensorsReader = self.local.reader
        return reader

    def of(self, form: DiskTensor, strip: Strip) -> tuple[Array, Array] | None:
        """(codes, one per byte; bytes of the scales) of a strip; None where the checkpoint no longer has them.

        Args:
            form: the tensor as a Hugging Face directory has it.
        """
        own, (region, _) = self.tensors.get(form.name), strip.parts[0]
        # of a tensor beside experts', in the layer's own layout too the name is its own, and it may lie the other way
        turned = own is not None and any(r.transposed != region.transposed for r in own.regions)
        if own is None or own.encoding is None or turned:
            return self._by_parameters(form, strip)
        return self.reader.stored(own, strip.index, strip.rows)

    def _by_parameters(self, form: DiskTensor, strip: Strip) -> tuple[Array, Array] | None:
        """The same where they lie in the layer's own layout."""
        encoding = form.coded[0]
        if not all(region.parameter in self.encoded for region, _ in strip.parts):
            return None
        item, width = DTYPE_BYTES[encoding.scale_dtype], form.code_matrix()[1]
        counts = encoding.num_scales((len(strip.rows), width))
        codes = np.empty((len(strip.rows), width), np.uint8)
        scales = np.empty((*counts, item), np.uint8)
        for region, rows in strip.parts:
            own, own_scales = self.reader.stored_rows(region.parameter, rows)
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


def _requantized(tensor: DiskTensor, originals: Originals) -> Iterator[OutputTensor]:
    """Codes of a tensor as its source stores it, and then its scales, which are made with the codes."""
    encoding, codes_part, scales_part = tensor.coded
    height, turned = encoding.block[0], encoding.transposed
    made: list[Array] = []
    errors = Errors(kind_of(tensor.name))

    def codes(strip: Strip, parts: Sequence[Array]) -> Iterator[tuple[Array, int]]:
        values = assembled(tensor, strip, parts, turned)
        original = originals.of(tensor, strip)
        step = max(1, _RUN_ELEMENTS // (height * values.shape[1])) * height
        for start in range(0, len(values), step):
            run, blocks = slice(start, start + step), slice(start // height, -(-(start + step) // height))
            before = None if original is None else (original[0][run], original[1][blocks])
            data, scales, changed = requantize(values[run], before, encoding, originals.quantization)
            errors.add(changed)
            made.append(scales)
            yield contiguous(pack_codes(data, encoding)), 0

    def scales(_: Strip, __: Sequence[Array]) -> Iterator[tuple[Array, int]]:
        while made:
            yield made.pop(0), 0

    yield OutputTensor(codes_part, tensor, lambda: strips_of(tensor, height, turned), codes, errors=errors)
    yield OutputTensor(scales_part, tensor, at_once(), scales)


def requantize(
    values: Array, original: tuple[Array, Array] | None, encoding: Encoding, quantization: Any
) -> tuple[Array, Array, Errors]:
    """(codes, one per byte; bytes of the scales; what that changes) of complete blocks.

    Args:
        values: bfloat16's bits.
        original: codes and scales in the source.
    """
    import torch

    def wide(codes: Array, scales: Array) -> Tensor:
        return as_tensor(
            dequantize_array(codes, scale_values(scales, encoding.scale_dtype), encoding, (0, 0)), WIDE
        ).float()

    values_RC = as_tensor(np.ascontiguousarray(values), WIDE).float()
    rows, columns = encoding.num_scales(values.shape)
    kept_rc = torch.zeros(rows, columns, dtype=torch.bool)
    if original is not None:
        differs_RC = wide(*original) != values_RC
        kept_rc = ~by_blocks(differs_RC, encoding.block).any(dim=3).any(dim=1)
        if kept_rc.all():
            return *original, Errors("", rows * columns)
    codes, scales = encode(values_RC, encoding, quantization)
    if original is not None:
        codes = np.where(spread(kept_rc, encoding.block, values.shape).numpy(), original[0], codes)
        shape = (rows, columns, -1)
        scales = np.where(kept_rc.numpy()[..., None], original[1].reshape(shape), scales.reshape(shape))
        scales = np.ascontiguousarray(scales.reshape(rows, -1))
    encoded_RC = spread(~kept_rc, encoding.block, values_RC.shape)
    off_RC, values_RC = (wide(codes, scales) - values_RC).abs() * encoded_RC, values_RC.abs() * encoded_RC
    least = torch.finfo(torch.float32).tiny
    largest_rc = by_blocks(values_RC, encoding.block).amax(dim=(1, 3)).clamp(min=least)
    errors = Errors(
        "",
        rows * columns,
        int((~kept_rc).sum()),
        float((by_blocks(off_RC, encoding.block).amax(dim=(1, 3)) / largest_rc).max()),
        float(off_RC.double().square().sum()),
        float(values_RC.double().square().sum()),
    )
    return codes, scales, errors
