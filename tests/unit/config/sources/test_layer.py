"""Dotted paths, and where a path was written."""

from __future__ import annotations

from trainer_kit.config.sources.layer import Layer, given_inside, is_inside, join


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
