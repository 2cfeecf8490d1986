"""The ways in which published checkpoints store quantized matrices: one class for each kind of codes, which says how
its tensors are known, what its codes stand for, and how values are quantized again.

A kind of your own is one call of `register_codes`; docs/how-to/extend.md has an example.

Shape suffixes: R rows, C columns of a matrix of codes; r, c of its blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ...moe.util.entry_checks import check_value, hints_of
from .dtype_names import CODE_NAMES
from .dtypes import torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from .tensors import StoredTensor

SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
EXPONENTS = ("U8", "F8_E8M0")
"""Dtypes of scales that are powers of two: a byte stands for 2^(byte - 127)."""


class UnreadableError(Exception):
    """Tensors that are known as codes and scales, and are none that can be read: the tensor at fault, and why."""

    def __init__(self, tensor: StoredTensor, why: str):
        super().__init__(f"tensor {tensor.name} ({tensor.file.name}) {why}")
        self.tensor = tensor.name


class CodedMatrix(NamedTuple):
    """What a tensor of codes stands for.

    name: of the tensor that a model knows. shape: of it, perhaps a stack of matrices. block: (rows, columns) of the
    matrix of codes that share a scale. transposed: whether that is the transpose of the matrix that a model knows.
    """

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    transposed: bool = False


class Codes(ABC):
    """A kind of codes. A value is what its code stands for, times the scale of its block, in bfloat16.

    Attributes:
        name: in manifests of EP shards. label: in messages.
        stored_dtype: of a tensor of codes, where this project writes one: a byte each.
        codes_a_byte: 1; or 2, the first in the low half.
        quant_methods: what `quant_method` of a config.json's `quantization_config` may say.
        stored_as, encoder: for people: the tensors, and whose rounding `encode` follows, if it is there.
    """

    name: str
    label: str
    stored_dtype: str
    codes_a_byte: int
    quant_methods: tuple[str, ...]
    stored_as: str
    encoder: str

    @abstractmethod
    def scales_name(self, name: str, stored: Mapping[str, StoredTensor], quantization: Any) -> str | None:
        """The name of the tensor with a tensor's scales, which may be missing; None: it has no such codes.

        Args:
            stored: all tensors as the files have them. quantization: `quantization_config` of config.json.
        """

    @abstractmethod
    def is_scales(self, tensor: StoredTensor) -> bool:
        """Whether a tensor can only be scales of such codes, so that these are missing where it is not theirs."""

    @abstractmethod
    def read(self, codes: StoredTensor, scales: StoredTensor, quantization: Any, turned: bool) -> CodedMatrix:
        """What a tensor of codes stands for.

        Args:
            codes: a matrix, or a stack of them. turned: whether the model's experts hold the transposes of theirs.

        Raises:
            UnreadableError: codes and scales do not fit one another.
        """

    @abstractmethod
    def values(self, codes: Tensor) -> Tensor:
        """What codes, one per byte, stand for, in fp32."""

    @abstractmethod
    def has_encoder(self, block: tuple[int, int], scale_dtype: str) -> bool:
        """Whether it is published how values are quantized."""

    @abstractmethod
    def encode(
        self, values_RC: Tensor, block: tuple[int, int], scale_dtype: str, quantization: Any
    ) -> tuple[Tensor, Tensor]:
        """(codes (R, C), one per byte; scales (r, c), fp32) of a matrix, where `has_encoder`.

        Args:
            values_RC: fp32; complete blocks, but for the last of each dim.
        """


def by_blocks(values_RC: Tensor, block: tuple[int, int]) -> Tensor:
    """(r, block's rows, c, block's columns), with zeros where the last blocks are not full."""
    import torch

    (rows, columns), (block_rows, block_columns) = values_RC.shape, block
    padding = (0, -columns % block_columns, 0, -rows % block_rows)
    if any(padding):
        values_RC = torch.nn.functional.pad(values_RC, padding)
    return values_RC.unflatten(0, (-1, block_rows)).unflatten(2, (-1, block_columns))


def spread(scales_rc: Tensor, block: tuple[int, int], shape: Any) -> Tensor:
    """Each block's value at each of its places: (R, C)."""
    rows, columns = shape
    wide = scales_rc.repeat_interleave(block[1], dim=1)[:, :columns]
    return wide.repeat_interleave(block[0], dim=0)[:rows]


def largest_of_blocks(values_RC: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude in each block, (r, c)."""
    return by_blocks(values_RC.abs(), block).amax(dim=(1, 3))


def blocks_of(
    codes: StoredTensor,
    scales: StoredTensor,
    size: tuple[int, int] | None = None,
    shape: tuple[int, ...] | None = None,
) -> tuple[int, int]:
    """Rows and columns of a matrix that share a scale: `size`, if the scales are as many as that makes; where it is
    None, as they divide the matrix evenly.

    Args:
        shape: of the codes, where several are a byte.

    Raises:
        UnreadableError: the scales have another dtype, or are not as many.
    """
    if scales.dtype not in SCALE_DTYPES:
        raise UnreadableError(scales, f"has dtype {scales.dtype}; scales must have one of {', '.join(SCALE_DTYPES)}")
    shape, counts = shape or codes.shape, scales.shape
    rows, columns = shape[-2:]
    if len(shape) == 2 and counts in ((), (1,), (1, 1)):
        return rows, columns
    if len(counts) == len(shape) and counts[:-2] == shape[:-2] and 0 not in counts:
        if size is not None and counts[-2:] == (-(-rows // size[0]), -(-columns // size[1])):
            return size
        if size is None and rows % counts[-2] == 0 and columns % counts[-1] == 0:
            return rows // counts[-2], columns // counts[-1]
    raise UnreadableError(scales, f"has shape {list(counts)}; one scale per block of {codes.name} needs {list(shape)}")


def _configured_block(quantization: Any) -> tuple[int, int] | None:
    """What config.json says of the blocks of floats of 8 bits."""
    size = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if isinstance(size, list) and len(size) == 2 and all(type(part) is int and 0 < part < 2**31 for part in size):
        return size[0], size[1]
    return None


def _scale_beside(name: str, stored: Mapping[str, StoredTensor]) -> str:
    """The scales of a tensor in FP8, and of FP4 in the same form; what they would be called if they are not there."""
    stem = name.removesuffix("weight")
    others = (f"{stem}scale", f"{stem}qscale_weight") if name.endswith(".weight") else ()
    return next((other for other in others if other in stored), f"{name}_scale_inv")


class Float8(Codes):
    """Floats of 8 bits, E4M3 or E5M2. An encoder is published for E4M3: transformers' `Fp8Quantize`
    (`integrations/finegrained_fp8.py`), by which a block's largest value becomes 448, and codes are rounded to the
    nearest, ties to even, of values times 1 / scale; scales that are powers of two are rounded up, as there and in
    DeepSeek's and DeepGEMM's (`ceil_to_ue8m0`)."""

    codes_a_byte = 1
    quant_methods = ("fp8",)
    stored_as = (
        "codes `NAME`; `NAME_scale_inv`, of `X.weight` also `X.scale` or `X.qscale_weight`, per block of "
        "`weight_block_size`, or one for the matrix"
    )
    largest = 448.0

    def __init__(self, name: str, encoder: str):
        self.name = self.stored_dtype = name
        self.label = CODE_NAMES[name]
        self.encoder = encoder

    def scales_name(self, name: str, stored: Mapping[str, StoredTensor], quantization: Any) -> str | None:
        return _scale_beside(name, stored) if stored[name].dtype == self.name else None

    def is_scales(self, tensor: StoredTensor) -> bool:
        return tensor.name.endswith("_scale_inv")

    def read(self, codes: StoredTensor, scales: StoredTensor, quantization: Any, turned: bool) -> CodedMatrix:
        return CodedMatrix(codes.name, codes.shape, blocks_of(codes, scales, _configured_block(quantization)))

    def values(self, codes: Tensor) -> Tensor:
        import torch

        return codes.view(torch.float8_e4m3fn if self.name == "F8_E4M3" else torch.float8_e5m2).float()

    def has_encoder(self, block: tuple[int, int], scale_dtype: str) -> bool:
        return self.name == "F8_E4M3"

    def encode(
        self, values_RC: Tensor, block: tuple[int, int], scale_dtype: str, quantization: Any
    ) -> tuple[Tensor, Tensor]:
        import torch

        largest_rc = largest_of_blocks(values_RC, block)
        # in the order of transformers' operations, which decides the last bit
        factors_rc = torch.where(largest_rc > 0, self.largest / torch.where(largest_rc > 0, largest_rc, 1.0), 1.0)
        scales_rc = 1.0 / factors_rc
        # powers of two may be stored in a dtype that could hold others
        is_power = isinstance(quantization, dict) and quantization.get("scale_fmt") == "ue8m0"
        if is_power or scale_dtype in EXPONENTS:
            scales_rc = scales_rc.clamp(min=torch.finfo(torch.float32).tiny).log2().ceil().exp2()
            factors_rc = 1.0 / scales_rc
        elif scale_dtype != "F32":
            # codes belong to the scale that is stored
            scales_rc = scales_rc.to(torch_dtype(scale_dtype)).float()
            factors_rc = 1.0 / scales_rc
        scaled_RC = values_RC * spread(factors_rc, block, values_RC.shape)
        codes_RC = scaled_RC.clamp(-self.largest, self.largest).to(torch.float8_e4m3fn).view(torch.uint8)
        return codes_RC, scales_rc


class Float4(Codes):
    """Floats of 4 bits, E2M1: MXFP4, or in the form of FP8. An encoder is published for exponents per 32 values:
    `downcast_to_mxfp_torch` of triton_kernels (`numerics_details/mxfp.py`), which transformers calls: the least power
    of two that makes no value larger than 6; codes to the nearest, ties away from zero."""

    name = "E2M1"
    label = "float4_e2m1"
    stored_dtype = "U8"
    codes_a_byte = 2
    quant_methods = ("fp8", "mxfp4")
    stored_as = (
        "MXFP4: codes `NAME_blocks`, 16 bytes for 32 values, and `NAME_scales`, exponents; or as FP8 has its tensors, "
        "codes in I8"
    )
    encoder = "triton_kernels' `downcast_to_mxfp`, for exponents per 32 values"

    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    """What the codes stand for, without the sign."""
    group_bytes = 16
    """Of MXFP4: 32 values share a scale."""

    def scales_name(self, name: str, stored: Mapping[str, StoredTensor], quantization: Any) -> str | None:
        if stored[name].dtype == "U8" and name.endswith("_blocks"):
            return name.removesuffix("_blocks") + "_scales"
        scales = _scale_beside(name, stored)
        return scales if stored[name].dtype == "I8" and scales in stored else None

    def is_scales(self, tensor: StoredTensor) -> bool:
        return tensor.name.endswith("_scale_inv") or (tensor.dtype == "U8" and tensor.name.endswith("_scales"))

    def read(self, codes: StoredTensor, scales: StoredTensor, quantization: Any, turned: bool) -> CodedMatrix:
        if codes.dtype == "I8":
            shape = (*codes.shape[:-1], 2 * codes.shape[-1])
            return CodedMatrix(codes.name, shape, blocks_of(codes, scales, shape=shape))
        if len(codes.shape) < 3 or codes.shape[-1] != self.group_bytes:
            raise UnreadableError(codes, f"has shape {list(codes.shape)}; of MXFP4 the last size is {self.group_bytes}")
        if scales.dtype != "U8":
            raise UnreadableError(scales, f"has dtype {scales.dtype}; scales have U8 in MXFP4")
        if scales.shape != codes.shape[:-1]:
            raise UnreadableError(scales, f"has shape {list(scales.shape)}; its blocks need {list(codes.shape[:-1])}")
        *stack, rows, groups, _ = codes.shape
        columns = groups * 2 * self.group_bytes
        shape = (*stack, columns, rows) if turned else (*stack, rows, columns)
        return CodedMatrix(codes.name.removesuffix("_blocks"), shape, (1, 2 * self.group_bytes), turned)

    def values(self, codes: Tensor) -> Tensor:
        import torch

        return torch.tensor([*self.magnitudes, *(-value for value in self.magnitudes)])[codes.int()]

    def has_encoder(self, block: tuple[int, int], scale_dtype: str) -> bool:
        return block == (1, 2 * self.group_bytes) and scale_dtype in EXPONENTS

    def encode(
        self, values_RC: Tensor, block: tuple[int, int], scale_dtype: str, quantization: Any
    ) -> tuple[Tensor, Tensor]:
        import torch

        # the least powers of two that are not smaller; 0 of 0
        wanted_rc = largest_of_blocks(values_RC, block) / self.magnitudes[-1]
        scales_rc = ((wanted_rc.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)
        factors_rc = torch.where(scales_rc == 0, 0.0, 1.0 / scales_rc)
        scaled_RC = values_RC * spread(factors_rc, block, values_RC.shape)
        # between two values; what is as large is rounded to the larger
        ties = torch.tensor([(low + high) / 2 for low, high in pairwise(self.magnitudes)])
        codes_RC = torch.bucketize(scaled_RC.abs(), ties, right=True).to(torch.uint8)
        # 8 is the sign, as it is of -0
        return codes_RC + 8 * torch.signbit(scaled_RC).to(torch.uint8), scales_rc


CODES: dict[str, Codes] = {
    kind.name: kind for kind in (Float8("F8_E4M3", "transformers' `Fp8Quantize`"), Float8("F8_E5M2", ""), Float4())
}
"""By name."""


def register_codes(added: Codes) -> None:
    """Read, and export, checkpoints that are quantized in one more way. Kinds that are registered later are asked
    first whether a tensor has their codes.

    Raises:
        ValueError: its name is taken, it lacks an attribute, or no file can have its codes.
    """
    if not isinstance(added, Codes):
        raise ValueError(f"register_codes: {added!r:.80} is no object of a class made of Codes")
    if added.name in CODES:
        raise ValueError(f"register_codes: there are codes {added.name!r} already")
    for attribute in ("label", "stored_dtype", "codes_a_byte", "quant_methods", "stored_as", "encoder"):
        if not hasattr(added, attribute):
            raise ValueError(f"register_codes: the codes {added.name!r} have no {attribute}")
    for attribute, hint in hints_of(Codes).items():
        check_value(f"register_codes: the codes {added.name!r}", attribute, getattr(added, attribute), hint)
    if added.stored_dtype not in CODE_NAMES or added.codes_a_byte not in (1, 2):
        raise ValueError(
            f"register_codes: the codes {added.name!r} are {added.codes_a_byte} a byte of {added.stored_dtype}; what "
            f"can be read is 1 or 2, of {', '.join(CODE_NAMES)}"
        )
    CODES[added.name] = added


def quant_methods() -> list[str]:
    """What a config.json may say of how tensors are stored."""
    return sorted({method for kind in CODES.values() for method in kind.quant_methods})
