"""Tables that fit the terminal: what says least goes first, and no figure is ever cut."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...moe.util.terminal import folded, terminal_width

_NO_LIMIT = 10_000


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: of one line or several.
        cells: one text per row, in rich's markup.
        name: in a line of text, where it is not the heading.
        spare: 0: it stays in any case; of the others the greatest go first.
        is_text: to be aligned on the left, as figures are on the right.
        meaning: what the column says, for who has not seen it before.
    """

    heading: str
    cells: Sequence[str]
    name: str = ""
    spare: int = 0
    is_text: bool = False
    meaning: str = ""

    @property
    def called(self) -> str:
        return self.name or self.heading.replace("\n", " ")

    @property
    def is_constant(self) -> bool:
        return len(self.cells) > 1 and len(set(self.cells)) == 1


def open_console() -> Console:
    """A console that neither cuts nor wraps: what is printed on it has been made to fit, or is not to be broken."""
    # without a height, rich takes the width of a dumb terminal for 80 all the same
    return Console(width=_NO_LIMIT, height=_NO_LIMIT, soft_wrap=True, highlight=False)


def print_table(console: Console, columns: Sequence[Column]) -> None:
    """Print the complete table off a terminal, and on one that is wide enough. On another, a column that says the same
    in all rows becomes a line above, and then the most spare ones are left out until the rest fits; below stands
    which."""
    width = terminal_width()
    kept = list(columns)
    if width is not None and _width(console, kept) > width:
        same = [column for column in kept if column.is_constant]
        kept = [column for column in kept if not column.is_constant]
        if same:
            values = "; ".join(f"{column.called} {column.cells[0]}" for column in same)
            console.print(folded(f"in all lines: {values}"))
        while _width(console, kept) > width and any(column.spare for column in kept):
            most = max(column.spare for column in kept)
            kept = [column for column in kept if column.spare < most]
    console.print(_table(kept))
    left_out = dict.fromkeys(c.called for c in columns if c not in kept and not c.is_constant)
    if left_out:
        said = (
            f"left out at {width} columns: {', '.join(left_out)}; widen the terminal, or write to a "
            "file or pipe, to see them"
        )
        console.print(folded(said))


def _table(columns: Sequence[Column]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(
            Text(column.heading), justify="left" if column.is_text else "right", no_wrap=True, vertical="bottom"
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


def _width(console: Console, columns: Sequence[Column]) -> int:
    return console.measure(_table(columns)).maximum
