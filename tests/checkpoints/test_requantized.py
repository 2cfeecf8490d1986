"""Blocks that are quantized anew, and those whose bytes stay: `requantize`, against counts by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from expertmesh.checkpoints.files.encodings import encode
from expertmesh.checkpoints.files.tensors import Encoding
from expertmesh.checkpoints.hf.requantized import requantize

FP8 = Encoding("F8_E4M3", (4, 4), "F32")


def bits(values_RC: torch.Tensor) -> Any:
    """As an export in bfloat16 holds them."""
    return values_RC.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)


def values_of(codes: Any, scales: Any) -> torch.Tensor:
    """By torch's own fp8: each code times the scale of its block of 4 by 4."""
    wide = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float()
    scale_rc = torch.from_numpy(scales.copy()).view(torch.float32)
    return wide * scale_rc.repeat_interleave(4, 0).repeat_interleave(4, 1)[: len(wide), : wide.shape[1]]


@pytest.fixture
def original() -> tuple[Any, Any]:
    """6 rows of 8: the last blocks have 2 rows. In codes that no encoder would choose: half the codes, twice the
    scales."""
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    codes, scales = encode(weight, FP8, None)
    doubled = torch.from_numpy(scales.copy()).view(torch.float32) * 2
    halves = (torch.from_numpy(codes).view(torch.float8_e4m3fn).float() / 2).to(torch.float8_e4m3fn)
    return halves.view(torch.uint8).numpy(), doubled.view(torch.uint8).numpy()


def test_what_is_unchanged_keeps_its_bytes(original: tuple[Any, Any]) -> None:
    codes, scales, errors = requantize(bits(values_of(*original)), original, FP8, None)
    assert (codes == original[0]).all()
    assert (scales == original[1]).all()
    assert (errors.blocks, errors.encoded, errors.largest) == (4, 0, 0.0)


def test_a_changed_block_alone_is_quantized_anew(original: tuple[Any, Any]) -> None:
    """One value of the block of the last rows and columns."""
    changed = values_of(*original)
    changed[5, 6] *= 3
    codes, scales, errors = requantize(bits(changed), original, FP8, None)
    anew, new_scales = encode(changed.bfloat16().float()[4:, 4:], FP8, None)
    assert (codes[4:, 4:] == anew).all()
    assert (scales[1, 4:] == new_scales[0]).all()
    assert (codes[4:, 4:] != original[0][4:, 4:]).any()
    assert (codes[:4] == original[0][:4]).all()
    assert (codes[4:, :4] == original[0][4:, :4]).all()
    assert (scales[0] == original[1][0]).all()
    assert (scales[1, :4] == original[1][1, :4]).all()
    assert (errors.blocks, errors.encoded) == (4, 1)
    # what the numbers say is by how much the block is off
    wanted = changed.bfloat16().float()[4:, 4:]
    off = (values_of(codes, scales).bfloat16().float()[4:, 4:] - wanted).abs()
    assert errors.largest == pytest.approx(float(off.max() / wanted.abs().max()))
    assert 0 < errors.largest < 1 / 16


def test_without_an_original_all_is_quantized() -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    codes, scales, errors = requantize(bits(weight), None, FP8, None)
    expected = encode(weight, FP8, None)
    assert (codes == expected[0]).all()
    assert (scales.reshape(-1) == expected[1].reshape(-1)).all()
    assert (errors.blocks, errors.encoded) == (4, 4)
