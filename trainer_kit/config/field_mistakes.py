"""Turns pydantic's errors about a config class into the mistakes that the command line shows."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from trainer_kit.config.allowed_values import NO_SUCH_KEY, describe, hint, missing_key_advice, show
from trainer_kit.config.fields import (
    fields_advice,
    fields_of,
    leaves,
    listed_class,
    named_class,
    section_class,
    sections,
)
from trainer_kit.config.schema import base
from trainer_kit.config.schema.base import ONE, SEVERAL, Config, FieldError, Part
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources.layer import join
from trainer_kit.errors import Mistake
from trainer_kit.errors.user_frames import own_frames


def mistakes_of(config_class: type[Config], parts: Sequence[Part]) -> list[Mistake]:
    """Returns the mistakes in the parts of a FieldError, each once, with its path in an experiment.

    Args:
      config_class: The class that was built. The paths begin at its place in an experiment: `trainer.train_steps`.
      parts: The parts of the FieldError.
    """
    around = _place(config_class)
    found = [
        mistake
        for path, section, error in parts
        for details in error.errors(include_url=False)
        for mistake in _mistakes(section, dict(details), join(around, path))
    ]
    return list(dict.fromkeys(found))  # the parts of a union report one mistake several times


def giver() -> str:
    """Returns the file and line of the user's code that built the config; "" if only packages and trainer_kit did."""
    for frame, line in traceback.walk_stack(None):
        code = frame.f_code
        if code.co_filename in (__file__, base.__file__):
            continue
        frames = own_frames([traceback.FrameSummary(code.co_filename, line, code.co_name, lookup_line=False)])
        return f"{frames[0].file}:{line}" if frames else ""
    return ""


def _mistakes(config_class: type[Config], details: dict[str, Any], around: str) -> Iterator[Mistake]:
    """Yields the mistakes of a section of `config_class`, at the dotted path `around`."""
    value = details["input"]
    loc = [part for part in details["loc"] if part not in (ONE, SEVERAL)]
    if details["type"] == "rules":
        for name, message in details["ctx"]["broken"]:
            problem, _, advice = message.partition("; ")
            yield Mistake(join(around, *loc, name), problem, advice)
        return
    if isinstance(inner := details.get("ctx", {}).get("error"), FieldError):  # of a section that a rule builds
        for path, section, error in inner.parts:
            for one in error.errors():
                yield from _mistakes(section, dict(one), join(around, *loc, path))
        return
    if details["type"] == "unexpected_positional_argument":
        yield Mistake(around, f"{show(value)} is given without a name", "write name=value")
        return
    if details["type"] in ("value_error", "assertion_error") or not loc:  # of a check of the user's own
        yield Mistake(join(around, *loc), str(details.get("ctx", {}).get("error") or details["msg"]))
        return
    depth, holder = _holder(config_class, loc)
    where, name = join(around, *loc[: depth + 1]), str(loc[depth])
    field = fields_of(holder).get(name)
    if field is None and details["type"] != "unexpected_keyword_argument":  # found by a pydantic class of the user's
        yield Mistake(join(around, *loc), str(details["msg"]))
    elif field is None:
        advice = missing_key_advice(where, name, list(fields_of(holder)), leaves(ExperimentConfig()))
        yield Mistake(where, NO_SUCH_KEY, advice)
    elif details["type"] == "missing":
        yield Mistake(where, "is needed", "give it a value")
    else:
        if len(loc) > depth + 1 and isinstance(loc[-1], int) and section_class(field.annotation) is None:
            allowed = describe(field.annotation, tuple(field.metadata))
            yield Mistake(join(where, loc[-1]), f"{show(value)} cannot be an item of {allowed}")
            return
        allowed, inner_class = describe(field.annotation, tuple(field.metadata)), section_class(field.annotation)
        advice = fields_advice(inner_class) if inner_class else hint(field.annotation, value, where, field.metadata)
        yield Mistake(where, f"{show(value)} is not {allowed}", advice)


def _holder(config_class: type[Config], loc: list[Any]) -> tuple[int, type[Config]]:
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


def _place(config_class: type[Config]) -> str:
    """Returns where an experiment has a section of this class; its name when there are several such places or none."""
    known = [(path, there) for path, there, _ in sections(ExperimentConfig()) if there is not Config]
    places = [path for path, there in known if there is config_class]
    places = places or [path for path, there in known if issubclass(config_class, there)]
    return places[0] if len(places) == 1 else config_class.__name__
