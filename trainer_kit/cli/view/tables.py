"""Prints tables of text: fitted to the width of a terminal, or as plain columns in a pipe. No cell is ever cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TextIO

from trainer_kit.telemetry.report_lines import number_text, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table as RichTable

NONE = "-"  # a cell without a value, so that the columns of a pipe can be counted
_DIGITS = 6
_GAP = 2  # spaces between two columns


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
      title: The line above the table.
      headers: The headers of the columns; the first column names the row.
      rows: The cells of each row; "" is shown as a dash.
      styles: rich's style of a row, by row number.
      left: The headers of left-aligned columns, which hold words.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    styles: Mapping[int, str] = field(default_factory=dict)
    left: frozenset[str] = frozenset()

    def columns(self) -> list[list[str]]:
        """Returns each column's header and cells, without control characters."""
        rows = [self.headers, *self.rows]
        return [[printable(row[number]) or NONE for row in rows] for number in range(len(self.headers))]


def number(value: float | None) -> str:
    """Returns a metric as text with six digits; "" for None."""
    return "" if value is None else number_text(value, _DIGITS)


def terminal(stream: TextIO) -> Console | None:
    """Returns a rich Console for `stream`; None if it is not a terminal that can be drawn on."""
    if not stream.isatty():
        return None
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    return None if console.is_dumb_terminal else console


def show(tables: Sequence[Table], stream: TextIO) -> None:
    """Prints tables, separated by empty lines."""
    console = terminal(stream)
    if console is None:
        print("\n\n".join(map(plain, tables)), file=stream)
    else:
        console.print(drawn(tables, console.width), crop=False)


def plain(table: Table) -> str:
    """Returns a table as lines of text, without a limit on their length."""
    padded = []
    for column in table.columns():
        width = max(map(len, column))
        padded.append([cell.ljust(width) if column[0] in table.left else cell.rjust(width) for cell in column])
    lines = [(" " * _GAP).join(row).rstrip() for row in zip(*padded, strict=True)]
    return "\n".join([printable(table.title), *lines])


def drawn(tables: Sequence[Table], width: int) -> RenderableType:
    """Returns tables for rich to draw; a table wider than `width` continues below, repeating its first column."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for table in tables:
        parts += [Text("")] if parts else []
        parts.append(Text(printable(table.title), style="bold"))
        parts += [_part(table, numbers) for numbers in _fitted(table, width)] if table.headers else []
    return Group(*parts)


def _fitted(table: Table, width: int) -> Iterator[list[int]]:
    """Yields groups of column numbers that fit next to each other; the first column is in every group."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in table.columns()]
    taken, room = [0], width - widths[0]
    for column, needed in enumerate(widths[1:], 1):
        if needed + _GAP > room and len(taken) > 1:
            yield taken
            taken, room = [0], width - widths[0]
        taken.append(column)
        room -= needed + _GAP
    yield taken


def _part(table: Table, numbers: Sequence[int]) -> RichTable:
    from rich.cells import cell_len
    from rich.table import Table as RichTable
    from rich.text import Text

    part = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    shown = [table.columns()[number] for number in numbers]
    for header, *cells in shown:
        # A long header may be folded, a number not.
        least = max(map(cell_len, cells), default=1)
        justify: Literal["left", "right"] = "left" if header in table.left else "right"
        part.add_column(Text(header, overflow="fold"), justify=justify, min_width=least, overflow="fold")
    for row, of_row in enumerate(list(zip(*shown, strict=True))[1:]):
        part.add_row(*(Text(cell, overflow="fold") for cell in of_row), style=table.styles.get(row))
    return part
