"""One gradient norm over all meshes.

`torch.nn.utils.clip_grad_norm_` refuses parameters of different meshes; this sums squares over local shards instead,
each shard counted once, in one all-reduce.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from .mesh import Mesh
from .parallelize.unreached import agree_on_gradients, num_lacking
from .state import StateTensor, local_tensor, parameters_of
from .topology import Topology


def clip_grad_norm(model: nn.Module, mesh: Mesh, max_norm: float) -> float:
    """Scale all gradients so that their global 2-norm is at most `max_norm`; 0 leaves them alone, and so
    does a norm that is not finite. Afterwards a parameter has a gradient on all ranks that hold it, or on none, where
    no rank's sequences have reached it.

    Returns:
        The norm before scaling. The scale is torch's: max_norm / (norm + 1e-6), at most 1.
    """
    parts = [part for part in parameters_of(model).values() if part.tensor.grad is not None]
    grads = [local_tensor(part.tensor.grad) for part in parts]  # type: ignore[arg-type]
    counted = [grad for part, grad in zip(parts, grads, strict=True) if _is_counted(part, mesh.topology)]
    # in fp32 whatever the gradients' dtype: a norm in bf16 would have three digits
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in counted]
    # a rank may have nothing to count: where experts are frozen, the replicas of all else
    square = torch.stack(norms or [torch.zeros(())]).double().square().sum()
    # with --offload gradients are in host memory, where another backend would sum
    square = square.to(mesh.grid.device_type)
    # less than zero where something is lacking: every number that a dry run reads from the device is 1
    sums = torch.stack([square, square.new_full((), -num_lacking(model))])
    dist.all_reduce(sums)
    total, lacking = map(float, sums.cpu().unbind())
    norm = math.sqrt(total)
    if lacking < 0:
        agree_on_gradients(model, mesh)
    if max_norm > 0 and math.isfinite(norm):
        scale = min(max_norm / (norm + 1e-6), 1.0)
        # a rank may have none: where all that its stages of a pipeline hold is frozen
        if scale < 1.0 and grads:
            torch._foreach_mul_(grads, scale)
    return norm


def _is_counted(part: StateTensor, topology: Topology) -> bool:
    """Whether this rank's shard is counted, and not another rank's copy of it."""
    rank = dist.get_rank()
    dp_index, _ = topology.coordinates(rank)
    if topology.dense_shard == "hybrid" and dp_index > 0 and not part.is_expert:
        return False
    return part.layout.pp_ranks is None or topology.pp_rank(rank) == part.layout.pp_ranks[0]
