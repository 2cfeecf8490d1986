"""Whether what a user's own code registers is of the types that its fields are declared with."""

import builtins
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS = {str: "a text", bool: "True or False", int: "a whole number", float: "a number", type(None): "None"}


def check_fields(what: str, entry: Any) -> None:
    """Check each field of a dataclass.

    Args:
        what: the entry, in the message.

    Raises:
        ValueError: a field's value is not of its type, or is a function that does not take its arguments.
    """
    hints = hints_of(type(entry))
    for field in fields(entry):
        check_value(what, field.name, getattr(entry, field.name), hints[field.name])


def check_value(what: str, name: str, value: Any, hint: Any) -> None:
    """See `check_fields`; of one value.

    Raises:
        ValueError: it is not as its type hint says.
    """
    if not fits(value, hint):
        raise ValueError(f"{what}: {name} is {value!r:.80}, not {in_words(hint)}")


class _Names(dict[str, Any]):
    """Of a module; those that it imports for type checkers alone stand for anything."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


def hints_of(cls: type) -> dict[str, Any]:
    """The types of a class's attributes, those of its bases included."""
    return get_type_hints(cls, localns=_Names(vars(sys.modules[cls.__module__])))


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is as a type hint says; of a list, and of a dictionary, not what is in it."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in args)
    if origin is Literal:
        return any(value is each or (type(value) is type(each) and value == each) for each in args)
    if (call := _call_of(hint)) is not None:
        return callable(value) and _takes(value, *call)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, origin or hint):
        return False
    if origin is tuple:
        if args[-1] is not Ellipsis:
            return len(value) == len(args) and all(map(fits, value, args))
        return all(fits(each, args[0]) for each in value)
    return True


def _call_of(hint: Any) -> tuple[int | None, tuple[str, ...]] | None:
    """(how many positional arguments, None where any do; names of the others) that a function is called with; None:
    this is no function."""
    if get_origin(hint) is Callable:
        arguments = get_args(hint)[0]
        return (None if arguments is Ellipsis else len(arguments)), ()
    if not getattr(hint, "_is_protocol", False) or "__call__" not in vars(hint):
        return None
    _, *parameters = inspect.signature(hint.__call__).parameters.values()
    by_name = tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
    return len(parameters) - len(by_name), by_name


def _takes(function: Callable[..., Any], positional: int | None, by_name: tuple[str, ...]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one of C's that does not tell
        return True
    if positional is None:
        return True
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(by_name))
    except TypeError:
        return False
    return True


def in_words(hint: Any) -> str:
    """What a value must be, as in "a text or None"."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if origin in (Union, UnionType):
        return " or ".join(map(in_words, args))
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if (call := _call_of(hint)) is not None:
        positional, by_name = call
        if positional is None:
            return "a function"
        named = "".join(f" and {name}=" for name in by_name)
        return f"a function of {positional} argument{'s' if positional != 1 else ''}{named}"
    if origin is list:
        return "a list"
    if origin is tuple:
        return f"a tuple, {'each ' if args[-1] is Ellipsis else ''}{in_words(args[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a dictionary"
    return f"of type {(origin or hint).__name__}"
