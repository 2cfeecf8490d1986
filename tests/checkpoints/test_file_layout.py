"""Files as checkpoints.files.file_layout plans them, as safetensors itself reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import _TYPES, load_file

from expertmesh.checkpoints.files.dtype_names import ALL_NAMES, DTYPE_BYTES
from expertmesh.checkpoints.files.file_layout import hf_index, plain_output, plan_files, plan_hf_files
from expertmesh.checkpoints.files.tensors import DiskTensor, Region

ROWS, WIDTH = 6, 4
MATRICES = {
    "as it is": [Region("a", range(ROWS))],
    "of two parameters": [Region("a", range(2, 5)), Region("b", range(1, 3), first=3)],
    "alternating": [Region("a", range(3), step=2), Region("b", range(3), first=1, step=2)],
    "transposed": [Region("a", range(ROWS), transposed=True)],
    "two matrices": [Region("a", range(3), (0,)), Region("b", range(3), (1,))],
}


def wanted(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return {
        "as it is": a,
        "of two parameters": torch.cat([a[2:5], b[1:3]]),
        "alternating": torch.stack([a[:3], b[:3]], dim=1).flatten(0, 1),
        "transposed": a.T.contiguous(),
        "two matrices": torch.stack([a[:3], b[:3]]),
    }[name]


@pytest.mark.parametrize("size", [10**6, 100, 1])
def test_files_hold_what_was_planned(tmp_path: Path, size: int) -> None:
    values = {"a": torch.arange(24.0).view(ROWS, WIDTH), "b": -torch.arange(24.0).view(ROWS, WIDTH)}
    expected = {name: wanted(name, **values) for name in MATRICES}
    outputs = [plain_output(DiskTensor(n, tuple(t.shape), "F32", tuple(MATRICES[n]))) for n, t in expected.items()]
    files = plan_hf_files(outputs, size)
    found: dict[str, torch.Tensor] = {}
    for file in files:
        data = file.header
        for output in file.tensors:
            for strip in output.strips():
                parts = [np.asarray(values[region.parameter])[rows.start : rows.stop] for region, rows in strip.parts]
                data += b"".join(part.tobytes() for part, _ in output.content(strip, parts))
        assert len(data) == len(file.header) + file.num_bytes
        assert file.num_bytes <= size or len(file.tensors) == 1
        (tmp_path / file.name).write_bytes(data)
        found |= load_file(tmp_path / file.name)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert (len(files) == 1) == (files[0].name == "model.safetensors") == (size == 10**6)
    assert all(output.part.name in hf_index(files) for output in outputs)
    assert [file.name for file in plan_files(outputs, 10**6, "x")] == ["x-00001-of-00001.safetensors"]


def test_dtypes_are_those_of_safetensors() -> None:
    known = ALL_NAMES.keys() & _TYPES.keys()  # the newest codes are not in each version's table
    assert known > {"F32", "BF16", "F8_E4M3", "U8"}
    for code in known:
        dtype: Any = _TYPES[code]
        assert str(dtype).startswith(f"torch.{ALL_NAMES[code]}")
        assert dtype.itemsize == DTYPE_BYTES[code]
