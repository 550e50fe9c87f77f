"""Creates the JSON schema of an experiment's config files, for editors and other programs.

Pydantic describes the values. The sections are described here, since pydantic knows neither the
classes of an experiment's own sections, nor registered branches, nor short forms. The schema
describes changes of a config: no section needs all of its fields.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema

from trainer_kit.config.field_docs import read_class_summary, read_field_docs
from trainer_kit.config.fields import (
    create_field_adapter,
    find_dict_value_class,
    find_list_item_class,
    find_section_class,
    get_fields,
    get_plain_members,
    is_section_mapping,
)
from trainer_kit.config.schema.configclass import OneOfConfig
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.section import Section, to_plain_data

Schema = dict[str, Any]


def create_json_schema(config: ExperimentConfig, title: str) -> Schema:
    """Returns the JSON schema of files with values for `config`.

    Args:
      config: The config of the experiment. It gives the classes of the sections, and the defaults.
      title: The name of the experiment.
    """
    builder = _SchemaBuilder()
    root = builder.describe_section(type(config), config)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        **root,
        "$defs": builder.definitions,
    }


class _SchemaBuilder:
    """Describes sections.

    A value of several types has keywords for each of them, instead of alternatives: a mistake is
    then reported at its own path, and not at the path of the alternatives.

    Attributes:
      definitions: The descriptions of classes of which the config has no section, by name.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}

    def describe_section(self, section_class: type[Section], section: Section | None) -> Schema:
        """Returns the schema of a section without its type."""
        docs = read_field_docs(section_class)
        properties: dict[str, Schema] = {}
        for name in get_fields(section_class):
            value = getattr(section, name, None)
            schema = self._describe_field(section_class, name, value)
            properties[name] = {"description": docs[name].text, **schema}
        for alias, name in section_class.aliases:
            choice_class: Any = type(getattr(section_class, name))
            properties[alias] = _describe_value(choice_class, "type")

        summary = read_class_summary(section_class)
        schema = {
            "description": summary,
            "properties": properties,
            "additionalProperties": False,
        }
        if issubclass(section_class, OneOfConfig):
            short_form = _describe_short_form(section_class)
            del short_form["type"]
            schema.update(short_form)
        return schema

    def _describe_field(self, section_class: type[Section], name: str, value: object) -> Schema:
        """Returns the schema of a field, whose present value gives the default or the class."""
        annotation = get_fields(section_class)[name].annotation
        item_class = find_list_item_class(annotation)
        named_class = find_dict_value_class(annotation)
        field_class = find_section_class(annotation)
        if isinstance(value, Section):
            field_class = type(value)

        if not (item_class or named_class or field_class):
            schema = _describe_value(section_class, name)
            if value is not None:
                schema["default"] = to_plain_data(value)
            return schema

        types = ["object"]
        schema = {}
        plain_members = get_plain_members(annotation)
        if plain_members:
            plain_schema = TypeAdapter(plain_members).json_schema()
            alternatives = plain_schema.get("anyOf", [plain_schema])
            types += [alternative["type"] for alternative in alternatives]
        if field_class is not None:
            schema |= self._refer_to_section(field_class, value)
            if issubclass(field_class, OneOfConfig):
                types += _describe_short_form(field_class)["type"]
        if named_class is not None:
            sections = value if is_section_mapping(value) else {}
            named_schemas = {}
            for key, section in sections.items():
                named_schema = self._refer_to_section(type(section), section)
                named_schemas[key] = {"type": ["object", "null"], **named_schema}
            new_schema = self._refer_to_section(named_class, None)
            schema["additionalProperties"] = {"type": ["object", "null"], **new_schema}
            schema["properties"] = {**schema.get("properties", {}), **named_schemas}
        if item_class is not None:
            types.remove("object")
            types.append("array")
            fields = get_fields(item_class)
            required = [key for key, info in fields.items() if info.is_required()]
            item_types = ["object"]
            if issubclass(item_class, OneOfConfig):
                item_types += _describe_short_form(item_class)["type"]
            item_schema = self._refer_to_section(item_class, None)
            schema["items"] = {"type": item_types, "required": required, **item_schema}
        return {"type": sorted(set(types)), **schema}

    def _refer_to_section(self, section_class: type[Section], section: object) -> Schema:
        """Returns the schema of a present section, or the reference to that of a class."""
        if isinstance(section, Section):
            return self.describe_section(section_class, section)
        name = f"{section_class.__module__}.{section_class.__qualname__}"
        if name not in self.definitions:
            # A class may contain itself.
            self.definitions[name] = {}
            self.definitions[name] = self.describe_section(section_class, None)
        return {"$ref": f"#/$defs/{name}"}


def _describe_value(section_class: type[Section], name: str) -> Schema:
    """Returns the schema of a field that is no section. It allows anything if pydantic has none."""
    try:
        return create_field_adapter(section_class, name).json_schema()
    except PydanticInvalidForJsonSchema:
        return {}


def _describe_short_form(choice_class: type[OneOfConfig]) -> Schema:
    """Returns the schema of the short forms of a choice: a name, null or the main value."""
    branches = choice_class.branches()
    names = "|".join(branches)
    schema: Schema = {"examples": list(branches)}
    types = ["string", "null"]
    patterns = [f"^({names})$"]
    main_class = branches.get(choice_class.main_branch)
    main_fields = get_fields(main_class) if main_class is not None else {}
    for name in choice_class.main_fields:
        if main_class is None or name not in main_fields:
            continue
        value_schema = _describe_value(main_class, name)
        for alternative in value_schema.get("anyOf", [value_schema]):
            types.append(alternative["type"])
            if "pattern" in alternative:
                patterns.append(alternative["pattern"])
            if "minimum" in alternative:
                schema["minimum"] = alternative["minimum"]
    schema["type"] = sorted(set(types))
    schema["pattern"] = "|".join(patterns)
    return schema
