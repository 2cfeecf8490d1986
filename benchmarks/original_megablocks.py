"""MegaBlocks' own layer, `megablocks.layers.dmoe.dMoE`, on our weights: a reference for
ours, in benchmarks and tests.

Shape suffixes: E experts, e experts on this rank, D model width, F expert width, P rows with each expert's padded to
full blocks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh.moe.experts.shape import MoEShape
from expertmesh.moe.kernels.megablocks import (
    SPARSE_PACKAGES,
    _indices,
    check_megablocks_sparse,
    check_offsets,
    load_megablocks,
    require,
)


def original_dmoe(
    shape: MoEShape,
    router_ED: Tensor,
    w1: Tensor,
    v1: Tensor,
    w2: Tensor,
    group: dist.ProcessGroup | None = None,
    normalize_top_k: bool = True,
) -> nn.Module:
    """A dMoE (B, S, D) -> (B, S, D) that computes what the Hugging Face block does, on weights that it shares with the
    caller. Its parameters are `router.layer.weight` and `experts.mlp.w1`, `.v1`, `.w2`.

    What stays MegaBlocks' own: the softmax of the router in the weights' dtype (ours and Hugging Face's is in fp32),
    all positions routed, padding too, and no auxiliary losses. What does not: MegaBlocks scales the experts' gradients
    by 1 / (ranks of the group); here they are plain sums.

    Args:
        shape: that of the layer, whose experts are plain SwiGLU, and whose router is a softmax over all experts.
        router_ED: the router's weight, on every rank.
        w1, v1, w2: gate, up and down (transposed) of this rank's experts, (e·F, D), in one dtype, on one device.
        group: the ranks over which the experts are distributed, rank i having those from i·e on; None if all are here.
        normalize_top_k: whether the K weights of a token are divided by their sum.

    Raises:
        ExpertMeshError: a package is not installed, or D or F is no multiple of 128.
    """
    check_megablocks_sparse(shape.model_width, shape.expert_width)
    require("MegaBlocks' dMoE", SPARSE_PACKAGES)
    load_megablocks()
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    arguments = Arguments(
        hidden_size=shape.model_width,
        ffn_hidden_size=shape.expert_width,
        moe_num_experts=shape.num_experts,
        moe_top_k=shape.top_k,
        moe_normalize_expert_weights=1 if normalize_top_k else None,
        moe_loss_weight=0.0,
        moe_expert_model_parallelism=group is not None,
        expert_parallel_group=group,
        activation_fn=F.silu,
        bias=False,
        return_bias=False,
        fp16=w1.dtype == torch.float16,
        bf16=w1.dtype == torch.bfloat16,
        device=torch.device("meta"),
        init_method=_leave_alone,
        output_layer_init_method=_leave_alone,
        mlp_type="glu",
        mlp_impl="chosen below",
    )
    # the constructor refuses "sparse" for triton >= 3.2; what goes wrong there, `_safe_topology` prevents
    arguments.mlp_impl = "sparse"
    layer = dMoE(arguments)
    mlp = layer.experts.mlp
    mlp.gradient_scale = None
    layer.experts.topology = _safe_topology(layer.experts)
    layer.router.layer.weight = nn.Parameter(router_ED.detach())
    for name, weight in (("w1", w1), ("v1", v1), ("w2", w2)):
        setattr(mlp, name, _like(getattr(mlp, name), weight))
    return layer


def _safe_topology(experts: Any) -> Callable[[Tensor, Tensor], Any]:
    """MegaBlocks' topology without its overflows."""
    import stk

    topology = experts.topology

    def safe(x_PD: Tensor, padded_ends_e: Tensor) -> Any:
        check_offsets(x_PD.shape[0], experts.ffn_hidden_size, experts.mlp.w1)
        found = topology(x_PD, padded_ends_e)
        # indices that stk can multiply; those that are int32 already are shared, not copied
        return stk.Matrix(found.size(), found.data, *(index.int() for index in _indices(found)))

    return safe


def _like(parameter: Any, weight: Tensor) -> nn.Parameter:
    """`weight` as a parameter with the mark by which MegaBlocks tells experts from other parameters."""
    assert weight.shape == parameter.shape, (weight.shape, parameter.shape)
    ours: Any = nn.Parameter(weight.detach())
    ours.expert_model_parallel = parameter.expert_model_parallel
    return ours


def _leave_alone(weight: Tensor) -> None:
    """The initialiser of weights that are replaced at once."""
