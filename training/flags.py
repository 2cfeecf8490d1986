"""Flags from a dataclass of settings, as transformers' `HfArgumentParser` makes them, which takes as long to import as
the rest of transformers."""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin

from moe import ExpertMeshError

_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


class FlagParser(ArgumentParser):
    """Has a flag for each field of a dataclass, spelled with dashes or underscores, and raises what is wrong.

    A bool is a switch that also takes a value, and has a `--no-` form where it is on by default; a Literal has choices;
    a list takes one value or more. A field's metadata go to `add_argument`, but for "aliases", its other names, and
    "scope", which says nothing to a parser.

    Attributes:
        names: the field that each name is of, aliases included, all with underscores.

    Raises:
        ExpertMeshError: from all that parse: a value will not do.
    """

    def __init__(self, settings: type, **arguments: Any):
        super().__init__(formatter_class=ArgumentDefaultsHelpFormatter, **arguments)
        self.names: dict[str, str] = {}
        for setting in fields(settings):
            self._add_flag(setting)

    def error(self, message: str) -> NoReturn:
        raise ExpertMeshError(message)

    def check_names(self, arguments: Sequence[str]) -> None:
        """
        Raises:
            ExpertMeshError: a flag is given under its name and under an alias, or under two aliases.
        """
        flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
        given: dict[str, str] = {}
        for flag in flags:
            name = flag[2:].replace("-", "_")
            first = given.setdefault(self.names.get(name, name), flag)
            if first[2:].replace("-", "_") != name:
                alias, other = (first, flag) if name in self.names.values() else (flag, first)
                raise ExpertMeshError(f"{alias} is another name of {other}: give one of them")

    def takes_list(self, name: str) -> bool:
        """Whether a field has a list of values."""
        return self._option_string_actions[f"--{name}"].nargs == "+"

    def _add_flag(self, setting: Field[Any]) -> None:
        arguments: dict[str, Any] = {"type": _value_type(setting), **setting.metadata}
        names = [setting.name, *arguments.pop("aliases", [])]
        self.names |= dict.fromkeys(names, setting.name)
        arguments.pop("scope", None)
        arguments["default"] = setting.default if setting.default_factory is MISSING else setting.default_factory()
        if arguments["type"] is bool:
            arguments.update(type=_as_bool, nargs="?", const=True)
        elif get_origin(arguments["type"]) is list:
            arguments.update(type=get_args(arguments["type"])[0], nargs="+")
        elif get_origin(arguments["type"]) is Literal:
            arguments.update(type=str, choices=get_args(arguments["type"]))
        self.add_argument(*(flag for name in names for flag in _spellings("--", name)), **arguments)
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
