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
      bold_rows: The numbers of the rows that a terminal shows in bold, counted from 0.
      notes: The lines below the table.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_aligned: frozenset[str] = frozenset()
    bold_rows: frozenset[int] = frozenset()
    notes: Sequence[str] = ()

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

    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    return None if console.is_dumb_terminal else console


def print_tables(tables: Sequence[Table], stream: TextIO) -> None:
    """Prints tables, separated by empty lines. On a terminal they fit its width."""
    console = find_console(stream)
    if console is None:
        print("\n\n".join(map(format_table, tables)), file=stream)
        return
    for number, table in enumerate(tables):
        if number > 0:
            console.print()
        draw_table(table, console)


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
    lines += map(replace_unprintable, table.notes)
    return "\n".join(lines)


def draw_table(table: Table, console: Console) -> None:
    """Draws a table on a terminal. If it is too wide, lines end between words, never within."""
    from rich.table import Table as RichTable

    columns = table.columns()
    gaps = _GAP * (len(columns) - 1)
    cell_widths: list[int] = []
    word_widths: list[int] = []
    for column in columns:
        words = " ".join(column).split(" ")
        longest_cell = max(map(len, column))
        longest_word = max(map(len, words))
        cell_widths.append(longest_cell)
        word_widths.append(longest_word)

    natural_width = sum(cell_widths) + gaps
    is_too_wide = natural_width > console.width
    grid = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for column, word_width in zip(columns, word_widths, strict=True):
        header = column[0]
        is_left_aligned = header in table.left_aligned
        grid.add_column(
            header,
            justify="left" if is_left_aligned else "right",
            width=word_width if is_too_wide else None,
        )
    rows = list(zip(*columns, strict=True))
    # The first row has the headers.
    for number, row in enumerate(rows[1:]):
        is_bold = number in table.bold_rows
        grid.add_row(*row, style="bold" if is_bold else None)

    title = replace_unprintable(table.title)
    console.print(title)
    least_width = sum(word_widths) + gaps
    if least_width <= console.width:
        console.print(grid)
    else:
        # Each cell has its own line.
        headers = rows[0]
        for row in rows[1:]:
            for header, cell in zip(headers, row, strict=True):
                console.print(f"{header}: {cell}")
            console.print()
    for note in table.notes:
        text = replace_unprintable(note)
        console.print(text)
