"""What a tower makes of patches: as its convolution would, by one product."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.hf_model.images import image_features, images_of
from tests.images import GRIDS, image_config, picture
from tests.tiers import tiered

QUICK = ["qwen3_vl_moe"]
aten = torch.ops.aten


class Convolutions(TorchDispatchMode):
    """Within it, operators of convolutions are counted by the dims of their kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: list[int] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator in (aten.convolution.default, aten.convolution_backward.default):
            self.dims.append(next(x for x in args[1:3] if isinstance(x, Tensor) and x.dim() > 3).dim() - 2)
        return operator(*args, **(kwargs or {}))


def tower_of(family: str) -> Any:
    torch.manual_seed(0)
    model = build_model(image_config(family), images=True)
    for path in images_of(model).paths:  # type: ignore[union-attr]
        part = model.get_submodule(path)
        part.to_empty(device="cpu")
        for tensor in (*part.parameters(), *part.buffers()):
            nn.init.normal_(tensor, std=0.1) if tensor.is_floating_point() else tensor.zero_()
    return model


@pytest.mark.parametrize("family", tiered(QUICK, [family for family in GRIDS if family not in QUICK]))
def test_patches_take_no_convolution(family: str) -> None:
    """And give what transformers' own forward of them gives, and its gradients."""
    model = tower_of(family)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv3d) and "forward" in vars(module)]
    shown = picture(model, 2, 3, seed=0)
    inputs = dict(zip(images_of(model).inputs, (shown.pixels, shown.size[None]), strict=True))  # type: ignore[union-attr]
    found = []
    for is_own in (False, True):
        with Convolutions() as called:
            features = image_features(model, inputs)
            weights = [module.weight for module in convolutions]
            gradients = torch.autograd.grad(features, weights, list(map(torch.ones_like, features))) if weights else ()
        assert (3 in called.dims) == (is_own and bool(convolutions))
        found.append([*features, *gradients])
        for module in convolutions:
            vars(module).pop("forward", None)
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())
