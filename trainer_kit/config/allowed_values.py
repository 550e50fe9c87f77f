"""Describes what a field allows and what is wrong with a value, in plain words."""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from trainer_kit.config.schema.durations import DurationField
from trainer_kit.config.schema.section import Section
from trainer_kit.errors import find_similar_names, suggest_names

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
# Names from other frameworks, and what to write here.
OTHER_NAMES = {"epochs": "trainer.train_steps='5 epochs'", "lr": "learning_rate"}
_NUMBER = re.compile(r"[-+]?\d[\d_]*(\.\d*)?([eE][-+]?\d+)?")


def describe_allowed_values(annotation: object, metadata: tuple[object, ...] = ()) -> str:
    """Returns what an annotation allows, such as "a whole number of at least 1 or null".

    Args:
      annotation: The type of a field.
      metadata: What is annotated about the type, such as its bounds.
    """
    origin = get_origin(annotation)
    args = get_args(annotation)

    if origin is Annotated:
        inner_annotation, *inner_metadata = args
        return describe_allowed_values(inner_annotation, (*inner_metadata, *metadata))

    # A field of durations describes its values itself, whatever its type.
    for item in metadata:
        if isinstance(item, DurationField):
            return item.allowed_values

    if origin in (Union, types.UnionType):
        # Two members of a union may have the same description.
        members = [describe_allowed_values(arg) for arg in args]
        different_members = dict.fromkeys(members)
        return " or ".join(different_members) + _describe_bounds(metadata)
    if origin is Literal:
        words = [arg if isinstance(arg, str) else format_value(arg) for arg in args]
        if len(words) == 1:
            return words[0]
        all_words = ", ".join(words)
        return f"one of {all_words}"
    if origin in (tuple, list) or annotation in (tuple, list):
        if not args:
            return "a list"
        item = describe_allowed_values(args[0])
        return f"a list (each item {item})"
    if origin is dict or annotation is dict:
        if not args:
            return "a mapping"
        value = describe_allowed_values(args[1])
        return f"a mapping (each value {value})"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "a section"

    type_name = getattr(annotation, "__name__", str(annotation))
    return _NAMES.get(annotation, type_name) + _describe_bounds(metadata)


def format_value(value: object) -> str:
    """Returns a value as a config file would show it, cut to one short line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value)
    if len(text) <= 60:
        return text
    beginning = text[:57]
    return f"{beginning}..."


def suggest_correction(annotation: object, value: object, metadata: Sequence[object] = ()) -> str:
    """Returns what the user probably meant by a wrong value of a field, or "".

    Args:
      annotation: The type of the field.
      value: The value.
      metadata: What is annotated about the type, such as its bounds.
    """
    parts = [*metadata, *_iterate_annotation_parts(annotation)]
    for part in parts:
        if isinstance(part, DurationField) and (advice := part.suggest_correction(value)):
            return advice

    if isinstance(value, float) and not math.isfinite(value):
        return "it has to be finite"
    if not isinstance(value, str):
        return ""

    # A number in quotes is text.
    if _NUMBER.fullmatch(value):
        takes_number = float in parts
        if not takes_number and int in parts:
            takes_number = float(value).is_integer()
        if takes_number:
            return f"write {value} without quotes"

    words: list[str] = []
    for part in parts:
        if get_origin(part) is Literal:
            choices = get_args(part)
            words += [choice for choice in choices if isinstance(choice, str)]
    similar_words = find_similar_names(value, words)
    if not similar_words:
        return ""
    suggestion = " or ".join(similar_words)
    return f"did you mean {suggestion}?"


def suggest_key(path: str, name: str, siblings: Sequence[str], known_paths: Iterable[str]) -> str:
    """Returns what the user probably meant by an unknown key.

    Args:
      path: The dotted path of the key.
      name: The key, which is the end of `path`.
      siblings: The keys that its section has.
      known_paths: The dotted paths of all values.
    """
    if "." in name:
        return "nest the keys, or write it as a.b=c in --params_override"

    # The same key in another section comes before a similar one in its own section.
    section_prefix = path[: -len(name)]
    same_keys = [other for other in known_paths if other.rpartition(".")[2] == name]
    if not same_keys and name in OTHER_NAMES:
        return f"did you mean {OTHER_NAMES[name]}?"
    similar_keys = [section_prefix + key for key in find_similar_names(name, siblings)]
    suggestions = [*same_keys, *similar_keys]
    if not suggestions:
        return suggest_names(name, siblings)
    first_suggestions = " or ".join(suggestions[:3])
    return f"did you mean {first_suggestions}?"


def _iterate_annotation_parts(annotation: object) -> Iterator[object]:
    """Yields the types that an annotation allows, and what is annotated about them."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is Annotated:
        yield from args[1:]
        yield from _iterate_annotation_parts(args[0])
    elif origin in (Union, types.UnionType):
        for arg in args:
            yield from _iterate_annotation_parts(arg)
    else:
        yield annotation


def _describe_bounds(metadata: Sequence[object]) -> str:
    """Returns the bounds in the metadata in words, with a space before them, or ""."""
    # A pydantic Field has its bounds in metadata of its own.
    items: list[object] = []
    for item in metadata:
        items.append(item)
        items += getattr(item, "metadata", ())

    # The last of several bounds of one kind counts.
    limits: dict[str, object] = {}
    for key, _ in _BOUNDS:
        for item in items:
            limit = getattr(item, key, None)
            if limit is not None:
                limits[key] = limit
    if "ge" in limits and limits.get("le") == limits["ge"]:
        return f" that is {limits['ge']}"

    bounds = []
    for key, word in _BOUNDS:
        if key in limits:
            bounds.append(f"{word} {limits[key]}")
    if not bounds:
        return ""
    text = " and ".join(bounds)
    return f" {text}"
