"""Checkpoints whose tensors are stored quantized, made as their publishers make them: FP8 with a scale per block of
128 x 128 (here 8 x 8), and MXFP4."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK = (8, 8)


def to_fp8(
    weight: Tensor, block: tuple[int, int] = BLOCK, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a matrix: each block's largest value becomes the largest that a code can be."""
    rows, columns = (-(-size // part) for size, part in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    codes = torch.empty(weight.shape, dtype=dtype)
    for row in range(rows):
        for column in range(columns):
            place = tuple(slice(i * size, (i + 1) * size) for i, size in zip((row, column), block, strict=True))
            part = weight[place].float()
            scales[row, column] = part.abs().max().clamp(min=1e-12) / LARGEST[dtype]
            codes[place] = (part / scales[row, column]).to(dtype)
    return codes, scales


def from_fp8(codes: Tensor, scales: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """What codes and scales stand for, in bfloat16, block by block."""
    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    for row, column in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        place = tuple(slice(i * size, (i + 1) * size) for i, size in zip((row, column), block, strict=True))
        out[place] = (codes[place].float() * scales[row, column].float()).to(torch.bfloat16)
    return out


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(blocks, scales) of (..., O, I): each 32 values along I share an exponent."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(dim=-1).clamp(min=1e-20).log2().floor() - 2).clamp(-127, 127)
    scaled = groups / exponents.exp2().unsqueeze(-1)
    nearest = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(dim=-1) + 8 * (scaled < 0)
    pairs = nearest.to(torch.uint8).unflatten(-1, (16, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4), (exponents + 127).to(torch.uint8)


def change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def save_fp8(model: Any, path: Path, pattern: str = r"\.(self_attn|mlp)\..*proj[a-z_]*\.weight$") -> None:
    """In bf16, with those matrices in FP8 whose names match. The config promises no layer for multi-token prediction:
    transformers saves none."""
    if hasattr(model.config, "num_nextn_predict_layers"):
        model.config.num_nextn_predict_layers = 0
    model.to(torch.bfloat16).save_pretrained(path)
    (file,) = path.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        tensors[name] = tensor
        if re.search(pattern, name) and tensor.dim() == 2:
            tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(tensor)
    save_file(tensors, file, {"format": "pt"})
    change_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": list(BLOCK)})


def save_mxfp4(model: Any, path: Path) -> None:
    """In bf16, with the experts' matrices in MXFP4, which has them as (O, I), perhaps a stack of them."""
    model.to(torch.bfloat16).save_pretrained(path)
    (file,) = path.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = to_mxfp4(tensor.transpose(1, 2))
        elif re.search(r"experts\.\d+\.", name):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = to_mxfp4(tensor)
        else:
            tensors[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    change_config(path, quantization_config={"quant_method": "mxfp4"})
