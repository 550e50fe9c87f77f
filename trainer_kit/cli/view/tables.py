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

    console = Console(file=stream, highlight=False)
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
    rows = _format_rows(table, [table.headers])
    lines = [table.title, *rows, *table.notes]
    return "\n".join(map(replace_unprintable, lines))


def draw_table(table: Table, console: Console) -> None:
    """Draws a table on a terminal, without breaking words.

    If the table is too wide, each word of a header gets its own line. If it is still too wide, each
    cell gets its own line.
    """
    word_columns = [header.split(" ") for header in table.headers]
    height = max(map(len, word_columns), default=0)
    padded_words = [[""] * (height - len(words)) + words for words in word_columns]
    word_rows = list(zip(*padded_words, strict=True))

    row_lines: list[str] = []
    for header_rows in ([table.headers], word_rows):
        row_lines = _format_rows(table, header_rows)
        if max(map(len, row_lines), default=0) <= console.width:
            break
    else:
        row_lines = []
        for row in table.rows:
            cells = zip(table.headers, row, strict=True)
            row_lines += [f"{header}: {cell or EMPTY_CELL}" for header, cell in cells]
            row_lines.append("")

    # The rows are the last lines, unless each cell has its own.
    first_row = len(row_lines) - len(table.rows)
    bold_lines = {first_row + row for row in table.bold_rows}
    console.print(replace_unprintable(table.title), markup=False)
    for number, line in enumerate(row_lines):
        style = "bold" if number in bold_lines else None
        console.print(replace_unprintable(line), style=style, markup=False)
    for note in table.notes:
        console.print(replace_unprintable(note), markup=False)


def _format_rows(table: Table, header_rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of the headers and of the rows, in columns of equal width."""
    padded_columns: list[list[str]] = []
    for number, column in enumerate(table.columns()):
        headers = [replace_unprintable(row[number]) for row in header_rows]
        cells = [*headers, *column[1:]]
        width = max(map(len, cells))
        if table.headers[number] in table.left_aligned:
            padded_columns.append([cell.ljust(width) for cell in cells])
        else:
            padded_columns.append([cell.rjust(width) for cell in cells])

    gap = " " * _GAP
    return [gap.join(row).rstrip() for row in zip(*padded_columns, strict=True)]
