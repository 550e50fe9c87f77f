"""Merges layers of values into a config. Pure; one report has every mistake of every layer.

A later layer wins. Sections merge field by field, and sections by name (`task.validation_data`, if
there are several) name by name: None removes one. Everything else is replaced whole: scalars, None,
lists, and mappings that are values (`DataConfig.input_path`). A value is checked against its own
field as it is merged, so a mistake in one layer hides none in another; the rules across fields are
checked once, on the result.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from trainer_kit.config.allowed_values import (
    NO_SUCH_KEY,
    REMOVED_VALUES,
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
    """A checked config and, by dotted path, where every one of its values comes from ("default": its factory)."""

    config: ConfigT
    origins: dict[str, str]


def apply_layers(config: ConfigT, layers: Sequence[ConfigLayer]) -> ResolvedConfig[ConfigT]:
    """Returns `config` with the values of `layers` merged into it; the last layer wins.

    A section is checked against the class of the section that `config` has there: a task's against
    the task's own.

    Raises:
      ConfigError: for unknown keys, wrong types, values out of bounds and broken rules; it holds
        all of all layers.
    """
    merged, origins, mistakes = merge_layers(config, layers, check_all_sections=True)
    if mistakes:
        raise ConfigError(mistakes)
    return ResolvedConfig(
        merged, {path: origins.get(path, DEFAULT_ORIGIN) for path in flatten_values(merged)}
    )


def merge_layers(
    config: ConfigT, layers: Sequence[ConfigLayer], check_all_sections: bool = False
) -> tuple[ConfigT, dict[str, str], list[Mistake]]:
    """Returns `config` with the values of `layers`, the origins of the values that they give, and all mistakes.

    The config is worth nothing if there are mistakes.

    Args:
      config: The config, or a section of it.
      layers: The values; the last layer wins.
      check_all_sections: Whether sections that no layer touches are checked too, which gives their
        values the fields' types.
    """
    merger = _Merger(config, config.path_in_experiment or "", check_all_sections)
    root = _Draft.from_section(config)
    for layer in layers:
        merger.layer = layer
        merger.merge(root, layer.values, "")
    return merger.build(root, ""), merger.origins, merger.mistakes


def find_mistakes(config_class: type[Section], values: Mapping[str, Any]) -> list[Mistake]:
    """Returns the mistakes in the values that a section is to be made of, with their paths inside the section."""
    merger = _Merger(config_class, get_path_in_experiment(config_class))
    draft = _Draft.from_defaults(config_class)
    defaults = {name: value for name, value in draft.values.items() if name not in values}
    merger.merge(draft, values, "")
    if (
        not merger.mistakes
    ):  # classes that are made of other programs' values may have wrong defaults
        merger.merge(draft, defaults, "")
    if merger.mistakes:
        merger.build(draft, "")  # which adds broken rules
    return [replace(mistake, origin="") for mistake in merger.mistakes]


@dataclass
class _Draft:
    """A section that can still change. `values` holds leaves, sections, drafts, and lists or dicts of these."""

    config_class: type[Section]
    values: dict[str, Any]
    touched_branches: list[str] = field(default_factory=list)
    has_explicit_type: bool = False

    @classmethod
    def from_section(cls, config: Section) -> _Draft:
        """The values of `config`."""
        return cls(
            type(config), {name: getattr(config, name, None) for name in get_fields(type(config))}
        )

    @classmethod
    def from_defaults(cls, config_class: type[Section]) -> _Draft:
        """The defaults of `config_class`; fields without a default are left out."""
        fields = {
            name: info for name, info in get_fields(config_class).items() if not info.is_required()
        }
        return cls(
            config_class,
            {name: info.get_default(call_default_factory=True) for name, info in fields.items()},
        )

    @classmethod
    def from_value(cls, value: Any, config_class: type[Section]) -> _Draft:
        """A draft that changes independently of `value`, a section or a draft; any other value: a fresh one."""
        if isinstance(value, Section):
            return cls.from_section(value)
        return (
            copy.deepcopy(value) if isinstance(value, _Draft) else cls.from_defaults(config_class)
        )


class _Merger:
    """Puts the values of layers on a draft, one layer after the other, and builds the config of it.

    Args:
      config: The config, or its class, for near names.
      path_prefix: The path of the config in an experiment, for near names.
      check_all_sections: See merge_layers.

    Attributes:
      layer: The layer that is being merged.
      mistakes: The mistakes so far.
      origins: The origins of the accepted values.
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

    def merge(self, section: _Draft, values: Mapping[Any, Any], path: str) -> None:
        """Puts values on a section, each checked against its field."""
        for key, value in values.items():
            name = str(key)
            where = join_keys(path, key)
            info = get_fields(section.config_class).get(name)
            if info is None:
                self._add_unknown_key(section, name, where)
                continue
            current = section.values.get(name)
            inner = _get_value_class(current) or find_section_class(info.annotation)
            named = find_dict_value_class(info.annotation)
            listed = find_list_item_class(info.annotation)
            has_names = (
                isinstance(current, dict)
                and bool(current)
                and not self.layer.replaces_named_sections
            )
            if isinstance(value, Section):
                self._set_leaf(section, name, value, where)
            elif (
                named is not None
                and isinstance(value, Mapping)
                and (inner is None or has_names or has_several_sections(inner, value))
            ):
                self._merge_section_dict(section, name, inner or named, value, where)
            elif (
                inner is not None
                and value is not None
                # A field that takes a section or something else may have got the latter.
                and (find_section_class(info.annotation) is not None or isinstance(value, Mapping))
            ):
                draft = self._merge_section(current, inner, value, where)
                if draft is not None:
                    section.values[name] = draft
                    section.touched_branches += [name] if section.config_class.is_choice else []
            elif listed is not None and isinstance(value, (list, tuple)):
                self._merge_section_list(section, name, listed, value, where)
            else:
                self._set_leaf(section, name, value, where)

    def _merge_section(
        self, current: Any, config_class: type[Section], value: Any, path: str
    ) -> _Draft | None:
        """Returns the draft of a section with the values of a mapping; None for a value that is refused."""
        if not isinstance(value, Mapping):
            self._add_mistake(
                path,
                f"{format_value(value)} is not a section",
                suggest_fields(config_class, path, value),
            )
            return None
        if not is_configclass(config_class):
            advice = "remove it, or declare its type in the task's config class"
            self._add_mistake(path, "this experiment has no such section", advice)
            return None
        draft = current if isinstance(current, _Draft) else _Draft.from_value(current, config_class)
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
        """Merges sections by name. Each new one starts as the single section before, or as the field's default."""
        current = parent.values.get(name)
        before = current if isinstance(current, dict) else {}
        model = (
            current
            if _get_value_class(current)
            else _Draft.from_defaults(parent.config_class).values.get(name)
        )
        sections = {} if self.layer.replaces_named_sections else dict(before)
        parent.values[name] = sections
        fields = get_fields(config_class)
        for key, item in value.items():
            section_path = join_keys(path, key)
            if item is None and key in sections:
                del sections[key]
                self._remove_origins(section_path)
            elif item is None:
                advice = suggest_names(str(key), [str(name) for name in sections])
                self._add_mistake(section_path, "there is no such section to remove", advice)
            elif isinstance(item, Section):
                sections[key] = item
                self._set_origin(section_path)
            elif key in fields:
                advice = f"name one: {join_keys(path, next(iter(sections), 'NAME'), key)}"
                self._add_mistake(section_path, "there are several sections here", advice)
            else:
                draft = _Draft.from_value(before.get(key, model), config_class)
                self._merge_section(draft, config_class, item, section_path)
                lacking = [
                    name
                    for name, info in fields.items()
                    if info.is_required() and name not in draft.values
                ]
                if lacking and before and key not in before:
                    names = sorted(map(str, before))
                    problem = (
                        f"there is none of this name (all: {', '.join(names)}), and a new one needs"
                    )
                    self._add_mistake(
                        section_path,
                        f"{problem} {', '.join(lacking)}",
                        suggest_names(str(key), names),
                    )
                else:
                    sections[key] = draft

    def _merge_section_list(
        self, parent: _Draft, name: str, config_class: type[Section], value: Any, path: str
    ) -> None:
        """Replaces a list of sections as a whole, unless its class merges it item by item."""
        now = parent.values.get(name)
        merges = (
            parent.config_class.merges_values
            and isinstance(now, (list, tuple))
            and len(now) == len(value)
        )
        items: list[Any] = []
        for index, item in enumerate(value):
            if not isinstance(item, Section):
                current = _Draft.from_value(now[index], config_class) if now and merges else None
                item = self._merge_section(current, config_class, item, join_keys(path, index))
            items.append(item)
        if None not in items:
            parent.values[name] = items
            self._set_origin(path)

    def _set_leaf(self, section: _Draft, name: str, value: Any, path: str) -> None:
        section.has_explicit_type |= name == "type"
        info = get_fields(section.config_class)[name]
        current = section.values.get(name)
        if (
            section.config_class.merges_values
            and isinstance(value, Mapping)
            and isinstance(current, Mapping)
        ):
            value = {**current, **value}
        try:
            section.values[name] = create_field_adapter(section.config_class, name).validate_python(
                value
            )
        except ValidationError as error:
            causes = [details.get("ctx", {}).get("error") for details in error.errors()]
            if any(causes):  # of a check of the user's own
                self._add_mistake(path, str(next(filter(None, causes))))
                return
            allowed = describe_allowed_values(info.annotation, tuple(info.metadata))
            advice = REMOVED_VALUES.get(f"{name}={value}") or suggest_correction(
                info.annotation, value, info.metadata
            )
            self._add_mistake(path, f"{format_value(value)} is not {allowed}", advice)
        else:
            self._set_origin(path)

    def _set_origin(self, path: str) -> None:
        self._remove_origins(path)
        self.origins[path] = self.layer.find_origin(path) or "given"

    def _remove_origins(self, path: str) -> None:
        for inner_path in list_paths_inside(self.origins, path):
            del self.origins[inner_path]

    def _add_mistake(self, path: str, problem: str, advice: str = "") -> None:
        self.mistakes.append(Mistake(path, problem, advice, self.layer.find_origin(path)))

    def _add_unknown_key(self, section: _Draft, name: str, path: str) -> None:
        try:
            config = self._config if isinstance(self._config, Section) else self._config()
            paths = [join_keys(self._path_prefix, path) for path in flatten_values(config)]
        except FieldError:  # the class has fields without a default
            paths = []
        siblings = list(get_fields(section.config_class))
        self._add_mistake(
            path,
            NO_SUCH_KEY,
            suggest_key(join_keys(self._path_prefix, path), name, siblings, paths),
        )

    def build(self, value: Any, path: str) -> Any:
        """Returns a value with sections in place of the drafts in it, and adds broken rules to the mistakes.

        A section with a mistake becomes a stand-in with the same values, so that the rules of outer
        sections can be checked.
        """
        if isinstance(value, (list, tuple)) and any(_get_value_class(item) for item in value):
            return [self.build(item, join_keys(path, index)) for index, item in enumerate(value)]
        if isinstance(value, dict) and any(_get_value_class(item) for item in value.values()):
            return {key: self.build(item, join_keys(path, key)) for key, item in value.items()}
        section = (
            _Draft.from_section(value)
            if isinstance(value, Section) and self._check_all_sections
            else value
        )
        if not isinstance(section, _Draft):
            return value

        values = dict(section.values)
        if section.config_class.is_choice:
            chosen = values.get("type")
            for name in (
                () if section.has_explicit_type else dict.fromkeys(section.touched_branches)
            ):
                if name != chosen:
                    where = join_keys(path, "type")
                    problem = f"has no effect while {where} is {format_value(chosen)}"
                    self._add_broken_rule(
                        join_keys(path, name), problem, f"set {where}={name} too, or remove it"
                    )
            for name, value in section.values.items():
                if _get_value_class(value) and name != chosen:
                    values[name] = None
        values = {name: self.build(value, join_keys(path, name)) for name, value in values.items()}
        try:
            return section.config_class(**values)
        except FieldError as error:
            for mistake in error.relative_mistakes:
                self._add_broken_rule(
                    join_keys(path, mistake.path), mistake.problem, mistake.advice
                )
        except Exception:
            if not self.mistakes:  # else a rule stumbled over what could not be set
                raise
        config = object.__new__(section.config_class)
        for name, value in values.items():
            object.__setattr__(config, name, value)
        return config

    def _add_broken_rule(self, path: str, problem: str, advice: str) -> None:
        """Adds a mistake found in the result, unless its value, or one that its message names, was refused before."""
        section = path.rpartition(".")[0]
        text = f"{problem} {advice}"
        named = [
            *(join_keys(section, word) for word in re.findall(r"\w+", text)),
            *re.findall(r"\w+(?:\.\w+)+", text),
        ]
        refused = {mistake.path for mistake in self.mistakes}
        if path in refused or not refused.isdisjoint(named):
            return

        # The origin to blame is that of the rule's field, or else of another field that the message
        # names.
        own = list_paths_inside(self.origins, path) or [
            place for place in self.origins if is_inside(path, place)
        ]
        others = [place for place in named if place in self.origins]
        origin = DEFAULT_ORIGIN
        if own:
            origin = self.origins[own[0]]
        elif others:
            origin = f"{DEFAULT_ORIGIN}, with {others[0]} from {self.origins[others[0]]}"
        self.mistakes.append(Mistake(path, problem, advice, origin))


def _get_value_class(value: Any) -> type[Section] | None:
    """Returns the class of a section or a draft; None for any other value."""
    if isinstance(value, _Draft):
        return value.config_class
    return type(value) if isinstance(value, Section) else None
