"""Rows that embedding and head of a model have for tokens that its checkpoint does not know.

They begin as `resize_token_embeddings` of transformers draws them by default: from a normal distribution with the mean
of the old rows and 1e-9 times their covariance. It is drawn here as a sum over the old rows, each with a random weight,
which needs no covariance matrix; the random numbers depend on the seed, the parameter's name and the row alone.

Shape suffixes: V old rows, C of them at once, N new ones, D model width.
"""

from math import prod, sqrt
from zlib import crc32

import torch
from torch import Tensor, nn

from ..sharding.runtime.process import raise_together
from ..sharding.state import new_tokens_of, sharded_parameters, token_rows_of
from ..sharding.topology import Topology, rows_of
from .files.dtypes import as_tensor
from .files.tensors import overlap
from .hf.checkpoint import Checkpoint

_SPREAD = 1e-9
_ROWS_AT_ONCE = 4096


@torch.no_grad()
def fill_new_rows(model: nn.Module, checkpoint: Checkpoint, topology: Topology, seed: int) -> None:
    """Fill the rows that `checkpoint`, which a sharded model was loaded from, has not. All ranks call it together; one
    that holds some of them reads the old ones once.

    Raises:
        ExpertMeshError: on all ranks, when the old rows cannot be read.
    """
    with raise_together():
        num_old = checkpoint.rows_in_files
        for name, shard in sharded_parameters(model, topology).items():
            new = range(num_old.get(name, 0), rows_of(checkpoint.names.parameters[name]))
            if name in num_old and (mine := overlap(new, shard.rows)):
                rows_ND = initial_rows(checkpoint, name, new, seed)[mine.start - new.start : mine.stop - new.start]
                shard.fill(mine, rows_ND.float().view(-1, *shard.row_shape))


@torch.no_grad()
def fill_token_rows(model: nn.Module, checkpoint: Checkpoint, topology: Topology, seed: int) -> None:
    """Have rows of new tokens that are trained alone begin as the model has them. All ranks call it together.

    Raises:
        ExpertMeshError: on all ranks, when they cannot be read.
    """
    with raise_together():
        parts = {name: part for name, part in token_rows_of(model).items() if part.is_here}
        for name, shard in sharded_parameters(model, topology, parts).items():
            module = name.rpartition(".")[0]
            ids, weight = new_tokens_of(model, module), f"{module}.weight"
            reader, num_old = checkpoint.file_reader(), checkpoint.rows_in_files[weight]
            new = range(num_old, rows_of(checkpoint.names.parameters[weight]))
            drawn_ND = initial_rows(checkpoint, weight, new, seed)
            for place in shard.rows:
                value = drawn_ND[ids[place] - num_old] if ids[place] in new else None
                if value is None:
                    found = reader.rows(weight, range(ids[place], ids[place] + 1))
                    assert found is not None
                    value = as_tensor(*found)
                shard.fill(range(place, place + 1), value.float().view(1, -1))
            reader.close()


def initial_rows(checkpoint: Checkpoint, name: str, new: range, seed: int) -> Tensor:
    """What the rows `new` of a parameter begin as, which follow on those in files: (N, D) fp64."""
    reader, num_old, width = checkpoint.file_reader(), new.start, prod(checkpoint.names.parameters[name][1:])
    total_D = torch.zeros(width, dtype=torch.float64)
    drawn_ND, weight_N1 = total_D.repeat(len(new), 1), torch.zeros(len(new), 1, dtype=torch.float64)
    for start in range(0, num_old, _ROWS_AT_ONCE):
        rows = range(start, min(start + _ROWS_AT_ONCE, num_old))
        found = reader.rows(name, rows)
        assert found is not None
        old_CD = as_tensor(*found).double().view(len(rows), width)
        generator = torch.Generator().manual_seed(crc32(f"{seed} {name} {start}".encode()))
        weights_NC = torch.randn(len(new), len(rows), generator=generator, dtype=torch.float64)
        total_D += old_CD.sum(0)
        drawn_ND += weights_NC @ old_CD
        weight_N1 += weights_NC.sum(1, keepdim=True)
    reader.close()
    mean_D = total_D / num_old
    return mean_D + sqrt(_SPREAD / num_old) * (drawn_ND - weight_N1 * mean_D)
