"""`--dense-precision`: which linear layers beside the experts multiply in fp8."""

from typing import Any

import torch

from ...moe.experts.lora import layers_linear, unquantized
from ...moe.linear.fp8 import suits_fp8
from ...moe.linear.linear import use_fp8
from ...moe.util.change_order import begin_change
from ...moe.util.errors import ExpertMeshError


def multiply_in_fp8(model: Any, device_type: str) -> str:
    """Have the linear layers of a model's decoder layers multiply in fp8, in place, before it is sharded: attention's
    projections, dense MLPs and shared experts; not the routers, which choose, nor the LM head. Of layers with an
    adapter it is the frozen weight's matmuls, forward and for the input's gradient.

    Returns:
        A line for a run's first ones: how many, and which do not.

    Raises:
        ExpertMeshError: the GPU cannot, or no layer could.
    """
    begin_change(model, "fp8")
    has_gpu = device_type == "cuda" and torch.cuda.is_available()  # a dry run has none
    if has_gpu and (found := torch.cuda.get_device_capability())[0] < 9:
        raise ExpertMeshError(
            "--dense-precision fp8: needs a GPU of compute capability 9 or more (H100); this one has "
            f"{'.'.join(map(str, found))}; leave it out"
        )
    linear, left = layers_linear(model), set(unquantized(model))
    left |= {path for path, module in linear.items() if not suits_fp8(module.get_parameter("weight"))}
    for path, module in linear.items():
        if path not in left:
            use_fp8(module)
    if len(left) == len(linear):
        raise ExpertMeshError(
            "--dense-precision fp8: no linear layer of this model can use fp8: other code reads "
            "their weights, or their widths are not multiples of 16; leave it out"
        )
    names = sorted({path.rpartition(".")[2] for path in left})
    but = f"; in bf16, because of their widths or code: {len(left)} ({', '.join(names)})" if left else ""
    return f"dense GEMMs in fp8: {len(linear) - len(left)} linear layers of {len(linear)}{but}"
