"""Tables on terminals of any width and in pipes: nothing is cut."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from trainer_kit.cli.view.tables import Table, drawn, number, plain, show

_NUMBERS = [f"0.{digit}23456" for digit in range(10)]
_WIDE = Table(
    "wide", ["step", *(f"metric_{one}" for one in range(10))], [["100", *_NUMBERS], ["20000", *_NUMBERS]], {1: "dim"}
)


def _drawn(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
    console.print(drawn([table], width), crop=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _words(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).split()


def test_a_pipe_gets_plain_columns_without_spaces_at_the_end() -> None:
    table = Table("best", ["step", "name", "value"], [["5", "a", "0.25"], ["100", "", "nan"]], left=frozenset({"name"}))
    assert plain(table) == "best\nstep  name  value\n   5  a      0.25\n 100  -       nan"


def test_a_pipe_has_no_width() -> None:
    assert len(plain(_WIDE).splitlines()) == 4
    assert _words(plain(_WIDE)) == ["wide", *_WIDE.headers, *_WIDE.rows[0], *_WIDE.rows[1]]


@pytest.mark.parametrize("width", [20, 24, 40, 79, 200])
def test_a_terminal_cuts_no_number_and_exceeds_no_line(width: int) -> None:
    text = _drawn(_WIDE, width)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, shown.splitlines())) <= width
    words = _words(text)
    assert [word for word in words if word.startswith("0.")].count(_NUMBERS[0]) == 2
    assert {word for word in words if word.startswith("0.")} == set(_NUMBERS)
    assert words.count("20000") == words.count("step")  # each part tells what its rows are about


def test_a_terminal_narrower_than_a_header_keeps_the_numbers() -> None:
    words = _words(_drawn(Table("t", ["step", "a_very_long_name_of_a_metric"], [["100", "0.123456"]]), 16))
    assert "100" in words and "0.123456" in words


def test_rows_have_styles_and_names_are_no_markup() -> None:
    text = _drawn(Table("[red]t", ["[bold]a"], [["[dim]b"]], {0: "bold green"}), 40)
    assert "[red]t" in text and "[dim]b" in text and "\x1b[1;32m" in text


def test_control_characters_are_no_control() -> None:
    table = Table("t\x1b[2J", ["a\tb"], [["c\nd\x07"]])
    assert plain(table) == "t [2J\n a b\nc d"
    assert "\x1b[2J" not in _drawn(table, 40)


def test_tables_are_apart_and_one_without_columns_is_its_title() -> None:
    stream = io.StringIO()
    show([Table("a", (), ()), Table("b", ["x"], [])], stream)
    assert stream.getvalue() == "a\n\nb\nx\n"
    assert _words(_drawn(Table("waiting", (), ()), 40)) == ["waiting"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.98123456, "0.981235"), (1234567.0, "1234567"), (float("nan"), "nan"), (None, "")]
)
def test_numbers_have_six_digits_and_absence_is_a_dash(value: float | None, text: str) -> None:
    assert number(value) == text
