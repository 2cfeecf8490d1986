"""Another tool's file of settings, written as one for `--config`: `train_ep.py migrate theirs.yaml > ours.yaml`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import yaml

from ...moe.util.errors import ExpertMeshError, problems_of
from ...moe.util.parser import Parser, unknown_name
from ...moe.util.terminal import ends_with_reader
from .flags import FlagParser
from .other_tools import LEAVE_OUT
from .train_config import TrainConfig, as_words, make_parser, parse_words, read_yaml, words_of, written_by_name


@dataclass
class Migrated:
    """A file of settings here.

    Attributes:
        settings: by their names.
        notes: by those of settings, where each is from, in words.
        left_out: lines of the other file that ask for what is done anyway.
        open: those that are not here yet, each with what to do instead; and what does not go together.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def take(self, settings: Mapping[str, Any], note: str) -> None:
        """Write settings, but for those that have another value already."""
        for name, value in settings.items():
            if self.settings.setdefault(name, value) == value:
                self.notes[name] = "; ".join(filter(None, (self.notes.get(name), note)))
            else:
                self.open.append(f"{note}: {name} is {self.settings[name]} already, by {self.notes[name]}")

    def text(self) -> str:
        """As YAML, with comments."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for name, value in self.settings.items():
            # not where the other tool calls it so, too
            note = "" if self.notes[name].startswith(f"{name}: ") else f"  # {self.notes[name]}"
            yield f"{name}: {_as_yaml(value)}{note}"
        for title, lines in (("Left out, as it is done anyway", self.left_out), ("Open", self.open)):
            yield from ["", f"# {title}:", *(f"#   {' '.join(line.split())}" for line in lines)] if lines else []


def migrate(file: Path) -> Migrated:
    """
    Raises:
        ExpertMeshError: the file cannot be read.
    """
    parser, content = make_parser(), read_yaml(file)
    migrated = Migrated()
    for key, value in content.items():
        _take_key(migrated, parser, str(key), value)
    for tool, name, value in parser.others.other_defaults(written_by_name(content), migrated.settings):
        migrated.take(parse_words(parser, [f"--{name}={value}"]), f"by default in {tool}")
    try:
        migrated.open += TrainConfig(**{"model": "-", **migrated.settings}).broken_rules()
    except ExpertMeshError as error:
        migrated.open += problems_of(error)
    return migrated


def _take_key(migrated: Migrated, parser: FlagParser, key: str, value: Any) -> None:
    """One key of the other tool's file."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "path" in each for each in value):
        # axolotl's: each has columns and forms of its own, too, which are found by themselves
        migrated.open += [f"{key}: {_in_line(each)}: look at its columns with --preview" for each in value]
        value = [each["path"] for each in value]
    written = f"{key}: {_in_line(value)}"
    try:
        settings = _here(parser, key, value)
    except ExpertMeshError as error:
        migrated.open.append(f"{written}: {error}")
        return
    migrated.take(settings, written)
    if not settings:
        migrated.left_out.append(written)


def _here(parser: FlagParser, key: str, value: Any) -> dict[str, Any]:
    """The settings that ask for what a key asks for; none: it is done anyway.

    Raises:
        ExpertMeshError: no settings do, or somebody has to choose; with what to do instead.
    """
    name = parser.names.get(key.replace("-", "_"))
    if name is None:
        instead = parser.instead_of(key, as_words(value))
        if instead is None:
            raise ExpertMeshError(unknown_name("key", key, parser.names))
    else:
        try:
            return parse_words(parser, words_of(parser, key, value, {}))
        except ExpertMeshError:
            instead = parser.others.answer_to_value(name, " ".join(as_words(value)))
            if not instead:
                raise
    if instead in ("", LEAVE_OUT):
        return {}
    words = parser.others.flags_of(key, as_words(value), instead)
    if words is None:
        raise ExpertMeshError(instead)
    return parse_words(parser, words)


def _as_yaml(value: Any) -> str:
    """In one line."""
    quotes = '"' if "\\n" in repr(value) else None
    # of a list, as YAML ends a text alone by a line of its own
    as_list = yaml.safe_dump([value], allow_unicode=True, default_flow_style=True, default_style=quotes, width=inf)
    return as_list.strip()[1:-1]


def _in_line(value: Any) -> str:
    """What of a value goes into a comment."""
    return " ".join(" ".join(as_words(value) or ["(a list or table)"]).split())


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, also where something is left open; 2 where there is no such file."""
    parser = Parser(
        prog="python -m expertmesh.train_ep migrate",
        description="Write another tool's file of settings as one for train_ep.py --config, to standard output; what "
        "has no setting here stands at its end, in comments.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="YAML or JSON of another tool")
    try:
        migrated = migrate(parser.parse_args(argv).file)
    except ExpertMeshError as error:
        print(f"migrate: error: {str(error).removeprefix('--config ')}", file=sys.stderr)
        return 2
    print(migrated.text(), end="")
    if migrated.open:
        print(f"migrate: {len(migrated.open)} left open; see the end of the file", file=sys.stderr)
    return 0
