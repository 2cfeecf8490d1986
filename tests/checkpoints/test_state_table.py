"""Rows of tensors that `torch.distributed.checkpoint` has saved: those of a slice of them, and nothing run."""

import os
import pickle
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from expertmesh.checkpoints.files.dtypes import as_tensor
from expertmesh.checkpoints.files.open_files import OpenFiles
from expertmesh.checkpoints.files.tensors import ByRows
from expertmesh.checkpoints.training_state.state_table import StateTable, _TensorUnpickler
from expertmesh.moe.util.errors import ExpertMeshError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {
    "matrix": torch.randn(300, 17),
    "cube": torch.randn(5, 3, 2).bfloat16(),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "whole numbers": torch.arange(7),
    "part": torch.randn(9, 4)[3:8],
    "parameter": torch.nn.Parameter(torch.randn(6, 2)),
}


def saved(path: Path, state: dict[str, Tensor]) -> StateTable:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return StateTable(path)


def test_rows_are_those_of_the_tensor(tmp_path: Path) -> None:
    table, files = saved(tmp_path, STATE), OpenFiles()
    for name, tensor in STATE.items():
        all_rows = tensor.detach().view(-1, *tensor.shape[1:])
        for rows in (range(len(all_rows)), range(1, 4), range(2, 3)):
            if rows.stop <= len(all_rows):
                found = as_tensor(table.rows(name, rows, files), table.dtype(name))
                assert torch.equal(found, all_rows[rows.start : rows.stop]), (name, rows)
    with pytest.raises(ExpertMeshError, match="slices of matrix are missing"):
        table.rows("matrix", range(299, 301), files)


def test_a_tensor_cut_along_its_columns(tmp_path: Path) -> None:
    left, right = torch.randn(4, 3), torch.randn(4, 5)
    table: Any = saved(tmp_path, {"left": left, "right": right})
    boxes = {"left": (range(4), range(3)), "right": (range(4), range(3, 8))}
    parts = {name: table._chunks[name].holders[0] for name in boxes}
    table.tensors["both"] = (4, 8), torch.float32
    table._chunks["both"] = ByRows([(rows, replace(part, box=boxes[name])) for name, (rows, part) in parts.items()])
    found = torch.from_numpy(table.rows("both", range(1, 3), OpenFiles()))
    assert torch.equal(found, torch.cat([left, right], 1)[1:3])
    table.tensors["both"] = (4, 7), torch.float32
    with pytest.raises(ExpertMeshError, match="reaches beyond the tensor"):
        table.rows("both", range(1, 3), OpenFiles())


def test_what_lies_in_another_order_is_refused(tmp_path: Path) -> None:
    table = saved(tmp_path, {"turned": torch.randn(6, 4).t()})
    with pytest.raises(ExpertMeshError, match=r"turned cannot be read: .* in the order of its rows"):
        table.rows("turned", range(4), OpenFiles())


def test_a_tensors_description_runs_nothing() -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, ("false",)

    with pytest.raises(pickle.UnpicklingError, match="system, which checkpoints never use"):
        _TensorUnpickler(BytesIO(pickle.dumps(Hostile()))).load()
