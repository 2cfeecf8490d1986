"""Images in a family's model: which of its parts they pass, what its forward takes for them, and where they stand.

transformers' own forward embeds tokens, calls `get_image_features`, and writes the rows that it gives to the places of
the image tokens, in their order. A rank that has a part of each sequence has some of these places: there it gets the
rows for them alone. Gradients of the tower are summed over ranks as all others are.

What a family can do is read from its class: from the arguments of its forward, and from the code of
`get_image_features`.

No host waits for a GPU to learn what it knows: sizes of images stay in host memory, where a tower finds positions and
lengths, and a forward is told where image tokens stand.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..experts.forward import current_forward
from ..experts.layout import expert_modules
from ..experts.model_layers import decoder_layers
from ..transformers_private import mentions
from ..util.change_order import begin_change
from ..util.errors import ExpertMeshError
from ..util.gpu import bring_to
from ..util.tensors import tensors_in

PIXELS = "pixel_values"
KINDS = "mm_token_type_ids"
"""What transformers' processors tell of each token: 1 for an image's. Here the tokens tell it."""
GRID = "image_grid_thw"
_BY_IMAGE = (GRID, "image_position_ids")
"""What tells the images' sizes, an entry each: one of them goes to a family that is supported."""
_PROJECTORS = re.compile(r"\.(\w+_)?(merger|projector|aligner)(_\w+)?\.")
"""In the paths of modules of a tower that bring images to the width of the language model."""
_FEATURES = "image_features"
"""An argument of `get_placeholder_mask`: features that are to be as many as the image tokens."""
_DEEP = "_deepstack_process"
"""A language model's method that adds image features to a layer's result."""
_ATTRIBUTE, _OF_IMAGES = "_expertmesh_images", "_expertmesh_of_images"
_SAME_PLACES = {Tensor.unsqueeze, Tensor.expand_as, Tensor.to}
"""What a model makes of its mask of image tokens."""


@dataclass(frozen=True)
class ImageFacts:
    """How a model takes images.

    Attributes:
        paths: of the modules that images alone pass.
        inputs: what it takes for them: pixels, and what tells each image's size.
        token: the id of image tokens. others: ids of tokens that stand for, or begin, what is not supported, by name.
        takes_kinds: whether its forward takes the kinds of tokens.
        sees_both_ways: whether tokens of an image attend to those behind them, by a mask made of the tokens' kinds.
        num_deep: to the results of how many of the first layers image features are added, too (DeepStack).
    """

    paths: tuple[str, ...]
    inputs: tuple[str, str]
    token: int
    others: dict[str, int]
    takes_kinds: bool
    sees_both_ways: bool
    num_deep: int


def images_of(model: Any) -> ImageFacts | None:
    """How a model takes images; None where it was built for text alone."""
    found: ImageFacts | None = vars(model).get(_ATTRIBUTE)
    return found


def image_token(config: Any) -> int | None:
    """The id of image tokens, which a config has under one of two names; None: it has none."""
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    return None if token is None else int(token)


def other_tokens(config: Any) -> dict[str, int]:
    """Ids of tokens that stand for, or begin, what is not supported, by name."""
    names = ("video_token_id", "video_start_token_id", "audio_token_id")
    ids = {name: getattr(config, name, None) for name in names}
    return {name: int(other) for name, other in ids.items() if other is not None and other != image_token(config)}


def token_ids_of_media(config: Any) -> dict[str, int]:
    """Ids that a config has beside those of its text model, by name."""
    named = {name: value for name, value in config.to_dict().items() if name.endswith(("_token_id", "_token_index"))}
    of_text = config.get_text_config().to_dict()
    return {name: value for name, value in named.items() if isinstance(value, int) and name not in of_text}


def sees_both_ways(config: Any) -> bool:
    """Whether tokens of an image attend to those behind them."""
    return getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"


def image_paths(model: Any, unmet: Sequence[str]) -> list[str]:
    """Paths of the modules that images pass, of those that no text passes.

    Args:
        unmet: the latter.

    Raises:
        ExpertMeshError: the family takes no images, or otherwise than is supported.
    """
    inner = inner_model(model)
    _image_inputs(inner)
    if apart := [path for path, _ in expert_modules(model) if f"{path}.".startswith(tuple(f"{p}." for p in unmet))]:
        raise _unsupported(model, f"has experts that no text passes ({apart[0]})")
    code = inspect.unwrap(type(inner).get_image_features)
    prefix = next(path for path, module in model.named_modules() if module is inner)
    found = [path for path in unmet if _parent(path) == prefix and mentions(code, path.rpartition(".")[2])]
    if not found:
        raise _unsupported(model, "has no vision tower, or none that its get_image_features names")
    return found


def see_images(model: Any, paths: Sequence[str]) -> None:
    """Have a model's image features be those of the image tokens that are on a rank, in place.

    Args:
        paths: from `image_paths`.
    """
    inner, config = inner_model(model), model.config
    token = image_token(config)
    if token is None:
        raise _unsupported(model, "names no image_token_id in its config")
    facts = vars(model)[_ATTRIBUTE] = ImageFacts(
        tuple(paths),
        _image_inputs(inner),
        token,
        other_tokens(config),
        KINDS in inspect.signature(model.forward).parameters,
        sees_both_ways(config),
        len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()),
    )
    begin_change(model, "images")
    for path in paths:
        for module in model.get_submodule(path).modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d) and _is_one_product(module):
                vars(module)["forward"] = partial(_of_patches, module, module.forward)
    inner.get_image_features = _FeaturesHere(inner, facts.inputs)
    if hasattr(inner, "get_placeholder_mask"):
        inner.get_placeholder_mask = partial(_masks, inner.get_placeholder_mask)
        places = _ByPlaces()
        inner.register_forward_pre_hook(places.begin)
        layers = decoder_layers(model)
        decoder = next(module for module in model.modules() if any(part is layers for part in module.children()))
        decoder.register_forward_pre_hook(places.end, prepend=True)
        inner.register_forward_hook(places.end, always_call=True)
    for module in model.modules():
        if hasattr(module, _DEEP):
            setattr(module, _DEEP, partial(_add_to_layer, getattr(module, _DEEP)))
    inner.register_forward_hook(_without_graph)
    model.get_input_embeddings().register_forward_hook(_TakingGradients(model))


def _is_one_product(conv: nn.Conv2d | nn.Conv3d) -> bool:
    """Whether of an input as large as its kernel a convolution computes one product of matrices."""
    return conv.groups == 1 and not any(conv.padding) and set(conv.dilation) == {1}


def _of_patches(conv: nn.Conv2d | nn.Conv3d, forward: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
    """A convolution's forward, of patches that are as large as its kernel: as one product. For the gradients of bf16
    kernels of three dims cuDNN has no engine, or a slow one (tao-core#29; sglang-omni#539: 3.7 s a call on an H100)."""
    if pixels.shape[2:] != conv.kernel_size:
        return forward(pixels)
    features = nn.functional.linear(pixels.flatten(1), conv.weight.flatten(1), conv.bias)
    return features.view(*features.shape, *(1 for _ in conv.kernel_size))


def _without_graph(inner: nn.Module, args: Any, output: Any) -> None:
    """Have image features that a model also gives beside its logits take no gradient. Else FSDP, on whose hooks they
    come by, would gather the last layer's parameters once more where a backward comes to them, and ranks without images
    would not."""
    given = output.get("image_outputs") if isinstance(output, dict) else None
    if given is not None:
        output["image_outputs"] = tree_map_only(Tensor, Tensor.detach, given)


class _TakingGradients:
    """A hook on the embedding: where images' parts are trained, what it gives takes a gradient without images too, so
    that all ranks' backwards come through the same layers."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, embedding: nn.Module, args: Any, output: Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad and trains_images(self.model):
            output.requires_grad_(True)


class _FeaturesHere:
    """A model's `get_image_features`, of whose result the rows for image tokens of this rank are kept."""

    def __init__(self, inner: Any, inputs: tuple[str, str]):
        self.features, self.inputs = inner.get_image_features, inputs
        self.config = getattr(inner.config, "vision_config", inner.config)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.inputs, args, strict=False)) | kwargs
        pixels, sizes = (given[name] for name in self.inputs)
        images = _placed()
        # flash attention takes lengths on the device, in recomputation too
        if images is not None and "flash" not in str(self.config._attn_implementation):
            sizes = images.sizes
        # what else comes along is for the language model's attention
        with _BringingTo(pixels.device):
            found = self.features(pixels, sizes, return_dict=given.get("return_dict"))
        if images is None:
            return found
        if (number := _number_of_rows(found.pooler_output)) != images.num_tokens:
            raise ExpertMeshError(
                f"a batch has {images.num_tokens} image tokens, and images of {number} by {self.inputs[1]}: a sample "
                "was cut within an image, or its images are others; give complete samples"
            )
        if images.rows_N is not None:
            for name in ("pooler_output", "deepstack_features"):
                if getattr(found, name, None) is not None:
                    found[name] = _rows(found[name], images.rows_N)
        return found


class _BringingTo(TorchFunctionMode):
    """Within it, what meets tensors of a device is brought there from host memory, without waiting. Until then it
    stays, whoever moves it: its values are known without waiting."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.to and self._is_on_host(args[0]):
            args, kwargs = args[:1], {"dtype": _dtype_asked_for(args[0], *args[1:], **kwargs)}
        devices = {tensor.device for tensor in tensors_in(args, kwargs) if tensor.dim()}
        if len(devices) > 1 and self.device in devices:
            if function is Tensor.__getitem__ and _is_mask(args[1]):
                # how many places it has is known in host memory alone
                args = args[0], args[1].nonzero(as_tuple=True)
            args, kwargs = tree_map_only(Tensor, self._brought, (args, kwargs))
        return function(*args, **kwargs)

    def _is_on_host(self, tensor: Tensor) -> bool:
        device = tensor.device
        return device.type == "cpu" and device != self.device

    def _brought(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or not tensor.dim():
            return tensor
        return bring_to(tensor, self.device)


def _dtype_asked_for(tensor: Tensor, *args: Any, dtype: torch.dtype | None = None, **others: Any) -> torch.dtype:
    """By the arguments of `Tensor.to`."""
    told = [each for each in args if isinstance(each, torch.dtype)] + [x.dtype for x in args if isinstance(x, Tensor)]
    return dtype or next(iter(told), tensor.dtype)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _masks(masks: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A model's `get_placeholder_mask` without its count of image tokens, for which the host would wait: they are
    counted where images are placed. The first of the masks is known by `_ByPlaces`."""
    if _placed() is None:
        return masks(*args, **kwargs)
    if _FEATURES in inspect.signature(masks).parameters:
        kwargs[_FEATURES] = None
    found = masks(*args, **kwargs)
    setattr(found[0], _OF_IMAGES, True)
    return found


class _ByPlaces(TorchFunctionMode):
    """From where a forward with images begins until its decoder does, what is done at the image tokens' mask is done at
    their places, with the same bits: to find these from the mask the host would wait, and once more in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()

    def begin(self, inner: nn.Module, *given: Any) -> None:
        if _placed() is not None:
            self.stack.enter_context(self)

    def end(self, module: nn.Module, *given: Any) -> None:
        self.stack.close()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.masked_scatter and _is_of_images(args[1]):
            hidden_BLD, _, features = args
            hidden_TD = hidden_BLD.flatten(0, 1)
            features_ND = features.reshape(-1, hidden_TD.shape[1])
            return hidden_TD.index_copy(0, _placed().index_N, features_ND).view_as(hidden_BLD)
        if function is Tensor.__getitem__ and _is_of_images(args[1]):
            values_BLD, mask = args
            values_ND = values_BLD.flatten(0, 1).index_select(0, _placed().index_N)
            return values_ND.flatten() if mask.dim() == values_BLD.dim() else values_ND
        if function is Tensor.sum and _is_of_images(args[0]):
            return torch.tensor(len(_placed().index_N))
        result = function(*args, **(kwargs or {}))
        if function in _SAME_PLACES and _is_of_images(args[0]):
            setattr(result, _OF_IMAGES, True)
        return result


def _is_of_images(mask: Any) -> bool:
    return isinstance(mask, Tensor) and _OF_IMAGES in vars(mask)


def _add_to_layer(add: Callable[..., Tensor], hidden_BLD: Tensor, mask_BL: Tensor, features_ND: Tensor) -> Tensor:
    """DeepStack: image features added to a layer's result at the image tokens. By their places, as to find these from
    the mask the host would wait."""
    images = _placed()
    if images is None:
        return add(hidden_BLD, mask_BL, features_ND)
    hidden_TD = hidden_BLD.flatten(0, 1)
    return hidden_TD.index_add(0, images.index_N, features_ND.to(hidden_TD)).view_as(hidden_BLD)


def _placed() -> Any:
    """The images of the forward that is current (`training.data.images.Images`); None: it has none, or none is."""
    forward = current_forward()
    return None if forward is None else forward.images


def image_features(model: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """What the parts that images alone pass give of some, those of DeepStack too.

    Args:
        inputs: in the order of `ImageFacts.inputs`.
    """
    found = inner_model(model).get_image_features(*inputs.values(), return_dict=True)
    return tensors_in(found.pooler_output, found.get("deepstack_features"))


def image_prefixes(model: Any) -> tuple[str, ...]:
    """What paths of modules begin with that images alone pass."""
    facts = images_of(model)
    return () if facts is None else tuple(f"{path}." for path in facts.paths)


def image_parameters(model: Any) -> list[nn.Parameter]:
    """Those that images alone pass."""
    return [p for prefix in image_prefixes(model) for p in model.get_submodule(prefix[:-1]).parameters()]


def parameters_by_part(model: Any) -> dict[str, list[nn.Parameter]]:
    """The parameters of the tower, and of the projector behind it."""
    facts = images_of(model)
    assert facts is not None
    found: dict[str, list[nn.Parameter]] = {"tower": [], "projector": []}
    tower = max(facts.paths, key=lambda path: sum(1 for _ in model.get_submodule(path).modules()))
    for path in facts.paths:
        for name, parameter in model.get_submodule(path).named_parameters(prefix=path):
            found["projector" if path != tower or _PROJECTORS.search(name) else "tower"].append(parameter)
    return found


def trains_images(model: Any) -> bool:
    """Whether something is trained that images alone pass."""
    return any(p.requires_grad for p in image_parameters(model))


def rope_positions(model: Any, tokens_1L: Tensor, grid_I3: Tensor) -> Tensor | None:
    """Positions of one sample's tokens in time, height and width, (3, L), as the family's own code gives them; None
    where it has no such positions.

    Raises:
        ExpertMeshError: the sample's image tokens are not those of its images.
    """
    inner, facts = inner_model(model), images_of(model)
    assert facts is not None
    if not hasattr(inner, "get_rope_index"):
        return None
    if len(grid_I3) == 0:
        return torch.arange(tokens_1L.shape[1]).expand(3, -1)
    kinds_1L = (tokens_1L == facts.token).int()
    lengths = torch.diff(torch.nn.functional.pad(kinds_1L[0], (1, 1)).diff().nonzero().flatten())[::2].tolist()
    try:
        # each image by itself: two that take as many tokens together may stand in the other order
        for length, grid_3 in zip(lengths, grid_I3, strict=True):
            inner.get_rope_index(
                tokens_1L.new_full((1, length), facts.token), kinds_1L.new_ones(1, length), grid_3[None]
            )
        found_31L, _ = inner.get_rope_index(tokens_1L, kinds_1L, grid_I3)
    except RuntimeError as error:  # the shape of its result is that of the images, not of the tokens
        raise ExpertMeshError(
            f"a sample of a batch has images of {lengths} tokens, which are not as many as those of {GRID} "
            f"{grid_I3.tolist()} take: it was cut within an image, or its images are others; give complete samples"
        ) from error
    positions_3L: Tensor = found_31L[:, 0]
    return positions_3L


def inner_model(model: Any) -> Any:
    inner = model.base_model
    if inner is model or not hasattr(inner, "get_image_features"):
        raise _unsupported(model, "has no get_image_features")
    return inner


def _image_inputs(inner: Any) -> tuple[str, str]:
    """
    Raises:
        ExpertMeshError: they are not those of a family that is supported.
    """
    taken = list(inspect.signature(type(inner).get_image_features).parameters.values())[1:]
    names = [parameter.name for parameter in taken if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(names) != 2 or names[0] != PIXELS or names[1] not in _BY_IMAGE:
        raise _unsupported(
            inner, f"takes {', '.join(names)} for images, not {PIXELS} with {' or '.join(_BY_IMAGE)} alone"
        )
    return names[0], names[1]


def _unsupported(model: Any, why: str) -> ExpertMeshError:
    return ExpertMeshError(
        f"--images: {type(model).__name__} {why}: its images are not supported; leave --images out to train on text"
    )


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _number_of_rows(features: Any) -> int:
    return sum(tensor.shape[:-1].numel() for tensor in tensors_in(features))


def _rows(features: Any, rows_N: Tensor) -> Any:
    """Of a tensor, or of one for each image, or of lists of these: the rows, in one part."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2).index_select(0, rows_N)
    if isinstance(features, tuple) and all(isinstance(part, Tensor) for part in features):
        return (torch.cat(features).index_select(0, rows_N),)
    return type(features)(_rows(part, rows_N) for part in features)
