"""Creates the JSON schema of an experiment's config files, for editors and other programs.

Pydantic describes the values. The sections are described here, since pydantic knows neither the
classes of an experiment's own sections, nor registered branches, nor short forms. The schema
describes changes of a config, so no field is required.
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
    is_section_mapping,
    list_plain_members,
)
from trainer_kit.config.schema.configclass import OneOfConfig
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.section import Section

Schema = dict[str, Any]


def create_json_schema(config: ExperimentConfig, title: str) -> Schema:
    """Returns the JSON schema of files with values for `config`.

    Args:
      config: The config of the experiment. It gives the classes of the sections.
      title: The name of the experiment.
    """
    builder = _SchemaBuilder()
    root = builder.describe_section(type(config), config)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **root,
        "$defs": builder.definitions,
    }


class _SchemaBuilder:
    """Describes sections.

    Attributes:
      definitions: The schemas of classes that others refer to, by class name: those whose sections
        are not in the config, and those of values that are no sections.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}

    def describe_section(self, section_class: type[Section], section: Section | None) -> Schema:
        """Returns the schema of a section as a mapping of fields."""
        docs = read_field_docs(section_class)
        properties: dict[str, Schema] = {}
        for name in get_fields(section_class):
            value = getattr(section, name, None)
            field_schema = self._describe_field(section_class, name, value)
            properties[name] = {"description": docs[name].text, **field_schema}
        for alias, name in section_class.aliases:
            choice = getattr(section_class, name)
            properties[alias] = self._describe_type(create_field_adapter(type(choice), "type"))
        schema = {
            "description": read_class_summary(section_class),
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
        }
        if not issubclass(section_class, OneOfConfig):
            return schema

        # The short forms of a choice.
        branches = section_class.branches()
        alternatives: list[Schema] = [schema, {"enum": [*branches, None]}]
        main_field = section_class.find_main_field(section_class.main_branch)
        if main_field:
            main_adapter = create_field_adapter(branches[section_class.main_branch], main_field)
            alternatives.append(self._describe_type(main_adapter))
        return {"anyOf": alternatives}

    def _describe_field(self, section_class: type[Section], name: str, value: object) -> Schema:
        """Returns the schema of a field. A section has the class of its present value."""
        annotation = get_fields(section_class)[name].annotation
        field_class = find_section_class(annotation)
        named_class = find_dict_value_class(annotation)
        item_class = find_list_item_class(annotation)
        section = None
        if isinstance(value, Section):
            section = value
            field_class = type(value)
        if not (field_class or named_class or item_class):
            return self._describe_type(create_field_adapter(section_class, name))

        members = list_plain_members(annotation)
        alternatives = [self._describe_type(TypeAdapter(member)) for member in members]

        schema: Schema = {"type": "object", "properties": {}}
        if field_class and (section or named_class):
            schema = self.describe_section(field_class, section)
        elif field_class:
            schema = self._refer_to_class(field_class)
        if named_class:
            # One schema describes a single section and several, so a mistake is at its own path.
            new_schema = self._refer_to_class(named_class)
            schema["additionalProperties"] = {"anyOf": [new_schema, {"type": "null"}]}
            sections = value if is_section_mapping(value) else {}
            for key, named_section in sections.items():
                named_schema = self.describe_section(type(named_section), named_section)
                schema["properties"][key] = named_schema
        if item_class:
            schema = {"type": "array", "items": self._refer_to_class(item_class)}
        # Validators name the place of a mistake only outside of alternatives.
        return {"anyOf": [*alternatives, schema]} if alternatives else schema

    def _refer_to_class(self, section_class: type[Section]) -> Schema:
        """Returns the reference to the definition of a class."""
        name = f"{section_class.__module__}.{section_class.__qualname__}"
        if name not in self.definitions:
            # A class may contain itself.
            self.definitions[name] = {}
            self.definitions[name] = self.describe_section(section_class, None)
        return {"$ref": f"#/$defs/{name}"}

    def _describe_type(self, adapter: TypeAdapter[Any]) -> Schema:
        """Returns pydantic's schema of a type. It allows anything if pydantic has none.

        Its definitions are moved to those of the whole schema, where its references look for them.
        """
        # Classes of different modules may have the same name.
        prefix = f"{len(self.definitions)}."
        try:
            schema = adapter.json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
        except PydanticInvalidForJsonSchema:
            return {}
        for name, definition in schema.pop("$defs", {}).items():
            self.definitions[prefix + name] = definition
        return schema
