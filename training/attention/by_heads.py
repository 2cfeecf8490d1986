"""Context parallelism by heads, for parts of layers that carry a state (mixers): where a mixer calls functions of
heads, as the gated delta rule, or causal convolutions of channels, and all else in it looks at each position by itself.

Each rank keeps its positions, calls the function of heads with some of these at all positions, and a convolution with
the last few positions of the rank before. Which functions of the mixer's file these are is found by trying: once with
complete sequences, once with each rank's positions.

Shape suffixes: B sequences, S positions, L = S/c of them on this rank, H heads, h = H/c of them, A head width, C
channels, k width of a convolution, D model width.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ...sharding.collectives.context_parallel import CPGroup

Kind = Literal["heads", "convolution"]

_DIFFERENCE = 1e-4
"""By how much results of a trial have to differ, relative to the largest, to be more than rounding."""


@dataclass(frozen=True)
class SplitFunctions:
    """Functions that a mixer calls with several positions. reach: how many positions before its own a rank needs."""

    kinds: dict[str, Kind]
    reach: int


@contextmanager
def splitting(mixer: nn.Module, functions: SplitFunctions, group: CPGroup) -> Iterator[None]:
    """Within it, a mixer that is called with this rank's positions gets results of all of them."""

    def split(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return partial({"heads": _of_heads, "convolution": _convolved}[functions.kinds[name]], group, function)

    with _replacing(mixer, functions.kinds, split):
        yield


def _of_heads(group: CPGroup, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it with this rank's heads at all positions; what it returns beside its first result is left out."""
    leaves, structure = tree_flatten((args, kwargs))
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    parts_BHLA = [leaves[i].transpose(1, 2) if leaves[i].dim() == 4 else leaves[i].mT.unsqueeze(-1) for i in indices]
    for i, x_BhSA in zip(indices, group.to_heads(*parts_BHLA), strict=True):
        x_BShA = x_BhSA.transpose(1, 2).contiguous()
        leaves[i] = x_BShA if leaves[i].dim() == 4 else x_BShA.squeeze(-1)
    args, kwargs = tree_unflatten(leaves, structure)
    results, structure = tree_flatten(function(*args, **kwargs))
    results = [x.new_empty(0) if isinstance(x, Tensor) and i > 0 else x for i, x in enumerate(results)]
    results[0] = group.to_positions(results[0])
    return tree_unflatten(results, structure)


def _convolved(group: CPGroup, function: Callable[..., Any], x_BCL: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    reach = _width(args, kwargs) - 1
    out: Tensor = function(torch.cat([group.from_before(x_BCL, reach), x_BCL], dim=-1), *args, **kwargs)
    return out[..., reach:]


def _width(args: Any, kwargs: Any) -> int:
    """Of a convolution, by its weight (C, k)."""
    return next(leaf.shape[1] for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


@contextmanager
def _replacing(
    mixer: nn.Module, names: Any, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Within it, the code of a mixer's class calls `around(name, function)` for functions of its file."""
    file = inspect.unwrap(type(mixer).forward).__globals__
    own = {name: file[name] for name in names}
    file.update({name: around(name, function) for name, function in own.items()})
    try:
        yield
    finally:
        file.update(own)


@torch.no_grad()
def find_split_functions(mixer: nn.Module, args: Any, kwargs: Any, cp_size: int) -> SplitFunctions | None:
    """Try whether each rank of a CP group could run a mixer with its own positions; None: no, or its heads cannot be
    divided.

    Args:
        mixer: on the meta device. A copy is tried, in fp32 on the CPU, with random weights.
        args, kwargs: what it is called with; of tensors, hidden states (B, L, D) alone.
    """
    kwargs = without_unnamed(mixer, kwargs)
    hidden = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    names = list(_functions(mixer))
    if len(hidden) != 1 or hidden[0].dim() != 3 or not names:
        return None
    trial = _Trial(_with_weights(mixer), args, kwargs, names, hidden[0].shape[1], cp_size)
    try:
        return trial.functions()
    except (_UnlikeError, RuntimeError, TypeError, ValueError, IndexError, StopIteration):
        # with some of the positions it does not even run
        return None


def without_unnamed(mixer: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without tensors that all modules of a layer are given and a mixer has no name for: it would only hand them on."""
    named = inspect.signature(type(mixer).forward).parameters
    return {
        name: value
        for name, value in kwargs.items()
        if name in named or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    }


def _functions(mixer: nn.Module) -> Iterator[str]:
    forward = inspect.unwrap(type(mixer).forward)
    for name in forward.__code__.co_names:
        value = forward.__globals__.get(name)
        if (
            callable(value)
            and not inspect.isclass(value)
            and getattr(value, "__module__", "").startswith("transformers.")
        ):
            yield name


def _with_weights(mixer: nn.Module) -> nn.Module:
    copied = deepcopy(mixer).to_empty(device="cpu").float().eval()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*copied.parameters(), *copied.buffers()):
        if tensor.is_floating_point():
            scale = 0.3 if tensor.dim() < 2 else tensor[0].numel() ** -0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    return copied


class _UnlikeError(Exception):
    """A rank's positions have given other results."""


@dataclass(frozen=True)
class _Call:
    """A call of a function with complete sequences. result: all that it has returned, out the first of it."""

    name: str
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    result: Any

    @property
    def out(self) -> Any:
        return tree_leaves(self.result)[0]

    def result_with(self, out: Tensor) -> Any:
        """What it would return with another first result; of others, nothing."""
        leaves, structure = tree_flatten(self.result)
        return tree_unflatten([out, *(None for _ in leaves[1:])], structure)


class _Trial:
    """A mixer, called with complete sequences and with each rank's positions."""

    def __init__(self, mixer: nn.Module, args: Any, kwargs: Any, names: list[str], length: int, cp_size: int):
        self.mixer, self.given, self.names, self.length, self.cp_size = mixer, (args, kwargs), names, length, cp_size
        self.kinds: dict[str, Kind] = {}
        self.calls: list[_Call] = []

    def functions(self) -> SplitFunctions | None:
        (like,) = (leaf for leaf in tree_leaves(self.given) if isinstance(leaf, Tensor))
        generator = torch.Generator().manual_seed(1)
        hidden_BSD = torch.randn(2, self.length * self.cp_size, like.shape[-1], generator=generator)
        out_BSD = self._run(hidden_BSD, self._noting)
        if not self.kinds:
            return None
        for call in self.calls:
            for rank in range(self.cp_size):
                check_part = self._check_heads if self.kinds[call.name] == "heads" else self._check_positions
                check_part(call, rank)
        for rank in range(self.cp_size):
            found_BLD = self._run(self._cut(hidden_BSD, 1, rank), partial(self._replaying, iter(self.calls), rank))
            _check(found_BLD, self._cut(out_BSD, 1, rank))
        convolutions = [call for call in self.calls if self.kinds[call.name] == "convolution"]
        return SplitFunctions(self.kinds, max((_width(c.args[1:], c.kwargs) - 1 for c in convolutions), default=0))

    def _run(self, hidden: Tensor, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Tensor:
        args, kwargs = tree_map_only(Tensor, lambda _: hidden, self.given)
        with _replacing(self.mixer, self.names, around):
            out: Tensor = tree_leaves(type(self.mixer).forward(self.mixer, *args, **kwargs))[0]
        return out

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            noted = _Call(name, function, args, kwargs, function(*args, **kwargs))
            kind = self._kind(noted)
            if kind is not None:
                self.kinds[name] = kind
                self.calls.append(noted)
            return noted.result

        return call

    def _kind(self, call: _Call) -> Kind | None:
        """What a function may be by the shapes that it is given and gives."""
        tensors = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
        out, length = call.out, self.length * self.cp_size
        if not tensors or not isinstance(out, Tensor):
            return None
        of_heads = [x.dim() in (3, 4) and x.shape[1] == length and x.shape[2] % self.cp_size == 0 for x in tensors]
        if out.dim() == 4 and out.shape[1] == length and all(of_heads):
            return "heads"
        x = tensors[0]
        is_first = len(call.args) > 0 and call.args[0] is x
        if is_first and x.dim() == 3 and x.shape == out.shape and x.shape[2] == length and len(tensors) > 1:
            weight = tensors[1]
            return "convolution" if weight.dim() == 2 and len(weight) == x.shape[1] else None
        return None

    def _check_heads(self, call: _Call, rank: int) -> None:
        """Whether it gives some of the heads the same, if it is called with these."""
        args, kwargs = tree_map_only(Tensor, lambda x: self._cut(x, 2, rank), (call.args, call.kwargs))
        _check(tree_leaves(call.function(*args, **kwargs))[0], self._cut(call.out, 2, rank))

    def _check_positions(self, call: _Call, rank: int) -> None:
        """Whether it gives a rank's positions the same, if it is called with these and a few before."""
        x_BCS, *args = call.args
        reach, start = _width(args, call.kwargs) - 1, rank * self.length
        x_BCS = torch.cat([x_BCS.new_zeros(*x_BCS.shape[:2], reach), x_BCS], dim=-1)
        x_BCL = x_BCS[..., start : start + reach + self.length]
        _check(call.function(x_BCL, *args, **call.kwargs)[..., reach:], self._cut(call.out, 2, rank))

    def _replaying(
        self, calls: Iterator[_Call], rank: int, name: str, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """A function's results at a rank's positions, if it is given what complete sequences gave it there."""
        if name not in self.kinds:
            return function
        dim = 1 if self.kinds[name] == "heads" else 2

        def call(*args: Any, **kwargs: Any) -> Any:
            noted = next(calls)
            if noted.name != name:
                raise _UnlikeError
            for found, whole in zip(tree_leaves((args, kwargs)), tree_leaves((noted.args, noted.kwargs)), strict=True):
                if isinstance(whole, Tensor):
                    # weights of a convolution are what they were
                    _check(found, self._cut(whole, dim, rank) if whole.dim() > 2 else whole)
            return noted.result_with(self._cut(noted.out, dim, rank))

        return call

    def _cut(self, x: Tensor, dim: int, rank: int) -> Tensor:
        return x.chunk(self.cp_size, dim)[rank]


def _check(found: Any, expected: Tensor) -> None:
    is_like = isinstance(found, Tensor) and found.shape == expected.shape
    if not is_like or not (found - expected).abs().max() <= _DIFFERENCE * expected.abs().max():
        raise _UnlikeError
