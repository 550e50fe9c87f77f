"""Types and values in plain words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from trainer_kit.config.allowed_values import describe, hint, show
from trainer_kit.config.schema.optimizers import AdamConfig


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        (int, "a whole number"),
        (float, "a number"),
        (bool, "true or false"),
        (str, "text"),
        (Any, "a value"),
        (int | None, "a whole number or null"),
        (Annotated[int, Field(ge=1)], "a whole number of at least 1"),
        (Annotated[float, Field(gt=0, lt=1)], "a number above 0 and below 1"),
        (Annotated[float, Field(ge=0, le=0)], "a number that is 0"),
        (Annotated[float, Field(ge=0)] | None, "a number of at least 0 or null"),
        (Literal["a", "b"], "one of a, b"),
        (Literal[False], "false"),
        (tuple[int, ...], "a list (each item a whole number)"),
        (list[str], "a list (each item text)"),
        (dict[str, float], "a mapping (each value a number)"),
        (str | tuple[str, ...], "text or a list (each item text)"),
        (AdamConfig, "a section"),
        (bytes, "bytes"),
    ],
)
def test_a_type_is_described_in_plain_words(annotation: object, said: str) -> None:
    assert describe(annotation) == said


def test_bounds_beside_the_annotation_count() -> None:
    assert describe(int, (Field(ge=3),)) == "a whole number of at least 3"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "null"), (True, "true"), (False, "false"), ("a", "'a'"), (1e-3, "0.001"), ([1, "b"], "[1, 'b']")],
)
def test_a_value_is_shown_as_a_file_has_it(value: object, shown: str) -> None:
    assert show(value) == shown


def test_a_long_value_is_cut() -> None:
    assert len(show("x" * 1000)) == 60


@pytest.mark.parametrize(
    ("annotation", "value", "said"),
    [
        (bool, "perhaps", ""),
        (float, "1e-3", "write 1e-3 without quotes"),
        (int, "many", ""),
        (int, 3.5, ""),
        (float, float("inf"), "it has to be finite"),
        (Literal["higher", "lower"], "hihger", "did you mean higher?"),
        (Literal["higher", "lower"], "best", ""),
        (list[int], "x", ""),
    ],
)
def test_a_hint_says_what_was_probably_meant(annotation: object, value: object, said: str) -> None:
    assert said in hint(annotation, value)
    assert bool(said) == bool(hint(annotation, value))
