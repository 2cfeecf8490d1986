"""Which methods of Trainer classes are never called behind `TrainerMixin`, found by following the code from method to
method."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import transformers

from ...moe.transformers_private import looked_up, mentions

_ENTRIES = ("__init__", "train", "evaluate", "predict", "save_model")
"""What users call of a Trainer that trains; all else is called by these."""


def replaced_methods(mixin: type) -> frozenset[str]:
    """Names of Trainer's methods in place of which `mixin`, put before a Trainer class, has its own, which do not call
    theirs."""
    return frozenset(name for name in _trainers_methods() if _ends_in(mixin, name))


def _ends_in(mixin: type, name: str) -> bool:
    """Whether calls of a method end in the mixin or in what it is derived from, and do not reach a class behind."""
    own = (_function(vars(base)[name]) for base in mixin.__mro__ if name in vars(base))
    return any(function is not None and not mentions(function, "super") for function in own)


@cache
def bypassed_methods(mixin: Any) -> frozenset[str]:
    """Names of Trainer's methods that it calls, and that nothing calls any more if `mixin` is before it."""
    behind = type("Behind", (mixin, transformers.Trainer), {})
    return frozenset((_called(transformers.Trainer) - _called(behind)) & _trainers_methods())


def uncalled_methods(kind: type, mixin: Any) -> Iterator[tuple[type, str]]:
    """(class, name) of each method in the classes that `kind` is derived from that takes the place of one of Trainer's
    and is not called for `mixin`, which is among them; Trainer's own, too."""
    order = kind.__mro__
    for place, base in enumerate(order):
        if issubclass(mixin, base):
            continue
        never = bypassed_methods(mixin)
        if place > order.index(mixin):
            never |= replaced_methods(mixin)
        yield from ((base, name) for name in vars(base) if name in never)


@cache
def _trainers_methods() -> frozenset[str]:
    return frozenset(name for name, value in vars(transformers.Trainer).items() if _function(value) is not None)


def _called(kind: type) -> set[str]:
    """Names of the methods that a Trainer class may call; what a method calls of a base class that it names is not
    followed, as it is for some evaluations alone."""
    names = _trainers_methods() | {name for base in kind.__mro__ for name in vars(base) if base is not object}
    called: set[str] = set()
    ahead = list(_ENTRIES)
    while ahead:
        name = ahead.pop()
        if name in called:
            continue
        called.add(name)
        for base in kind.__mro__:
            function = _function(vars(base).get(name))
            if function is not None:
                found = looked_up(function)
                ahead += names & found
                if "super" not in found:
                    break
    return called


def _function(value: Any) -> Callable[..., Any] | None:
    value = getattr(value, "__func__", value)  # of static and class methods
    return inspect.unwrap(value) if isinstance(value, FunctionType) else None
