"""Reads each rank's own slices of a Hugging Face checkpoint into its shards; no rank ever holds the full model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from checkpoints.mapping import DiskTensor, overlap
from checkpoints.shards import ShardedParameter, sharded_parameters
from checkpoints.source import Checkpoint, open_safetensors
from moe import ExpertMeshError
from sharding import Topology, raise_together

# A file is mapped into memory while its slices are copied, and mapped pages count as this process's own. It is
# closed and opened anew after so many bytes, so that they never pile up beside the shard.
_BYTES_BEFORE_REOPEN = 32 * 2**20


def load_model(model: nn.Module, checkpoint: Checkpoint, topology: Topology) -> None:
    """Fill the model's shards from the checkpoint. All ranks call it together.

    Raises:
        ExpertMeshError: on all ranks, when a tensor is not finite, or a tied copy differs from its original.
    """
    with raise_together():
        _load_shards(model, checkpoint, topology)


@torch.no_grad()
def _load_shards(model: nn.Module, checkpoint: Checkpoint, topology: Topology) -> None:
    shards = sharded_parameters(model, topology)
    reader = _Reader(checkpoint.source.path)
    for tensor in checkpoint.tensors:
        for target, data, file in _slices(tensor, checkpoint, shards, reader):
            target.copy_(data)
            if not _all_finite(target):
                raise ExpertMeshError(f"{file}: tensor {tensor.name} holds values that are not finite")
    for tensor in checkpoint.tied_copies:
        for target, data, file in _slices(tensor, checkpoint, shards, reader):
            if not torch.equal(target, data.to(target.device, target.dtype)):
                raise ExpertMeshError(
                    f"{file}: {tensor.name} differs from {tensor.regions[0].parameter}, though config.json ties them; "
                    "set tie_word_embeddings to false there"
                )
    reader.close()


def _slices(
    tensor: DiskTensor, checkpoint: Checkpoint, shards: dict[str, ShardedParameter], reader: "_Reader"
) -> Iterator[tuple[Tensor, Tensor, Path]]:
    """(part of a shard, what the tensor on disk has for it, file) for each region that this rank holds rows of."""
    file = checkpoint.infos[tensor.name].file
    for region in tensor.regions:
        shard = shards[region.parameter]
        rows = overlap(shard.rows, region.rows)
        if rows:
            data = reader.read(file, tensor.name, region.select(rows))
            yield shard.view(rows), data.t() if region.transposed else data, checkpoint.source.path / file


def _all_finite(tensor: Tensor) -> bool:
    # minimum and maximum carry NaN and infinity without a mask as large as the tensor
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


class _Reader:
    """Slices of the safetensors files in one directory, one file open at a time."""

    def __init__(self, path: Path):
        self.path = path
        self.file: str | None = None
        self.handle: Any = None
        self.bytes_read = 0

    def read(self, file: str, name: str, index: tuple[int | slice, ...]) -> Tensor:
        """A slice, lying in the mapped file: use it and let it go, or the file stays mapped."""
        if file != self.file or self.bytes_read > _BYTES_BEFORE_REOPEN:
            self.close()
            self.file, self.handle, self.bytes_read = file, open_safetensors(self.path / file), 0
        data = self.handle.get_slice(name)[index]
        self.bytes_read += data.numel() * data.element_size()
        return data

    def close(self) -> None:
        self.file = self.handle = None
