"""Quantized tensors: codes, and in a tensor beside them a scale per block.

Here the headers of files become those of the tensors that a model knows, and codes are dequantized to bfloat16, as
transformers does (`Fp8Dequantize`, `convert_moe_packed_tensors`), and values quantized. What codes there are, and how
files have them, is in `codes.py`.

Shape suffixes: R rows, C columns of a matrix of codes; r, c of its blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...moe.util.errors import ExpertMeshError
from .codes import CODES, EXPONENTS, Codes, UnreadableError, quant_methods
from .dtypes import Array, as_array, torch_dtype
from .tensors import DiskTensor, Encoding, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

WIDE = "BF16"
"""What codes are dequantized to."""

_QUANTIZATION = "quantization_config"


def quantization_of(config: Mapping[str, Any]) -> Any:
    """What a config.json, or a part of it, says of how tensors are stored; None where it says nothing, or has an empty
    table."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return next((part[_QUANTIZATION] for part in parts if part.get(_QUANTIZATION) not in (None, {})), None)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json for tensors that are stored as they are."""
    kept = {name: part for name, part in config.items() if name != _QUANTIZATION}
    return {name: without_quantization(part) if isinstance(part, dict) else part for name, part in kept.items()}


def with_quantization(config: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that says of tensors' storage what another one says, in the same places; in the first, where it has
    none of these."""
    kept = _with_quantization(config, said)
    if quantization_of(kept) is None:
        kept[_QUANTIZATION] = quantization_of(said)
    return kept


def _with_quantization(config: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    kept = {
        name: _with_quantization(part, said[name])
        if isinstance(part, dict) and isinstance(said.get(name), dict)
        else part
        for name, part in config.items()
    }
    return {**kept, _QUANTIZATION: said[_QUANTIZATION]} if _QUANTIZATION in said else kept


def check_quantization(quantization: Any, file: Path) -> None:
    """
    Raises:
        ExpertMeshError: `file`, a config.json, says that tensors are stored in a way that cannot be read.
    """
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method not in quant_methods():
        raise ExpertMeshError(
            f"{file}: {_QUANTIZATION} says that tensors are quantized by {method!r:.80}; what can be "
            f"read is {' or '.join(quant_methods())}, and tensors that are not quantized: use a "
            "release of this model in bfloat16, and quantize it with --base-dtype"
        )


def encodings_in(tensors: Iterable[DiskTensor]) -> str:
    """How many tensors have which encoding, as in "33 tensors as float8_e4m3 with scales per block of 128 x 128"."""
    counts = Counter(str(tensor.encoding) for tensor in tensors if tensor.encoding is not None)
    return ", ".join(f"{count:,} tensors as {encoding}" for encoding, count in counts.items())


@dataclass(frozen=True)
class Decoded:
    """What tensors as files have them stand for.

    Attributes:
        tensors: those that a model knows, by their names there.
        left_out: scales of activations, which only say how these were to be rounded.
        problems: what is wrong, by the name of the tensor.
    """

    tensors: dict[str, DiskTensor] = field(default_factory=dict)
    left_out: list[DiskTensor] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def decoded(stored: Mapping[str, StoredTensor], quantization: Any, transposed: bool) -> Decoded:
    """What tensors of these headers stand for.

    Args:
        stored: by name.
        quantization: `quantization_config` of config.json, which tells the size of blocks where the last are not full.
        transposed: whether the model's experts hold the transposes of their matrices, as what MXFP4 is made of does.
    """
    found = Decoded()
    kinds = {name: _kind_of(name, stored, quantization) for name in stored}
    taken = {scales for _, scales in filter(None, kinds.values())}
    for name, part in stored.items():
        if name in taken:
            continue
        kind = kinds[name]
        plain = DiskTensor(name, part.shape, part.dtype, parts=(part,))
        if name.endswith(("activation_scale", "input_scale")):
            found.left_out.append(plain)
        elif kind is not None:
            codes, scales = kind[0], stored.get(kind[1])
            try:
                if scales is None:
                    raise UnreadableError(part, f"has dtype {part.dtype}, but its scales {kind[1]} are missing")
                if len(part.shape) < 2 or 0 in part.shape:
                    raise UnreadableError(part, f"has dtype {part.dtype} and shape {list(part.shape)}: not a matrix")
                matrix = codes.read(part, scales, quantization, transposed)
            except UnreadableError as error:
                found.problems[error.tensor] = str(error)
                continue
            encoding = Encoding(codes.name, matrix.block, scales.dtype, matrix.transposed)
            found.tensors[matrix.name] = DiskTensor(
                matrix.name, matrix.shape, WIDE, parts=(part, scales), encoding=encoding
            )
        elif any(codes.is_scales(part) for codes in CODES.values()):
            found.problems[name] = (
                f"tensor {name} ({part.file.name}) has scales of a tensor that is missing, or not quantized"
            )
        else:
            found.tensors[name] = plain
    return found


def _kind_of(name: str, stored: Mapping[str, StoredTensor], quantization: Any) -> tuple[Codes, str] | None:
    """The kind of a tensor's codes, and the name of their scales; None: it has no codes."""
    for kind in reversed(CODES.values()):
        scales = kind.scales_name(name, stored, quantization)
        if scales is not None:
            return kind, scales
    return None


def unpack(packed: Array, encoding: Encoding) -> Array:
    """Codes, one per byte, from rows of bytes as they are stored."""
    if encoding.kind.codes_a_byte == 1:
        return packed
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 0xF, packed >> 4
    return codes


def pack_codes(codes: Array, encoding: Encoding) -> Array:
    """Rows of bytes as they are stored, from codes, one per byte."""
    return codes if encoding.kind.codes_a_byte == 1 else codes[:, 0::2] | (codes[:, 1::2] << 4)


def scale_values(stored: Array, dtype: str) -> Any:
    """Scales as an fp32 tensor, from bytes (rows, columns · bytes a scale) as they are stored."""
    import torch

    scales = torch.from_numpy(np.ascontiguousarray(stored))
    if dtype in EXPONENTS:
        # 255 stands for no number in either, and 2^(255 - 127) is infinite
        return (scales.float() - 127.0).exp2()
    return scales.view(torch_dtype(dtype)).float()


def dequantize_array(codes: Array, scales: Any, encoding: Encoding, first: tuple[int, int]) -> Array:
    """Dequantize: values, in bfloat16's bits, from codes, one per byte.

    Args:
        codes: a rectangle of the matrix of codes.
        scales: from `scale_values`, of all blocks that the rectangle has a part in, and no others.
        first: row and column of the rectangle's first code in the matrix.
    """
    import torch

    (block_rows, block_columns), (rows, columns) = encoding.block, codes.shape
    values = encoding.kind.values(torch.from_numpy(np.ascontiguousarray(codes)))
    block_of_row = torch.arange(first[0], first[0] + rows) // block_rows - first[0] // block_rows
    begin = first[1] % block_columns
    by_row = scales[block_of_row].repeat_interleave(block_columns, dim=1)[:, begin : begin + columns]
    return as_array(values.mul_(by_row).to(torch.bfloat16))


def encode(values_RC: Tensor, encoding: Encoding, quantization: Any) -> tuple[Array, Array]:
    """Quantize: (codes (R, C), one per byte; bytes of the scales (r, c · bytes per scale)), as they lie in a file.

    Args:
        values_RC: complete blocks, but for the last of each dim; finite, of any floating-point dtype.
        quantization: `quantization_config` of config.json.
    """
    import torch

    assert encoding.has_encoder, encoding
    codes_RC, scales_rc = encoding.kind.encode(values_RC.float(), encoding.block, encoding.scale_dtype, quantization)
    if encoding.scale_dtype in EXPONENTS:
        return codes_RC.numpy(), (scales_rc.view(torch.int32) >> 23).to(torch.uint8).numpy()
    stored = scales_rc.to(torch_dtype(encoding.scale_dtype)).contiguous()
    return codes_RC.numpy(), np.ascontiguousarray(stored.view(torch.uint8).numpy())


def runs_of_rows(rows: range, columns: int) -> Iterator[range]:
    """Runs of rows of bounded size, each to be dequantized by itself."""
    step = max(1, 2**20 // max(1, columns))
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))


@dataclass
class Errors:
    """What encoding has changed, of one tensor or of all of a kind.

    Attributes:
        kind: the tensors' name without the numbers of layer and expert.
        blocks: all of them. encoded: those that were quantized anew, of which alone the others speak.
        largest: error, relative to the largest value of its block.
        squares_of_errors, squares: sums over values.
    """

    kind: str
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
            return f"{self.kind}: as in the source, bit for bit"
        share = "all" if self.encoded == self.blocks else f"{self.encoded:,} of {self.blocks:,}"
        root = sqrt(self.squares_of_errors / self.squares) if self.squares else 0.0
        return (
            f"{self.kind}: {share} blocks quantized anew: error at most {self.largest:.2%} of a block's largest value, "
            f"root mean square {root:.2%} of the values'"
        )


def kind_of(name: str) -> str:
    """A tensor's name without the numbers of its layer and expert."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def error_lines(errors: Iterable[Errors | None]) -> list[str]:
    """What to tell of an export: a line for each kind of tensor."""
    kinds: dict[str, Errors] = {}
    for each in errors:
        if each is not None:
            kinds.setdefault(each.kind, Errors(each.kind)).add(each)
    return [str(total) for total in kinds.values()]
