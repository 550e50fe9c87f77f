"""Makes config classes: `@configclass`, and the base classes Config and OneOfConfig.

A config class is a pydantic dataclass: frozen, keyword-only, without extra keys. Fields are strict
one by one ("5" is not an int, "yes" is not a bool). Nested sections may be given as dicts, and
tuples as lists. A strict class would refuse the nested dicts, hence the rewriting of annotations.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import pydantic.dataclasses
from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Strict, Tag, ValidationError

from trainer_kit.config.allowed_values import format_value
from trainer_kit.config.merge import create_section, merge_layers
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
from trainer_kit.files import expand_home

ConfigT = TypeVar("ConfigT")


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field, Field)
)
def configclass(cls: type[ConfigT]) -> type[ConfigT]:
    """Makes a config class of `cls`: frozen, keyword-only, typed and checked when built.

    Every int, float, bool and str in its annotations becomes strict. To check a rule across fields,
    define `rules(self)`, which yields (field name, what is wrong and what to do) for each broken
    rule. The class raises a FieldError, which is a ConfigError and a ValueError, for unknown
    fields, wrong types and broken rules.

    Raises:
      TypeError: When `cls` does not inherit from Config (usually from TaskConfig).
    """
    if not issubclass(cls, Config):
        raise TypeError(
            f"{cls.__qualname__} must inherit from trainer_kit.Config (a task's from"
            " trainer_kit.TaskConfig)"
        )

    # The name of the class itself is not in its module yet.
    declared = inspect.get_annotations(cls)
    module_names = vars(sys.modules[cls.__module__])
    hints = get_type_hints(cls, module_names, {cls.__name__: cls}, include_extras=True)
    for name in cls.one_or_several:
        if name in declared:
            hints[name] = _allow_several(hints[name])
    cls.__annotations__ = {
        name: hints[name] if get_origin(hints[name]) is ClassVar else _make_strict(hints[name])
        for name in declared
    }

    settings = ConfigDict(
        extra="forbid", allow_inf_nan=False, defer_build=True, arbitrary_types_allowed=True
    )
    config_class = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=settings)(cls)
    return config_class  # type: ignore[return-value]


class Config(Section):
    """The base class of every config class. Section has the attributes that a class may set."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Makes the class raise FieldErrors, and returns a new object."""
        # It is done here because pydantic sets `__init__` again when a class is first used.
        if is_configclass(cls) and not hasattr(cls.__init__, "__wrapped__"):
            checked_init = cls.__init__

            @functools.wraps(checked_init)
            def __init__(self: Any, *args: Any, **values: Any) -> None:
                try:
                    checked_init(self, *args, **values)
                except ValidationError as error:
                    # The values may have short forms, which the merge of all sources expands.
                    section, mistakes = create_section(type(self), values)
                    if section is None or mistakes or args:
                        mistakes = _collect_mistakes(args, mistakes, error)
                        raise FieldError(type(self), mistakes) from error
                    vars(self).update(vars(section))

            cls.__init__ = __init__  # type: ignore[method-assign]
        return super().__new__(cls)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yields (field name, message) for each broken rule across fields. By default, none."""
        yield from ()

    def __post_init__(self) -> None:
        mistakes = []
        for name, message in self.rules():
            problem, _, advice = message.partition("; ")
            mistakes.append(Mistake(name, problem, advice))
        if mistakes:
            raise FieldError(type(self), mistakes)

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with the given fields changed.

        A dict for a nested section changes only what it names. A dict for named sections changes
        only the sections that it names, and None removes one. Where there was a single section,
        each named section begins as a copy of it.

        Args:
          **changes: The new values by the names of the fields.

        Raises:
          FieldError: A ConfigError and ValueError, for unknown fields, wrong types and broken
            rules. It contains all of them, with their whole paths.
        """
        config, _, mistakes = merge_layers(self, [ConfigLayer(changes)])
        if mistakes:
            raise FieldError(type(self), mistakes)
        return config


class OneOfConfig(Config):
    """A choice of a branch: the field `type` names the one that counts, and the others are None.

    If `type` is None, nothing is chosen. The fields of the branches are optional sections.

    The section has short forms. The name of a branch chooses it, and null chooses none. Any other
    plain value, such as a number or a duration, is set in the main field of the chosen branch.

    Attributes:
      main_fields: The names of main fields. The first that a branch has is its main field.
      main_branch: The branch that a number or a duration chooses if none is chosen.
    """

    is_choice = True
    main_fields: tuple[str, ...] = ()
    main_branch: str = ""

    type: str | None

    def __post_init__(self) -> None:
        for name, branch in self.branches().items():
            value = getattr(self, name) if name == self.type else None

            # Only the chosen section is built: the first object of a class costs milliseconds.
            if name == self.type and value is None:
                try:
                    value = branch()
                except FieldError as error:
                    # The branch has a field without a default.
                    mistakes = [
                        dataclasses.replace(mistake, path=join_keys(name, mistake.path))
                        for mistake in error.relative_mistakes
                    ]
                    raise FieldError(type(self), mistakes) from error
            object.__setattr__(self, name, value)
        super().__post_init__()

    @classmethod
    def expand_short_form(cls, value: object, current: Mapping[str, Any]) -> object:
        """Returns the mapping that a short form stands for."""
        # A text that begins with a number is a duration, or a number in quotes.
        is_name = False
        if isinstance(value, str):
            unsigned = value.lstrip(" +-.")
            is_name = not unsigned[:1].isdigit()
        if value is None or is_name:
            return {"type": value}

        chosen = current.get("type")
        branch = chosen or cls.main_branch
        main_field = cls.find_main_field(branch)
        if not main_field:
            return value
        section = {branch: {main_field: value}}
        return section if chosen else {"type": branch, **section}

    @classmethod
    def find_main_field(cls, branch: Any) -> str:
        """Returns the name of the main field of the branch called `branch`, or ""."""
        branch_class = cls.branches().get(branch, Config)
        fields = branch_class.get_field_infos()
        names = [name for name in cls.main_fields if name in fields]
        return names[0] if names else ""

    @classmethod
    def branches(cls) -> dict[str, builtins.type[Config]]:
        """Returns the name and the config class of each branch."""
        classes = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            section_classes = [
                member
                for member in get_args(field.type)
                if isinstance(member, type) and issubclass(member, Config)
            ]
            if section_classes:
                classes[field.name] = section_classes[0]
        return classes

    def get(self) -> Any:
        """Returns the chosen branch, or None."""
        return getattr(self, self.type) if self.type else None

    def get_active_fields(self) -> list[str]:
        return ["type", *([self.type] if self.type else [])]


def _collect_mistakes(
    args: tuple[object, ...], mistakes: list[Mistake], error: ValidationError
) -> list[Mistake]:
    """Returns the mistakes in the arguments that pydantic has refused, each of them once.

    Args:
      args: The arguments without a name.
      mistakes: The mistakes that merging the values has found.
      error: The error of pydantic.
    """
    if args:
        return [Mistake("", f"{format_value(args[0])} is given without a name", "write name=value")]
    if mistakes:
        return mistakes

    # What a merge does not see: broken rules, missing values, and checks of the user's own.
    for details in error.errors(include_url=False):
        path = join_keys(*(part for part in details["loc"] if part not in (ONE, SEVERAL)))
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, FieldError):
            mistakes += (
                dataclasses.replace(mistake, path=join_keys(path, mistake.path))
                for mistake in cause.relative_mistakes
            )
        elif details["type"] == "missing":
            mistakes.append(Mistake(path, "is needed", "give it a value"))
        else:
            mistakes.append(Mistake(path, str(cause or details["msg"])))

    # The parts of a union report one mistake several times.
    return list(dict.fromkeys(mistakes))


def _allow_several(annotation: object) -> Any:
    """Returns the annotation of a field that is a section, or several of them by name.

    An annotation that is not a section is returned as it is.
    """
    if not (isinstance(annotation, type) and issubclass(annotation, Config)):
        return annotation

    # With a tag, a mistake is reported once, for what was meant, and not for each part of the
    # union.
    def which(value: object) -> str:
        if isinstance(value, Mapping) and has_several_sections(annotation, value):
            return SEVERAL
        return ONE

    section: Any = annotation
    single_section: Any = Annotated[section, Tag(ONE)]
    named_sections: Any = Annotated[dict[str, section], Tag(SEVERAL)]
    return Annotated[Union[single_section, named_sections], Discriminator(which)]  # noqa: UP007


def _make_strict(annotation: Any) -> Any:
    """Returns `annotation` with every int, float, bool and str inside it made strict.

    A text that begins with ~/ is a path in the home of the user, also where any value may come.
    """
    if annotation is str:
        return Annotated[annotation, Strict(), AfterValidator(expand_home)]
    if annotation is Any:
        return Annotated[annotation, AfterValidator(expand_home)]
    if annotation in (int, float, bool):
        return Annotated[annotation, Strict()]
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is Annotated:
        return Annotated[(_make_strict(args[0]), *args[1:])]
    if origin is Literal or not args:
        return annotation
    if origin in (Union, types.UnionType):
        return Union[tuple(_make_strict(arg) for arg in args)]  # noqa: UP007
    return origin[tuple(arg if arg is Ellipsis else _make_strict(arg) for arg in args)]
