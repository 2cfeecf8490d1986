"""Flags from a dataclass of settings, as transformers' `HfArgumentParser` makes them, which takes as long to import as
the rest of transformers."""

import operator
import sys
from argparse import Action, ArgumentError, _ArgumentGroup
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from itertools import takewhile
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from ...moe.util.errors import ExpertMeshError, SeveralMistakes
from ...moe.util.parser import Parser, Switch, flag_of, nearest
from .other_tools import LEAVE_OUT, TORCHRUN, OtherTools

LIMITS = {
    "least": (operator.ge, "{} or more"),
    "above": (operator.gt, "more than {}"),
    "most": (operator.le, "at most {}"),
    "below": (operator.lt, "less than {}"),
}
"""Metadata of a field that say what numbers it takes, each with how it is compared, and in words."""

_OF_PARSERS = ("choices", "const", "help", "metavar", "nargs", "type")
"""Metadata of a field that go to `add_argument`."""

_FOUND_OUT = ("help", "choices")
"""Those that may be functions, which are asked when a parser is made."""


class FlagParser(Parser):
    """Has a flag for each field of a dataclass.

    A bool is a switch that also takes a value, with a Literal beside it one of its words, too, and has a `--no-` form
    where it is on by default; a Literal has choices; a list takes one value or more. In `--help` it is under the title
    that is the GROUP of the class whose field it is (groups come in the order of their first fields). Of a field's
    metadata, "aliases" are its other names, and `_OF_PARSERS` go to `add_argument`. "scope" marks a setting that may be
    another on each node: "input", a place that is read; "output", one that is written; "node", anything. "help" and
    "choices" may be functions without arguments: the parser has what they return when it is made.

    Flags of other tools are refused, all in one error, with what to give instead; one that asks only for what is done
    anyway is passed over. What they call a setting is in the OTHERS of the class whose field it is.

    Args:
        beside: flags that the command takes as well, and has taken out: what is unknown may be one of them, misspelt.

    Attributes:
        names: the field that each name is of, aliases included, all with underscores.
        others: what other tools call them.
        passed_over: flags and keys of other tools that asked only for what is done anyway, each with its values.

    Raises:
        ExpertMeshError: from all that parse: a value is invalid.
    """

    def __init__(self, settings: type, beside: Sequence[str] = (), **arguments: Any):
        super().__init__(**arguments)
        self.beside = beside
        self.names: dict[str, str] = {}
        self.passed_over: list[tuple[str, Sequence[str]]] = []
        groups: dict[str, _ArgumentGroup] = {}
        for setting in fields(settings):
            title = group_of(settings, setting.name)
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            self._add_flag(groups[title], setting)
        actions = {action.dest: action for action in self._actions}
        self.others = OtherTools(actions, (table() if callable(table) else table for table in _tables(settings)))

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
                raise ExpertMeshError(f"{alias} is another name of {other}; give one of them")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        kept: list[str] = []
        refused: list[str] = []
        while words:
            word = words.pop(0)
            flag, equals, value = word.partition("=")
            is_known = flag.replace("_", "-") in self._option_string_actions
            if is_known or not flag.startswith("--") or " " in flag:
                kept.append(word)
                continue
            values = list(takewhile(lambda word: not word.startswith("--"), words))
            given = [value] if equals else values or ["true"]
            instead = self.instead_of(flag[2:], given)
            if instead is None:
                kept.append(word)
                continue
            if instead:
                refused.append(f"unknown flag {flag}: {instead}")
            if not equals:
                del words[: len(values)]
        if refused:
            raise SeveralMistakes(refused)
        return super().parse_known_args(kept, namespace)

    def instead_of(self, name: str, values: Sequence[str]) -> str | None:
        """What to do instead of giving another tool's flag or key, whose values are as on a command line.

        Returns: None: no known tool has it, or a flag of ours is near; empty: it asks only for what is done anyway.
        """
        plain = name.replace("-", "_")
        instead = self.others.answer(plain, values, exactly=True)
        if instead is None and nearest(plain, [*self.names, *self.beside]) is None:
            instead = self.others.answer(plain, values, exactly=False)
        if instead == "":
            self.passed_over.append((name, values))
        return "give --gpus and --gpus-per-node" if instead == TORCHRUN and "--gpus" in self.beside else instead

    def passes_over(self, name: str, value: Any) -> bool:
        """Whether a setting has another tool's value that asks only for what is done anyway."""
        return isinstance(value, str) and self.others.answer_to_value(name, value) == LEAVE_OUT

    def _get_value(self, action: Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except ArgumentError as error:
            raise self._with_answer(error, action, arg_string) from error

    def _check_value(self, action: Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except ArgumentError as error:
            raise self._with_answer(error, action, str(value)) from error

    def _with_answer(self, error: ArgumentError, action: Action, value: str) -> ArgumentError:
        """The error with what to give instead, if the value is another tool's."""
        instead = self.others.answer_to_value(action.dest, value)
        message = error.message.replace(value, f"{value[:100]} ...") if len(value) > 100 else error.message
        return ArgumentError(action, f"{message}; {instead}" if instead else message)

    def takes_list(self, name: str) -> bool:
        """Whether a field has a list of values."""
        return self._option_string_actions[flag_of(name)].nargs == "+"

    def value_of(self, name: str, texts: Sequence[str]) -> Any:
        """A field's value, read as its flag reads these; a field without a list has one of them."""
        action, values = self._option_string_actions[flag_of(name)], []
        if "--" in texts:  # which no flag can have
            self.error(f"argument {flag_of(name)}: -- is no value")
        try:
            for text in texts:
                values.append(self._get_value(action, text))
                self._check_value(action, values[-1])
        except ArgumentError as error:
            self.error(str(error))
        return values if self.takes_list(name) else values[0]

    def _add_flag(self, group: _ArgumentGroup, setting: Field[Any]) -> None:
        own = {name: setting.metadata[name] for name in _OF_PARSERS if name in setting.metadata}
        arguments: dict[str, Any] = {"type": value_type(setting), **own}
        names = [setting.name, *setting.metadata.get("aliases", ())]
        self.names |= dict.fromkeys(names, setting.name)
        arguments |= {name: arguments[name]() for name in _FOUND_OUT if callable(arguments.get(name))}
        arguments["default"] = default_of(setting)
        if arguments["type"] is bool:
            del arguments["type"]
            arguments["action"] = Switch
            arguments["words"] = words_of_switch(setting)
        elif get_origin(arguments["type"]) is list:
            arguments.update(type=get_args(arguments["type"])[0], nargs="+")
        elif get_origin(arguments["type"]) is Literal:
            arguments.update(type=str, choices=get_args(arguments["type"]))
        group.add_argument(*map(flag_of, names), dest=setting.name, **arguments)


def found_out(settings: type) -> list[Any]:
    """What the functions return now that say something of a class's flags: all that two parsers of it can differ in."""
    metadata = (setting.metadata.get(name) for setting in fields(settings) for name in _FOUND_OUT)
    return [function() for function in (*metadata, *_tables(settings)) if callable(function)]


def _tables(settings: type) -> list[Any]:
    """What other tools call the settings, or a function that returns it, of each class that has some."""
    return [vars(base)["OTHERS"] for base in settings.__mro__ if "OTHERS" in vars(base)]


def group_of(settings: type, name: str) -> str:
    """The title of a field's flag in `--help`."""
    return str(of_class(settings, name, "GROUP"))


def of_class(settings: type, name: str, what: str, default: Any = None) -> Any:
    """An attribute of the class whose field it is."""
    # not inspect.get_annotations, with which a parser takes twice as long
    bases = (base for base in settings.__mro__ if name in vars(base).get("__annotations__", ()))
    return vars(next(bases)).get(what, default)


def default_of(setting: Field[Any]) -> Any:
    """The default of a dataclass's field."""
    return setting.default if setting.default_factory is MISSING else setting.default_factory()


def words_of_switch(setting: Field[Any]) -> list[str]:
    """What a switch takes beside truth values."""
    return [word for kind in _kinds(setting) if get_origin(kind) is Literal for word in get_args(kind)]


def is_switch(setting: Field[Any]) -> bool:
    """Whether a field is a bool, perhaps with words beside."""
    return bool in _kinds(setting)


def _kinds(setting: Field[Any]) -> tuple[Any, ...]:
    # typing's own kind of union is what a Literal makes one of
    return get_args(setting.type) if get_origin(setting.type) in (UnionType, Union) else (setting.type,)


def value_type(setting: Field[Any]) -> Any:
    """The type of a field; without None, which is what leaving out the flag gives."""
    if is_switch(setting):
        return bool
    (kind,) = (kind for kind in _kinds(setting) if kind is not type(None))
    return kind
