"""Describes what a field allows and what is wrong with a value, in plain words."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from trainer_kit.config.schema.durations import TakesDurations
from trainer_kit.config.schema.section import Section
from trainer_kit.errors import near_names, suggestion

NO_SUCH_KEY = "there is no such key"

_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Any: "a value",
}
_BOUNDS = (("gt", "above"), ("ge", "of at least"), ("lt", "below"), ("le", "of at most"))
_FORMER = {  # values of earlier releases, and the advice about each
    ("trainer.fuse_steps", "auto"): (
        "set a number: compare short runs with 1 and 20; for a run that began with auto, take fuse_steps from its "
        "manifest.json"
    )
}
_NUMBER = re.compile(r"[-+]?\d[\d_]*(\.\d*)?([eE][-+]?\d+)?")


def describe(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Returns what an annotation allows: "a whole number of at least 1 or null"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(args[0], (*args[1:], *metadata))
    if marks := [item for item in metadata if isinstance(item, TakesDurations)]:
        return marks[0].allowed
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(arg) for arg in args)) + _bounds(metadata)
    if origin is Literal:
        words = [show(arg) if not isinstance(arg, str) else arg for arg in args]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if origin in (tuple, list) or annotation in (tuple, list):
        return f"a list (each item {describe(args[0])})" if args else "a list"
    if origin is dict or annotation is dict:
        return f"a mapping (each value {describe(args[1])})" if args else "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "a section"
    return _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation))) + _bounds(metadata)


def show(value: Any) -> str:
    """Returns a value as a config file would show it, cut to one short line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def hint(annotation: Any, value: Any, path: str, metadata: Sequence[Any] = ()) -> str:
    """Returns what the user probably meant by `value` for the field at the dotted `path`, or ""."""
    if isinstance(value, str) and (path, value) in _FORMER:
        return _FORMER[path, value]
    marks = durations_of(annotation, metadata)
    if marks and (advice := marks[0].hint(value)):
        return advice
    if isinstance(value, float) and not math.isfinite(value):
        return "it has to be finite"
    if not isinstance(value, str):
        return ""
    kinds, words = _allowed(annotation)
    if _NUMBER.fullmatch(value) and (float in kinds or (int in kinds and float(value).is_integer())):
        return f"write {value} without quotes"
    near = near_names(value, words)
    return f"did you mean {' or '.join(near)}?" if near else ""


def durations_of(annotation: Any, metadata: Sequence[Any] = ()) -> list[TakesDurations]:
    """Returns the mark of a field that takes durations; [] for any other field."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return durations_of(args[0], (*args[1:], *metadata))
    marks = [item for item in metadata if isinstance(item, TakesDurations)]
    if marks or origin not in (Union, types.UnionType):
        return marks
    return [mark for arg in args for mark in durations_of(arg)]


def missing_key_advice(where: str, name: str, siblings: Sequence[str], known: Iterable[str]) -> str:
    """Returns what the user probably meant by an unknown key.

    Args:
      where: The dotted path of the key.
      name: The key, which is the end of `where`.
      siblings: The keys that its section has.
      known: The dotted paths of all values.
    """
    if "." in name:
        return "nest the keys, or write it as a.b=c in --params_override"
    elsewhere = [path for path in known if path.rpartition(".")[2] == name]
    near = [where[: -len(name)] + sibling for sibling in near_names(name, siblings)]
    return f"did you mean {' or '.join([*elsewhere, *near][:3])}?" if near or elsewhere else suggestion(name, siblings)


def _allowed(annotation: Any) -> tuple[set[Any], list[str]]:
    """Returns the plain types and the words of a Literal that an annotation allows."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _allowed(args[0])
    if origin in (Union, types.UnionType):
        arms = [_allowed(arg) for arg in args]
        return set().union(*(arm[0] for arm in arms)), [word for arm in arms for word in arm[1]]
    if origin is Literal:
        return set(), [arg for arg in args if isinstance(arg, str)]
    return ({annotation}, []) if annotation in _NAMES else (set(), [])


def _bounds(metadata: tuple[Any, ...]) -> str:
    flat = [inner for item in metadata for inner in (item, *getattr(item, "metadata", ()))]
    found = {key: limit for key, _ in _BOUNDS for item in flat if (limit := getattr(item, key, None)) is not None}
    if "ge" in found and found.get("le") == found["ge"]:
        return f" that is {found['ge']}"
    limits = " and ".join(f"{word} {found[key]}" for key, word in _BOUNDS if key in found)
    return f" {limits}" if limits else ""
