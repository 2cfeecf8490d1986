"""What an image takes in a family's model: pixels for so many tokens, and floating point operations. Found by asking
the family's own code, on tensors that hold no memory.

Shape suffixes: P patches, I images.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from ..experts.model_facts import key_of_facts
from ..util.errors import ExpertMeshError
from ..util.tensors import tensors_in
from .facts_cache import keep_trial, recall_trial
from .images import GRID, ImageFacts, image_features, image_parameters, images_of
from .probe import leaving_no_trace

aten = torch.ops.aten
_BY_MASK = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_TRIAL, _SIZES = "images", "image-sizes"
_THERE, _HERE = "_expertmesh_on_device", "_expertmesh_in_host_memory"
_SIDE = 12
"""Patches along a side of the image that is asked about: a multiple of as many as are ever merged to a token's."""


def image_of(model: Any, tokens: int) -> dict[str, Tensor]:
    """What a model takes for one image of so many tokens; pixels are on the meta device.

    Args:
        model: from `build_model`, on the meta device, not sharded.

    Raises:
        ExpertMeshError: it has no such image.
    """
    key, asked = key_of_facts(model), str(tokens)
    sizes = recall_trial(key, _SIZES) or {}
    if asked not in sizes:
        sizes[asked] = _size_of(model, tokens)
        keep_trial(key, _SIZES, sizes)
    if sizes[asked] is None:
        raise ExpertMeshError(f"--image-tokens {tokens}: {type(model).__name__} has no image of so many tokens")
    return _inputs(model, *sizes[asked])


def _size_of(model: Any, tokens: int) -> tuple[int, int] | None:
    """Height and width in patches of an image that takes so many tokens; None: there is none."""
    with _without_memory(model):
        rows = _rows(model, _SIDE, _SIDE)
        # a token is a square of patches; some write one more at the end of each of its rows
        found = [(side, ends) for side in range(1, _SIDE + 1) for ends in (0, 1) if _rows_of(side, side, ends) == rows]
        if not found:
            return None
        ((side, ends),) = found
        merged = _SIDE // side
        for height in range(int(tokens**0.5), 0, -1):
            width = tokens // height - ends
            if width and _rows_of(height, width, ends) == tokens == _rows(model, height * merged, width * merged):
                return height * merged, width * merged
    return None


def small_image(model: Any) -> dict[str, Tensor]:
    """What a model takes for an image that takes no time to speak of; pixels are on the meta device.

    Args:
        model: as of `image_of`.
    """
    return _inputs(model, _SIDE, _SIDE)


def _rows_of(height: int, width: int, ends: int) -> int:
    return height * (width + ends)


def image_flops(model: Any) -> tuple[float, float]:
    """Floating point operations that a forward and a backward of images need by patch, and by pair of patches of one
    image: exact where each patch sees all of its image.

    Args:
        model: from `build_model`, on the meta device, with what is frozen, not sharded.
    """
    key = key_of_facts(model)
    trained = "".join(str(int(p.requires_grad)) for p in image_parameters(model))
    by_trained = recall_trial(key, _TRIAL) or {}
    if trained not in by_trained:
        keep_trial(key, _TRIAL, {**by_trained, trained: _image_flops(model)})
        by_trained = recall_trial(key, _TRIAL)
    by_patch, by_pair = by_trained[trained]
    return by_patch, by_pair


def _image_flops(model: Any) -> tuple[float, float]:
    counts = []
    with _without_memory(model), sdpa_kernel(SDPBackend.MATH):
        for side in (_SIDE, 2 * _SIDE):
            with FlopCounterMode(display=False) as counted:
                features = [x for x in _features(model, side, side) if x.requires_grad]
                if features:
                    torch.autograd.backward(features, [torch.empty_like(x) for x in features])
            counts.append((side**2, counted.get_total_flops()))
    (few, of_few), (many, of_many) = counts
    by_pair = (of_many / many - of_few / few) / (many - few)
    return of_few / few - by_pair * few, by_pair


@contextmanager
def _without_memory(model: Any) -> Iterator[None]:
    """Within it, what images pass is on the CPU, and computes nothing."""
    from ..torch_private import FakeTensorMode

    facts = _facts(model)
    with leaving_no_trace(model), FakeTensorMode(allow_non_fake_inputs=True), KnownValues():
        for path in facts.paths:
            for module in model.get_submodule(path).modules():
                module.training = False
                module._parameters = {name: None if p is None else _there(p) for name, p in module._parameters.items()}
        yield


def _there(parameter: nn.Parameter) -> nn.Parameter:
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
    return nn.Parameter(values, parameter.requires_grad)


def _facts(model: Any) -> ImageFacts:
    facts = images_of(model)
    assert facts is not None
    return facts


def _inputs(model: Any, height: int, width: int) -> dict[str, Tensor]:
    """height, width: in patches."""
    facts = _facts(model)
    parts = (module for path in facts.paths for module in model.get_submodule(path).modules())
    # what pixels meet first: a matrix, or a convolution whose kernels are as large as patches
    first: Any = next(part for part in parts if isinstance(part, nn.Linear | nn.modules.conv._ConvNd))
    pixels_PX = torch.empty(height * width, first.weight[0].numel(), device="meta")
    if facts.inputs[1] == GRID:
        return dict(zip(facts.inputs, (pixels_PX, torch.tensor([[1, height, width]])), strict=True))
    places_PX = torch.cartesian_prod(torch.arange(width), torch.arange(height))
    return dict(zip(facts.inputs, (pixels_PX[None], places_PX[None]), strict=True))


def _features(model: Any, height: int, width: int) -> list[Tensor]:
    with _disable_current_modes():
        inputs = _inputs(model, height, width)
    return image_features(
        model, {name: torch.empty_like(x, device="cpu") if x.is_meta else x for name, x in inputs.items()}
    )


def _rows(model: Any, height: int, width: int) -> int:
    return _features(model, height, width)[0].flatten(0, -2).shape[0]


class KnownValues(TorchDispatchMode):
    """Within it, and within a mode whose tensors hold no memory, tensors that are known stay known: what follows from
    them alone is computed, and tells the shapes of what does not. What follows from some `on_device` is there, too."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in(args, kwargs)
        if all(map(is_known, tensors)) and (tensors or operator.overloadpacket is aten.arange):
            with _disable_current_modes():
                result = operator(*args, **kwargs)
            if any(vars(tensor).get(_THERE) for tensor in tensors):
                for tensor in tensors_in(result):
                    setattr(tensor, _THERE, True)
            return result
        if operator in _BY_MASK:
            args = (args[0], [index for each in args[1] for index in _places(each)], *args[2:])
        if operator is aten.masked_select.default and is_known(args[1]):
            with _disable_current_modes():
                number = int(args[1].expand(args[0].shape).sum())
            return args[0].new_empty(number)
        return operator(*args, **kwargs)


def is_known(tensor: Tensor) -> bool:
    """Whether a tensor has values, where others hold no memory."""
    return type(tensor) is Tensor and not tensor.is_meta


def on_device(tensor: Tensor) -> Tensor:
    """A copy of a known tensor that stands for one on a device, whose values the host waits for; else the tensor."""
    if not is_known(tensor):
        return tensor
    return put_on_device(tensor.clone())


def put_on_device(tensor: Tensor) -> Tensor:
    """Have a known tensor stand for one on a device, in place."""
    setattr(tensor, _THERE, True)
    return tensor


def put_on_host(tensor: Tensor) -> Tensor:
    """Have a tensor, known or not, stand for one in host memory, in place."""
    setattr(tensor, _HERE, True)
    return tensor


def stands_on_host(tensor: Tensor) -> bool:
    """Whether `put_on_host` had a tensor."""
    return _HERE in vars(tensor)


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor's values are in host memory, where others hold no memory."""
    return stands_on_host(tensor) or (is_known(tensor) and not vars(tensor).get(_THERE))


def _places(index: Tensor | None) -> list[Tensor | None]:
    """Where a mask is set, by dim, everywhere where it is not known; any other index is itself."""
    if index is None or index.dtype != torch.bool:
        return [index]
    if not is_known(index):
        return [index.new_empty(index.numel(), dtype=torch.int64) for _ in index.shape]
    with _disable_current_modes():
        return list(index.nonzero(as_tuple=True))
