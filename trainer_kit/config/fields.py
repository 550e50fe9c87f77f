"""The shape of config classes: which fields are sections or leaves, and how each is checked."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

from trainer_kit.config.schema.section import Section, to_plain_data
from trainer_kit.config.sources.layer import join_keys


def get_fields(config_class: type[Section]) -> dict[str, FieldInfo]:
    """Returns the fields of a config class by name, registered branches included.

    The bare Config has none.
    """
    return config_class.get_field_infos()


def find_section_class(annotation: object) -> type[Section] | None:
    """Returns the config class of a field that is a section, and None for any other field.

    The field may also allow None, or several sections by name.
    """
    members = []
    for member in _get_union_members(annotation):
        if member is not type(None) and get_origin(member) is not dict:
            members.append(member)
    return _get_only_section(members)


def find_list_item_class(annotation: object) -> type[Section] | None:
    """Returns the config class of a field that is a list of sections, and None for any other field.

    The field may also allow None or text.
    """
    members = _get_union_members(annotation)
    members = [member for member in members if member not in (type(None), str)]
    if len(members) != 1:
        return None
    list_type = members[0]
    if get_origin(list_type) not in (tuple, list):
        return None

    # tuple[X, ...] has an Ellipsis as its second argument.
    item_types = [arg for arg in get_args(list_type) if arg is not Ellipsis]
    if len(item_types) != 1:
        return None
    return find_section_class(item_types[0])


def find_dict_value_class(annotation: object) -> type[Section] | None:
    """Returns the config class of a field that may be a dict of sections by name, or None."""
    members = _get_union_members(annotation)
    dict_types = [member for member in members if get_origin(member) is dict]
    if len(dict_types) != 1:
        return None
    _, value_type = get_args(dict_types[0])
    return find_section_class(value_type)


def list_plain_members(annotation: object) -> list[Any]:
    """Returns the types without sections in them that a field allows beside a section."""
    members = []
    for member in _get_union_members(annotation):
        item_class = find_dict_value_class(member) or find_list_item_class(member)
        if not item_class and not find_section_class(member):
            members.append(member)
    return members


def create_field_adapter(config_class: type[Section], name: str) -> TypeAdapter[Any]:
    """Returns the pydantic adapter that checks a value of one field as its config class does."""
    field = get_fields(config_class)[name]
    annotation: Any = field.annotation
    if field.metadata:
        annotation = Annotated[(field.annotation, *field.metadata)]

    # A config class has its own settings, and pydantic accepts no others for it.
    members = _get_union_members(annotation)
    if _get_only_section(members) is not None:
        return TypeAdapter(annotation)

    settings = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
    return TypeAdapter(annotation, config=settings)


def suggest_fields(config_class: type[Section], path: str = "", value: object = None) -> str:
    """Returns the advice for a value that is no section: the names of the section's first fields.

    For a "oneof" at `path`, the advice also shows how to choose a branch. The example is the branch
    that `value` names, or else the first one.
    """
    names = list(get_fields(config_class))
    if not names:
        return ""

    branches: list[str] = []
    if path and config_class.is_choice:
        branches = [name for name in names if name != "type"]
    example = ""
    if branches:
        branch = value if value in branches else branches[0]
        example = f", as in {path}.type={branch}"
    first_names = ", ".join(names[:4])
    return f"give its fields ({first_names}, ...){example}"


def flatten_values(config: Section) -> dict[str, Any]:
    """Returns every value of `config` by dotted path, as plain data.

    Of a "oneof" only the chosen branch counts.
    """
    plain_values = {}
    for path, value in walk_values(config):
        plain_values[path] = to_plain_data(value)
    return plain_values


def walk_values(config: Section, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value of `config` as it is, with its dotted path.

    Of a "oneof" only the chosen branch counts.
    """
    for name in config.get_active_fields():
        value = getattr(config, name)
        value_path = join_keys(path, name)
        if isinstance(value, Section):
            yield from walk_values(value, value_path)
        elif is_section_mapping(value):
            for key, section in value.items():
                section_path = join_keys(value_path, key)
                yield from walk_values(section, section_path)
        else:
            yield value_path, value


def list_sections(config: Section) -> list[tuple[str, type[Section], bool]]:
    """Returns (dotted path, class, is present) of `config` and all its sections, outer ones first.

    Sections that are None, and the branches of a "oneof" that are not chosen, are listed as not
    present.
    """
    sections = _walk_sections(type(config), config, "", ())
    return list(sections)


def _get_union_members(annotation: object) -> list[Any]:
    """Returns the types that an annotation allows, without what is annotated about them."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is Annotated:
        return _get_union_members(args[0])
    if origin in (Union, types.UnionType):
        members = []
        for arg in args:
            members += _get_union_members(arg)
        return members
    return [annotation]


def _get_only_section(members: Sequence[object]) -> type[Section] | None:
    """Returns the config class if it is the only one of several types, else None."""
    if len(members) != 1:
        return None
    member = members[0]
    if isinstance(member, type) and issubclass(member, Section):
        return member
    return None


def _walk_sections(
    config_class: type[Section],
    config: Section | None,
    path: str,
    enclosing_classes: tuple[type, ...],
) -> Iterator[tuple[str, type[Section], bool]]:
    yield path, config_class, config is not None
    classes = (*enclosing_classes, config_class)
    for name, field in get_fields(config_class).items():
        value: Any = getattr(config, name, None)
        value_path = join_keys(path, name)
        if is_section_mapping(value):
            for key, section in value.items():
                section_path = join_keys(value_path, key)
                yield from _walk_sections(type(section), section, section_path, classes)
            continue

        section_class = find_section_class(field.annotation)
        if isinstance(value, Section):
            section_class = type(value)

        # A class that may contain itself is followed only as far as sections are present.
        if section_class is None or (value is None and section_class in classes):
            continue
        yield from _walk_sections(section_class, value, value_path, classes)


def is_section_mapping(value: object) -> TypeGuard[Mapping[str, Section]]:
    """Whether `value` is a mapping of sections by name."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(isinstance(item, Section) for item in value.values())
