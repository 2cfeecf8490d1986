"""Where a model's forward can be cut into stages, and what travels over each cut: found in forwards on the meta device.

Nothing is computed, no memory held, and no family is known by name. One forward of the complete model says, operator by
operator, which parameters are used where, and whether what one layer gives is used by any but the next: such a
dependence cannot be cut. Forwards of other sizes say how the shapes of what layers give follow from a batch's.

Shape suffixes: B sequences, S positions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.flop_counter import flop_registry

from ...moe.experts.model_layers import decoder_layers, moe_layers
from ...moe.hf_model.build import fp32_parameters, without_computing
from ...moe.hf_model.images import images_of
from ...moe.hf_model.mtp import final_norm, mtp_of
from ...moe.util.errors import ExpertMeshError
from ...moe.util.tensors import tensors_in
from ..dataflow import BEFORE, Dim, Given, Leaf, Survey

_SIZES = ((2, 24), (3, 40), (2, 3000))
"""(B, S) of the forwards. The last is longer than the lengths that some families cut off at, and takes long in those
that go through a sequence step by step: it is left out where layers give hidden states alone."""


@torch.compiler.set_stance("force_eager")
def survey(model: Any, compute_dtype: torch.dtype) -> Survey:
    """Find out how a model's forward passes values on.

    Args:
        model: assembled, on the meta device, not sharded.
        compute_dtype: of its matmuls.

    Raises:
        ExpertMeshError: layers give what has no shape that follows from a batch's; or the forward does not run.
    """
    layers = decoder_layers(model)
    path = next(path for path, module in model.named_modules() if module is layers)
    with _computing_in(model, compute_dtype) as names, without_computing(model):
        runs = [_Run(model, path, names, size) for size in _SIZES[:2]]
        first = runs[0]
        if any(len(tree_leaves(output)) > 1 for output in first.given.values()):
            runs.append(_Run(model, path, names, _SIZES[2]))
    given = tuple(_given(model, [run.given[i] for run in runs], f"{path}.{i}") for i in range(len(layers)))
    outside = {
        name: _given(model, [run.given_outside[name] for run in runs], name)
        for name in first.given_outside
        if all(name in run.given_outside for run in runs)
    }
    tokens = prod(_SIZES[0])
    flops = [first.flops[i] / tokens for i in range(len(layers) + 1)]
    for number, layer in enumerate(layers):
        flops[number] += _expert_flops(layer)
    uses = {name: frozenset(places) for name, places in first.uses.items()}
    around = {parameter for module in _around(model, layers) for parameter in module._parameters.values()}
    for name, parameter in model.named_parameters():
        if parameter in around and 0 in uses.get(name, ()):
            # the code around the layers, which every stage runs, computes with it
            uses[name] |= set(range(len(layers) + 1))
    if (images := images_of(model)) is not None:
        # what images add to the first layers' results is on the first stage, and added where the next layer begins
        first.skips |= {(layer, layer + 1) for layer in range(images.num_deep)}
        if any(start == BEFORE for start, _ in first.skips):
            raise ExpertMeshError(
                f"--images: every stage of a pipeline would need the images, as layers of {type(model).__name__} read "
                "embeddings; leave out --pp-size, or --images"
            )
    if (mtp := mtp_of(model)) is not None:
        # a forward without targets only passes through the layer
        for name, parameter in model.named_parameters():
            if parameter in {model.get_input_embeddings().weight, final_norm(model).weight}:
                uses[name] |= {mtp.number}
        flops[mtp.number] += flops[mtp.like] - _expert_flops(layers[mtp.like])
        flops[-1] *= 2
    return Survey(type(model).__name__, path, len(layers), uses, frozenset(first.skips), given, outside, tuple(flops))


def _around(model: nn.Module, layers: nn.Module) -> list[nn.Module]:
    """The modules that the list of layers is in."""
    return [module for module in model.modules() if any(part is layers for part in module.modules())]


def _expert_flops(layer: nn.Module) -> float:
    """Of a token's forward through its experts, which forwards on the meta device leave out."""
    shapes = [(experts.shape, sum(p.numel() for p in experts.mlp.parameters())) for experts in moe_layers(layer)]
    return sum(2.0 * numel * shape.top_k / shape.num_experts for shape, numel in shapes)


@contextmanager
def _computing_in(model: Any, dtype: torch.dtype) -> Iterator[dict[int, str]]:
    """Within it, parameters on the meta device have the dtypes that they are computed with; their names by id."""
    kept = fp32_parameters(model).keys()
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    casts: dict[int, nn.Parameter] = {}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        target = torch.float32 if name in kept else dtype
        cast = parameter.detach().to(target) if parameter.is_floating_point() else parameter.detach()
        casts[id(parameter)] = nn.Parameter(cast, requires_grad=False)
        names[id(casts[id(parameter)])] = name
    for module in model.modules():
        for own_name, parameter in module._parameters.items():
            if parameter is not None:
                replaced.append((module, own_name, parameter))
                module._parameters[own_name] = casts[id(parameter)]
    try:
        yield names
    finally:
        for module, own_name, parameter in replaced:
            module._parameters[own_name] = parameter


class _Run:
    """One forward, and what was seen in it (see `Survey`); `given` are pytrees of meta tensors."""

    def __init__(self, model: Any, layers: str, names: dict[int, str], size: tuple[int, int]):
        self.layers, self.names = layers, names
        self.num_layers = len(model.get_submodule(layers))
        self.layer: int | None = None  # that is being run
        self.place = 0  # the layer that is or will be run next
        self.uses: dict[str, set[int]] = {}
        self.skips: set[tuple[int, int]] = set()
        self.given: dict[int, Any] = {}
        self.given_outside: dict[str, Any] = {}
        self.flops: dict[int, float] = dict.fromkeys(range(self.num_layers + 1), 0.0)
        self._origins: dict[int, frozenset[int]] = {}
        self._inside: dict[int, int] = {}  # by storage, the layer that made it and did not give it
        self._alive: list[Tensor] = []  # storages that live have distinct addresses
        tokens_BS = torch.zeros(size, dtype=torch.long, device="meta")
        positions_BS = torch.zeros(size, dtype=torch.long, device="meta")
        with ExitStack() as stack:
            for number, layer in enumerate(model.get_submodule(layers)):
                stack.enter_context(_hooked(layer, self._enters(number), self._leaves(number)))
            for path, module in _with_own_parameters(model, layers):
                stack.enter_context(_hooked(module, None, self._gives(path)))
            stack.enter_context(_Watching(self))
            try:
                model(input_ids=tokens_BS, position_ids=positions_BS, use_cache=False)
            except Exception as error:
                raise ExpertMeshError(
                    f"--pp-size: {type(model).__name__} cannot be cut into stages: its forward does not run on the "
                    f"meta device: {type(error).__name__}: {error}"
                ) from error
        if len(self.given) < self.num_layers:
            raise ExpertMeshError(
                f"--pp-size: {type(model).__name__} cannot be cut into stages: a forward calls "
                f"{len(self.given)} of its {self.num_layers} layers"
            )

    def _enters(self, number: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self.layer = self.place = number

        return enter

    def _leaves(self, number: int) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.layer, self.place = None, number + 1
            self.given[number] = output
            for tensor in tensors_in(output):
                self._set_origins(tensor, frozenset({number}))
                self._inside.pop(_storage(tensor), None)

        return leave

    def _gives(self, path: str) -> Callable[..., None]:
        def give(module: nn.Module, args: Any, output: Any) -> None:
            self.given_outside[path] = output

        return give

    def saw(self, operator: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operator has run."""
        inputs = tensors_in(args, kwargs)
        found = frozenset[int]().union(*(self._origins_of(tensor) for tensor in inputs))
        named = [self.names[id(tensor)] for tensor in inputs if id(tensor) in self.names]
        for name in named:
            self.uses.setdefault(name, set()).add(self.place)
        if operator.overloadpacket in flop_registry:
            self.flops[self.place] += flop_registry[operator.overloadpacket](*args, **kwargs, out_val=out)
        if self.layer is not None or self.place == self.num_layers:
            self.skips |= {(origin, self.place) for origin in found if origin not in (self.place - 1, self.place)}
        inside = {self._inside[_storage(tensor)] for tensor in inputs if _storage(tensor) in self._inside}
        self.skips |= {(origin, origin + 1) for origin in inside if origin != self.place}
        origins = found
        if self.layer is not None and (found or named):
            origins = frozenset({self.layer})
        elif named and self.place == 0:
            origins = frozenset({BEFORE})
        storages = {_storage(tensor) for tensor in inputs}
        for tensor in tensors_in(out):
            # a view has what its base has, unless it was written to
            if _storage(tensor) not in storages or operator._schema.is_mutable:
                self._set_origins(tensor, origins)
                if self.layer in origins:
                    self._inside[_storage(tensor)] = next(iter(origins))

    def _set_origins(self, tensor: Tensor, origins: frozenset[int]) -> None:
        self._alive.append(tensor)
        self._origins[_storage(tensor)] = origins

    def _origins_of(self, tensor: Tensor) -> frozenset[int]:
        return self._origins.get(_storage(tensor), frozenset())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Watching(TorchDispatchMode):
    def __init__(self, run: _Run):
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = operator(*args, **kwargs)
        self.run.saw(operator, args, kwargs, out)
        return out


def _with_own_parameters(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules outside the decoder layers that have parameters of their own, with their paths."""
    for path, module in model.named_modules():
        if not path.startswith(f"{layers}.") and any(p is not None for p in module._parameters.values()):
            yield path, module


@contextmanager
def _hooked(module: nn.Module, before: Callable[..., None] | None, after: Callable[..., None]) -> Iterator[None]:
    handles = [] if before is None else [module.register_forward_pre_hook(before)]
    handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _given(model: nn.Module, outputs: Sequence[Any], path: str) -> Given:
    """What a module gives for any batch, from what it gave for those of `_SIZES`.

    Raises:
        ExpertMeshError: it is not told by them.
    """
    flat = [tree_flatten(output) for output in outputs]
    (first, spec) = flat[0]
    leaves: list[Leaf | None] = []
    for number, leaf in enumerate(first):
        if not isinstance(leaf, Tensor):
            leaves.append(None)
            continue
        tensors = [found[number] for found, other in flat if other == spec and isinstance(found[number], Tensor)]
        if len(tensors) < len(flat) or len({tensor.dim() for tensor in tensors}) > 1:
            raise ExpertMeshError(_unpredictable(model, path))
        lengths = zip(*(tensor.shape for tensor in tensors), strict=True)
        dims = [_dim(found) for found in lengths]
        if any(dim is None for dim in dims):
            raise ExpertMeshError(_unpredictable(model, path))
        leaves.append(Leaf(tuple(dim for dim in dims if dim is not None), leaf.dtype))
    constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in first)
    return Given(tuple(leaves), constants, spec)


def _unpredictable(model: nn.Module, path: str) -> str:
    return (
        f"--pp-size: {type(model).__name__} cannot be cut into stages: the shape of the output of "
        f"{path} does not follow from the sequences and positions of a batch"
    )


def _dim(lengths: Sequence[int]) -> Dim | None:
    """The dimension that has these lengths for batches of `_SIZES`; None if there is none."""
    if len(set(lengths)) == 1:
        return Dim(lengths[0])
    for by_b, by_s in ((True, False), (False, True), (True, True)):
        base = (_SIZES[0][0] if by_b else 1) * (_SIZES[0][1] if by_s else 1)
        dim = Dim(lengths[0] // base, by_b, by_s)
        for candidate in (dim, replace(dim, most=lengths[-1])):
            if [candidate.of(size) for size in _SIZES[: len(lengths)]] == list(lengths):
                return candidate
    return None
