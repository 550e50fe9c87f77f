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

# The spaces between two columns.
_GAP = "  "


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
      title: The line above the table.
      headers: The headers of the columns. The first column names the row.
      rows: The cells of each row. "" is shown as a dash.
      left_aligned: The headers of left-aligned columns, which contain words.
      notes: The lines below the table.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_aligned: frozenset[str] = frozenset()
    notes: Sequence[str] = ()


def format_metric(value: float | None) -> str:
    """Returns a metric as text with six digits, "" for None."""
    if value is None:
        return ""
    return format_number(value, _DIGITS)


def find_console(stream: TextIO) -> Console | None:
    """Returns a rich Console for `stream`, None if it is not a terminal that can be drawn on."""
    if not stream.isatty():
        return None
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    if console.is_dumb_terminal:
        return None
    return console


def print_tables(tables: Sequence[Table], stream: TextIO) -> None:
    """Prints tables, separated by empty lines. Their width has no limit."""
    texts = [format_table(table) for table in tables]
    text = "\n\n".join(texts)
    print(text, file=stream)


def format_table(table: Table) -> str:
    """Returns a table as lines of text, without a limit on their length."""
    columns: list[list[str]] = []
    for number, header in enumerate(table.headers):
        cells = [replace_unprintable(header)]
        for row in table.rows:
            cell = replace_unprintable(row[number])
            cells.append(cell or EMPTY_CELL)
        width = max(map(len, cells))
        is_left_aligned = header in table.left_aligned
        pad_cell = str.ljust if is_left_aligned else str.rjust
        column = [pad_cell(cell, width) for cell in cells]
        columns.append(column)

    title = replace_unprintable(table.title)
    lines = [title]
    for row in zip(*columns, strict=True):
        line = _GAP.join(row)
        lines.append(line.rstrip())
    for note in table.notes:
        line = replace_unprintable(note)
        lines.append(line)
    return "\n".join(lines)
