"""One gradient norm over all meshes.

`torch.nn.utils.clip_grad_norm_` refuses parameters of different meshes; this sums squares over local shards instead,
each shard counted once, in one all-reduce.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..moe.util.step_parts import register_step_part
from .mesh import Mesh
from .parallelize.unreached import agree_on_gradients, num_lacking, sharded_parts
from .state import StateTensor, local_tensor
from .topology import Topology

register_step_part(__name__, "clipping")

EPSILON = 1e-6
"""That of `torch.nn.utils.clip_grad_norm_`."""


def clip_grad_norm(model: nn.Module, mesh: Mesh, max_norm: float) -> float:
    """Scale all gradients so that their global 2-norm is at most `max_norm`; 0 leaves them alone, and so
    does a norm that is not finite. Afterwards a parameter has a gradient on all ranks that hold it, or on none, where
    no rank's sequences have reached it.

    Returns:
        The norm before scaling. The scale is torch's: max_norm / (norm + EPSILON), at most 1.
    """
    sums = squares_and_lacking(model, mesh)
    dist.all_reduce(sums)
    square, lacking = sums.tolist()
    if lacking < 0:
        agree_on_gradients(model, mesh)
    norm = math.sqrt(square)
    scale_gradients(model, norm, max_norm)
    return norm


@torch.no_grad()
def squares_and_lacking(model: nn.Module, mesh: Mesh) -> Tensor:
    """This rank's part of the squared gradient norm, and how many parameters nothing has reached here, negated: a sum
    over ranks that is less than 0 says that `agree_on_gradients` has to be called.

    Returns:
        (2,) fp64, on the device. Less than zero, as every number that a dry run reads from the device is 1.
    """
    counted = [
        part for part in sharded_parts(model) if part.tensor.grad is not None and _is_counted(part, mesh.topology)
    ]
    grads = [local_tensor(part.tensor.grad) for part in counted]  # type: ignore[arg-type]
    # in fp32 whatever the gradients' dtype: a norm in bf16 would have three digits. A rank may have nothing to count:
    # where experts are frozen, the replicas of all else
    norms = torch._foreach_norm(grads, 2, torch.float32) if grads else [torch.zeros(())]
    square = torch.stack(list(norms)).double().square().sum()
    # with --offload gradients are in host memory, where another backend would sum
    square = square.to(mesh.grid.device_type)
    return torch.stack([square, square.new_full((), -num_lacking(model))])


@torch.no_grad()
def scale_gradients(model: nn.Module, norm: float, max_norm: float) -> None:
    """Scale all gradients, whose norm is known, as `clip_grad_norm` does."""
    if not (max_norm > 0 and math.isfinite(norm)):
        return
    scale = min(max_norm / (norm + EPSILON), 1.0)
    grads = [local_tensor(part.tensor.grad) for part in sharded_parts(model) if part.tensor.grad is not None]
    # a rank may have none: where all that its stages of a pipeline hold is frozen
    if scale < 1.0 and grads:
        torch._foreach_mul_(grads, scale)


def clip_divisor(square: Tensor, max_norm: float) -> Tensor:
    """What gradients are to be divided by, for the same: a scalar in fp32, on the device of the squared norm."""
    if max_norm <= 0:
        return torch.ones_like(square, dtype=torch.float32)
    return ((square.sqrt() + EPSILON) / max_norm).clamp(min=1.0).float()


def _is_counted(part: StateTensor, topology: Topology) -> bool:
    """Whether this rank's shard is counted, and not another rank's copy of it."""
    rank = dist.get_rank()
    dp_index, _ = topology.coordinates(rank)
    if topology.dense_shard == "hybrid" and dp_index > 0 and not part.is_expert:
        return False
    return part.layout.pp_ranks is None or topology.pp_rank(rank) == part.layout.pp_ranks[0]
