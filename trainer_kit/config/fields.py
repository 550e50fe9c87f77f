"""The shape of config classes: which fields are sections, which are leaves, and how each is checked."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

from trainer_kit.config.schema.section import Section, to_plain_data
from trainer_kit.config.sources.layer import join_keys


def get_fields(config_class: type[Section]) -> dict[str, FieldInfo]:
    """Returns the fields of a config class by name, registered branches included; none for the bare Config."""
    return config_class.get_field_infos()


def find_section_class(annotation: Any) -> type[Section] | None:
    """Returns the config class of a field that is a section, also if None or several by name are allowed; else None."""
    arms = [
        arm
        for arm in _get_union_members(annotation)
        if arm is not type(None) and get_origin(arm) is not dict
    ]
    if len(arms) == 1 and isinstance(arms[0], type) and issubclass(arms[0], Section):
        return arms[0]
    return None


def find_list_item_class(annotation: Any) -> type[Section] | None:
    """Returns the config class of a field that is a list of sections, also if None or text is allowed; else None."""
    arms = [arm for arm in _get_union_members(annotation) if arm not in (type(None), str)]
    if len(arms) != 1 or get_origin(arms[0]) not in (tuple, list):
        return None
    args = [arg for arg in get_args(arms[0]) if arg is not Ellipsis]
    return find_section_class(args[0]) if len(args) == 1 else None


def find_dict_value_class(annotation: Any) -> type[Section] | None:
    """Returns the config class of a field that is, or may be, a dict of sections by name; else None."""
    dicts = [arm for arm in _get_union_members(annotation) if get_origin(arm) is dict]
    return find_section_class(get_args(dicts[0])[1]) if len(dicts) == 1 else None


def create_field_adapter(config_class: type[Section], name: str) -> TypeAdapter[Any]:
    """Returns the pydantic adapter that checks a value of one field, with the settings of config classes."""
    field = get_fields(config_class)[name]
    annotation: Any = (
        Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    )
    arms = _get_union_members(annotation)
    if len(arms) == 1 and isinstance(arms[0], type) and issubclass(arms[0], Section):
        return TypeAdapter(annotation)  # a config class has its own settings and takes no others
    return TypeAdapter(
        annotation, config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
    )


def suggest_fields(config_class: type[Section], path: str = "", value: Any = None) -> str:
    """Returns the advice for a value that is no section: the names of the section's first fields.

    For a "oneof" at `path` it also shows how to choose a branch: the one that `value` names, or the
    first.
    """
    fields = list(get_fields(config_class))
    if not fields:
        return ""
    branches = (
        [name for name in fields if name != "type"] if path and config_class.is_choice else []
    )
    chosen = [value] if value in branches else branches[:1]
    example = f", as in {path}.type={chosen[0]}" if chosen else ""
    return f"give its fields ({', '.join(fields[:4])}, ...){example}"


def flatten_values(config: Section) -> dict[str, Any]:
    """Returns every value of `config` by dotted path, as plain data; of a "oneof" only the chosen branch."""
    return {path: to_plain_data(value) for path, value in walk_values(config)}


def walk_values(config: Section, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value of `config` as it is, with its dotted path; of a "oneof" only the chosen branch."""
    for name in config.get_active_fields():
        value = getattr(config, name)
        if isinstance(value, Section):
            yield from walk_values(value, join_keys(path, name))
        elif is_section_mapping(value):
            for key, section in value.items():
                yield from walk_values(section, join_keys(path, name, key))
        else:
            yield join_keys(path, name), value


def list_sections(config: Section) -> list[tuple[str, type[Section], bool]]:
    """Returns (dotted path, class, is present) of `config` and of all its sections, outer ones first.

    Sections that are None, and the branches of a "oneof" that are not chosen, are listed as not
    present.
    """
    return list(_walk_sections(type(config), config, "", ()))


def _get_union_members(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _get_union_members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [arm for arg in get_args(annotation) for arm in _get_union_members(arg)]
    return [annotation]


def _walk_sections(
    config_class: type[Section],
    config: Section | None,
    path: str,
    enclosing_classes: tuple[type, ...],
) -> Iterator[tuple[str, type[Section], bool]]:
    yield path, config_class, config is not None
    for name, field in get_fields(config_class).items():
        value: Any = getattr(config, name, None)
        if is_section_mapping(value):
            for key, item in value.items():
                yield from _walk_sections(
                    type(item), item, join_keys(path, name, key), (*enclosing_classes, config_class)
                )
            continue
        inner = type(value) if isinstance(value, Section) else find_section_class(field.annotation)
        if inner is None or (value is None and inner in (*enclosing_classes, config_class)):
            continue  # a class that may hold itself ends where there is nothing
        yield from _walk_sections(
            inner, value, join_keys(path, name), (*enclosing_classes, config_class)
        )


def is_section_mapping(value: Any) -> bool:
    """Whether `value` is a mapping of sections by name."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(item, Section) for item in value.values())
    )
