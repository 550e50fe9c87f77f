"""Reads what each config field means from the docstrings of config classes.

The sentences under `Attributes:` are written nowhere else. `trainer-kit show` and the reference
pages take them from here.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from trainer_kit.config.allowed_values import describe_allowed_values, format_value
from trainer_kit.config.fields import (
    find_dict_value_class,
    find_list_item_class,
    find_section_class,
    get_fields,
    list_sections,
)
from trainer_kit.config.schema.section import Section
from trainer_kit.config.sources.layer import join_keys

_ENTRY = re.compile(r"  (\w+): ")
_NEXT_SENTENCE = re.compile(r"(?<=\.) (?=[A-Z`])")


@dataclass(frozen=True)
class FieldDoc:
    """The documentation of a field.

    Attributes:
      text: The whole entry of the docstring. It is empty if the class has none for the field.
      allowed_values: What the field takes, in words.
      default: The default as a config file would show it. It is empty for a section and for a field
        without a default.
      section: The config class of the field if it is a section or contains sections, or else None.
    """

    text: str
    allowed_values: str
    default: str
    section: type[Section] | None

    @property
    def first_sentence(self) -> str:
        """The first sentence of the text, which makes sense alone."""
        return get_first_sentence(self.text)


def get_first_sentence(text: str) -> str:
    """Returns the first sentence of a paragraph."""
    return _NEXT_SENTENCE.split(text, maxsplit=1)[0]


def read_field_docs(config_class: type[Section]) -> dict[str, FieldDoc]:
    """Returns the docs of a class's fields by name, inherited fields too."""
    # The entry of a subclass wins over that of its base class.
    texts: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):
        docstring = inspect.cleandoc(vars(cls).get("__doc__") or "")
        _, _, attributes = docstring.partition("\nAttributes:\n")
        name = ""
        for line in attributes.splitlines():
            if entry := _ENTRY.match(line):
                name = entry[1]
                texts[name] = line[entry.end() :]
            elif line.startswith("    ") and name:
                # An entry continues in lines that are indented further.
                texts[name] += f" {line.strip()}"

    docs = {}
    for name, field in get_fields(config_class).items():
        annotation = field.annotation
        section = (
            find_section_class(annotation)
            or find_list_item_class(annotation)
            or find_dict_value_class(annotation)
        )

        default = ""
        if not field.is_required():
            value = field.get_default(call_default_factory=True)
            # A config file shows an empty tuple as an empty list.
            if value == ():
                default = format_value([])
            elif not isinstance(value, Section):
                default = format_value(value)

        docs[name] = FieldDoc(
            text=texts.get(name, ""),
            allowed_values=describe_allowed_values(annotation, tuple(field.metadata)),
            default=default,
            section=section,
        )
    return docs


def read_docs_by_path(config: Section) -> dict[str, FieldDoc]:
    """Returns the docs of every field of `config` by dotted path.

    Those of branches that are not chosen are included.
    """
    return {
        join_keys(path, name): doc
        for path, config_class, _ in list_sections(config)
        for name, doc in read_field_docs(config_class).items()
    }


def read_class_summary(config_class: type[Section]) -> str:
    """Returns what a class's docstring says before its attributes, as one paragraph."""
    docstring = inspect.cleandoc(config_class.__doc__ or "")
    summary = docstring.split("\n\nAttributes:\n")[0]
    return " ".join(summary.split())
