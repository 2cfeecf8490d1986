"""Flags from a dataclass of settings, as transformers' `HfArgumentParser` makes them, which takes as long to import as
the rest of transformers."""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin

from moe import ExpertMeshError

_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


class FlagParser(ArgumentParser):
    """Has a flag for each field of a dataclass, spelled with dashes or underscores, and raises what is wrong.

    A bool is a switch that also takes a value, and has a `--no-` form where it is on by default; a Literal has choices;
    a list takes one value or more. A field's metadata go to `add_argument`, but for "aliases": other names of the flag.

    Raises:
        ExpertMeshError: from all that parse: a value will not do.
    """

    def __init__(self, settings: type, **arguments: Any):
        super().__init__(formatter_class=ArgumentDefaultsHelpFormatter, **arguments)
        for setting in fields(settings):
            self._add_flag(setting)

    def error(self, message: str) -> NoReturn:
        raise ExpertMeshError(message)

    def _add_flag(self, setting: Field[Any]) -> None:
        arguments: dict[str, Any] = {"type": _value_type(setting), **setting.metadata}
        aliases = arguments.pop("aliases", [])
        arguments["default"] = setting.default if setting.default_factory is MISSING else setting.default_factory()
        if arguments["type"] is bool:
            arguments.update(type=_as_bool, nargs="?", const=True)
        elif get_origin(arguments["type"]) is list:
            arguments.update(type=get_args(arguments["type"])[0], nargs="+")
        elif get_origin(arguments["type"]) is Literal:
            arguments.update(type=str, choices=get_args(arguments["type"]))
        self.add_argument(*_spellings("--", setting.name), *aliases, **arguments)
        if setting.default is True:
            self.add_argument(
                *_spellings("--no_", setting.name),
                action="store_false",
                dest=setting.name,
                default=False,
                help=setting.metadata["help"],
            )


def _value_type(setting: Field[Any]) -> Any:
    """The type of a field; without None, which is what leaving out the flag gives."""
    if isinstance(setting.type, UnionType):
        (kind,) = (kind for kind in get_args(setting.type) if kind is not type(None))
        return kind
    return setting.type


def _spellings(prefix: str, name: str) -> list[str]:
    return list(dict.fromkeys([prefix + name, (prefix + name).replace("_", "-")]))


def _as_bool(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ArgumentTypeError(f"{text} is neither true nor false")
    return text.lower() in _TRUE
