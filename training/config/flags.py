"""Flags from a dataclass of settings, as transformers' `HfArgumentParser` makes them, which takes as long to import as
the rest of transformers."""

from argparse import _ArgumentGroup
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from expertmesh.moe import ExpertMeshError
from expertmesh.moe.base.parser import Parser, Switch, flag_of


class FlagParser(Parser):
    """Has a flag for each field of a dataclass.

    A bool is a switch that also takes a value, and has a `--no-` form where it is on by default; a Literal has choices;
    a list takes one value or more. A field's metadata go to `add_argument`, but for "group", the title in `--help`
    under which the flag is printed (groups come in the order of their first fields), "aliases", its other names, and
    "scope", which says nothing to a parser.

    Attributes:
        names: the field that each name is of, aliases included, all with underscores.

    Raises:
        ExpertMeshError: from all that parse: a value is invalid.
    """

    def __init__(self, settings: type, **arguments: Any):
        super().__init__(**arguments)
        self.names: dict[str, str] = {}
        groups: dict[str, _ArgumentGroup] = {}
        for setting in fields(settings):
            title = setting.metadata["group"]
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            self._add_flag(groups[title], setting)

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
        return self._option_string_actions[flag_of(name)].nargs == "+"

    def _add_flag(self, group: _ArgumentGroup, setting: Field[Any]) -> None:
        arguments: dict[str, Any] = {"type": _value_type(setting), **setting.metadata}
        names = [setting.name, *arguments.pop("aliases", [])]
        self.names |= dict.fromkeys(names, setting.name)
        for other in ("group", "scope"):
            arguments.pop(other, None)
        arguments["default"] = setting.default if setting.default_factory is MISSING else setting.default_factory()
        if arguments["type"] is bool:
            del arguments["type"]
            arguments["action"] = Switch
        elif get_origin(arguments["type"]) is list:
            arguments.update(type=get_args(arguments["type"])[0], nargs="+")
        elif get_origin(arguments["type"]) is Literal:
            arguments.update(type=str, choices=get_args(arguments["type"]))
        group.add_argument(*map(flag_of, names), dest=setting.name, **arguments)


def _value_type(setting: Field[Any]) -> Any:
    """The type of a field; without None, which is what leaving out the flag gives."""
    # typing's own kind of union is what a Literal makes one of
    if get_origin(setting.type) in (UnionType, Union):
        (kind,) = (kind for kind in get_args(setting.type) if kind is not type(None))
        return kind
    return setting.type
