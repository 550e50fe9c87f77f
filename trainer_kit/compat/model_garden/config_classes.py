"""Translates Model Garden's config objects to trainer_kit config classes, and back.

Model Garden's classes take any value for any key. A mirror is a trainer_kit config class with the
fields of one Model Garden object, so that overrides are checked, mistakes reported, origins kept
and changes at a resume found, as for every experiment. Model Garden's tasks never see a mirror:
they get a copy of the original object with the changes.
"""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import dataclasses
import functools
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from official.modeling.hyperparams.base_config import Config as TheirConfig
from official.modeling.hyperparams.oneof import OneOfConfig as TheirOneOfConfig
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from trainer_kit.config.fields import get_fields
from trainer_kit.config.schema.configclass import Config, OneOfConfig, configclass
from trainer_kit.config.schema.schedules import LrConfig
from trainer_kit.config.schema.section import FieldError
from trainer_kit.config.sources.layer import join_keys
from trainer_kit.errors import ConfigError, Mistake

_ARBITRARY = ConfigDict(arbitrary_types_allowed=True)
_SCALARS = (int, float, bool, str, type(None))

# Fields that Model Garden declares more narrowly than its own files use them.
_WIDER = {
    "input_size": list[int | None],
    "include_in_weight_decay": list[str] | str | None,
    "exclude_from_weight_decay": list[str] | str | None,
}


class MirrorMixin:
    """Mixin of the classes that `mirror` creates.

    Attributes:
      garden_config: The original object.
      original_values: The original's values as plain nested dicts.
    """

    # Model Garden merges values, too.
    merges_values = True
    garden_config: ClassVar[TheirConfig]
    original_values: ClassVar[dict[str, Any]]


# A class costs 4 ms and 50 KB. It is dropped with its last object.
_mirror_class_cache: weakref.WeakValueDictionary[Any, type[Config]] = weakref.WeakValueDictionary()


def mirror(garden_config: TheirConfig, base: type[Config] = Config, **changes: Any) -> Any:
    """Returns a trainer_kit config with the fields and the values of `garden_config`.

    Mirrors of equal objects of the same class are equal.

    Args:
      garden_config: Any config object of Model Garden. A copy of it is kept for `build_original`.
      base: The base class of the mirror, which determines the types of the fields that both have.
      **changes: Values that replace those of `garden_config`.

    Raises:
      ConfigError: When `base` does not allow a value of `garden_config`.
    """
    return _create_mirror(garden_config, base, changes, ())


def build_original(mirrored_config: Config) -> Any:
    """Returns an unlocked copy of the Model Garden object behind a mirror, with its values.

    Raises:
      ConfigError: When Model Garden's class refuses a value.
    """
    assert isinstance(mirrored_config, MirrorMixin), (
        f"{type(mirrored_config).__qualname__} was not made by mirror"
    )
    original = copy.deepcopy(mirrored_config.garden_config)
    _unlock(original)
    original_values = mirrored_config.original_values
    values = mirrored_config.as_dict()
    changes = _changes(original_values, values, original)
    try:
        # The mirror was strict, and has options that only trainer_kit's engine knows.
        original.override(changes, is_strict=False)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(original).__name__} of Model Garden does not take {changes}"
        advice = ""
        if error.args:
            advice = str(error.args[0])
        raise ConfigError([Mistake("", problem, advice)]) from error
    return original


@contextlib.contextmanager
def prefix_mistakes(name: str) -> Iterator[None]:
    """A context in which the paths of reported mistakes are prefixed with a section's name."""
    try:
        yield
    except ConfigError as error:
        mistakes = []
        for mistake in error.mistakes:
            path = join_keys(name, mistake.path)
            mistakes.append(dataclasses.replace(mistake, path=path))
        raise ConfigError(mistakes) from None


def _create_mirror(
    garden_config: TheirConfig,
    base: type[Config],
    changes: dict[str, object],
    enclosing_classes: tuple[type, ...],
) -> Config:
    """Mirrors `garden_config`. See `mirror`.

    Args:
      garden_config, base, changes: The arguments of `mirror`.
      enclosing_classes: The classes of the optional sections that enclose the object. They end a
        recursion, where an optional section contains one of its own class.
    """
    config_key = _build_cache_key(garden_config)
    changes_key = _build_cache_key(changes)
    key = (base, enclosing_classes, config_key, changes_key)
    cls = _mirror_class_cache.get(key)
    if cls is None:
        cls = _create_mirror_class(garden_config, base, changes, enclosing_classes)

    try:
        mirrored = cls()
    except FieldError as error:
        garden_class = type(garden_config)
        origin = f"{garden_class.__module__}.{garden_class.__name__}"
        mistakes = []
        for mistake in error.relative_mistakes:
            mistakes.append(dataclasses.replace(mistake, origin=origin))
        raise ConfigError(mistakes) from None

    # A class whose defaults are refused is not cached.
    if key not in _mirror_class_cache:
        cls.garden_config = copy.deepcopy(garden_config)  # type: ignore[attr-defined]
        cls.original_values = mirrored.as_dict()  # type: ignore[attr-defined]
        _mirror_class_cache[key] = cls
    return mirrored


def _create_mirror_class(
    garden_config: TheirConfig,
    base: type[Config],
    changes: dict[str, object],
    enclosing_classes: tuple[type, ...],
) -> type[Config]:
    """Creates the class of a mirror, with the values of `garden_config` as defaults."""
    values = dict(_iterate_fields(garden_config))
    values.update(changes)
    if base is Config and isinstance(garden_config, TheirOneOfConfig):
        base = OneOfConfig

    annotations: dict[str, object] = {}
    body: dict[str, object] = {
        "__annotations__": annotations,
        "__module__": __name__,
        "__doc__": type(garden_config).__doc__,
    }
    if base is OneOfConfig:
        # A number in place of a learning rate is the base rate of its schedule.
        body["main_fields"] = LrConfig.main_fields
    for name, value in values.items():
        annotation, default = _build_field(garden_config, base, name, value, enclosing_classes)
        annotations[name] = annotation
        if isinstance(default, (list, dict)):
            # Each object gets a copy of its own.
            factory = functools.partial(copy.deepcopy, default)
            body[name] = Field(default_factory=factory, validate_default=True)
        else:
            body[name] = Field(default=default, validate_default=True)

    name = type(garden_config).__name__
    bases = (MirrorMixin, base)
    cls = types.new_class(name, bases, exec_body=lambda namespace: namespace.update(body))
    return configclass(cls)


def _iterate_fields(garden_config: TheirConfig) -> Iterator[tuple[str, object]]:
    """Yields the names and values of the fields."""
    for name, value in vars(garden_config).items():
        if name not in garden_config.RESERVED_ATTR:
            yield name, value


def _build_field(
    garden_config: TheirConfig,
    base: type[Config],
    name: str,
    value: object,
    enclosing_classes: tuple[type, ...],
) -> tuple[object, object]:
    """Returns the annotation and the default value of a field in the mirror of `garden_config`."""
    hints = get_field_hints(garden_config.__class__)
    base_fields = get_fields(base)
    hint: Any = hints.get(name, Any)

    # A field of `base` keeps the type that trainer_kit gives it. A value that is a Config is a
    # section that `changes` has.
    is_mirrored = isinstance(value, Config)
    is_ours_alone = name not in hints and not is_mirrored
    is_section = isinstance(value, (Config, TheirConfig))
    if name in base_fields and (is_ours_alone or not is_section):
        field = base_fields[name]
        if isinstance(value, TheirConfig):
            # The changes of a section that only trainer_kit has.
            default = field.get_default(call_default_factory=True)
            default_values = {}
            if isinstance(default, Config):
                default_values = default.as_dict()
            changed_values = value.as_dict()
            value = {**default_values, **changed_values}
        if field.metadata:
            return Annotated[(field.annotation, *field.metadata)], value
        return field.annotation, value

    if base is OneOfConfig and name == "type":
        return _type_annotation(garden_config, value), value

    section = value
    if isinstance(value, TheirConfig):
        with prefix_mistakes(name):
            section = _create_mirror(value, Config, {}, enclosing_classes)
    if isinstance(section, Config):
        if base is OneOfConfig:
            # OneOfConfig creates the section that is chosen.
            return type(section) | None, None
        alternatives = get_section_alternatives(hint)
        return Union[(type(section), *alternatives)], section

    section_class = optional_section(hint)
    if value is None and section_class is not None and section_class not in enclosing_classes:
        # A class whose fields have no defaults has no mirror.
        unset_section: TheirConfig | None = None
        with contextlib.suppress(TypeError):
            unset_section = section_class()
        if unset_section is not None:
            section_classes = (*enclosing_classes, section_class)
            unset_mirror = _create_mirror(unset_section, Config, {}, section_classes)
            return type(unset_mirror) | None, None

    if isinstance(value, (list, tuple)):
        item_class = find_list_section(hint)
        if item_class is not None:
            item_classes = (*enclosing_classes, item_class)
            default_item = _create_mirror(item_class(), Config, {}, item_classes)
            mirror_class = type(default_item)
            # Items may have further fields, such as those of a task's config.
            with contextlib.suppress(FieldError):
                items = [mirror_class(**item.as_dict()) for item in value]
                return list[mirror_class], items  # type: ignore[valid-type]

    # Model Garden does not check its annotations: some defaults do not match them.
    value = _convert_to_plain(value)
    annotation = _WIDER.get(name) or translate_annotation(hint)
    if not matches_annotation(value, annotation):
        annotation = Any
    return annotation, value


def _type_annotation(garden_config: TheirConfig, value: object) -> object:
    """Returns the annotation of a OneOfConfig's `type`.

    These are the names of its sections, if it chooses between sections.
    """
    branches = []
    others = []
    for name, field in _iterate_fields(garden_config):
        if isinstance(field, TheirConfig):
            branches.append(name)
        elif name != "type":
            others.append(name)

    # The chosen field may be one without a section.
    if not branches or value in others:
        return Any
    return Literal[tuple(branches)] | None


def _unlock(garden_config: TheirConfig | list[Any] | tuple[Any, ...]) -> None:
    """Unlocks a config, or a list of configs, with all sections."""
    values: Iterable[object] = garden_config
    if isinstance(garden_config, TheirConfig):
        values = vars(garden_config).values()
    for value in values:
        if isinstance(value, (list, tuple, TheirConfig)):
            _unlock(value)
    if isinstance(garden_config, TheirConfig):
        garden_config._locked = False


def _build_cache_key(value: object) -> Hashable:
    """Returns a cache key, equal for values that give the same mirror."""
    if isinstance(value, TheirConfig):
        fields = dict(vars(value))
        # Whether a config is locked does not matter for its mirror.
        fields.pop("_locked", None)
        return type(value), _build_cache_key(fields)
    if isinstance(value, dict):
        entries = []
        for name, entry in value.items():
            entry_key = _build_cache_key(entry)
            entries.append((name, entry_key))
        return tuple(entries)
    if isinstance(value, (list, tuple)):
        items = [_build_cache_key(item) for item in value]
        return type(value), tuple(items)
    if isinstance(value, (Config, *TheirConfig.IMMUTABLE_TYPES)):
        return type(value), repr(value)
    # A new object is equal to no other: such a value has no text by which it can be compared.
    return id(value), object()


def _convert_to_plain(value: object) -> object:
    if isinstance(value, TheirConfig):
        return value.as_dict()
    if isinstance(value, (list, tuple)):
        items = [_convert_to_plain(item) for item in value]
        return type(value)(items)
    return value


def _changes(
    before: dict[str, Any], after: dict[str, Any], garden_config: object
) -> dict[str, Any]:
    """Returns the values of a section that differ, as a nested dict.

    They have tuples where the original has tuples.

    Args:
      before: The values of the mirror when it was created.
      after: The values of the mirror.
      garden_config: The original object, or None.
    """
    changes: dict[str, Any] = {}
    for name, value in after.items():
        old = before.get(name)
        original_value = getattr(garden_config, name, None)
        was_section = isinstance(old, dict) or isinstance(original_value, TheirConfig)
        if isinstance(value, dict) and was_section:
            inner_changes = _changes(old or {}, value, original_value)
            if inner_changes:
                changes[name] = inner_changes
            continue

        # True == 1, but a field may take both.
        is_other_type = isinstance(value, bool) != isinstance(old, bool)
        if name not in before or value != old or is_other_type:
            if isinstance(value, list) and isinstance(original_value, tuple):
                value = tuple(value)
            changes[name] = value
    return changes


@functools.cache
def get_field_hints(section_class: type[TheirConfig]) -> dict[str, Any]:
    """Returns the annotations of a Model Garden config class by field.

    Cached, because finding them is costly.
    """
    return get_type_hints(section_class)


def optional_section(hint: object) -> type[TheirConfig] | None:
    """Returns the class of a section that may be None.

    None for any other field, and for a class without fields.
    """
    all_members = _get_union_members(hint)
    members = [member for member in all_members if member is not type(None)]
    if len(members) != 1:
        return None
    (member,) = members
    # The base class itself has no fields.
    if member is TheirConfig or not _is_section(member):
        return None
    return member


def find_list_section(hint: object) -> type[TheirConfig] | None:
    """Returns the class of the sections in a list. None if `hint` is not a list of sections."""
    item_types = []
    for member in _get_union_members(hint):
        if get_origin(member) in (list, tuple, collections.abc.Sequence):
            item_types.append(get_args(member)[0])
    if len(item_types) != 1:
        return None
    (item_type,) = item_types
    if not _is_section(item_type):
        return None
    return item_type


def get_section_alternatives(hint: object) -> list[Any]:
    """Returns the annotations that `hint` allows in place of a section, None included."""
    if not _is_union(hint):
        return []
    others = [member for member in get_args(hint) if not _is_section(member)]
    return [translate_annotation(member) for member in others]


def translate_annotation(hint: object) -> Any:
    """Returns `hint` without Model Garden's own types.

    A section becomes a mapping, any other object becomes Any.
    """
    origin = get_origin(hint)
    args = get_args(hint)
    if _is_union(hint):
        members = [translate_annotation(arg) for arg in args]
        return Union[tuple(members)]  # noqa: UP007
    if origin is tuple:
        items = []
        for arg in args:
            item = arg
            if arg is not Ellipsis:
                item = translate_annotation(arg)
            items.append(item)
        return types.GenericAlias(tuple, tuple(items))
    if origin in (list, collections.abc.Sequence):
        item = translate_annotation(args[0])
        return types.GenericAlias(list, (item,))
    if _is_section(hint):
        return dict[str, Any]
    return hint if hint in _SCALARS else Any


def matches_annotation(value: object, hint: Any) -> bool:
    """Whether `value` matches a translated annotation."""
    try:
        adapter = TypeAdapter(hint, config=_ARBITRARY)
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def _get_union_members(hint: object) -> tuple[Any, ...]:
    """Returns the alternatives of a union, or only `hint`."""
    if _is_union(hint):
        return get_args(hint)
    return (hint,)


def _is_union(hint: object) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _is_section(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, TheirConfig)
