"""Merges layers of values into a config, and collects every mistake of every layer in one report.

A later layer wins. Sections merge field by field. A short form, such as a name in place of a
section, is first expanded to a mapping. Named sections, such as several sets in
`task.validation_data`, merge name by name, and None removes one. Everything else is replaced as a
whole: scalars, None, lists, and mappings that are values (`DataConfig.input_path`).

A value is checked against its own field as it is merged, so a mistake in one layer hides none in
another. The rules across fields are checked once, on the result. The module has no side effects.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from trainer_kit.config.allowed_values import (
    NO_SUCH_KEY,
    describe_allowed_values,
    format_value,
    suggest_correction,
    suggest_key,
)
from trainer_kit.config.fields import (
    create_field_adapter,
    find_dict_value_class,
    find_list_item_class,
    find_section_class,
    flatten_values,
    get_fields,
    suggest_fields,
)
from trainer_kit.config.schema.section import (
    FieldError,
    Section,
    get_path_in_experiment,
    has_several_sections,
    is_configclass,
)
from trainer_kit.config.sources.layer import ConfigLayer, is_inside, join_keys, list_paths_inside
from trainer_kit.errors import ConfigError, Mistake, suggest_names

DEFAULT_ORIGIN = "default"
ConfigT = TypeVar("ConfigT", bound=Section)


@dataclass(frozen=True)
class ResolvedConfig(Generic[ConfigT]):
    """A checked config, with the origin of each of its values.

    Attributes:
      config: The config.
      origins: Where each value comes from, by its dotted path. "default" stands for the factory.
    """

    config: ConfigT
    origins: dict[str, str]


def apply_layers(config: ConfigT, layers: Sequence[ConfigLayer]) -> ResolvedConfig[ConfigT]:
    """Returns `config` with the values of `layers` merged into it.

    The last layer wins. A section is checked against the class of the section that `config` has
    there. The section of a task is thus checked against the task's own config class.

    Raises:
      ConfigError: For unknown keys, wrong types, values out of bounds and broken rules. It contains
        the mistakes of all layers.
    """
    merged, origins, mistakes = merge_layers(config, layers, check_all_sections=True)
    if mistakes:
        raise ConfigError(mistakes)

    all_origins = {}
    for path in flatten_values(merged):
        all_origins[path] = origins.get(path, DEFAULT_ORIGIN)
    return ResolvedConfig(merged, all_origins)


def merge_layers(
    config: ConfigT, layers: Sequence[ConfigLayer], check_all_sections: bool = False
) -> tuple[ConfigT, dict[str, str], list[Mistake]]:
    """Merges `layers` into `config`, and reports mistakes instead of raising them.

    Args:
      config: The config, or a section of it.
      layers: The values. The last layer wins.
      check_all_sections: Whether sections that no layer touches are checked too, which gives their
        values the fields' types.

    Returns:
      The merged config, the origins of the values that the layers give, and all mistakes. The
      config is not usable if there are mistakes.
    """
    merger = _Merger(config, config.path_in_experiment or "", check_all_sections)
    root = _Draft.from_section(config)

    for layer in layers:
        merger.layer = layer
        merger.merge(root, layer.values, "")

    return merger.build(root, ""), merger.origins, merger.mistakes


def create_section(
    config_class: type[Section], values: Mapping[str, object]
) -> tuple[Section | None, list[Mistake]]:
    """Creates a section from values with short forms, which pydantic itself refuses.

    Returns:
      The section, and the mistakes in the values, with their paths inside the section. The section
      is not usable if there are mistakes, and None if there are neither mistakes nor short forms.
    """
    merger = _Merger(config_class, get_path_in_experiment(config_class))
    draft = _Draft.from_defaults(config_class)
    defaults = {name: value for name, value in draft.values.items() if name not in values}

    # A class that is made from the values of another program may have wrong defaults.
    merger.merge(draft, defaults, "")
    merger.merge(draft, values, "")

    # Building the section adds the broken rules to the mistakes. If there was nothing to expand,
    # pydantic would refuse the same values again.
    section = None
    if merger.mistakes or merger.has_short_forms:
        section = merger.build(draft, "")
    return section, merger.mistakes


@dataclass
class _Draft:
    """A section that can still change.

    Attributes:
      config_class: The class of the section.
      values: The values of the fields: leaves, sections, drafts, and lists or dicts of sections and
        drafts.
      touched_branches: The branches of a "oneof" into which a layer has merged values.
      has_explicit_type: Whether a layer has set the field `type`.
    """

    config_class: type[Section]
    values: dict[str, Any]
    touched_branches: list[str] = field(default_factory=list)
    has_explicit_type: bool = False

    @classmethod
    def from_section(cls, config: Section) -> _Draft:
        """Returns a draft with the values of `config`."""
        config_class = type(config)
        values = {name: getattr(config, name, None) for name in get_fields(config_class)}
        return cls(config_class, values)

    @classmethod
    def from_defaults(cls, config_class: type[Section]) -> _Draft:
        """Returns a draft with the defaults of `config_class`, without the required fields."""
        defaults = {}
        for name, info in get_fields(config_class).items():
            if not info.is_required():
                defaults[name] = info.get_default(call_default_factory=True)
        return cls(config_class, defaults)

    @classmethod
    def from_value(cls, value: object, config_class: type[Section]) -> _Draft:
        """Returns a draft of `value`, a section or a draft, that changes independently of it.

        For any other value, the draft has the defaults of `config_class`.
        """
        if isinstance(value, Section):
            return cls.from_section(value)
        if isinstance(value, _Draft):
            return copy.deepcopy(value)
        return cls.from_defaults(config_class)


class _Merger:
    """Merges the values of layers into a draft, one layer after the other, and builds the config.

    Args:
      config: The config, or its class, for near names.
      path_prefix: The path of the config in an experiment, for near names.
      check_all_sections: See merge_layers.

    Attributes:
      layer: The layer that is being merged.
      mistakes: The mistakes so far.
      origins: The origins of the accepted values.
      has_short_forms: Whether a short form was expanded.
    """

    def __init__(
        self, config: Section | type[Section], path_prefix: str, check_all_sections: bool = False
    ) -> None:
        self._config = config
        self._path_prefix = path_prefix
        self._check_all_sections = check_all_sections
        self.layer = ConfigLayer()
        self.mistakes: list[Mistake] = []
        self.origins: dict[str, str] = {}
        self.has_short_forms = False

    def merge(self, section: _Draft, values: Mapping[Any, Any], path: str) -> None:
        """Merges values into a section, each checked against its field."""
        # A choice by an alias comes before the settings of what it chooses.
        aliases = dict(section.config_class.aliases)
        for alias in aliases:
            if alias in values:
                self._merge_alias(section, path, alias, values[alias])

        for key, value in values.items():
            if key in aliases:
                continue
            name = str(key)
            value_path = join_keys(path, key)
            fields = get_fields(section.config_class)
            info = fields.get(name)
            if info is None:
                known_paths = self._list_known_paths()
                full_path = join_keys(self._path_prefix, value_path)
                advice = suggest_key(full_path, name, [*fields, *aliases], known_paths)
                self._add_mistake(value_path, NO_SUCH_KEY, advice)
                continue

            # The class of the present value comes first: a task's section has the task's own class.
            current = section.values.get(name)
            declared_class = find_section_class(info.annotation)
            section_class = _get_value_class(current) or declared_class
            named_class = find_dict_value_class(info.annotation)
            list_class = find_list_item_class(info.annotation)
            has_names = isinstance(current, dict) and bool(current)
            keeps_names = has_names and not self.layer.replaces_named_sections

            is_mapping = isinstance(value, Mapping)
            if isinstance(value, Section):
                self._set_leaf(section, name, value, value_path)
            elif (
                named_class is not None
                and is_mapping
                # In a field that takes one section or several, the keys of the mapping decide,
                # unless there are several already.
                and (
                    section_class is None
                    or keeps_names
                    or has_several_sections(section_class, value)
                )
            ):
                item_class = section_class or named_class
                self._merge_section_dict(section, name, item_class, value, value_path)
            elif (
                section_class is not None
                # Null removes an optional section. A required choice takes it as a short form.
                and (value is not None or info.annotation is section_class)
                # Without a declared class, a value that is no mapping is of another type.
                and (declared_class is not None or is_mapping)
            ):
                draft = self._merge_section(current, section_class, value, value_path)
                if draft is not None:
                    section.values[name] = draft
                    if section.config_class.is_choice:
                        section.touched_branches.append(name)
            elif list_class is not None and isinstance(value, (list, tuple)):
                self._merge_section_list(section, name, list_class, value, value_path)
            else:
                self._set_leaf(section, name, value, value_path)

    def _merge_alias(self, section: _Draft, path: str, alias: str, value: object) -> None:
        """Merges the value of an alias into the choice, with the origin of the alias."""
        name = dict(section.config_class.aliases)[alias]
        alias_path = join_keys(path, alias)
        field_path = join_keys(path, name)
        # Anything but a name is refused as a wrong name.
        if not isinstance(value, str):
            value = {"type": value}

        layer = self.layer
        origin = layer.find_origin(alias_path)
        self.layer = ConfigLayer(origins={field_path: origin})
        self.merge(section, {name: value}, path)
        self.layer = layer
        self.has_short_forms = True

    def _merge_section(
        self, current: object, config_class: type[Section], value: object, path: str
    ) -> _Draft | None:
        """Returns the draft of a section with the values of a mapping or of a short form.

        Returns None if the value is neither.
        """
        draft = current
        if not isinstance(draft, _Draft):
            draft = _Draft.from_value(current, config_class)
        if not isinstance(value, Mapping):
            value = config_class.expand_short_form(value, draft.values)
            self.has_short_forms = True
        if not isinstance(value, Mapping):
            problem = f"{format_value(value)} is not a section"
            advice = suggest_fields(config_class, path, value)
            self._add_mistake(path, problem, advice)
            return None

        if not is_configclass(config_class):
            advice = "remove it, or declare its type in the task's config class"
            self._add_mistake(path, "this experiment has no such section", advice)
            return None

        self.merge(draft, value, path)
        return draft

    def _merge_section_dict(
        self,
        parent: _Draft,
        name: str,
        config_class: type[Section],
        value: Mapping[Any, Any],
        path: str,
    ) -> None:
        """Merges named sections name by name.

        A new section starts as a copy of the single section that was there before. If there was
        none, it starts as the default of the field.
        """
        current = parent.values.get(name)
        previous_sections = current if isinstance(current, dict) else {}
        template = current
        if not _get_value_class(current):
            parent_defaults = _Draft.from_defaults(parent.config_class)
            template = parent_defaults.values.get(name)

        sections = {} if self.layer.replaces_named_sections else dict(previous_sections)
        parent.values[name] = sections
        fields = get_fields(config_class)
        for key, item in value.items():
            section_path = join_keys(path, key)
            if item is None and key in sections:
                del sections[key]
                self._remove_origins(section_path)
            elif item is None:
                section_names = [str(section_name) for section_name in sections]
                advice = suggest_names(str(key), section_names)
                self._add_mistake(section_path, "there is no such section to remove", advice)
            elif isinstance(item, Section):
                sections[key] = item
                self._set_origin(section_path)
            elif key in fields:
                first_name = next(iter(sections), "NAME")
                example = join_keys(path, first_name, key)
                advice = f"name one: {example}"
                self._add_mistake(section_path, "there are several sections here", advice)
            else:
                previous = previous_sections.get(key, template)
                draft = _Draft.from_value(previous, config_class)
                self._merge_section(draft, config_class, item, section_path)
                missing_fields = []
                for field_name, info in fields.items():
                    if info.is_required() and field_name not in draft.values:
                        missing_fields.append(field_name)

                # An incomplete section beside others is probably a misspelled name of one of them.
                is_new = key not in previous_sections
                if missing_fields and previous_sections and is_new:
                    names = sorted(map(str, previous_sections))
                    all_names = ", ".join(names)
                    missing = ", ".join(missing_fields)
                    problem = (
                        f"there is none of this name (all: {all_names}), and a new one needs"
                        f" {missing}"
                    )
                    advice = suggest_names(str(key), names)
                    self._add_mistake(section_path, problem, advice)
                else:
                    sections[key] = draft

    def _merge_section_list(
        self,
        parent: _Draft,
        name: str,
        config_class: type[Section],
        value: Sequence[object],
        path: str,
    ) -> None:
        """Replaces a list of sections as a whole, unless its class merges it item by item."""
        present_items: Any = parent.values.get(name)
        merges = (
            parent.config_class.merges_values
            and isinstance(present_items, (list, tuple))
            and len(present_items) == len(value)
        )

        items: list[Any] = []
        for index, item in enumerate(value):
            if not isinstance(item, Section):
                current = present_items[index] if merges else None
                item_path = join_keys(path, index)
                item = self._merge_section(current, config_class, item, item_path)
            items.append(item)

        # None stands for an item that was refused.
        if None not in items:
            parent.values[name] = items
            self._set_origin(path)

    def _set_leaf(self, section: _Draft, name: str, value: object, path: str) -> None:
        if name == "type":
            section.has_explicit_type = True
        info = get_fields(section.config_class)[name]
        current = section.values.get(name)
        if section.config_class.merges_values:
            if isinstance(value, Mapping) and isinstance(current, Mapping):
                value = {**current, **value}

        adapter = create_field_adapter(section.config_class, name)
        try:
            section.values[name] = adapter.validate_python(value)
        except ValidationError as error:
            # A check of the user's own raises an error with a message of its own.
            for details in error.errors():
                context = details.get("ctx", {})
                cause = context.get("error")
                if cause:
                    self._add_mistake(path, str(cause))
                    return

            allowed_values = describe_allowed_values(info.annotation, tuple(info.metadata))
            advice = suggest_correction(info.annotation, value, info.metadata)
            self._add_mistake(path, f"{format_value(value)} is not {allowed_values}", advice)
            return

        self._set_origin(path)
        # The chosen branch always has a section, whose fields a source may name.
        fields = get_fields(section.config_class)
        if section.config_class.is_choice and name == "type" and value in fields:
            choice_path, _, _ = path.rpartition(".")
            self.merge(section, {value: {}}, choice_path)

    def _set_origin(self, path: str) -> None:
        self._remove_origins(path)
        self.origins[path] = self.layer.find_origin(path) or "given"

    def _remove_origins(self, path: str) -> None:
        for inner_path in list_paths_inside(self.origins, path):
            del self.origins[inner_path]

    def _add_mistake(self, path: str, problem: str, advice: str = "") -> None:
        origin = self.layer.find_origin(path)
        self.mistakes.append(Mistake(path, problem, advice, origin))

    def _list_known_paths(self) -> list[str]:
        """Returns the paths of all values in an experiment, for near names."""
        try:
            config = self._config if isinstance(self._config, Section) else self._config()
        except FieldError:
            # The class has fields without a default.
            return []
        return [join_keys(self._path_prefix, path) for path in flatten_values(config)]

    def build(self, value: object, path: str) -> Any:
        """Returns `value` with sections in place of the drafts in it.

        Broken rules are added to the mistakes. A section with a mistake becomes a stand-in with the
        same values, so that the rules of outer sections can be checked.
        """
        if isinstance(value, (list, tuple)) and any(_get_value_class(item) for item in value):
            items = []
            for index, item in enumerate(value):
                item_path = join_keys(path, index)
                items.append(self.build(item, item_path))
            return items
        if isinstance(value, dict) and any(_get_value_class(item) for item in value.values()):
            entries = {}
            for key, item in value.items():
                item_path = join_keys(path, key)
                entries[key] = self.build(item, item_path)
            return entries

        draft = value
        if isinstance(value, Section) and self._check_all_sections:
            draft = _Draft.from_section(value)
        if not isinstance(draft, _Draft):
            return value

        values = dict(draft.values)
        if draft.config_class.is_choice:
            chosen = values.get("type")
            type_path = join_keys(path, "type")
            branches = [] if draft.has_explicit_type else draft.touched_branches
            for name in dict.fromkeys(branches):
                if name != chosen:
                    branch_path = join_keys(path, name)
                    problem = f"has no effect while {type_path} is {format_value(chosen)}"
                    advice = f"set {type_path}={name} too, or remove it"
                    self._add_broken_rule(branch_path, problem, advice)

            # Only the chosen branch counts. The others are not built, so their rules do not apply.
            for name, branch in draft.values.items():
                if _get_value_class(branch) and name != chosen:
                    values[name] = None

        for name, item in values.items():
            item_path = join_keys(path, name)
            values[name] = self.build(item, item_path)
        try:
            return draft.config_class(**values)
        except FieldError as error:
            for mistake in error.relative_mistakes:
                mistake_path = join_keys(path, mistake.path)
                self._add_broken_rule(mistake_path, mistake.problem, mistake.advice)
        except Exception:
            # After a mistake, a rule may fail on a value that could not be set.
            if not self.mistakes:
                raise

        config = object.__new__(draft.config_class)
        for name, item in values.items():
            object.__setattr__(config, name, item)
        return config

    def _add_broken_rule(self, path: str, problem: str, advice: str) -> None:
        """Adds a mistake found in the result.

        It is left out if its value, or a value that its message names, was refused before.
        """
        section = path.rpartition(".")[0]
        text = f"{problem} {advice}"
        words = re.findall(r"\w+", text)
        named_paths = [join_keys(section, word) for word in words]
        named_paths += re.findall(r"\w+(?:\.\w+)+", text)
        refused_paths = {mistake.path for mistake in self.mistakes}
        if path in refused_paths or not refused_paths.isdisjoint(named_paths):
            return

        # The origin to blame is that of the rule's field, or else of another field that the message
        # names.
        own_paths = list_paths_inside(self.origins, path)
        if not own_paths:
            own_paths = [section for section in self.origins if is_inside(path, section)]
        other_paths = [other for other in named_paths if other in self.origins]
        origin = DEFAULT_ORIGIN
        if own_paths:
            origin = self.origins[own_paths[0]]
        elif other_paths:
            other_path = other_paths[0]
            other_origin = self.origins[other_path]
            origin = f"with {other_path} from {other_origin}"
        self.mistakes.append(Mistake(path, problem, advice, origin))


def _get_value_class(value: object) -> type[Section] | None:
    """Returns the class of a section or a draft, and None for any other value."""
    if isinstance(value, _Draft):
        return value.config_class
    return type(value) if isinstance(value, Section) else None
