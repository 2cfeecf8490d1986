"""The parser of every command's flags: what `--help` looks like, and errors that commands print in one line."""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from .errors import ExpertMeshError

_TRUE, _FALSE = ("yes", "true", "on", "t", "y", "1"), ("no", "false", "off", "f", "n", "0")
_FLAG = re.compile(r"--\w[\w-]*")
_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|-(inf|infinity|nan)$", re.IGNORECASE)
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
        # a flag's value, of which argparse knows those without an exponent: what is wrong with -1e-4 is its sign
        self._negative_number_matcher = _NEGATIVE

    def error(self, message: str) -> NoReturn:
        refused = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
        near = nearest(refused[1], re.findall(r"[\w.-]+", refused[2])) if refused else None
        raise ExpertMeshError(message if near is None else f"{message}; did you mean {near}?")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        self.refuse_unknown(sys.argv[1:] if args is None else args)
        return super().parse_args(args, namespace)

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Before anything else, as what is missing may be what was misspelt.

        Raises:
            ExpertMeshError: a flag is not one of the command's that is given.
        """
        parser: Parser = self
        for place, word in enumerate(words):
            commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
            parser = next((of.choices[word] for of in commands if word in of.choices), parser)
            flag = _with_dashes(word).partition("=")[0]
            if word == "--":
                return
            if _FLAG.fullmatch(flag) and flag not in parser._option_string_actions:
                instead = parser.instead_of(flag[2:], words[place + 1 : place + 2])
                known = list(parser._option_string_actions)
                raise ExpertMeshError(
                    f"unknown flag {flag}: {instead}" if instead else unknown_name("flag", flag, known)
                )

    def instead_of(self, name: str, values: Sequence[str]) -> str | None:
        """What to do instead of giving another tool's flag; None: no tool known here has it."""
        return None

    # with argparse's overloads this would be four signatures
    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = [_with_dashes(word) for word in (sys.argv[1:] if args is None else args)]
        self._refuse_repeated(words)
        for flag, _, value in (word.partition("=") for word in words):
            if value == "--" and flag in self._option_string_actions:  # argparse would take it for no value
                self.error(f"argument {flag}: -- is no value")
        return super().parse_known_args(words, namespace)

    def _refuse_repeated(self, words: Sequence[str]) -> None:
        """Refuse a flag that is given twice, of which argparse takes the last."""
        given: dict[str, str] = {}
        for flag in (word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]):
            action = self._option_string_actions.get(flag)
            if action is None:
                continue
            if (first := given.get(action.dest)) is not None:
                twice = f"{flag} is given twice; give it once{', with all its values' * (action.nargs == '+')}"
                self.error(twice if first == flag else f"{first} and {flag} are one setting; give one of them")
            given[action.dest] = flag


class Switch(argparse.Action):
    """A flag that is on without a value, or on or off by a truth value after it; one that is on by default has a
    `--no-` form. words: that it also takes, each a way of being on."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        default: bool = False,
        words: Sequence[str] = (),
        **arguments: Any,
    ):
        negations = [f"--no-{flag[2:]}" for flag in option_strings] if default else []
        self.words = words
        type_of = partial(_word_or_truth_of, words=words) if words else truth_of
        if words:
            arguments["metavar"] = "|".join(words)
        super().__init__([*option_strings, *negations], dest, "?", type=type_of, default=default, **arguments)

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
        is_plain = isinstance(action, Switch) and not action.words
        if not action.option_strings or is_plain or action.nargs == 0:
            return ", ".join(action.option_strings) or super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self.value_of(action)}"

    def value_of(self, action: argparse.Action) -> str:
        """What a flag takes, as in "N" or "FILE..."."""
        return self._format_args(action, self._get_default_metavar_for_optional(action))

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


def tell_without_effect(parser: argparse.ArgumentParser, given: argparse.Namespace, without: str, *names: str) -> None:
    """Say on stderr which of these flags, given with another value than the default, have no effect."""
    flags = [flag_of(name) for name in names if getattr(given, name) != parser.get_default(name)]
    if flags:
        print(f"note: {', '.join(flags)} ha{'ve' if len(flags) > 1 else 's'} no effect {without}", file=sys.stderr)


def refuse_gone(words: Iterable[str], gone: Mapping[str, str]) -> None:
    """gone: flags that there were, each with what to do instead.

    Raises:
        ExpertMeshError: one of them is among the words.
    """
    for word in words:
        if (flag := _with_dashes(word).partition("=")[0]) in gone:
            raise ExpertMeshError(f"{flag} was removed: {gone[flag]}")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """What to say of a name that is not known: one that is and was probably meant."""
    near = nearest(name, known)
    return f"unknown {kind} {name}; " + (f"did you mean {near}?" if near else "--help lists all flags")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was meant by one with a typing error or a missing end; None if none is that near.

    As much as a letter in six may be wrong, missing, too many or exchanged with its neighbour. What merely shares
    letters is not near: a hint at something else is worse than none.
    """
    plain = name.strip("-").replace("_", "-").lower()
    names = {other: other.strip("-").replace("_", "-").lower() for other in known}
    most = max(1, len(plain) // 6)
    alike = {other: written for other, written in names.items() if abs(len(written) - len(plain)) <= most}
    distances = {other: _typing_errors(plain, written) for other, written in alike.items()}
    near = min(distances, key=distances.__getitem__, default=None)
    if near is not None and distances[near] <= most:
        return near
    begun = [other for other, written in names.items() if plain and written.startswith(f"{plain}-")]
    return begun[0] if len(begun) == 1 else None


def _typing_errors(a: str, b: str) -> int:
    """Letters to replace, insert, delete, or exchange with the next, to make one word of the other."""
    two_before: list[int] = []
    before = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and (a[i - 2], letter) == (other, b[j - 2]):
                row[j] = min(row[j], two_before[j - 2] + 1)
        two_before, before = before, row
    return before[-1]


def _with_dashes(word: str) -> str:
    """A word of a command line, in which a flag has dashes for underscores."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if _FLAG.fullmatch(flag) else word


def truth_of(text: str) -> bool:
    """A switch's value.

    Raises:
        ArgumentTypeError: it is neither true nor false.
    """
    if text.lower() not in _TRUE + _FALSE:
        raise argparse.ArgumentTypeError(f"{text} is neither true nor false")
    return text.lower() in _TRUE


def _word_or_truth_of(text: str, words: Sequence[str]) -> bool | str:
    """The value of a switch that takes words, too.

    Raises:
        ArgumentTypeError: it is none.
    """
    if text in words:
        return text
    try:
        return truth_of(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor {' or '.join(words)}") from error
