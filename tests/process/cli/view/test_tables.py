"""Tables of plain text: nothing is cut."""

from __future__ import annotations

import io

import pytest

from trainer_kit.cli.view.tables import Table, format_metric, format_table, print_tables

_NUMBERS = [f"0.{digit}23456" for digit in range(10)]
_WIDE = Table(
    "wide",
    ["step", *(f"metric_{number}" for number in range(10))],
    [["100", *_NUMBERS], ["20000", *_NUMBERS]],
)


def test_columns_are_plain_without_spaces_at_the_end() -> None:
    table = Table(
        "best",
        ["step", "name", "value"],
        [["5", "a", "0.25"], ["100", "", "nan"]],
        left_aligned=frozenset({"name"}),
    )
    assert format_table(table) == "best\nstep  name  value\n   5  a      0.25\n 100  -       nan"


def test_a_table_has_no_width() -> None:
    assert len(format_table(_WIDE).splitlines()) == 4
    assert format_table(_WIDE).split() == ["wide", *_WIDE.headers, *_WIDE.rows[0], *_WIDE.rows[1]]


def test_control_characters_are_no_control() -> None:
    table = Table("t\x1b[2J", ["a\tb"], [["c\nd\x07"]], notes=["e\x1bf"])
    assert format_table(table) == "t [2J\n a b\nc d\ne f"


def test_tables_are_apart_and_one_without_columns_is_its_title() -> None:
    stream = io.StringIO()
    print_tables([Table("a", (), ()), Table("b", ["x"], [])], stream)
    assert stream.getvalue() == "a\n\nb\nx\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.98123456, "0.981235"), (1234567.0, "1234567"), (float("nan"), "nan"), (None, "")],
)
def test_numbers_have_six_digits_and_absence_is_a_dash(value: float | None, text: str) -> None:
    assert format_metric(value) == text
