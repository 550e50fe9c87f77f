"""OpenOneOfConfig: a choice to which users add branches, such as the choice of an optimizer.

A branch is registered with a name, a config class and a function that builds something from its
config. From then on the choice has a section of that name, like the sections of the branches that
it declares. It can be used in Python, YAML, gin and overrides.
"""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import SerializeAsAny, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ArgsKwargs

from trainer_kit.config.registry import Registry
from trainer_kit.config.schema.configclass import Config, OneOfConfig, configclass
from trainer_kit.config.schema.section import FieldError, is_configclass
from trainer_kit.errors import Mistake, UsageError

Builder = TypeVar("Builder", bound=Callable[..., Any])


@dataclass(frozen=True)
class Branch:
    """A registered branch of a choice.

    Attributes:
      config_class: The class of its section.
      build: The function that the user registered. The registering decorator says what it gets and
        returns.
    """

    config_class: type[Config]
    build: Callable[..., Any]


@configclass
class OpenOneOfConfig(OneOfConfig):
    """A choice between the branches that its class declares and those that are registered for it.

    A subclass has a separate `registry` and the field `type: str | None = None`.

    Attributes:
      registered_section: The section of the chosen branch if that is a registered one. It is given
        and shown under the branch's name.
    """

    registry: ClassVar[Registry[Branch]] = Registry("branch")

    registered_section: SerializeAsAny[Config] | None = None

    def __post_init__(self) -> None:
        branches = self.branches()
        if self.type is not None and self.type not in branches:
            names = ", ".join(branches)
            if not branches:
                names = f"the registered ones: no {self.registry.kind} is registered"
            problem = f"{self.type!r} is not one of {names}"
            raise FieldError(type(self), [Mistake("type", problem)])

        # The base class reads and builds the chosen section under the name of its branch.
        is_registered = self.type in self.registry
        if is_registered:
            object.__setattr__(self, str(self.type), self.registered_section)
        super().__post_init__()
        section = self.get() if is_registered else None
        object.__setattr__(self, "registered_section", section)

    @classmethod
    def branches(cls) -> dict[str, builtins.type[Config]]:
        """Returns the name and the config class of each branch.

        The declared branches come first, then the registered ones.
        """
        branches = dict(super().branches())
        branches.pop("registered_section", None)
        for name in cls.registry.names():
            branch = cls.registry.lookup(name)
            branches[name] = branch.config_class
        return branches

    @classmethod
    def get_field_infos(cls) -> dict[str, FieldInfo]:
        """Returns pydantic's description of each field.

        The registered branches stand in place of `registered_section`.
        """
        fields = super().get_field_infos()
        if not fields:
            return {}

        branches = cls.branches()
        type_annotation: Any = Literal[tuple(branches)] if branches else str
        del fields["registered_section"]
        fields["type"] = FieldInfo.from_annotated_attribute(type_annotation | None, None)
        for name in cls.registry.names():
            section_annotation: Any = branches[name] | None
            fields[name] = FieldInfo.from_annotated_attribute(section_annotation, None)
        return fields

    @model_validator(mode="before")
    @classmethod
    def _move_registered_section(cls, arguments: object) -> object:
        """Moves the section of a registered branch that is chosen to `registered_section`.

        The sections of other registered branches are left out.
        """
        values = arguments.kwargs if isinstance(arguments, ArgsKwargs) else arguments
        if not isinstance(values, Mapping):
            return arguments

        # The values of registered branches, and all others.
        sections: dict[str, Any] = {}
        fields: dict[str, Any] = {}
        for name, value in values.items():
            if name in cls.registry:
                sections[name] = value
            else:
                fields[name] = value

        section = None
        branch_name = str(values.get("type"))
        if branch_name in cls.registry:
            config_class = cls.registry.lookup(branch_name).config_class
            section = sections.get(branch_name, fields.get("registered_section"))
            if isinstance(section, Mapping):
                section = config_class(**section)
            if not isinstance(section, config_class):
                section = None
        fields["registered_section"] = section

        if isinstance(arguments, ArgsKwargs):
            return ArgsKwargs((), fields)
        return fields


def register_branch(
    choice: type[OpenOneOfConfig], name: str, config_class: type[Config]
) -> Callable[[Builder], Builder]:
    """Returns a decorator that registers a function as the builder of a new branch of `choice`.

    Raises:
      UsageError: When `config_class` is not made by `@configclass`, or the name is taken or cannot
        be that of a section.
    """
    kind = choice.registry.kind
    if not is_configclass(config_class):
        raise UsageError(
            f"{kind} {name!r}: decorate {config_class!r:.80} with @trainer_kit.configclass"
        )

    # A branch may not have the name of another field, such as `type`.
    branches = choice.branches()
    field_names = {field.name for field in dataclasses.fields(choice)}
    taken_names = field_names - branches.keys()
    if not name.isidentifier() or name in taken_names:
        raise UsageError(
            f"{name!r} is not a name for a {kind}; use letters, digits and _, as in a Python name"
        )
    if name in branches and name not in choice.registry:
        raise UsageError(f"the {kind} {name!r} is one of trainer_kit's own; choose another name")

    def register(build: Builder) -> Builder:
        if not callable(build):
            raise UsageError(
                f"{kind} {name!r}: {build!r:.80} cannot be called; decorate a function or a class"
            )
        branch = Branch(config_class, build)
        choice.registry.register(name)(branch)
        return build

    return register
