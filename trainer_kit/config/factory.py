"""What an experiment's factory returns; its mistakes in our words, with their whole paths and the factory's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from trainer_kit.config.base import ONE, SEVERAL, Config
from trainer_kit.config.layers import join
from trainer_kit.config.overrides import missing_key_advice
from trainer_kit.config.schema import ExperimentConfig
from trainer_kit.config.sections import fields_of, leaves, listed_class, named_class, section_class, sections
from trainer_kit.config.wording import describe, hint, show
from trainer_kit.errors import ConfigError, Mistake
from trainer_kit.experiment import experiments, get_experiment


def make_config(name: str) -> ExperimentConfig:
    """Returns the default config of the experiment `name`, as `get_experiment` does.

    Raises:
      UsageError: as `get_experiment` does.
      ConfigError: when the factory gives a config class what it does not take: unknown keys, wrong values.
    """
    try:
        return get_experiment(name)
    except ValidationError as error:
        config_class = next((found for found in _subclasses(Config) if found.__name__ == error.title), None)
        if config_class is None:
            raise  # from a pydantic class of the user's own: a bug, not a config
        factory = experiments.lookup(name)
        origin = f"{factory.__module__}.{getattr(factory, '__qualname__', name)}"
        found = [mistake for details in error.errors() for mistake in _mistakes(config_class, dict(details), origin)]
        raise ConfigError(dict.fromkeys(found)) from error  # the parts of a union tell one mistake several times


def _mistakes(config_class: type[Config], details: dict[str, Any], origin: str) -> Iterator[Mistake]:
    around, value = _place(config_class), details["input"]
    loc = [part for part in details["loc"] if part not in (ONE, SEVERAL)]
    if details["type"] == "rules":
        for name, message in details["ctx"]["broken"]:
            problem, _, advice = message.partition("; ")
            yield Mistake(join(around, *loc, name), problem, advice, origin)
        return
    if details["type"] == "unexpected_positional_argument":
        yield Mistake(around, f"{show(value)} is given without a name", "write name=value", origin)
        return
    depth, holder = _holder(config_class, loc)
    where, name = join(around, *loc[: depth + 1]), str(loc[depth])
    field = fields_of(holder).get(name)
    if field is None:
        advice = missing_key_advice(where, name, list(fields_of(holder)), leaves(ExperimentConfig()))
        yield Mistake(where, "there is no such key", advice, origin)
    elif details["type"] == "missing":
        yield Mistake(where, "is needed", "give it a value", origin)
    else:
        allowed = describe(field.annotation, tuple(field.metadata))
        yield Mistake(where, f"{show(value)} is not {allowed}", hint(field.annotation, value), origin)


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


def _subclasses(config_class: type[Config]) -> Iterator[type[Config]]:
    for inner in config_class.__subclasses__():
        yield inner
        yield from _subclasses(inner)
