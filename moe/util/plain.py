"""Dataclasses out of what JSON has made of them, by their type hints."""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_plain(hint: type[T], value: Any) -> T:
    """The value that `dataclasses.asdict` and `json` have written.

    Args:
        hint: its type: plain types, dataclasses and named tuples, and of these tuples, sequences, mappings from strings
            and unions with None.

    Raises:
        TypeError, ValueError, KeyError: it is another value.
    """
    kind: Any = hint
    made: T = _maker_of(kind)(value)
    return made


@cache
def _maker_of(hint: Any) -> Callable[[Any], Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        makers = {name: _maker_of(of) for name, of in get_type_hints(hint).items() if name in _names(hint)}
        return lambda value: hint(**{name: makers[name](each) for name, each in value.items()})
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return lambda value: hint(*value)
    if origin in (Union, types.UnionType):
        (other,) = (each for each in arguments if each is not type(None))
        of_other = _maker_of(other)
        return lambda value: None if value is None else of_other(value)
    if origin is tuple and arguments[-1] is not Ellipsis:
        each_of = [_maker_of(each) for each in arguments]
        return lambda value: tuple(make(each) for make, each in zip(each_of, value, strict=True))
    if origin is not None and origin is not Literal and issubclass(origin, Mapping):
        of_value = _maker_of(arguments[1])
        return lambda value: {name: of_value(each) for name, each in value.items()}
    if origin is not None and origin is not Literal and issubclass(origin, Sequence):
        of_each = _maker_of(arguments[0])
        return lambda value: tuple(map(of_each, value))
    return lambda value: value


def _names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}
