"""Dotted paths, and where a path was written."""

from __future__ import annotations

from trainer_kit.config.sources.layer import Layer, given_inside, is_inside, join, put


def test_a_path_without_an_origin_has_that_of_its_section() -> None:
    layer = Layer({}, {"a": "file:1", "a.b.c": "file:3"})
    assert layer.origin("a.b.c") == "file:3"
    assert layer.origin("a.b.c.d") == "file:3"
    assert layer.origin("a.b") == "file:1"
    assert layer.origin("ab") == ""


def test_a_path_is_inside_itself_and_its_sections_only() -> None:
    assert is_inside("a.b", "a.b") and is_inside("a.b", "a") and is_inside("a.b", "")
    assert not is_inside("ab", "a") and not is_inside("a", "a.b")
    assert given_inside({"a": "", "a.b": "", "ab": ""}, "a") == ["a", "a.b"]


def test_joining_leaves_out_empty_parts_and_keeps_zero() -> None:
    assert join("", "a", "", 0, "b") == "a.0.b"


def test_a_value_is_put_at_its_path_once() -> None:
    values: dict[str, object] = {"a": {"b": 1}, "c": 2}
    assert put(values, "a.d.e", 3) == ""
    assert put(values, "a.b", 4) == put(values, "a", {}) == "is given twice"
    assert put(values, "c.d", 5) == "cannot be set: c itself is set to a value"
    assert values == {"a": {"b": 1, "d": {"e": 3}}, "c": 2}
