"""Merges layers of values into a config. Pure; one report has every mistake of every layer.

A later layer wins. Sections merge field by field, and sections by name (`task.validation_data`, if there are several)
name by name: None removes one. Everything else is replaced whole: scalars, None, lists, and mappings that are values
(`DataConfig.input_path`). A value is checked against its own field as it is merged, so a mistake in one layer hides
none in another; the rules across fields are checked once, on the result.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from trainer_kit.config.allowed_values import NO_SUCH_KEY, describe, hint, missing_key_advice, show
from trainer_kit.config.fields import (
    checker,
    fields_advice,
    fields_of,
    leaves,
    listed_class,
    named_class,
    section_class,
)
from trainer_kit.config.schema.section import FieldError, Section, gives_several, is_configclass, place_of
from trainer_kit.config.sources.layer import Layer, given_inside, is_inside, join
from trainer_kit.errors import ConfigError, Mistake, suggestion

DEFAULT = "default"
ConfigT = TypeVar("ConfigT", bound=Section)


@dataclass(frozen=True)
class Resolved(Generic[ConfigT]):
    """A checked config and, by dotted path, where every one of its values comes from ("default": its factory)."""

    config: ConfigT
    origins: dict[str, str]


def apply(config: ConfigT, layers: Sequence[Layer]) -> Resolved[ConfigT]:
    """Returns `config` with the values of `layers` merged into it; the last layer wins.

    A section is checked against the class of the section that `config` has there: a task's against the task's own.

    Raises:
      ConfigError: for unknown keys, wrong types, values out of bounds and broken rules; it holds all of all layers.
    """
    merged, origins, mistakes = merge_layers(config, layers, checks_all=True)
    if mistakes:
        raise ConfigError(mistakes)
    return Resolved(merged, {path: origins.get(path, DEFAULT) for path in leaves(merged)})


def merge_layers(
    config: ConfigT, layers: Sequence[Layer], checks_all: bool = False
) -> tuple[ConfigT, dict[str, str], list[Mistake]]:
    """Returns `config` with the values of `layers`, the origins of the values that they give, and all mistakes.

    The config is worth nothing if there are mistakes.

    Args:
      config: The config, or a section of it.
      layers: The values; the last layer wins.
      checks_all: Whether sections that no layer touches are checked too, which gives their values the fields' types.
    """
    report = _Report(config, config.place or "", checks_all)
    root = _Draft.of(config)
    for layer in layers:
        _Merge(layer, report).into(root, layer.values, "")
    return _build(root, "", report), report.given, report.mistakes


def find_mistakes(config_class: type[Section], values: Mapping[str, Any]) -> list[Mistake]:
    """Returns the mistakes in the values that a section is to be made of, with their paths inside the section."""
    report = _Report(config_class, place_of(config_class))
    draft = _Draft.fresh(config_class)
    merge = _Merge(Layer(), report)
    defaults = {name: value for name, value in draft.values.items() if name not in values}
    merge.into(draft, values, "")
    if not report.mistakes:  # classes that are made of other programs' values may have wrong defaults
        merge.into(draft, defaults, "")
    if report.mistakes:
        _build(draft, "", report)  # which adds broken rules
    return [replace(mistake, origin="") for mistake in report.mistakes]


@dataclass
class _Draft:
    """A section that can still change. `values` holds leaves, sections, drafts, and lists or dicts of these."""

    config_class: type[Section]
    values: dict[str, Any]
    branches_given: list[str] = field(default_factory=list)
    type_given: bool = False

    @classmethod
    def of(cls, config: Section) -> _Draft:
        """The values of `config`."""
        return cls(type(config), {name: getattr(config, name, None) for name in fields_of(type(config))})

    @classmethod
    def fresh(cls, config_class: type[Section]) -> _Draft:
        """The defaults of `config_class`; fields without a default are left out."""
        fields = {name: info for name, info in fields_of(config_class).items() if not info.is_required()}
        return cls(config_class, {name: info.get_default(call_default_factory=True) for name, info in fields.items()})

    @classmethod
    def from_value(cls, value: Any, config_class: type[Section]) -> _Draft:
        """A draft that changes independently of `value`, a section or a draft; any other value: a fresh one."""
        if isinstance(value, Section):
            return cls.of(value)
        return copy.deepcopy(value) if isinstance(value, _Draft) else cls.fresh(config_class)


@dataclass
class _Report:
    """The mistakes found, and the origins of the accepted values."""

    config: Section | type[Section]
    place: str
    checks_all: bool = False
    mistakes: list[Mistake] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)

    def known_paths(self) -> list[str]:
        """Returns the paths of all values; none if the class has fields without a default."""
        try:
            config = self.config if isinstance(self.config, Section) else self.config()
        except FieldError:
            return []
        return [join(self.place, path) for path in leaves(config)]

    def add(self, path: str, problem: str, advice: str = "", origin: str = "") -> None:
        self.mistakes.append(Mistake(path, problem, advice, origin))

    def add_broken_rule(self, path: str, problem: str, advice: str = "") -> None:
        """Adds a mistake found in the result, unless its value, or one that its message names, was refused before."""
        section = path.rpartition(".")[0]
        text = f"{problem} {advice}"
        named = [*(join(section, word) for word in re.findall(r"\w+", text)), *re.findall(r"\w+(?:\.\w+)+", text)]
        refused = {mistake.path for mistake in self.mistakes}
        if path not in refused and refused.isdisjoint(named):
            self.add(path, problem, advice, self._culprit(path, named))

    def _culprit(self, path: str, named: list[str]) -> str:
        """Returns the origin to blame: of the rule's field, or else of another field that its message names."""
        inside = given_inside(self.given, path) or [given for given in self.given if is_inside(path, given)]
        if inside:
            return self.given[inside[0]]
        others = [given for given in named if given in self.given]
        return f"{DEFAULT}, with {others[0]} from {self.given[others[0]]}" if others else DEFAULT


class _Merge:
    """Puts one layer on the sections."""

    def __init__(self, layer: Layer, report: _Report) -> None:
        self._layer, self._report = layer, report

    def into(self, section: _Draft, values: Mapping[Any, Any], path: str) -> None:
        for key, value in values.items():
            name, where = str(key), join(path, key)
            info = fields_of(section.config_class).get(name)
            if info is None:
                self._unknown(section, name, where)
                continue
            current = section.values.get(name)
            inner = _class_of(current) or section_class(info.annotation)
            named, listed = named_class(info.annotation), listed_class(info.annotation)
            if isinstance(value, Section):
                self._leaf(section, name, value, where)
            elif (
                named is not None
                and isinstance(value, Mapping)
                and _gives_names(value, None if self._layer.complete else current, inner)
            ):
                self._named(section, name, inner or named, value, where)
            elif inner is not None and value is not None and not _instead(info.annotation, value):
                self._section(section, name, inner, value, where)
            elif listed is not None and isinstance(value, (list, tuple)):
                self._listed(section, name, listed, value, where)
            else:
                self._leaf(section, name, value, where)

    def _section(self, around: _Draft, name: str, config_class: type[Section], value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            self._refuse(where, f"{show(value)} is not a section", fields_advice(config_class, where, value))
        elif not is_configclass(config_class):
            advice = "remove it, or declare its type in the task's config class"
            self._refuse(where, "this experiment has no such section", advice)
        else:
            current = around.values.get(name)
            draft = current if isinstance(current, _Draft) else _Draft.from_value(current, config_class)
            around.values[name] = draft
            if around.config_class.is_choice:
                around.branches_given.append(name)
            self.into(draft, value, where)

    def _named(
        self, around: _Draft, name: str, config_class: type[Section], value: Mapping[Any, Any], where: str
    ) -> None:
        """Merges sections by name. Each new one starts as the single section before, or as the field's default."""
        current = around.values.get(name)
        before = current if isinstance(current, dict) else {}
        model = current if _class_of(current) else _Draft.fresh(around.config_class).values.get(name)
        sections = {} if self._layer.complete else dict(before)
        around.values[name] = sections
        for key, item in value.items():
            path = join(where, key)
            if item is None:
                self._remove(sections, key, path)
                continue
            if isinstance(item, Section):
                sections[key] = item
                self._given(path)
                continue
            if key in fields_of(config_class):
                advice = f"name one: {join(where, next(iter(sections), 'NAME'), key)}"
                self._refuse(path, "there are several sections here", advice)
                continue
            draft = _Draft.from_value(before.get(key, model), config_class)
            if lacking := self._fill(draft, item, path, is_new=bool(before) and key not in before):
                known = ", ".join(sorted(map(str, before)))
                problem = f"there is none of this name (all: {known}), and a new one needs {', '.join(lacking)}"
                self._refuse(path, problem, suggestion(str(key), [str(name) for name in before]))
            else:
                sections[key] = draft

    def _fill(self, draft: _Draft, item: Any, path: str, is_new: bool) -> list[str]:
        """Merges an item into a section by name; returns the fields that a new one lacks."""
        holder = _Draft(Section, {"item": draft})
        self._section(holder, "item", draft.config_class, item, path)
        fields = fields_of(draft.config_class) if is_new else {}
        return [name for name, info in fields.items() if info.is_required() and name not in draft.values]

    def _remove(self, sections: dict[Any, Any], key: Any, where: str) -> None:
        if key not in sections:
            advice = suggestion(str(key), [str(name) for name in sections])
            self._refuse(where, "there is no such section to remove", advice)
        elif sections.pop(key):
            self._given(where)
            del self._report.given[where]

    def _listed(self, around: _Draft, name: str, config_class: type[Section], value: Any, where: str) -> None:
        """Replaces a list of sections as a whole, unless its class merges it item by item."""
        now = around.values.get(name)
        merges = around.config_class.merges_values and isinstance(now, (list, tuple)) and len(now) == len(value)
        items: list[Any] = []
        for index, item in enumerate(value):
            if isinstance(item, Section):
                items.append(item)
                continue
            holder = _Draft(Section, {"item": now[index]} if now and merges else {})
            if merges:
                holder.values["item"] = _Draft.from_value(holder.values.get("item"), config_class)
            self._section(holder, "item", config_class, item, join(where, index))
            items.append(holder.values.get("item"))
        if all(_class_of(item) for item in items):
            around.values[name] = items
            self._given(where)

    def _leaf(self, section: _Draft, name: str, value: Any, where: str) -> None:
        section.type_given |= name == "type"
        info, now = fields_of(section.config_class)[name], section.values.get(name)
        if section.config_class.merges_values and isinstance(value, Mapping) and isinstance(now, Mapping):
            value = {**now, **value}
        try:
            section.values[name] = checker(section.config_class, name).validate_python(value)
        except ValidationError as error:
            causes = [details.get("ctx", {}).get("error") for details in error.errors()]
            if any(causes):  # of a check of the user's own
                self._refuse(where, str(next(filter(None, causes))))
                return
            allowed = describe(info.annotation, tuple(info.metadata))
            self._refuse(where, f"{show(value)} is not {allowed}", hint(info.annotation, value, info.metadata))
        else:
            self._given(where)

    def _given(self, where: str) -> None:
        for old in given_inside(self._report.given, where):
            del self._report.given[old]
        self._report.given[where] = self._layer.origin(where) or "given"

    def _refuse(self, where: str, problem: str, advice: str = "") -> None:
        self._report.add(where, problem, advice, self._layer.origin(where))

    def _unknown(self, section: _Draft, name: str, where: str) -> None:
        siblings = list(fields_of(section.config_class))
        advice = missing_key_advice(join(self._report.place, where), name, siblings, self._report.known_paths())
        self._refuse(where, NO_SUCH_KEY, advice)


def _class_of(value: Any) -> type[Section] | None:
    """Returns the class of a section or a draft; None for any other value."""
    if isinstance(value, _Draft):
        return value.config_class
    return type(value) if isinstance(value, Section) else None


def _instead(annotation: Any, value: Any) -> bool:
    """Whether a union field received a plain value instead of a section."""
    return section_class(annotation) is None and not isinstance(value, Mapping)


def _gives_names(value: Mapping[Any, Any], current: Any, single: type[Section] | None) -> bool:
    """Whether a mapping has sections by name, in a field that may also be a single section."""
    if single is None or (isinstance(current, dict) and current):
        return True
    return gives_several(single, value)


def _closed(value: Any, path: str, report: _Report) -> Any:
    if isinstance(value, Section) and report.checks_all:
        value = _Draft.of(value)
    if isinstance(value, _Draft):
        return _build(value, path, report)
    if isinstance(value, (list, tuple)) and any(_class_of(item) for item in value):
        return [_closed(item, join(path, index), report) for index, item in enumerate(value)]
    if isinstance(value, dict) and any(_class_of(item) for item in value.values()):
        return {key: _closed(item, join(path, key), report) for key, item in value.items()}
    return value


def _build(section: _Draft, path: str, report: _Report) -> Any:
    """Returns a section of the config and reports broken rules. A field keeps its value if the new one is refused."""
    values = dict(section.values)
    if section.config_class.is_choice:
        values = _chosen_only(section, path, report)
    values = {name: _closed(value, join(path, name), report) for name, value in values.items()}
    try:
        return section.config_class(**values)
    except FieldError as error:
        for mistake in error.inner:
            report.add_broken_rule(join(path, mistake.path), mistake.problem, mistake.advice)
    except Exception:
        if not report.mistakes:  # else a rule stumbled over what could not be set
            raise
    return _unchecked(section.config_class, values)


def _chosen_only(section: _Draft, path: str, report: _Report) -> dict[str, Any]:
    chosen = section.values.get("type")
    if not section.type_given:
        for name in dict.fromkeys(section.branches_given):
            if name != chosen:
                where = join(path, "type")
                problem = f"has no effect while {where} is {show(chosen)}"
                report.add_broken_rule(join(path, name), problem, f"set {where}={name} too, or remove it")
    inner = {name for name, value in section.values.items() if _class_of(value) and name != chosen}
    return {name: None if name in inner else value for name, value in section.values.items()}


def _unchecked(config_class: type[Section], values: dict[str, Any]) -> Section:
    """Returns a stand-in for a section with a mistake, so that the rules of outer sections can be checked."""
    config = object.__new__(config_class)
    for name, value in values.items():
        object.__setattr__(config, name, value)
    return config
