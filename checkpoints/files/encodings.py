"""Quantized tensors: codes, and in a tensor beside them a scale per block.

Here the headers of files become those of the tensors that a model knows, and codes are dequantized to bfloat16, as
transformers does (`Fp8Dequantize`, `convert_moe_packed_tensors`), and values quantized. What codes there are, and how
files have them, is in `codes.py`.

Shape suffixes: R rows, C columns of a matrix of codes; r, c of its blocks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...moe.util.errors import ExpertMeshError
from .codes import CODES, EXPONENTS, Codes, UnreadableError, quant_methods
from .dtypes import Array, as_array, torch_dtype

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
            f"{file}: {_QUANTIZATION} says that tensors are quantized by {method!r:.80}; what can be read is "
            f"{' or '.join(quant_methods())}, and what is not quantized: take a release of this model in bfloat16, or "
            "one of these, and quantize it with --base-dtype"
        )


@dataclass(frozen=True)
class Encoding:
    """How the values of a matrix are stored: a code times the scale of its block.

    Attributes:
        codes: the name of their kind, in CODES.
        block: (rows, columns) of the matrix of codes that share a scale. The last of a dim may have fewer.
        scale_dtype: of the scales. A byte (U8, F8_E8M0) stands for 2^(byte - 127).
        transposed: whether the matrix of codes is the transpose of the one that a model knows.
    """

    codes: str
    block: tuple[int, int]
    scale_dtype: str
    transposed: bool = False

    @property
    def kind(self) -> Codes:
        return CODES[self.codes]

    @property
    def codes_a_byte(self) -> int:
        return self.kind.codes_a_byte

    @property
    def stored_dtype(self) -> str:
        """The dtype of the codes, where this project writes them."""
        return self.kind.stored_dtype

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder of this encoding is published: else it can be read, and not written."""
        return self.kind.has_encoder(self.block, self.scale_dtype)

    def turned(self) -> "Encoding":
        """The encoding of the transposed matrix of codes."""
        return replace(self, block=(self.block[1], self.block[0]), transposed=not self.transposed)

    def num_scales(self, matrix: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of scales of a matrix of codes."""
        (rows, columns), (block_rows, block_columns) = matrix, self.block
        return -(-rows // block_rows), -(-columns // block_columns)

    def __str__(self) -> str:
        scales = "exponents" if self.scale_dtype in EXPONENTS else "scales"
        return f"{self.kind.label} with {scales} per block of {self.block[0]} x {self.block[1]}"


@dataclass(frozen=True)
class Scales:
    """The tensor of an encoded one's scales; a matrix, or a stack of them as the codes are. codes: the name of the
    tensor with these."""

    name: str
    file: str
    codes: str
    offset: int = field(default=0, compare=False)


@dataclass(frozen=True)
class TensorInfo:
    """What a tensor is and where it lies.

    Attributes:
        shape, dtype: of an encoded one, those of the values that it stands for.
        offset: of its first byte, or its codes' first, in the file, if that is a safetensors file.
        encoding, scales: of an encoded one.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = field(default=0, compare=False)
    encoding: Encoding | None = None
    scales: Scales | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The files in which it lies, its scales included."""
        return (self.file,) if self.scales is None else (self.file, self.scales.file)

    @property
    def encoded(self) -> tuple[Encoding, Scales]:
        """Encoding and scales of an encoded tensor."""
        assert self.encoding is not None
        assert self.scales is not None
        return self.encoding, self.scales

    def code_matrix(self) -> tuple[int, int]:
        """(rows, columns) of codes, in each matrix of an encoded one."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.encoded[0].transposed else (rows, columns)


@dataclass(frozen=True)
class StoredForm:
    """How an encoded tensor is stored.

    Attributes:
        info: what it stands for.
        parts: codes and then scales, by name, with the shapes and dtypes that a Hugging Face directory has.
    """

    info: TensorInfo
    parts: dict[str, TensorInfo]


def stored_forms(infos: Mapping[str, TensorInfo], stored: Mapping[str, TensorInfo]) -> dict[str, StoredForm]:
    """Of the encoded ones among `infos`, by name.

    Args:
        stored: all tensors as the files have them.
    """
    forms = {}
    for name, info in infos.items():
        if info.encoding is not None:
            _, scales = info.encoded
            parts = (scales.codes, scales.name)
            forms[name] = StoredForm(info, {part: stored[part] for part in parts})
    return forms


def encodings_in(forms: Iterable[StoredForm]) -> str:
    """How many tensors have which encoding, as in "33 tensors as float8_e4m3 with scales per block of 128 x 128"."""
    counts = Counter(str(form.info.encoding) for form in forms)
    return ", ".join(f"{count:,} tensors as {encoding}" for encoding, count in counts.items())


@dataclass(frozen=True)
class Decoded:
    """infos: of the tensors that a model knows, by their names there. left_out: names of tensors that only say how
    activations were to be rounded. problems: what is wrong, by the name of the tensor."""

    infos: dict[str, TensorInfo]
    left_out: list[str]
    problems: dict[str, str]


def decoded(infos: Mapping[str, TensorInfo], quantization: Any, transposed: bool) -> Decoded:
    """What tensors of these headers stand for.

    Args:
        infos: as the files have them.
        quantization: `quantization_config` of config.json, which tells the size of blocks where the last are not full.
        transposed: whether the model's experts hold the transposes of their matrices, as what MXFP4 is made of does.
    """
    found = Decoded({}, [], {})
    kinds = {name: _kind_of(name, infos, quantization) for name in infos}
    taken = {scales for _, scales in filter(None, kinds.values())}
    for name, info in infos.items():
        kind = kinds[name]
        if name in taken:
            continue
        if name.endswith(("activation_scale", "input_scale")):
            found.left_out.append(name)
        elif kind is not None:
            _add_matrix(name, *kind, infos, quantization, transposed, found)
        elif any(kind.is_scales(name, info) for kind in CODES.values()):
            found.problems[name] = (
                f"tensor {name} ({info.file}) has scales of a tensor that is missing, or not quantized"
            )
        else:
            found.infos[name] = info
    return found


def _kind_of(name: str, infos: Mapping[str, TensorInfo], quantization: Any) -> tuple[Codes, str] | None:
    """The kind of a tensor's codes, and the name of their scales; None: it has no codes."""
    for kind in reversed(CODES.values()):
        scales = kind.scales_name(name, infos, quantization)
        if scales is not None:
            return kind, scales
    return None


def _add_matrix(
    name: str,
    kind: Codes,
    scales_name: str,
    infos: Mapping[str, TensorInfo],
    quantization: Any,
    transposed: bool,
    found: Decoded,
) -> None:
    info, scales = infos[name], infos.get(scales_name)
    try:
        matrix = kind.read(name, info, scales_name, scales, quantization, transposed)
    except UnreadableError as error:
        found.problems[error.tensor] = str(error)
        return
    assert scales is not None
    encoding = Encoding(kind.name, matrix.block, scales.dtype, matrix.transposed)
    place = Scales(scales_name, scales.file, name, scales.offset)
    found.infos[matrix.name] = TensorInfo(info.file, matrix.shape, WIDE, info.offset, encoding, place)


def unpack(packed: Array, encoding: Encoding) -> Array:
    """Codes, one per byte, from rows of bytes as they are stored."""
    if encoding.codes_a_byte == 1:
        return packed
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 0xF, packed >> 4
    return codes


def pack(codes: Array, encoding: Encoding) -> Array:
    """Rows of bytes as they are stored, from codes, one per byte."""
    return codes if encoding.codes_a_byte == 1 else codes[:, 0::2] | (codes[:, 1::2] << 4)


def scale_values(stored: Array, dtype: str) -> Any:
    """Scales as an fp32 tensor, from bytes (rows, columns · bytes a scale) as they are stored."""
    import torch

    scales = torch.from_numpy(np.ascontiguousarray(stored))
    if dtype in EXPONENTS:
        # 255 stands for no number in either, and 2^(255 - 127) is infinite
        return (scales.float() - 127.0).exp2()
    return scales.view(torch_dtype(dtype)).float()


def dequantize(codes: Array, scales: Any, encoding: Encoding, first: tuple[int, int]) -> Array:
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


def encode(values_RC: "Tensor", encoding: Encoding, quantization: Any) -> tuple[Array, Array]:
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


def strips(rows: range, columns: int) -> Iterator[range]:
    """Runs of rows of bounded size, each to be dequantized by itself."""
    step = max(1, 2**20 // max(1, columns))
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))


def is_stored(info: TensorInfo, codes: TensorInfo | None, scales: TensorInfo | None) -> bool:
    """Whether two tensors as files have them are the codes and scales of `info`, as this project writes them."""
    if codes is None or scales is None or info.encoding is None or len(info.shape) != 2:
        return False
    rows, columns = info.shape
    stored = (rows, columns // info.encoding.codes_a_byte)
    return (
        (codes.shape, codes.dtype) == (stored, info.encoding.stored_dtype)
        and columns % info.encoding.codes_a_byte == 0
        and (scales.shape, scales.dtype) == (info.encoding.num_scales(info.shape), info.encoding.scale_dtype)
    )
