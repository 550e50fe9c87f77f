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
    REMOVED,
    describe,
    hint,
    missing_key_advice,
    show,
)
from trainer_kit.config.fields import (
    checker,
    fields_advice,
    fields_of,
    leaves,
    listed_class,
    named_class,
    section_class,
)
from trainer_kit.config.schema.section import (
    FieldError,
    Section,
    gives_several,
    is_configclass,
    place_of,
)
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

    A section is checked against the class of the section that `config` has there: a task's against
    the task's own.

    Raises:
      ConfigError: for unknown keys, wrong types, values out of bounds and broken rules; it holds
        all of all layers.
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
      checks_all: Whether sections that no layer touches are checked too, which gives their values
        the fields' types.
    """
    merger = _Merger(config, config.place or "", checks_all)
    root = _Draft.of(config)
    for layer in layers:
        merger.layer = layer
        merger.merge(root, layer.values, "")
    return merger.build(root, ""), merger.origins, merger.mistakes


def find_mistakes(config_class: type[Section], values: Mapping[str, Any]) -> list[Mistake]:
    """Returns the mistakes in the values that a section is to be made of, with their paths inside the section."""
    merger = _Merger(config_class, place_of(config_class))
    draft = _Draft.fresh(config_class)
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
    branches_given: list[str] = field(default_factory=list)
    type_given: bool = False

    @classmethod
    def of(cls, config: Section) -> _Draft:
        """The values of `config`."""
        return cls(
            type(config), {name: getattr(config, name, None) for name in fields_of(type(config))}
        )

    @classmethod
    def fresh(cls, config_class: type[Section]) -> _Draft:
        """The defaults of `config_class`; fields without a default are left out."""
        fields = {
            name: info for name, info in fields_of(config_class).items() if not info.is_required()
        }
        return cls(
            config_class,
            {name: info.get_default(call_default_factory=True) for name, info in fields.items()},
        )

    @classmethod
    def from_value(cls, value: Any, config_class: type[Section]) -> _Draft:
        """A draft that changes independently of `value`, a section or a draft; any other value: a fresh one."""
        if isinstance(value, Section):
            return cls.of(value)
        return copy.deepcopy(value) if isinstance(value, _Draft) else cls.fresh(config_class)


class _Merger:
    """Puts the values of layers on a draft, one layer after the other, and builds the config of it.

    Args:
      config: The config, or its class, for near names.
      place: The path of the config in an experiment, for near names.
      checks_all: See merge_layers.

    Attributes:
      layer: The layer that is being merged.
      mistakes: The mistakes so far.
      origins: The origins of the accepted values.
    """

    def __init__(
        self, config: Section | type[Section], place: str, checks_all: bool = False
    ) -> None:
        self._config = config
        self._place = place
        self._checks_all = checks_all
        self.layer = Layer()
        self.mistakes: list[Mistake] = []
        self.origins: dict[str, str] = {}

    def merge(self, section: _Draft, values: Mapping[Any, Any], path: str) -> None:
        """Puts values on a section, each checked against its field."""
        for key, value in values.items():
            name = str(key)
            where = join(path, key)
            info = fields_of(section.config_class).get(name)
            if info is None:
                self._refuse_unknown(section, name, where)
                continue
            current = section.values.get(name)
            inner = _class_of(current) or section_class(info.annotation)
            named = named_class(info.annotation)
            listed = listed_class(info.annotation)
            has_names = isinstance(current, dict) and bool(current) and not self.layer.complete
            if isinstance(value, Section):
                self._set_leaf(section, name, value, where)
            elif (
                named is not None
                and isinstance(value, Mapping)
                and (inner is None or has_names or gives_several(inner, value))
            ):
                self._merge_named(section, name, inner or named, value, where)
            elif (
                inner is not None
                and value is not None
                # A field that takes a section or something else may have got the latter.
                and (section_class(info.annotation) is not None or isinstance(value, Mapping))
            ):
                draft = self._merge_section(current, inner, value, where)
                if draft is not None:
                    section.values[name] = draft
                    section.branches_given += [name] if section.config_class.is_choice else []
            elif listed is not None and isinstance(value, (list, tuple)):
                self._merge_list(section, name, listed, value, where)
            else:
                self._set_leaf(section, name, value, where)

    def _merge_section(
        self, current: Any, config_class: type[Section], value: Any, where: str
    ) -> _Draft | None:
        """Returns the draft of a section with the values of a mapping; None for a value that is refused."""
        if not isinstance(value, Mapping):
            self._refuse(
                where, f"{show(value)} is not a section", fields_advice(config_class, where, value)
            )
            return None
        if not is_configclass(config_class):
            advice = "remove it, or declare its type in the task's config class"
            self._refuse(where, "this experiment has no such section", advice)
            return None
        draft = current if isinstance(current, _Draft) else _Draft.from_value(current, config_class)
        self.merge(draft, value, where)
        return draft

    def _merge_named(
        self,
        around: _Draft,
        name: str,
        config_class: type[Section],
        value: Mapping[Any, Any],
        where: str,
    ) -> None:
        """Merges sections by name. Each new one starts as the single section before, or as the field's default."""
        current = around.values.get(name)
        before = current if isinstance(current, dict) else {}
        model = (
            current if _class_of(current) else _Draft.fresh(around.config_class).values.get(name)
        )
        sections = {} if self.layer.complete else dict(before)
        around.values[name] = sections
        fields = fields_of(config_class)
        for key, item in value.items():
            path = join(where, key)
            if item is None and key in sections:
                del sections[key]
                self._forget_origins(path)
            elif item is None:
                advice = suggestion(str(key), [str(name) for name in sections])
                self._refuse(path, "there is no such section to remove", advice)
            elif isinstance(item, Section):
                sections[key] = item
                self._note_origin(path)
            elif key in fields:
                advice = f"name one: {join(where, next(iter(sections), 'NAME'), key)}"
                self._refuse(path, "there are several sections here", advice)
            else:
                draft = _Draft.from_value(before.get(key, model), config_class)
                self._merge_section(draft, config_class, item, path)
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
                    self._refuse(
                        path, f"{problem} {', '.join(lacking)}", suggestion(str(key), names)
                    )
                else:
                    sections[key] = draft

    def _merge_list(
        self, around: _Draft, name: str, config_class: type[Section], value: Any, where: str
    ) -> None:
        """Replaces a list of sections as a whole, unless its class merges it item by item."""
        now = around.values.get(name)
        merges = (
            around.config_class.merges_values
            and isinstance(now, (list, tuple))
            and len(now) == len(value)
        )
        items: list[Any] = []
        for index, item in enumerate(value):
            if not isinstance(item, Section):
                current = _Draft.from_value(now[index], config_class) if now and merges else None
                item = self._merge_section(current, config_class, item, join(where, index))
            items.append(item)
        if None not in items:
            around.values[name] = items
            self._note_origin(where)

    def _set_leaf(self, section: _Draft, name: str, value: Any, where: str) -> None:
        section.type_given |= name == "type"
        info = fields_of(section.config_class)[name]
        current = section.values.get(name)
        if (
            section.config_class.merges_values
            and isinstance(value, Mapping)
            and isinstance(current, Mapping)
        ):
            value = {**current, **value}
        try:
            section.values[name] = checker(section.config_class, name).validate_python(value)
        except ValidationError as error:
            causes = [details.get("ctx", {}).get("error") for details in error.errors()]
            if any(causes):  # of a check of the user's own
                self._refuse(where, str(next(filter(None, causes))))
                return
            allowed = describe(info.annotation, tuple(info.metadata))
            advice = REMOVED.get(f"{name}={value}") or hint(info.annotation, value, info.metadata)
            self._refuse(where, f"{show(value)} is not {allowed}", advice)
        else:
            self._note_origin(where)

    def _note_origin(self, where: str) -> None:
        self._forget_origins(where)
        self.origins[where] = self.layer.origin(where) or "given"

    def _forget_origins(self, where: str) -> None:
        for path in given_inside(self.origins, where):
            del self.origins[path]

    def _refuse(self, where: str, problem: str, advice: str = "") -> None:
        self.mistakes.append(Mistake(where, problem, advice, self.layer.origin(where)))

    def _refuse_unknown(self, section: _Draft, name: str, where: str) -> None:
        try:
            config = self._config if isinstance(self._config, Section) else self._config()
            paths = [join(self._place, path) for path in leaves(config)]
        except FieldError:  # the class has fields without a default
            paths = []
        siblings = list(fields_of(section.config_class))
        self._refuse(
            where, NO_SUCH_KEY, missing_key_advice(join(self._place, where), name, siblings, paths)
        )

    def build(self, value: Any, path: str) -> Any:
        """Returns a value with sections in place of the drafts in it, and adds broken rules to the mistakes.

        A section with a mistake becomes a stand-in with the same values, so that the rules of outer
        sections can be checked.
        """
        if isinstance(value, (list, tuple)) and any(_class_of(item) for item in value):
            return [self.build(item, join(path, index)) for index, item in enumerate(value)]
        if isinstance(value, dict) and any(_class_of(item) for item in value.values()):
            return {key: self.build(item, join(path, key)) for key, item in value.items()}
        section = _Draft.of(value) if isinstance(value, Section) and self._checks_all else value
        if not isinstance(section, _Draft):
            return value

        values = dict(section.values)
        if section.config_class.is_choice:
            chosen = values.get("type")
            for name in () if section.type_given else dict.fromkeys(section.branches_given):
                if name != chosen:
                    where = join(path, "type")
                    problem = f"has no effect while {where} is {show(chosen)}"
                    self._add_broken_rule(
                        join(path, name), problem, f"set {where}={name} too, or remove it"
                    )
            for name, value in section.values.items():
                if _class_of(value) and name != chosen:
                    values[name] = None
        values = {name: self.build(value, join(path, name)) for name, value in values.items()}
        try:
            return section.config_class(**values)
        except FieldError as error:
            for mistake in error.inner:
                self._add_broken_rule(join(path, mistake.path), mistake.problem, mistake.advice)
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
            *(join(section, word) for word in re.findall(r"\w+", text)),
            *re.findall(r"\w+(?:\.\w+)+", text),
        ]
        refused = {mistake.path for mistake in self.mistakes}
        if path in refused or not refused.isdisjoint(named):
            return

        # The origin to blame is that of the rule's field, or else of another field that the message
        # names.
        own = given_inside(self.origins, path) or [
            place for place in self.origins if is_inside(path, place)
        ]
        others = [place for place in named if place in self.origins]
        origin = DEFAULT
        if own:
            origin = self.origins[own[0]]
        elif others:
            origin = f"{DEFAULT}, with {others[0]} from {self.origins[others[0]]}"
        self.mistakes.append(Mistake(path, problem, advice, origin))


def _class_of(value: Any) -> type[Section] | None:
    """Returns the class of a section or a draft; None for any other value."""
    if isinstance(value, _Draft):
        return value.config_class
    return type(value) if isinstance(value, Section) else None
