"""Loops over a sequence, predicted from what they do on short ones.

Where no kernel of a recurrent layer is installed, transformers computes it by a function of Python that loops over
tokens, or over chunks of them: tens of thousands of operators, each of which takes as long to measure as any other. So
such a function is run at four short lengths, by itself, and what it does at others follows: bytes and FLOPs, and how
many operators there are, are polynomials of the length. Three lengths make them, the fourth must agree in everything.
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .attribution import Parts
from .live_memory import LiveTensors
from .recorder import Recorder
from .seen_spans import Numbers, on_line

SHORTEST = 4
"""Tokens by which short lengths differ, at least; a function that is told of chunks goes by these."""
LENGTHS = (4, 5, 6, 8)
"""Short lengths, in such units. The first and the last round of a loop are not like the others."""

How = Literal["first", "to be again", "again"]
"""Whether a forward keeps what its backward needs, keeps nothing as it will be computed again, or is computed again."""


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its storage, of so many elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    elements: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "Layout":
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        return Layout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), elements, tensor.dtype)

    def make(self) -> Tensor:
        return torch.empty(self.elements, dtype=self.dtype).as_strided(self.shape, self.stride, self.offset)

    @property
    def nbytes(self) -> int:
        """Bytes of its storage."""
        return self.elements * self.dtype.itemsize

    @property
    def numbers(self) -> Numbers:
        return (*self.shape, *self.stride, self.offset, self.elements)

    def like(self, numbers: Iterator[float]) -> "Layout":
        """The same layout with the next of these numbers."""
        shape, stride = (tuple(int(next(numbers)) for _ in self.shape) for _ in range(2))
        return Layout(shape, stride, int(next(numbers)), int(next(numbers)), self.dtype)


@dataclass(frozen=True)
class Kernels:
    """Totals of one operator: how many there are, their FLOPs, those without recomputation, and bytes."""

    name: str
    numbers: Numbers


@dataclass(frozen=True)
class Pass:
    """A forward, or a backward.

    kernels: by operator. calls: operators called by the host. levels: bytes beyond those before it, after each change
    of memory; at a predicted length, those of the first and of the last rounds, or the peak alone.
    """

    kernels: tuple[Kernels, ...]
    calls: int
    levels: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max((0, *self.levels))

    def cut(self, first: int, last: int) -> "Pass":
        """The same, cut to so many levels after the start, and before the end."""
        return replace(self, levels=(*self.levels[:first], *self.levels[len(self.levels) - last :]))


@dataclass(frozen=True)
class Done:
    """What a call has done.

    Attributes:
        inputs, outputs: the tensors that it was given and gave; tree: in what, gives: where there are tensors in it.
        gradients: of the inputs, None of one that has none.
        learned: whether each input has a gradient.
        keeps_inputs, keeps_outputs: numbers of those that it keeps for its backward. kept: bytes of all else.
        forward: where what backward needs is kept. dropping: where it is not, but recomputed: with so many
            `calls_again`, of tensors of which so many are `used_again`.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    tree: Any
    gives: tuple[bool, ...]
    gradients: tuple[Layout | None, ...]
    learned: tuple[bool, ...]
    keeps_inputs: tuple[int, ...]
    keeps_outputs: tuple[int, ...]
    kept: int
    forward: Pass
    dropping: Pass
    calls_again: int
    used_again: int
    backward: Pass

    @property
    def _layouts(self) -> list[Layout]:
        return [*self.inputs, *self.outputs, *(layout for layout in self.gradients if layout is not None)]

    @property
    def _passes(self) -> tuple[Pass, ...]:
        return self.forward, self.dropping, self.backward

    @property
    def form(self) -> Hashable:
        """All that is no number, alike at all lengths."""
        return (
            [(len(layout.shape), layout.dtype) for layout in self._layouts],
            [layout is None for layout in self.gradients],
            (str(self.tree), self.gives, self.learned, self.keeps_inputs, self.keeps_outputs),
            [[kernels.name for kernels in each.kernels] for each in self._passes],
            [len(each.levels) for each in self._passes],
        )

    @property
    def numbers(self) -> Numbers:
        found: list[float] = [self.kept, self.calls_again, self.used_again]
        for layout in self._layouts:
            found += layout.numbers
        for each in self._passes:
            found += [each.calls, *each.levels, *(n for kernels in each.kernels for n in kernels.numbers)]
        return tuple(found)

    def like(self, numbers: Sequence[float]) -> "Done":
        """The same with these numbers."""
        rest = iter(numbers)
        kept, calls_again, used_again = (int(next(rest)) for _ in range(3))
        inputs = tuple(layout.like(rest) for layout in self.inputs)
        outputs = tuple(layout.like(rest) for layout in self.outputs)
        gradients = tuple(None if layout is None else layout.like(rest) for layout in self.gradients)
        passes = []
        for each in self._passes:
            calls, levels = int(next(rest)), tuple(int(next(rest)) for _ in each.levels)
            kernels = tuple(Kernels(k.name, tuple(next(rest) for _ in k.numbers)) for k in each.kernels)
            passes.append(Pass(kernels, calls, levels))
        forward, dropping, backward = passes
        layouts: dict[str, Any] = dict(inputs=inputs, outputs=outputs, gradients=gradients)
        figures: dict[str, Any] = dict(kept=kept, forward=forward, dropping=dropping, backward=backward)
        return replace(self, **layouts, **figures, calls_again=calls_again, used_again=used_again)


def at_length(short: Sequence[Done], units: int) -> Done | None:
    """What a call of so many `units` does, extended from calls of LENGTHS units; None where these do not agree."""
    by_length = zip(*(_alike(each) for each in zip(*(done._passes for done in short), strict=True)), strict=True)
    short = [
        replace(done, forward=forward, dropping=dropping, backward=backward)
        for done, (forward, dropping, backward) in zip(short, by_length, strict=True)
    ]
    first = short[0]
    if any(done.form != first.form for done in short):
        return None
    numbers = [done.numbers for done in short]
    if _extended(numbers[:3], LENGTHS[3]) != numbers[3]:
        return None
    return first.like(_extended(numbers[:3], units))


def _alike(short: Sequence[Pass]) -> list[Pass]:
    """Cut to the levels that follow from one another, counted from the start and from the end: a round in between is
    between others in memory too. To the peak alone where these leave out any of the shortest."""
    first = _agreeing([each.levels for each in short])
    last = _agreeing([each.levels[::-1] for each in short])
    if first + last < len(short[0].levels):
        return [replace(each, levels=(each.peak,)) for each in short]
    return [each.cut(first, last) for each in short]


def _agreeing(levels: Sequence[tuple[int, ...]]) -> int:
    """How many at the start agree with the polynomial of the first three in the fourth."""
    shortest = min(map(len, levels))
    *three, fourth = (each[:shortest] for each in levels)
    told = _extended(three, LENGTHS[3])
    return next((n for n in range(shortest) if told[n] != fourth[n]), shortest)


def _extended(numbers: Sequence[Numbers], units: int) -> Numbers:
    """Each number's polynomial of the second degree, given at the first three of LENGTHS, which follow one another."""
    beyond = units - LENGTHS[0]
    return tuple(
        a + beyond * (b - a) + beyond * (beyond - 1) // 2 * (c - 2 * b + a) for a, b, c in zip(*numbers, strict=True)
    )


@dataclass(frozen=True)
class Given:
    """The arguments of a call, with a `Layout` in the place of each tensor. learned: which tensors have a gradient.
    held: which are kept for backward by others than the function."""

    function: FunctionType
    leaves: tuple[Any, ...]
    tree: Any
    learned: tuple[bool, ...]
    held: tuple[bool, ...] = ()

    @staticmethod
    def of(function: FunctionType, args: Any, kwargs: Any) -> "Given":
        leaves, tree = tree_flatten((args, kwargs))
        told = tuple(Layout.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return Given(function, told, tree, tuple(leaf.requires_grad for leaf in _tensors(leaves)))

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Layout))

    @property
    def form(self) -> Hashable:
        """All but tensors' sizes, as a key."""
        others = [leaf.dtype if isinstance(leaf, Layout) else leaf for leaf in self.leaves]
        return self.function, str(others), str(self.tree)

    @property
    def is_plain(self) -> bool:
        """Whether all that it is given are tensors and plain values."""
        return all(leaf is None or isinstance(leaf, Layout | int | float | str | torch.dtype) for leaf in self.leaves)

    def unit(self, length: int) -> int:
        """Tokens by which short lengths are to differ: those of the chunks that it is given, or declares. Longer ones
        than the sequence it never comes to the end of."""
        declared = (p.default for p in inspect.signature(self.function).parameters.values())
        whole = (n for n in (*self.leaves, *declared) if isinstance(n, int) and n <= length)
        return max(SHORTEST, *whole, 0)

    def with_held(self, storages: Sequence[StorageWeakRef]) -> "Given":
        """The same, with those of these storages that still exist held."""
        return replace(self, held=tuple(not storage.expired() for storage in storages))

    def tensors(self, ready: Callable[[int, Tensor], None]) -> list[Tensor]:
        """New tensors for the layouts. ready: called with each one's number and gradient, in the end."""
        start = torch.zeros((), requires_grad=True)
        return [
            Source.apply(start, layout, partial(ready, number)) if has_gradient else layout.make()
            for number, (layout, has_gradient) in enumerate(zip(self.layouts, self.learned, strict=True))
        ]

    def call(self, tensors: Iterable[Tensor]) -> Any:
        """Call the function with tensors in place of the layouts."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Layout) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.tree)
        del leaves
        return self.function(*args, **kwargs)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class _Watch:
    """Records what is done from its creation on."""

    def __init__(self, recorder: Recorder, live: LiveTensors):
        self.recorder, self.live = recorder, live
        self.start, self.events, self.calls = live.total, len(recorder.events), recorder.num_calls
        self.levels: list[int] = []
        live.changed = lambda number, more, is_gone: self.levels.append(live.total - self.start)

    def seen(self) -> Pass:
        sums: dict[str, list[float]] = {}
        for event in self.recorder.events[self.events :]:
            total = sums.setdefault(event.name, [0, 0.0, 0.0, 0])
            for place, more in enumerate((1, event.flops, event.needed, event.moved)):
                total[place] += more
        kernels = tuple(Kernels(name, tuple(total)) for name, total in sorted(sums.items()))
        return Pass(kernels, self.recorder.num_calls - self.calls, tuple(self.levels))


def measured(given: Given, make_recorder: Callable[[], Recorder]) -> Done | None:
    """What a call does, by itself; None of one that gives a part of what it was given."""
    packed: list[bool] = []

    def drop(tensor: Tensor) -> None:
        packed.append(tensor.requires_grad)

    with _watching(make_recorder()) as begin, saved_tensors_hooks(drop, lambda nothing: nothing):
        inputs = given.tensors(lambda number, gradient: None)
        watch = begin()
        given.call(inputs)
        dropping = watch.seen()
    gradients: dict[int, Tensor] = {}
    backward = Pass((), 0, ())

    def ready(number: int, gradient: Tensor) -> None:
        nonlocal backward
        if not gradients:
            # all gradients are there before the first of them is passed on
            backward = started[0].seen()
        gradients[number] = gradient

    with _watching(make_recorder()) as begin:
        inputs = given.tensors(ready)
        watch = begin()
        returned = given.call(inputs)
        forward, outputs = watch.seen(), _tensors(returned)
        keys = [[tensor.untyped_storage()._cdata for tensor in tensors] for tensors in (inputs, outputs)]
        if len({*keys[0], *keys[1]}) < len({*keys[0]}) + len(outputs):
            return None
        made, (leaves, tree) = tuple(map(Layout.of, outputs)), tree_flatten(returned)
        gives = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        kept = watch.live.total - watch.start - sum(layout.nbytes for layout in made)
        started: list[_Watch] = []
        learned = [tensor for tensor in outputs if tensor.requires_grad]
        loss = _Sink.apply(lambda: started.append(begin()), *learned) if learned else None
        held = [tensor for tensor, is_held in zip(inputs, given.held, strict=True) if is_held]
        del inputs, outputs, returned, learned, leaves
        keeps = [tuple(n for n, key in enumerate(of) if key in watch.live.sizes) for of in keys]
        if loss is not None:
            loss.backward()
        del held
    if len({gradient.untyped_storage()._cdata for gradient in gradients.values()}) < len(gradients):
        return None
    found = tuple(Layout.of(gradients[n]) if n in gradients else None for n in range(len(given.layouts)))
    return Done(
        *(given.layouts, made, tree, gives, found, given.learned, keeps[0], keeps[1]),
        # what is recomputed is detached when it is kept and when it is used (`torch.utils.checkpoint`)
        *(kept, forward, dropping, dropping.calls + sum(packed), len(packed), backward),
    )


@contextmanager
def _watching(recorder: Recorder) -> Iterator[Callable[[], _Watch]]:
    live = LiveTensors([])
    with live, recorder:
        yield partial(_Watch, recorder, live)


class Source(torch.autograd.Function):
    """A tensor made from a description of it; reports its gradient."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, layout: Any, ready: Callable[[Tensor], None]) -> Tensor:
        ctx.ready = ready
        return layout.make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.ready(gradient)
        return None, None, None


@dataclass(frozen=True)
class Results:
    """What a call returns, with a `Layout` in place of each tensor."""

    leaves: tuple[Any, ...]
    tree: Any

    @staticmethod
    def of(function: FunctionType, args: Any, kwargs: Any) -> "Results":
        with torch.no_grad():
            leaves, tree = tree_flatten(function(*args, **kwargs))
        return Results(tuple(Layout.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves), tree)

    def without_graph(self, args: Any, kwargs: Any) -> Any:
        """The results as new tensors, as if the call kept nothing for backward."""
        layouts = [leaf for leaf in self.leaves if isinstance(leaf, Layout)]
        made = iter(_Fresh.apply(layouts, *_tensors((args, kwargs))))
        return tree_unflatten([next(made) if isinstance(leaf, Layout) else leaf for leaf in self.leaves], self.tree)


class _Fresh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layouts: list[Layout], *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(layout.make() for layout in layouts)


class _Sink(torch.autograd.Function):
    """Gives outputs their gradients, and reports when it has."""

    @staticmethod
    def forward(ctx: Any, begun: Callable[[], object], *outputs: Tensor) -> Tensor:
        ctx.begun, ctx.outputs = begun, [(x.shape, x.stride(), x.dtype) for x in outputs]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        made = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in ctx.outputs]
        ctx.begun()
        return None, *made


class ToldLoop(torch.autograd.Function):
    """Does what was predicted of a call, in operators and bytes, and returns tensors with the layouts of its own."""

    @staticmethod
    def forward(ctx: Any, done: Done, recorder: Recorder, how: How, *inputs: Tensor) -> Any:
        own = sum(inputs[n].requires_grad for n in done.keeps_inputs) + len(done.keeps_outputs)
        again = replace(done.forward, calls=done.calls_again - own)
        _repeat({"first": done.forward, "to be again": done.dropping, "again": again}[how], recorder)
        with recorder.paused():
            outputs = tuple(layout.make() for layout in done.outputs)
            # recomputed, it is to look the same
            kept = torch.empty(min(done.kept, 1) if how == "to be again" else done.kept, dtype=torch.uint8)
            kept = kept.expand(done.kept)
        ctx.save_for_backward(kept, *(inputs[n] for n in done.keeps_inputs), *(outputs[n] for n in done.keeps_outputs))
        ctx.mark_non_differentiable(*(tensor for tensor in outputs if not tensor.is_floating_point()))
        ctx.done, ctx.recorder, ctx.is_again = done, recorder, how != "first"
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        done, recorder = ctx.done, ctx.recorder
        kept, *others = ctx.saved_tensors
        more = done.used_again - 1 - len(others) if ctx.is_again else 0
        _repeat(replace(done.backward, calls=done.backward.calls + more), recorder)
        # it goes step by step, as gradients come
        kept.untyped_storage().resize_(0)
        with recorder.paused():
            made = [None if layout is None else layout.make() for layout in done.gradients]
        return None, None, None, *made


def _repeat(what: Pass, recorder: Recorder) -> None:
    recorder.calls[recorder.micro] += what.calls
    for kernels in what.kernels:
        recorder.repeated(kernels.name, *kernels.numbers)
    recorder.reached(what.levels)


@dataclass(frozen=True)
class Loop:
    """A function at one length: how it is called, and what it does then."""

    form: Hashable
    done: Done

    def takes(self, given: Given) -> bool:
        """Whether it is called with these arguments."""
        is_learned = self.done.learned == given.learned or not torch.is_grad_enabled()
        return self.form == given.form and self.done.inputs == given.layouts and is_learned

    def __call__(self, recorder: Recorder, how: How, args: Any, kwargs: Any) -> Any:
        made = iter(ToldLoop.apply(self.done, recorder, how, *_tensors((args, kwargs))))
        return tree_unflatten([next(made) if is_tensor else None for is_tensor in self.done.gives], self.done.tree)


def call_told(
    loops: Sequence[Loop],
    recorder: Recorder,
    parts: Parts,
    is_checkpointed: bool,
    function: FunctionType,
    args: Any,
    kwargs: Any,
) -> Any:
    """Do what was predicted of a call; or call the function, where nothing was of these arguments.

    Args:
        is_checkpointed: whether its layer is computed again in backward.
    """
    given = Given.of(function, args, kwargs)
    loop = next((loop for loop in loops if loop.takes(given)), None)
    if loop is None:
        return function(*args, **kwargs)
    again: How = "again" if parts.here().is_recomputed else "to be again"
    return loop(recorder, again if is_checkpointed else "first", args, kwargs)


def loops_at(length: int, given_at: Callable[[int], list[Given]], make_recorder: Callable[[], Recorder]) -> list[Loop]:
    """Predictions of a layer's functions for sequences of so many tokens.

    Args:
        given_at: how they are called, in order, for a sequence of so many.
    """
    unit = max((given.unit(length) for given in given_at(min(length, SHORTEST))), default=length)
    while length > (LENGTHS[-1] + 1) * unit:
        # padding to whole chunks is then the same at all lengths
        rest = length % unit
        calls = [given_at(rest + units * unit) for units in LENGTHS]
        if len({tuple(given.form for given in each) for each in calls}) == 1:
            loops = [_loop(same, length // unit, make_recorder) for same in zip(*calls, strict=True)]
            if all(loop is not None for loop in loops):
                return [loop for loop in loops if loop is not None]
        unit *= 4
    return []


def _loop(short: Sequence[Given], units: int, make_recorder: Callable[[], Recorder]) -> Loop | None:
    done = [measured(given, make_recorder) for given in short]
    found = [each for each in done if each is not None]
    told = at_length(found, units) if len(found) == len(LENGTHS) else None
    return None if told is None else Loop(short[0].form, told)


def loops_between(low: Sequence[Loop], high: Sequence[Loop], beyond: int, whole: int) -> list[Loop] | None:
    """Loops `beyond` / `whole` of the way from one to the other; None where they do not follow."""
    if [(a.form, a.done.form) for a in low] != [(b.form, b.done.form) for b in high]:
        return None
    numbers = [on_line(a.done.numbers, b.done.numbers, beyond, whole) for a, b in zip(low, high, strict=True)]
    return [replace(a, done=a.done.like(n)) for a, n in zip(low, numbers, strict=True) if n is not None]
