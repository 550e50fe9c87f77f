"""A layer: the values of one source, and where each was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ConfigLayer:
    """The values of one source.

    Attributes:
      values: Nested dicts of the values, as in the source. They are not checked against the
        config's classes.
      origins: The place of each value or section by its dotted path: "conf.yaml:12",
        "--params_override", "conf.gin:3", "--gin_params".
      replaces_named_sections: Whether named sections that the source leaves out do not exist, as in
        the record of a run.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    replaces_named_sections: bool = False

    def find_origin(self, path: str) -> str:
        """Returns where `path` was written, or "" if that is not known.

        A path without an entry has the origin of its section.
        """
        while path not in self.origins and "." in path:
            path = path.rpartition(".")[0]
        return self.origins.get(path, "")


def join_keys(*parts: object) -> str:
    """Returns the dotted path made of `parts`, leaving out empty ones."""
    keys = [str(part) for part in parts if part != ""]
    return ".".join(keys)


def insert_value(values: dict[str, Any], path: str, value: object) -> str:
    """Puts a value at a dotted path into nested dicts.

    Returns:
      What is wrong, or "" if the value was inserted.
    """
    # Sections that are not there yet are created on the way.
    *sections, name = path.split(".")
    for depth, section in enumerate(sections, 1):
        inner_values = values.setdefault(section, {})
        if not isinstance(inner_values, dict):
            section_path = join_keys(*sections[:depth])
            return (
                f"cannot be set: {section_path} itself is set to a value"
                f" (a choice is also set by {section_path}.type)"
            )
        values = inner_values

    if name in values:
        return "is given twice"
    values[name] = value
    return ""


def unflatten_values(values: Mapping[str, object]) -> dict[str, Any]:
    """Returns nested dicts in place of dotted paths."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        insert_value(nested, path, value)
    return nested


def list_paths_inside(origins: dict[str, str], path: str) -> list[str]:
    """Returns the paths in `origins` that are `path` or inside it."""
    return [inner_path for inner_path in origins if is_inside(inner_path, path)]


def is_inside(path: str, section: str) -> bool:
    """Whether the dotted `path` is `section` or inside it.

    The empty section contains everything.
    """
    if not section or path == section:
        return True
    prefix = section + "."
    return path.startswith(prefix)
