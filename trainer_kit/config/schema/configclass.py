"""Makes config classes: `@configclass`, the base class Config, and OneOfConfig for the choice of a branch.

A config class is a pydantic dataclass: frozen, keyword-only, without extra keys. Fields are strict
one by one ("5" is not an int, "yes" is not a bool), nested sections may be given as dicts and
tuples as lists. A strict class would refuse the nested dicts, hence the rewriting of annotations.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import pydantic.dataclasses
from pydantic import ConfigDict, Discriminator, Field, Strict, Tag, ValidationError
from typing_extensions import Self, dataclass_transform

from trainer_kit.config.allowed_values import format_value
from trainer_kit.config.merge import find_mistakes, merge_layers
from trainer_kit.config.schema.section import (
    ONE,
    SEVERAL,
    FieldError,
    Section,
    has_several_sections,
    is_configclass,
)
from trainer_kit.config.sources.layer import ConfigLayer, join_keys
from trainer_kit.errors import Mistake

ConfigT = TypeVar("ConfigT")


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field, Field)
)
def configclass(cls: type[ConfigT]) -> type[ConfigT]:
    """Makes a config class of `cls`: frozen, keyword-only, typed and checked when built.

    Every int, float, bool and str in its annotations becomes strict. To check a rule across fields,
    define `rules(self)`, yielding (field name, what is wrong and what to do) for each broken one.
    The class raises a FieldError, which is a ConfigError and a ValueError, for unknown fields,
    wrong types and broken rules.

    Raises:
      TypeError: when `cls` does not inherit from Config (usually from TaskConfig).
    """
    if not issubclass(cls, Config):
        raise TypeError(
            f"{cls.__qualname__} must inherit from trainer_kit.Config (a task's from"
            " trainer_kit.TaskConfig)"
        )
    declared = inspect.get_annotations(cls)
    hints = get_type_hints(
        cls, vars(sys.modules[cls.__module__]), {cls.__name__: cls}, include_extras=True
    )
    hints.update(
        {name: _allow_several(hints[name]) for name in cls.one_or_several if name in declared}
    )
    cls.__annotations__ = {
        name: hints[name] if get_origin(hints[name]) is ClassVar else _make_strict(hints[name])
        for name in declared
    }
    settings = ConfigDict(
        extra="forbid", allow_inf_nan=False, defer_build=True, arbitrary_types_allowed=True
    )
    made = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=settings)(cls)
    return made  # type: ignore[return-value]


class Config(Section):
    """What every config class can do; Section has the attributes that a class may set."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Makes the class raise FieldErrors. pydantic sets `__init__` again when a class is first used."""
        if is_configclass(cls) and not hasattr(cls.__init__, "__wrapped__"):
            cls.__init__ = _convert_init_errors(cls.__init__)  # type: ignore[method-assign]
        return super().__new__(cls)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yields (field name, message) for each broken rule across fields; none by default."""
        yield from ()

    def __post_init__(self) -> None:
        mistakes = []
        for name, message in self.rules():
            problem, _, advice = message.partition("; ")
            mistakes.append(Mistake(name, problem, advice))
        if mistakes:
            raise FieldError(type(self), mistakes)

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with the given fields changed; a dict for a nested section changes only what it names.

        So does a dict for sections by name: None removes one, and where a single section was, each
        begins as that.

        Raises:
          FieldError: a ConfigError and ValueError, for unknown fields, wrong types and broken
            rules: all of them, with their whole paths.
        """
        config, _, mistakes = merge_layers(self, [ConfigLayer(changes)])
        if mistakes:
            raise FieldError(
                type(self), [dataclasses.replace(mistake, origin="") for mistake in mistakes]
            )
        return config


class OneOfConfig(Config):
    """A choice: the field `type` names the one branch that counts; the others are None.

    With `type` None nothing is chosen. Branch fields are optional sections.
    """

    is_choice = True

    type: str | None

    def __post_init__(self) -> None:
        for name, branch in self.branches().items():
            value = getattr(self, name) if name == self.type else None
            if name == self.type and value is None:
                try:
                    value = (
                        branch()
                    )  # only of the chosen one: a class's first object costs milliseconds
                except FieldError as error:  # a field without a default
                    mistakes = [
                        dataclasses.replace(mistake, path=join_keys(name, mistake.path))
                        for mistake in error.relative_mistakes
                    ]
                    raise FieldError(type(self), mistakes) from error
            object.__setattr__(self, name, value)
        super().__post_init__()

    @classmethod
    def branches(cls) -> dict[str, builtins.type[Config]]:
        """Returns the name and the config class of each branch."""
        found = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            classes = [
                part
                for part in get_args(field.type)
                if isinstance(part, type) and issubclass(part, Config)
            ]
            if classes:
                found[field.name] = classes[0]
        return found

    def get(self) -> Any:
        """Returns the chosen branch, or None."""
        return getattr(self, self.type) if self.type else None

    def get_active_fields(self) -> list[str]:
        return ["type", *([self.type] if self.type else [])]


def _convert_init_errors(checked_init: Callable[..., None]) -> Callable[..., None]:
    """Returns the `__init__` of a config class that raises a FieldError in place of pydantic's error."""

    @functools.wraps(checked_init)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        try:
            checked_init(self, *args, **values)
        except ValidationError as error:
            raise FieldError(
                type(self), _collect_mistakes(type(self), args, values, error)
            ) from error

    return __init__


def _collect_mistakes(
    config_class: type[Section],
    args: tuple[Any, ...],
    values: dict[str, Any],
    error: ValidationError,
) -> list[Mistake]:
    """Returns the mistakes in the arguments of a config class that pydantic has refused, each once."""
    if args:
        return [Mistake("", f"{format_value(args[0])} is given without a name", "write name=value")]
    if mistakes := find_mistakes(config_class, values):
        return mistakes

    for details in error.errors(include_url=False):
        path = join_keys(*(part for part in details["loc"] if part not in (ONE, SEVERAL)))
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, FieldError):  # of broken rules
            mistakes += (
                dataclasses.replace(inner, path=join_keys(path, inner.path))
                for inner in cause.relative_mistakes
            )
        elif details["type"] == "missing":
            mistakes.append(Mistake(path, "is needed", "give it a value"))
        else:  # of a check of the user's own
            mistakes.append(Mistake(path, str(cause or details["msg"])))
    return list(dict.fromkeys(mistakes))  # the parts of a union report one mistake several times


def _allow_several(annotation: Any) -> Any:
    """Returns the annotation of a field that is a section, or several of them by name, if `annotation` is a section."""
    if not (isinstance(annotation, type) and issubclass(annotation, Config)):
        return annotation

    def which(value: Any) -> str:
        # So that a mistake is reported once, for what was meant, and not for each part of the
        # union.
        return (
            SEVERAL
            if isinstance(value, Mapping) and has_several_sections(annotation, value)
            else ONE
        )

    one, several = Annotated[annotation, Tag(ONE)], Annotated[dict[str, annotation], Tag(SEVERAL)]
    return Annotated[Union[one, several], Discriminator(which)]  # noqa: UP007


def _make_strict(annotation: Any) -> Any:
    """Returns `annotation` with every int, float, bool and str inside it made strict."""
    if annotation in (int, float, bool, str):
        return Annotated[annotation, Strict()]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return Annotated[(_make_strict(args[0]), *args[1:])]
    if origin is Literal or not args:
        return annotation
    if origin in (Union, types.UnionType):
        return Union[tuple(_make_strict(arg) for arg in args)]  # noqa: UP007
    return origin[tuple(arg if arg is Ellipsis else _make_strict(arg) for arg in args)]
