"""Turns pydantic's errors about a config class into the mistakes that the command line shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from trainer_kit.config.allowed_values import NO_SUCH_KEY, describe, hint, missing_key_advice, show
from trainer_kit.config.fields import fields_advice, fields_of, leaves, listed_class, named_class, section_class
from trainer_kit.config.schema.section import ONE, SEVERAL, FieldError, Section, place_of
from trainer_kit.config.sources.layer import join
from trainer_kit.errors import Mistake


def mistakes_of(config_class: type[Section], error: ValidationError) -> list[Mistake]:
    """Returns the mistakes that pydantic found in a section, each once, with their paths inside the section."""
    errors = error.errors(include_url=False)
    mistakes = [mistake for details in errors for mistake in _mistakes(config_class, dict(details))]
    return list(dict.fromkeys(mistakes))  # the parts of a union report one mistake several times


def _mistakes(config_class: type[Section], details: dict[str, Any]) -> Iterator[Mistake]:
    value = details["input"]
    kind = details["type"]
    loc = [part for part in details["loc"] if part not in (ONE, SEVERAL)]
    cause = details.get("ctx", {}).get("error")
    if kind == "rules":
        for name, message in details["ctx"]["broken"]:
            problem, _, advice = message.partition("; ")
            yield Mistake(join(*loc, name), problem, advice)
        return
    if isinstance(cause, FieldError):  # of a section that a rule builds
        yield from (dataclasses.replace(mistake, path=join(*loc, mistake.path)) for mistake in cause.inner)
        return
    if kind == "unexpected_positional_argument":
        yield Mistake("", f"{show(value)} is given without a name", "write name=value")
        return
    if kind in ("value_error", "assertion_error") or not loc:  # of a check of the user's own
        yield Mistake(join(*loc), str(cause or details["msg"]))
        return

    depth, holder = _holder(config_class, loc)
    where = join(*loc[: depth + 1])
    field = fields_of(holder).get(str(loc[depth]))
    if field is None and kind != "unexpected_keyword_argument":  # found by a pydantic class of the user's
        yield Mistake(join(*loc), str(details["msg"]))
    elif field is None:
        place = place_of(config_class)
        known = [join(place, path) for path in _default_leaves(config_class)]
        advice = missing_key_advice(join(place, where), str(loc[depth]), list(fields_of(holder)), known)
        yield Mistake(where, NO_SUCH_KEY, advice)
    elif kind == "missing":
        yield Mistake(where, "is needed", "give it a value")
    else:
        allowed = describe(field.annotation, tuple(field.metadata))
        inner = section_class(field.annotation)
        if len(loc) > depth + 1 and isinstance(loc[-1], int) and inner is None:
            yield Mistake(join(where, loc[-1]), f"{show(value)} cannot be an item of {allowed}")
            return
        advice = fields_advice(inner) if inner else hint(field.annotation, value, where, field.metadata)
        yield Mistake(where, f"{show(value)} is not {allowed}", advice)


def _holder(config_class: type[Section], loc: list[Any]) -> tuple[int, type[Section]]:
    """Returns the depth in `loc` of the last part that names a field, and the class that has that field or lacks it."""
    depth = 0
    while depth + 1 < len(loc):
        field = fields_of(config_class).get(str(loc[depth]))
        annotation = field.annotation if field is not None else None
        inner, items = section_class(annotation), listed_class(annotation) or named_class(annotation)
        if inner is not None:
            config_class, depth = inner, depth + 1
        elif items is not None and depth + 2 < len(loc):
            config_class, depth = items, depth + 2
        else:
            break
    return depth, config_class


def _default_leaves(config_class: type[Section]) -> dict[str, Any]:
    """Returns the values of a section by path; none if it has fields that have to be given."""
    try:
        return leaves(config_class())
    except FieldError:
        return {}
