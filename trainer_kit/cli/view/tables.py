"""Prints tables of text as plain columns. No cell is ever cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from trainer_kit.telemetry.report_lines import format_number, replace_unprintable

if TYPE_CHECKING:
    from rich.console import Console

# A cell without a value, so that the columns of a pipe can be counted.
EMPTY_CELL = "-"
_DIGITS = 6

# The number of spaces between two columns.
_GAP = 2


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
      title: The line above the table.
      headers: The headers of the columns. The first column names the row.
      rows: The cells of each row. "" is shown as a dash.
      left_aligned: The headers of left-aligned columns, which contain words.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_aligned: frozenset[str] = frozenset()

    def columns(self) -> list[list[str]]:
        """Returns each column's header and cells, without control characters."""
        rows = [self.headers, *self.rows]
        return [
            [replace_unprintable(row[number]) or EMPTY_CELL for row in rows]
            for number in range(len(self.headers))
        ]


def format_metric(value: float | None) -> str:
    """Returns a metric as text with six digits, "" for None."""
    return "" if value is None else format_number(value, _DIGITS)


def find_console(stream: TextIO) -> Console | None:
    """Returns a rich Console for `stream`, None if it is not a terminal that can be drawn on."""
    if not stream.isatty():
        return None
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    return None if console.is_dumb_terminal else console


def print_tables(tables: Sequence[Table], stream: TextIO) -> None:
    """Prints tables, separated by empty lines."""
    print("\n\n".join(map(format_table, tables)), file=stream)


def format_table(table: Table) -> str:
    """Returns a table as lines of text, without a limit on their length."""
    padded_columns: list[list[str]] = []
    for column in table.columns():
        width = max(map(len, column))
        if column[0] in table.left_aligned:
            padded_columns.append([cell.ljust(width) for cell in column])
        else:
            padded_columns.append([cell.rjust(width) for cell in column])

    gap = " " * _GAP
    lines = [replace_unprintable(table.title)]
    for row in zip(*padded_columns, strict=True):
        lines.append(gap.join(row).rstrip())
    return "\n".join(lines)
