"""Another tool's file of settings, written as one for `--config`: `train_ep.py migrate theirs.yaml > ours.yaml`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import yaml

from ...moe.util.errors import ExpertMeshError, problems_of
from ...moe.util.parser import Parser, flag_of, unknown_name
from ...moe.util.terminal import ends_with_reader
from .flags import FlagParser
from .train_config import (
    TrainConfig,
    as_flag,
    as_words,
    make_parser,
    parse_words,
    read_yaml,
    setting_of,
    unknown_template,
    written_by_name,
)


@dataclass
class Migrated:
    """A file of settings here.

    Attributes:
        settings: by their names.
        notes: by those of settings, where each is from, in words.
        left_out: lines of the other file that ask for what is done anyway. empty: those without a value.
        open: those that are not here yet, each with what to do instead; and what does not go together.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def take(self, settings: Mapping[str, Any], note: str) -> None:
        """Write settings, but for those that have another value already."""
        for name, value in settings.items():
            there = self.settings.setdefault(name, value)
            if there is True and isinstance(value, str):  # a switch's word says more than that it is on
                self.settings[name] = there = value
            if there == value or (value is True and isinstance(there, str)):
                self.notes[name] = "; ".join(filter(None, (self.notes.get(name), note)))
            else:
                self.open.append(f"{note}: {name} is {_as_yaml(self.settings[name])} already, by {self.notes[name]}")

    def text(self) -> str:
        """As YAML, with comments."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for name, value in self.settings.items():
            # not where the other tool says the same in the same words
            is_same = self.notes[name] in (f"{name}: {_in_line(value)}", f"{name}: {_as_yaml(value)}")
            yield f"{name}: {_as_yaml(value)}" + ("" if is_same else f"  # {_printable(self.notes[name])}")
        told = {
            "Left out, as it is done anyway": self.left_out,
            "Left out, as it is empty": self.empty,
            "Open": self.open,
        }
        for title, lines in told.items():
            yield from ["", f"# {title}:", *(f"#   {_printable(line)}" for line in lines)] if lines else []


def migrate(file: Path) -> Migrated:
    """
    Raises:
        ExpertMeshError: the file cannot be read.
    """
    parser, content = make_parser(), read_yaml(file, str(file))
    migrated = Migrated(empty=[f"{key}:" for key, value in content.items() if _is_empty(value)])
    content = {key: value for key, value in content.items() if not _is_empty(value)}
    for key, value in content.items():
        _take_key(migrated, parser, str(key), value)
    for tool, default in parser.others.other_defaults(written_by_name(content), migrated.settings):
        name, value = default.setting, default.value
        if value:
            migrated.take({name: parser.value_of(name, [value])}, f"by default in {tool}")
        else:
            migrated.open.append(f"{name}: {default.words(tool)}")
    for key, values in parser.passed_over:
        for name in parser.others.contradicted(key.replace("-", "_"), migrated.settings):
            said = as_flag(name, migrated.settings[name])
            migrated.open.append(f"{key}: {' '.join(values)}: is not what {said} says, which is from another key")
    try:
        migrated.open += TrainConfig(**{"model": "-", **migrated.settings}).broken_rules()
    except ExpertMeshError as error:
        migrated.open += problems_of(error)
    return migrated


def _is_empty(value: Any) -> bool:
    return value in (None, "", [], {})


def _take_key(migrated: Migrated, parser: FlagParser, key: str, value: Any) -> None:
    """One key of the other tool's file."""
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        # axolotl's: of each the path alone has a setting of the same meaning
        told = "its path alone is taken; see --preview, --dataset-split, --dataset-config and NAME:WEIGHT"
        migrated.open += [f"{key}: {_in_line(each)}: {told}" for each in value]
        value = [each["path"] for each in value if isinstance(each, dict) and "path" in each]
        if not value:
            return
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
        ExpertMeshError: no settings do, their value is none that they may have, or somebody has to choose; with what to
            do instead.
    """
    plain = key.replace("-", "_")
    name = parser.names.get(plain)
    if name is not None:
        try:
            return _checked(setting_of(parser, key, value, {}))
        except ExpertMeshError:
            words = parser.others.flags_for(name, as_words(value))
            if words is None or words == [flag_of(name), *as_words(value)]:
                raise
            return parse_words(parser, words)
    instead = parser.instead_of(key, as_words(value))
    if instead is None:
        raise ExpertMeshError(unknown_name("key", key, parser.names))
    words = [] if instead == "" else parser.others.flags_for(plain.lower(), as_words(value))
    if words is None:
        raise ExpertMeshError(instead)
    return _checked(parse_words(parser, words))


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """
    Raises:
        ExpertMeshError: a value is none that the setting may have, whatever the others are.
    """
    alone = TrainConfig(**{"model": "-", **settings})
    if problems := [*alone.out_of_range(), *unknown_template(settings)]:
        raise ExpertMeshError("; ".join(problems))
    return settings


def _as_yaml(value: Any) -> str:
    """In one line."""
    quotes = '"' if "\\n" in repr(value) else None
    # of a list, as YAML ends a text alone by a line of its own
    as_list = yaml.safe_dump([value], allow_unicode=True, default_flow_style=True, default_style=quotes, width=inf)
    return as_list.strip()[1:-1]


def _in_line(value: Any) -> str:
    """What of a value goes into a comment."""
    words = [_in_short(value)] if isinstance(value, dict) else as_words(value) or [_in_short(value)]
    return " ".join(words)[:500]


def _in_short(value: Any, depth: int = 4) -> str:
    """A table or list with what it has, but for what is far within: of aliases there may be no end."""
    if isinstance(value, dict) and depth:
        return "{" + ", ".join(f"{key}: {_in_short(each, depth - 1)}" for key, each in [*value.items()][:20]) + "}"
    if isinstance(value, list) and depth:
        return "[" + ", ".join(_in_short(each, depth - 1) for each in value[:20]) + "]"
    return "..." if isinstance(value, dict | list) else str(value)


def _printable(text: str) -> str:
    """In one line that YAML takes."""
    return "".join(each if each.isprintable() else " " for each in " ".join(text.split()))


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
        print(f"migrate: error: {error}", file=sys.stderr)
        return 2
    print(migrated.text(), end="")
    if migrated.open:
        print(f"migrate: {len(migrated.open)} left open; see the end of the file", file=sys.stderr)
    return 0
