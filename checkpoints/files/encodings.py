"""Quantized tensors: codes, and in a tensor beside them a scale per block.

    of       codes                               scales
    FP8      NAME: F8_E4M3 or F8_E5M2            NAME_scale_inv; of X.weight also X.scale or X.qscale_weight
    FP4      NAME: I8, two E2M1 a byte           the same
    MXFP4    NAME_blocks: U8, 16 bytes a group   NAME_scales: U8, exponents

Here the headers of files become those of the tensors that a model knows, and codes are dequantized to bfloat16, as
transformers does (`Fp8Dequantize`, `convert_moe_packed_tensors`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ...moe.util.errors import ExpertMeshError
from .dtypes import CODE_NAMES, Array, as_array, torch_dtype

Codes = Literal["F8_E4M3", "F8_E5M2", "E2M1"]
WIDE = "BF16"
"""What codes are dequantized to."""
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes of four bits stand for, without the sign."""
_NAMES = {**CODE_NAMES, "E2M1": "float4_e2m1"}
_GROUP_BYTES = 16
"""Bytes of a group of MXFP4: 32 values share a scale."""


_QUANTIZATION = "quantization_config"
_METHODS = ("fp8", "mxfp4")


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
    if method not in _METHODS:
        raise ExpertMeshError(
            f"{file}: {_QUANTIZATION} says that tensors are quantized by {method!r:.80}; what can be read is "
            f"{' or '.join(_METHODS)}, and what is not quantized: take a release of this model in bfloat16, or one of "
            "these, and quantize it with --base-dtype"
        )


@dataclass(frozen=True)
class Encoding:
    """How the values of a matrix are stored: a code times the scale of its block.

    Attributes:
        codes: floats of 8 bits, or of 4 (E2M1), two of which stand in a byte, the first in its low half.
        block: (rows, columns) of the matrix of codes that share a scale. The last of a dim may have fewer.
        scale_dtype: of the scales. A byte (U8, F8_E8M0) stands for 2^(byte - 127).
        transposed: whether the matrix of codes is the transpose of the one that a model knows.
    """

    codes: Codes
    block: tuple[int, int]
    scale_dtype: str
    transposed: bool = False

    @property
    def codes_a_byte(self) -> int:
        return 2 if self.codes == "E2M1" else 1

    @property
    def stored_dtype(self) -> str:
        """The dtype of the codes, where this project writes them."""
        return "U8" if self.codes == "E2M1" else self.codes

    def turned(self) -> "Encoding":
        """The encoding of the transposed matrix of codes."""
        return replace(self, block=(self.block[1], self.block[0]), transposed=not self.transposed)

    def num_scales(self, matrix: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of scales of a matrix of codes."""
        (rows, columns), (block_rows, block_columns) = matrix, self.block
        return -(-rows // block_rows), -(-columns // block_columns)

    def __str__(self) -> str:
        scales = "exponents" if self.scale_dtype in ("U8", "F8_E8M0") else "scales"
        return f"{_NAMES[self.codes]} with {scales} per block of {self.block[0]} x {self.block[1]}"


@dataclass(frozen=True)
class Scales:
    """The tensor of an encoded one's scales; a matrix, or a stack of them as the codes are."""

    name: str
    file: str
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
            parts = (name if name in stored else f"{name}_blocks", scales.name)
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
    scales_of = {name: _scales_name(name, info, infos) for name, info in infos.items()}
    taken = set(scales_of.values())
    for name, info in infos.items():
        if name in taken:
            continue
        if name.endswith(("activation_scale", "input_scale")):
            found.left_out.append(name)
        elif info.dtype in get_args(Codes) or (info.dtype == "I8" and scales_of[name] in infos):
            _add_matrix(name, scales_of[name], infos, quantization, found)
        elif info.dtype == "U8" and name.endswith("_blocks"):
            _add_groups(name, scales_of[name], infos, transposed, found)
        elif name.endswith("_scale_inv") or (info.dtype == "U8" and name.endswith("_scales")):
            found.problems[name] = (
                f"tensor {name} ({info.file}) has scales of a tensor that is missing, or not quantized"
            )
        else:
            found.infos[name] = info
    return found


def _scales_name(name: str, info: TensorInfo, infos: Mapping[str, TensorInfo]) -> str:
    """Name of the tensor that holds a tensor's scales, should it have any; what it would be called if it is not
    there."""
    if info.dtype == "U8" and name.endswith("_blocks"):
        return name.removesuffix("_blocks") + "_scales"
    if info.dtype not in (*get_args(Codes), "I8"):
        return ""
    stem = name.removesuffix("weight")
    others = (f"{stem}scale", f"{stem}qscale_weight") if name.endswith(".weight") else ()
    return next((other for other in others if other in infos), f"{name}_scale_inv")


def _add_matrix(
    name: str,
    scales_name: str,
    infos: Mapping[str, TensorInfo],
    quantization: Any,
    found: Decoded,
) -> None:
    info, scales = infos[name], infos.get(scales_name)
    if scales is None:
        found.problems[name] = (
            f"tensor {name} ({info.file}) has dtype {info.dtype}, but its scales {scales_name} are missing"
        )
        return
    if len(info.shape) < 2 or 0 in info.shape:
        found.problems[name] = (
            f"tensor {name} ({info.file}) has dtype {info.dtype} and shape {list(info.shape)}: no matrix"
        )
        return
    codes: Any = "E2M1" if info.dtype == "I8" else info.dtype
    shape = (*info.shape[:-1], info.shape[-1] * (2 if codes == "E2M1" else 1))
    block = _block(shape, scales.shape, None if codes == "E2M1" else _said_block(quantization))
    if scales.dtype not in SCALE_DTYPES:
        found.problems[scales_name] = _wrong_dtype(scales_name, scales)
    elif block is None:
        found.problems[scales_name] = (
            f"tensor {scales_name} ({scales.file}) has shape {list(scales.shape)}, which is not that of one scale "
            f"per block of {name}, {list(shape)}"
        )
    else:
        encoding = Encoding(codes, block, scales.dtype)
        found.infos[name] = TensorInfo(
            info.file, shape, WIDE, info.offset, encoding, Scales(scales_name, scales.file, scales.offset)
        )


def _block(shape: tuple[int, ...], scales: tuple[int, ...], said: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns that share a scale: as is said, if the scales are as many as that makes; where nothing is said,
    as they divide the matrix evenly."""
    rows, columns = shape[-2:]
    if len(shape) == 2 and scales in ((), (1,), (1, 1)):
        return rows, columns
    if len(scales) != len(shape) or scales[:-2] != shape[:-2] or 0 in scales:
        return None
    if said is not None:
        return said if scales[-2:] == (-(-rows // said[0]), -(-columns // said[1])) else None
    if rows % scales[-2] == 0 and columns % scales[-1] == 0:
        return rows // scales[-2], columns // scales[-1]
    return None


def _said_block(quantization: Any) -> tuple[int, int] | None:
    """What config.json says of the blocks of floats of 8 bits."""
    said = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if isinstance(said, list) and len(said) == 2 and all(type(size) is int and 0 < size < 2**31 for size in said):
        return said[0], said[1]
    return None


def _add_groups(name: str, scales_name: str, infos: Mapping[str, TensorInfo], transposed: bool, found: Decoded) -> None:
    info, scales = infos[name], infos.get(scales_name)
    if scales is None:
        found.problems[name] = f"tensor {name} ({info.file}) has no scales: {scales_name} is missing"
    elif len(info.shape) < 3 or info.shape[-1] != _GROUP_BYTES:
        found.problems[name] = (
            f"tensor {name} ({info.file}) has shape {list(info.shape)}; of MXFP4 the last size is {_GROUP_BYTES}"
        )
    elif scales.dtype != "U8":
        found.problems[scales_name] = _wrong_dtype(scales_name, scales)
    elif scales.shape != info.shape[:-1]:
        found.problems[scales_name] = (
            f"tensor {scales_name} ({scales.file}) has shape {list(scales.shape)}; its blocks ask for "
            f"{list(info.shape[:-1])}"
        )
    else:
        *stack, rows, groups, _ = info.shape
        matrix = (groups * 2 * _GROUP_BYTES, rows) if transposed else (rows, groups * 2 * _GROUP_BYTES)
        encoding = Encoding("E2M1", (1, 2 * _GROUP_BYTES), "U8", transposed)
        found.infos[name.removesuffix("_blocks")] = TensorInfo(
            info.file, (*stack, *matrix), WIDE, info.offset, encoding, Scales(scales_name, scales.file, scales.offset)
        )


def _wrong_dtype(name: str, info: TensorInfo) -> str:
    return f"tensor {name} ({info.file}) has dtype {info.dtype}; scales have one of {', '.join(SCALE_DTYPES)}"


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
    if dtype in ("U8", "F8_E8M0"):
        # 255 stands for no number in either, and 2^(255 - 127) is infinite
        return (scales.float() - 127.0).exp2()
    return scales.view(torch_dtype(dtype)).float()


def widen(codes: Array, scales: Any, encoding: Encoding, first: tuple[int, int]) -> Array:
    """Dequantize: values, in bfloat16's bits, from codes, one per byte.

    Args:
        codes: a rectangle of the matrix of codes.
        scales: from `scale_values`, of all blocks that the rectangle has a part in, and no others.
        first: row and column of the rectangle's first code in the matrix.
    """
    import torch

    (block_rows, block_columns), (rows, columns) = encoding.block, codes.shape
    tensor = torch.from_numpy(np.ascontiguousarray(codes))
    if encoding.codes == "E2M1":
        values = torch.tensor([*E2M1, *(-value for value in E2M1)])[tensor.int()]
    else:
        values = tensor.view(getattr(torch, f"{_NAMES[encoding.codes]}{'fn' if encoding.codes == 'F8_E4M3' else ''}"))
        values = values.float()
    block_of_row = torch.arange(first[0], first[0] + rows) // block_rows - first[0] // block_rows
    begin = first[1] % block_columns
    by_row = scales[block_of_row].repeat_interleave(block_columns, dim=1)[:, begin : begin + columns]
    return as_array(values.mul_(by_row).to(torch.bfloat16))


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
