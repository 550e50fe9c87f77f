"""Section: what the modules that inspect, check and merge configs know of a config class.

Config builds on these modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from trainer_kit.config.schema.durations import Duration, RoundedSteps
from trainer_kit.config.sources.layer import join_keys
from trainer_kit.errors import ConfigError, Mistake, add_note
from trainer_kit.errors.user_frames import caller_location

# What pydantic puts into the place of a mistake in a field that is one section or several.
ONE = "(one)"
SEVERAL = "(several)"

_CONFIG_CLASS_MODULES = (__name__, "trainer_kit.config.schema.configclass")


class Section:
    """A section of a config, or a whole config.

    Attributes:
      one_or_several: The names of sections that may also be given several times, as a dict by name.
        They apply to this class and to those that inherit from it, whatever class these give the
        section.
      merges_values: Whether a mapping that is a value, and a list of sections as long as the
        present one, change only what they name when another source gives them. Otherwise they
        replace the present one.
      path_in_experiment: The path of such a section in an experiment, for messages. If it is None,
        the name of the class stands for it.
      is_choice: Whether the class is a choice between branches, of which a field names one.
      aliases: Pairs of a second name and a field that is a choice. The value of the second name
        chooses a branch of that field.
    """

    one_or_several: tuple[str, ...] = ()
    merges_values: bool = False
    path_in_experiment: str | None = None
    is_choice: bool = False
    aliases: tuple[tuple[str, str], ...] = ()

    @classmethod
    def expand_short_form(cls, value: object, current: Mapping[str, Any]) -> object:
        """Returns the mapping that a short form stands for, and any other value as it is.

        Args:
          value: The value that a source gives for the section. It is not a mapping.
          current: The present values of the section, by the names of its fields.
        """
        del current
        return value

    @classmethod
    def get_field_infos(cls) -> dict[str, FieldInfo]:
        """Returns pydantic's description of each field by name."""
        return dict(getattr(cls, "__pydantic_fields__", {}))

    def as_dict(self) -> dict[str, Any]:
        """Returns plain nested dicts, lists and scalars, ready for YAML.

        Of a "oneof", only the chosen branch is returned.
        """
        return {name: to_plain_data(getattr(self, name)) for name in self.get_active_fields()}

    def get_active_fields(self) -> list[str]:
        """Returns the names of the fields that count.

        Of a "oneof", only the field `type` and the chosen branch count.
        """
        return [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]


class FieldError(ConfigError):
    """An error for values that a config class refuses.

    Its message is the one that the command line shows for them.

    Attributes:
      relative_mistakes: The mistakes, with their paths inside the class. The paths in `mistakes`
        begin at the place of the class in an experiment.
    """

    def __init__(self, config_class: type[Section], relative_mistakes: Sequence[Mistake]) -> None:
        self.relative_mistakes = tuple(relative_mistakes)
        place = get_path_in_experiment(config_class)
        # Values in Python have no origin that the user knows.
        super().__init__(
            dataclasses.replace(mistake, path=join_keys(place, mistake.path), origin="")
            for mistake in relative_mistakes
        )
        if location := caller_location(_CONFIG_CLASS_MODULES):
            add_note(self, f"given in {location}")


def get_path_in_experiment(config_class: type[Section]) -> str:
    """Returns the path of such a section in an experiment, or the name of its class."""
    if config_class.path_in_experiment is None:
        return config_class.__name__
    return config_class.path_in_experiment


def is_configclass(cls: object) -> bool:
    """Whether `cls` itself was made by `@configclass`.

    A plain subclass of a config class was not.
    """
    if not isinstance(cls, type):
        return False
    return issubclass(cls, Section) and "__pydantic_fields__" in vars(cls)


def has_several_sections(section_class: type[Section], value: Mapping[Any, Any]) -> bool:
    """Whether a mapping gives several sections by name, and not the fields of a single one.

    Args:
      section_class: The config class of the section, which may be one or several.
      value: The mapping. A mapping of sections has no key that is a field of the class.
    """
    fields = vars(section_class)["__pydantic_fields__"].keys()
    are_sections = all(
        item is None or isinstance(item, (Mapping, Section)) for item in value.values()
    )
    return bool(value) and not fields & value.keys() and are_sections


def to_plain_data(value: object) -> Any:
    """Returns a value of a config as plain nested dicts, lists and scalars."""
    if isinstance(value, Section):
        return value.as_dict()
    if isinstance(value, Mapping):
        return {key: to_plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain_data(item) for item in value]
    if isinstance(value, Duration):
        return str(value)
    if isinstance(value, RoundedSteps):
        return int(value)
    return value
