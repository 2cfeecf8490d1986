"""Reads each rank's own rows of a checkpoint into its shards; no rank ever holds the full model."""

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..moe.linear.quantized import MX_BLOCK
from ..moe.util.errors import ExpertMeshError
from ..moe.util.progress import CountedProgress
from ..sharding.mesh import Mesh
from ..sharding.parallelize.choices import Strategy
from ..sharding.parallelize.parallelize import materialize, parallelize
from ..sharding.runtime.process import raise_together
from ..sharding.state import ShardedParameter, adapters_of, parameters_of, set_parameter_dtypes, sharded_parameters
from ..sharding.topology import Topology
from .ep_shards.manifest import is_shards, open_checkpoint
from .files.checksums import add_sums, row_sum, to_granule_end
from .files.codes import EXPONENTS
from .files.dtypes import as_tensor
from .files.tensors import DiskTensor, overlap
from .hf.checkpoint import Checkpoint
from .hf.names import Names
from .hf.reader import SafetensorsReader, differing_copy
from .hf.source import ModelSource
from .hf.untrained_tensors import check_carried_bytes


def shard_and_load(
    model: nn.Module,
    source: ModelSource,
    mesh: Mesh,
    device: torch.device,
    compute_dtype: torch.dtype = torch.float32,
    strategy: Strategy | None = None,
    read_weights: bool = True,
    checkpoint: Checkpoint | None = None,
) -> Checkpoint:
    """Take a model from the meta device to its ranks, loaded. All ranks call it together.

    Args:
        model: from `build_model`; parallelised in place (see `sharding.parallelize.parallelize`).
        source: the directory it is read from.
        strategy: what is kept, freed and recomputed; by default nothing is.
        read_weights: False leaves them uninitialised, for one who fills them from elsewhere.
        checkpoint: from `open_for`, of the model as it is now.

    Returns:
        The checkpoint it came from, which an export needs.

    Raises:
        ExpertMeshError: on all ranks, when the checkpoint is damaged or does not fit (see `open_checkpoint`).
    """
    if checkpoint is None:
        checkpoint = open_for(model, source)
    if not adapters_of(model):
        hold_exactly(model, checkpoint)
    strategy = strategy or Strategy()
    parallelize(model, mesh, compute_dtype, strategy)
    materialize(model, device, strategy.offload, strategy.offload_experts)
    if read_weights:
        load_model(model, checkpoint, mesh.topology)
    return checkpoint


def open_for(model: nn.Module, source: ModelSource) -> Checkpoint:
    """Read names, shapes and dtypes of a model's weights, before it is sharded. All ranks call it together.

    Raises:
        ExpertMeshError: on all ranks, when the checkpoint is damaged or does not fit (see `open_checkpoint`).
    """
    with raise_together():
        check_form(model, source)
        checkpoint = open_checkpoint(source, Names(model))
        check_mxfp4(model, checkpoint)
    return checkpoint


_MXFP4_FLAG = "--base-dtype mxfp4: keeps experts as a checkpoint in MXFP4 has them; "


def check_form(model: nn.Module, source: ModelSource) -> None:
    """
    Raises:
        ExpertMeshError: codes are to be kept that EP shards do not have as the model would hold them.
    """
    if _in_mxfp4(model) and is_shards(source.path):
        raise ExpertMeshError(
            f"{_MXFP4_FLAG}{source.path} has EP shards: give the model in Hugging Face form, or --base-dtype nf4"
        )


def check_mxfp4(model: nn.Module, checkpoint: Checkpoint) -> None:
    """
    Raises:
        ExpertMeshError: the model is to hold MXFP4 where the checkpoint has something else.
    """
    kept = _in_mxfp4(model)
    for tensor in checkpoint.tensors:
        for region in tensor.regions:
            if region.parameter not in kept:
                continue
            encoding = tensor.encoding
            if (
                encoding is None
                or (encoding.codes, encoding.block) != ("E2M1", (1, MX_BLOCK))
                or encoding.scale_dtype not in EXPONENTS
                or encoding.transposed != region.transposed
            ):
                raise ExpertMeshError(
                    f"{_MXFP4_FLAG}{checkpoint.path} has {tensor.name} as {encoding or tensor.dtype}; --base-dtype nf4 "
                    "holds any weights in 4 bits"
                )


def _in_mxfp4(model: nn.Module) -> set[str]:
    """Parameters that are to be held so."""
    parts = parameters_of(model).items()
    return {name for name, part in parts if part.storage is not None and part.storage.kind == "mxfp4"}


def hold_exactly(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Have parameters that are not trained hold what the checkpoint has of them bit for bit, in place, before they are
    sharded: in fp32 where they would be in bf16 and it does not have them so. Beside adapters this is not needed, as
    nothing of the base is exported."""
    stored = checkpoint.parameter_dtypes
    frozen = {name for name, part in parameters_of(model).items() if not part.trainable and stored.get(name) != "BF16"}
    set_parameter_dtypes(model, dict.fromkeys(frozen, torch.float32))


def load_model(model: nn.Module, checkpoint: Checkpoint, topology: Topology) -> None:
    """Fill the model's shards from the checkpoint. All ranks call it together.

    Raises:
        ExpertMeshError: on all ranks, when a tensor is not finite, a tied copy differs from its original, or a file's
            content does not match its checksum.
    """
    sums: dict[str, int] = {}
    with raise_together():
        shards = sharded_parameters(model, topology)
        sums = _load_shards(shards, checkpoint)
    if checkpoint.row_sums is not None:
        _check_row_sums(sums, checkpoint)
    with raise_together():
        check_carried_bytes(checkpoint.carried[dist.get_rank() :: dist.get_world_size()])


@torch.no_grad()
def _load_shards(shards: dict[str, ShardedParameter], checkpoint: Checkpoint) -> dict[str, int]:
    """The row sums of what this rank has read and owns."""
    reader = checkpoint.file_reader()
    sums: dict[str, int] = {}
    pieces = [
        (shard, *place, mine)
        for parameter, shard in shards.items()
        if parameter in reader.places
        for place, mine in reader.places[parameter].sharing(shard.rows)
    ]
    sizes = [
        tensor.num_bytes * len(mine) * shard.row_shape.numel() // max(prod(tensor.shape), 1)
        for shard, tensor, _, mine in pieces
    ]
    with CountedProgress(f"loading {checkpoint.path}", sum(sizes), is_shown=dist.get_rank() == 0) as progress:
        for (shard, tensor, region, mine), size in zip(pieces, sizes, strict=True):
            # sums are of whole granules: of the last one all rows are read
            rows = mine if checkpoint.row_sums is None else to_granule_end(mine, region.rows)
            if shard.storage is not None and shard.storage.kind == "mxfp4":
                codes, scales = map(torch.from_numpy, reader.packed(tensor, region, rows))
                written = shard.fill_packed(mine, codes, scales)
            else:
                data = reader.read(tensor, region, rows)
                written = shard.fill(mine, as_tensor(data[: len(mine)], tensor.dtype))
            if checkpoint.row_sums is not None and shard.is_owner and not region.transposed:
                own = row_sum(data, rows.start - region.rows.start)
                sums[tensor.name] = add_sums(sums.get(tensor.name, 0), own)
            if not _all_finite(written):
                raise ExpertMeshError(f"{tensor.file}: tensor {tensor.name} has values that are not finite")
            progress.add(size)
    if checkpoint.row_sums is not None:
        sums |= _sums_of_transposed(checkpoint.tensors, reader)
    for copy in checkpoint.tied_copies:
        # what a layer for multi-token prediction repeats is out of date where a model was trained without its layer
        if copy.name not in checkpoint.names.shared_with_mtp:
            _check_copy(copy, shards, reader)
    reader.close()
    return sums


def _sums_of_transposed(tensors: Sequence[DiskTensor], reader: SafetensorsReader) -> dict[str, int]:
    """The row sums of some of the tensors whose rows are columns of parameters; the other ranks have the others."""
    transposed = [tensor for tensor in tensors if tensor.regions[0].transposed]
    sums = {}
    for tensor in transposed[dist.get_rank() :: dist.get_world_size()]:
        (region,) = tensor.regions
        sums[tensor.name] = row_sum(reader.read(tensor, region, region.rows).T, 0)
    return sums


def _check_copy(copy: DiskTensor, shards: dict[str, ShardedParameter], reader: SafetensorsReader) -> None:
    for region in copy.regions:
        shard = shards[region.parameter]
        if rows := overlap(region.rows, shard.rows):
            target = shard.view(rows)
            repeated = as_tensor(reader.read(copy, region, rows), copy.dtype)
            if not torch.equal(target, repeated.to(target.device).to(target.dtype)):
                raise differing_copy(copy, region.parameter)


def _all_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # minimum and maximum carry NaN and infinity without a mask as large as the tensor
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _check_row_sums(sums: dict[str, int], checkpoint: Checkpoint) -> None:
    assert checkpoint.row_sums is not None
    shares: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, sums)
    for name, expected in checkpoint.row_sums.items():
        if add_sums(*(share.get(name, 0) for share in shares)) != expected:
            file = next(tensor.file for tensor in checkpoint.tensors if tensor.name == name)
            raise ExpertMeshError(f"{file}: is damaged: the content of {name} does not match its checksum")
