"""The parser of every command's flags: what `--help` looks like, and errors that commands print in one line."""

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from expertmesh.moe.base.errors import ExpertMeshError

_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")
_FLAG = re.compile(r"--\w[\w-]*")
_HELP_COLUMN = 26


class Parser(argparse.ArgumentParser):
    """A parser that raises errors in flags, which it takes with dashes or underscores, never abbreviated.

    `--help` shows each flag once, with dashes, and a default where it says something. A help text that has its own
    "(default: ...)" keeps that.

    Raises:
        ExpertMeshError: from every parsing method: an unknown flag, or a bad value.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"formatter_class": PlainHelp, "allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise ExpertMeshError(message)

    # with argparse's overloads this would be four signatures
    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_dashes(word) for word in words], namespace)


class Switch(argparse.Action):
    """A flag that is on without a value, or on or off by a truth value after it; one that is on by default has a
    `--no-` form."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: bool = False, **arguments: Any):
        negations = [f"--no-{flag[2:]}" for flag in option_strings] if default else []
        super().__init__([*option_strings, *negations], dest, "?", type=_as_bool, default=default, **arguments)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        if flag is not None and flag in self.option_strings and flag.startswith("--no-"):
            if values is not None:
                parser.error(f"argument {flag}: takes no value")
            values = False
        setattr(namespace, self.dest, True if values is None else values)


class PlainHelp(argparse.RawDescriptionHelpFormatter):
    """Help with each flag and its value once, and its default where there is one; texts around flags as written."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=_HELP_COLUMN)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or isinstance(action, Switch) or action.nargs == 0:
            return ", ".join(action.option_strings) or super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return {int: "N", float: "X"}.get(action.type, "TEXT")  # type: ignore[call-overload]

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == "+":
            return f"{super()._format_args(action, default_metavar).partition(' ')[0]}..."
        return super()._format_args(action, default_metavar)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        says_nothing = default is None or default is False or default in ("", []) or default is argparse.SUPPRESS
        if "(default" in text or says_nothing:
            return text.replace("%", "%%")
        if default is True:
            default = "on"
        elif isinstance(default, list):
            default = ",".join(map(str, default))
        return f"{text} (default: {default})".replace("%", "%%")


def flag_of(name: str) -> str:
    """The flag of a setting, such as "--ep-size" of ep_size."""
    return "--" + name.replace("_", "-")


def _with_dashes(word: str) -> str:
    """A word of a command line, in which a flag has dashes for underscores."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if _FLAG.fullmatch(flag) else word


def _as_bool(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise argparse.ArgumentTypeError(f"{text} is neither true nor false")
    return text.lower() in _TRUE
