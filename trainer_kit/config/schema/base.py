"""Makes config classes: `@configclass`, the base class Config, and OneOfConfig for the choice of a branch.

A config class is a pydantic dataclass: frozen, keyword-only, without extra keys. Fields are strict one by one ("5" is
not an int, "yes" is not a bool), nested sections may be given as dicts and tuples as lists. A strict class would
refuse the nested dicts, hence the rewriting of annotations.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import pydantic.dataclasses
from pydantic import ConfigDict, Discriminator, Field, Strict, Tag, ValidationError
from pydantic_core import PydanticCustomError
from typing_extensions import Self, dataclass_transform

from trainer_kit.config.schema.durations import Duration, RoundedSteps
from trainer_kit.errors import ConfigError, add_note

Section = TypeVar("Section")
Part = tuple[str, "type[Config]", ValidationError]  # dotted path, class, what pydantic found
ONE, SEVERAL = "(one)", "(several)"  # what pydantic puts into the place of a mistake in such a field


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field, Field))
def configclass(cls: type[Section]) -> type[Section]:
    """Makes a config class of `cls`: frozen, keyword-only, typed and checked when built.

    Every int, float, bool and str in its annotations becomes strict. To check a rule across fields, define
    `rules(self)`, yielding (field name, what is wrong and what to do) for each broken one. The class raises a
    FieldError, which is a ConfigError and a ValueError, for unknown fields, wrong types and broken rules.

    Raises:
      TypeError: when `cls` does not inherit from Config (usually from TaskConfig).
    """
    if not issubclass(cls, Config):
        raise TypeError(
            f"{cls.__qualname__} must inherit from trainer_kit.Config (a task's from trainer_kit.TaskConfig)"
        )
    declared = inspect.get_annotations(cls)
    hints = get_type_hints(cls, vars(sys.modules[cls.__module__]), {cls.__name__: cls}, include_extras=True)
    hints.update({name: _one_or_several(hints[name]) for name in cls.one_or_several if name in declared})
    cls.__annotations__ = {
        name: hints[name] if get_origin(hints[name]) is ClassVar else _strict(hints[name]) for name in declared
    }
    settings = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True, arbitrary_types_allowed=True)
    made = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=settings)(cls)
    return made  # type: ignore[return-value]


def is_configclass(cls: object) -> bool:
    """Whether `cls` itself was made by `@configclass`; a plain subclass of one was not."""
    return isinstance(cls, type) and issubclass(cls, Config) and "__pydantic_fields__" in vars(cls)


class FieldError(ConfigError):
    """An error for values that a config class refuses, with the message that the command line shows for them.

    Attributes:
      parts: For each section with a mistake: its dotted path, its class, and pydantic's error.
    """

    def __init__(self, config_class: type[Config], parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        from trainer_kit.config.field_mistakes import giver, mistakes_of  # it needs all config classes

        super().__init__(mistakes_of(config_class, self.parts))
        if place := giver():
            add_note(self, f"given in {place}")

    def errors(self) -> list[dict[str, Any]]:
        """Returns pydantic's errors in the form of `ValidationError.errors()`, with whole paths."""
        return [
            {**details, "loc": (*filter(None, path.split(".")), *details["loc"])}
            for path, _, error in self.parts
            for details in error.errors(include_url=False)
        ]

    def below(self, path: str) -> list[Part]:
        """Returns the parts as parts of the outer section, in which this section is at the dotted `path`."""
        return [(_joined(path, inner), config_class, error) for inner, config_class, error in self.parts]


class Config:
    """What every config class can do.

    Attributes:
      one_or_several: names of sections that may also be given several times, as a dict by name: in this class and in
        those that inherit from it, whatever class they give the section.
      merges_values: whether a mapping that is a value, and a list of sections as long as the one before, change only
        what they name when another source gives them; else they replace the one before.
    """

    one_or_several: tuple[str, ...] = ()
    merges_values: bool = False

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Makes the class raise FieldErrors. pydantic sets `__init__` again when a class is first used."""
        if is_configclass(cls) and not hasattr(cls.__init__, "__wrapped__"):
            cls.__init__ = _with_field_errors(cls.__init__)  # type: ignore[method-assign]
        return super().__new__(cls)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yields (field name, message) for each broken rule across fields; none by default."""
        yield from ()

    def __post_init__(self) -> None:
        broken = list(self.rules())
        if broken:
            text = "; ".join(f"{name}: {message}" for name, message in broken)
            raise PydanticCustomError("rules", "{text}", {"text": text, "broken": broken})

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with the given fields changed; a dict for a nested section changes only what it names.

        So does a dict for sections by name: None removes one, and where a single section was, each begins as that.

        Raises:
          FieldError: a ConfigError and ValueError, for unknown fields, wrong types and broken rules: all of them, with
            their whole paths.
        """
        wrong: list[Part] = []
        made = self._changed(changes, "", wrong)
        if wrong:
            raise FieldError(type(self), wrong)
        return made

    def _changed(self, changes: Mapping[Any, Any], path: str, wrong: list[Part]) -> Self:
        """Returns a copy with `changes`; what is wrong with them goes to `wrong`, as parts of a FieldError."""
        known = len(wrong)
        merged = {str(name): self._merged(str(name), value, path, wrong) for name, value in changes.items()}
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        try:
            return type(self)(**{**values, **merged})
        except FieldError as error:
            of_rules = all(details["type"] == "rules" for details in error.errors())
            if len(wrong) == known or not of_rules:  # a rule may be broken because an inner change was refused
                wrong += error.below(path)
            return self

    def _merged(self, name: str, value: Any, path: str, wrong: list[Part]) -> Any:
        now, where = getattr(self, name, None), _joined(path, name)
        if not isinstance(value, Mapping):
            return value
        if isinstance(now, Config):
            if not (name in self.one_or_several and gives_several(type(now), value)):
                return now._changed(value, where, wrong)
            return {key: _item(now, one, _joined(where, key), wrong) for key, one in value.items()}
        if not isinstance(now, Mapping) or not any(isinstance(one, Config) for one in now.values()):
            return value
        changed = {key: _item(now.get(key), one, _joined(where, key), wrong) for key, one in value.items()}
        return {key: one for key, one in {**now, **changed}.items() if one is not None}

    def as_dict(self) -> dict[str, Any]:
        """Returns plain nested dicts, lists and scalars, ready for YAML; of a "oneof" only the chosen branch."""
        return {name: _plain(getattr(self, name)) for name in self._shown_fields()}

    def _shown_fields(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]


class OneOfConfig(Config):
    """A choice: the field `type` names the one branch that counts; the others are None.

    With `type` None nothing is chosen. Branch fields are optional sections.
    """

    type: str | None

    def __post_init__(self) -> None:
        for name, branch in self.branches().items():
            value = getattr(self, name) if name == self.type else None
            if name == self.type and value is None:
                value = self._made(name, branch)  # only of the chosen one: a class's first object costs milliseconds
            object.__setattr__(self, name, value)
        super().__post_init__()

    def _made(self, name: str, branch: Callable[[], Config]) -> Config:
        try:
            return branch()
        except FieldError as error:  # a field without a default
            raise FieldError(type(self), error.below(name)) from error

    @classmethod
    def branches(cls) -> dict[str, builtins.type[Config]]:
        """Returns the name and the config class of each branch."""
        found = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            classes = [part for part in get_args(field.type) if isinstance(part, type) and issubclass(part, Config)]
            if classes:
                found[field.name] = classes[0]
        return found

    def get(self) -> Any:
        """Returns the chosen branch, or None."""
        return getattr(self, self.type) if self.type else None

    def _shown_fields(self) -> list[str]:
        return ["type", *([self.type] if self.type else [])]


def _item(now: Any, value: Any, path: str, wrong: list[Part]) -> Any:
    """Returns one of several sections by name, with the changes to it if there is one already."""
    return now._changed(value, path, wrong) if isinstance(now, Config) and isinstance(value, Mapping) else value


def _joined(path: str, name: object) -> str:
    return f"{path}.{name}" if path and name else f"{path}{name}"


def _with_field_errors(checked_init: Callable[..., None]) -> Callable[..., None]:
    """Returns the `__init__` of a config class that raises a FieldError in place of pydantic's error."""

    @functools.wraps(checked_init)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        try:
            checked_init(self, *args, **values)
        except ValidationError as error:
            raise FieldError(type(self), [("", type(self), error)]) from error

    return __init__


def gives_several(section: type[Config], value: Mapping[Any, Any]) -> bool:
    """Whether a mapping, given for a section that may be one or several, gives several of them by name."""
    fields = vars(section)["__pydantic_fields__"].keys()
    return bool(value) and not fields & value.keys() and all(_may_be_section(item) for item in value.values())


def _may_be_section(value: Any) -> bool:
    return value is None or isinstance(value, (Mapping, Config))


def _one_or_several(annotation: Any) -> Any:
    """Returns the annotation of a field that is a section, or several of them by name, if `annotation` is a section."""
    if not (isinstance(annotation, type) and issubclass(annotation, Config)):
        return annotation

    def which(value: Any) -> str:
        # So that a mistake is reported once, for what was meant, and not for each part of the union.
        return SEVERAL if isinstance(value, Mapping) and gives_several(annotation, value) else ONE

    one, several = Annotated[annotation, Tag(ONE)], Annotated[dict[str, annotation], Tag(SEVERAL)]
    return Annotated[Union[one, several], Discriminator(which)]  # noqa: UP007


def _strict(annotation: Any) -> Any:
    """Returns `annotation` with every int, float, bool and str inside it made strict."""
    if annotation in (int, float, bool, str):
        return Annotated[annotation, Strict()]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return Annotated[(_strict(args[0]), *args[1:])]
    if origin is Literal or not args:
        return annotation
    if origin in (Union, types.UnionType):
        return Union[tuple(_strict(arg) for arg in args)]  # noqa: UP007
    return origin[tuple(arg if arg is Ellipsis else _strict(arg) for arg in args)]


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.as_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Duration):
        return str(value)
    if isinstance(value, RoundedSteps):
        return int(value)
    return value
