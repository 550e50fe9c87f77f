"""Tells which values of a config its experiment sets, and which are the defaults of config classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer_kit.config.fields import fields_of, has_sections
from trainer_kit.config.schema.base import Config
from trainer_kit.config.sources.layer import join
from trainer_kit.errors import ConfigError


def differing(config: Config, default: Any = None, path: str = "") -> Iterator[str]:
    """Yields the dotted paths of the values that differ from their defaults, and of those without a default.

    Args:
      config: A section, or a whole config.
      default: The section as the class around it has it by default; another class, or None: the defaults of its own
        class count.
      path: The dotted path of the section.
    """
    if type(default) is not type(config):
        default = _default(type(config))
    for name in config.as_dict():
        value, other = getattr(config, name), _value(default, type(config), name)
        if isinstance(value, Config):
            yield from differing(value, other, join(path, name))
        elif has_sections(value):
            others = other if has_sections(other) else {}
            for key, section in value.items():
                yield from differing(section, others.get(key), join(path, name, key))
        elif value != other:
            yield join(path, name)


def _default(config_class: type[Config]) -> Config | None:
    """Returns a section with the defaults of its class; None if the class has fields that have to be given."""
    try:
        return config_class()
    except ConfigError:
        return None


def _value(default: Config | None, config_class: type[Config], name: str) -> Any:
    """Returns the default of a field; of a field that has to be given an object that equals no value."""
    if default is not None:
        return getattr(default, name)
    field = fields_of(config_class)[name]
    return object() if field.is_required() else field.get_default(call_default_factory=True)
