"""Opening a checkpoint in safetensors form, whichever it is: a Hugging Face directory or EP shards."""

from pathlib import Path

import torch

from checkpoints.manifest import MANIFEST, open_shards
from checkpoints.source import Checkpoint, ModelSource, Parameters, open_hf
from moe import KERNELS, build_model


def parameter_shapes(source: ModelSource) -> Parameters:
    """Global shapes of the model that a config describes, from the meta device."""
    model = build_model(source.family, source.config, KERNELS["loop"])
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def is_shards(path: Path) -> bool:
    return (path / MANIFEST).exists() or any(path.glob("ep-*-of-*.safetensors*"))


def open_checkpoint(source: ModelSource, parameters: Parameters, strict: bool = True) -> Checkpoint:
    """Open a Hugging Face directory or EP shards, whichever `source.path` is.

    Raises:
        ExpertMeshError: it is damaged, not whole, or does not fit the model (see `open_hf` and `open_shards`).
    """
    if is_shards(source.path):
        return open_shards(source, parameters)
    return open_hf(source, parameters, strict)


def parameter_dtypes(checkpoint: Checkpoint) -> dict[str, torch.dtype]:
    """The dtype in which each parameter lies on disk; of mixed ones, that which holds all."""
    dtypes: dict[str, torch.dtype] = {}
    for tensor in checkpoint.tensors:
        for region in tensor.regions:
            dtype = checkpoint.infos[tensor.name].dtype
            dtypes[region.parameter] = torch.promote_types(dtypes.get(region.parameter, dtype), dtype)
    return dtypes
