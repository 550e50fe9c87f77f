"""Model Garden's config objects as config classes of ours, and back.

Their classes take any value for any key. A mirror is a config class of ours with the fields of one of their objects, so
that overrides are checked, mistakes named, origins kept and changes at a resume found as for any other experiment.
Their tasks never see it: they get a copy of their own object, with the changes on it.
"""

from __future__ import annotations

import collections.abc
import copy
import functools
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from official.modeling.hyperparams.base_config import Config as TheirConfig
from official.modeling.hyperparams.oneof import OneOfConfig as TheirOneOfConfig
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from trainer_kit.config.base import Config, OneOfConfig, configclass
from trainer_kit.config.sections import fields_of
from trainer_kit.errors import ConfigError, Mistake

_ARBITRARY = ConfigDict(arbitrary_types_allowed=True)
_WIDER = {  # what they declare more narrowly than their own files and configs are
    "input_size": list[int | None],
    "include_in_weight_decay": list[str] | str | None,
    "exclude_from_weight_decay": list[str] | str | None,
}
_originals: dict[type[Config], tuple[TheirConfig, dict[str, Any]]] = {}


def mirror(theirs: TheirConfig, base: type[Config] = Config, **changes: Any) -> Any:
    """Returns a config of ours with the fields and the values of `theirs`.

    Args:
      theirs: any of their config objects; a copy of it is kept for `original`.
      base: the config class of ours that it is one of; the fields that both have are typed as ours.
      **changes: values of fields that are something else here.

    Raises:
      ConfigError: when `base` does not allow a value of theirs.
    """
    cls = _mirror_class(theirs, base, changes)
    try:
        mirrored = cls()
    except ValidationError as error:
        raise ConfigError(_mistakes(theirs, error)) from None
    _originals[cls] = (copy.deepcopy(theirs), mirrored.as_dict())
    return mirrored


def original(mirrored: Config) -> Any:
    """Returns a config object of theirs, like the one that `mirrored` was made from, with the values it has now.

    Raises:
      ConfigError: when their class does not take a value.
    """
    kept, before = _originals[type(mirrored)]
    theirs = copy.deepcopy(kept)
    theirs._locked = False
    changed = _with_tuples(_changed(before, mirrored.as_dict()), theirs)
    try:
        theirs.override(changed, is_strict=False)  # the mirror was strict, and has options that only our engine knows
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = str(error.args[0]) if error.args else type(error).__name__
        problem = f"{type(theirs).__name__} of Model Garden does not take {changed}"
        raise ConfigError([Mistake("", problem, reason)]) from error
    return theirs


def _mirror_class(theirs: TheirConfig, base: type[Config], changes: dict[str, Any]) -> type[Config]:
    values = {**dict(_values(theirs)), **changes}
    if base is Config and isinstance(theirs, TheirOneOfConfig):
        base = OneOfConfig
    fields = {name: _field(theirs, base, name, value) for name, value in values.items()}
    body = {
        "__annotations__": {name: annotation for name, (annotation, _) in fields.items()},
        "__module__": __name__,
        "__doc__": type(theirs).__doc__,
        **{name: _default(value) for name, (_, value) in fields.items()},
    }
    made = types.new_class(type(theirs).__name__, (base,), exec_body=lambda namespace: namespace.update(body))
    return configclass(made)


def _values(theirs: TheirConfig) -> Iterator[tuple[str, Any]]:
    for name, value in vars(theirs).items():
        if name not in theirs.RESERVED_ATTR:
            yield name, value


def _field(theirs: TheirConfig, base: type[Config], name: str, value: Any) -> tuple[Any, Any]:
    """Returns annotation and default value of a field of the mirror of `theirs`."""
    hint = typing.get_type_hints(type(theirs)).get(name, Any)
    if name in fields_of(base) and not isinstance(value, (Config, TheirConfig)):
        known = fields_of(base)[name]
        return Annotated[(known.annotation, *known.metadata)] if known.metadata else known.annotation, value
    if base is OneOfConfig and name == "type":
        branches = tuple(name for name, one in _values(theirs) if isinstance(one, TheirConfig))
        return (Literal[branches] | None if branches and value in (None, *branches) else Any), value
    section = mirror(value) if isinstance(value, TheirConfig) else value
    if isinstance(section, Config):
        if base is OneOfConfig:
            return type(section) | None, None  # OneOfConfig makes the one that is chosen
        return (type(section) | None if _is_optional(hint) else type(section)), section
    if value is None and (section_class := _optional_section(hint)) is not None:
        return type(mirror(section_class())) | None, None
    if isinstance(value, (list, tuple)) and (item_class := _listed_section(hint)) is not None:
        listed = type(mirror(item_class()))
        return list[listed], [listed(**item.as_dict()) for item in value]  # type: ignore[valid-type]
    value = _plain(value)
    annotation = _WIDER.get(name) or _annotation(hint)
    return (annotation if _fits(value, annotation) else Any), value


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def _optional_section(hint: Any) -> type[TheirConfig] | None:
    """The class of a section of theirs that may be missing; None for any other field, and for one without fields."""
    arms = [arm for arm in get_args(hint) if arm is not type(None)] if _is_optional(hint) else [hint]
    section = arms[0] if len(arms) == 1 and isinstance(arms[0], type) else None
    if section is None or section is TheirConfig or not issubclass(section, TheirConfig):
        return None
    return section


def _listed_section(hint: Any) -> type[TheirConfig] | None:
    """The class of the sections in a list of theirs; None for a list of anything else."""
    arms = get_args(hint) if _is_optional(hint) else (hint,)
    items = [get_args(arm)[0] for arm in arms if get_origin(arm) in (list, tuple, collections.abc.Sequence)]
    section = items[0] if len(items) == 1 and isinstance(items[0], type) else None
    return section if section is not None and issubclass(section, TheirConfig) else None


def _annotation(hint: Any) -> Any:
    """Returns `hint` with what only they know replaced: their sections by mappings, objects by anything."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return Union[tuple(_annotation(arg) for arg in args)]  # noqa: UP007
    if origin is tuple:
        return types.GenericAlias(tuple, tuple(arg if arg is Ellipsis else _annotation(arg) for arg in args))
    if origin in (list, collections.abc.Sequence):
        return types.GenericAlias(list, (_annotation(args[0]),))
    if isinstance(hint, type) and issubclass(hint, TheirConfig):
        return dict[str, Any]
    return hint if hint in (int, float, bool, str, type(None)) else Any


def _fits(value: Any, annotation: Any) -> bool:
    try:
        TypeAdapter(annotation, config=_ARBITRARY).validate_python(value)
    except ValidationError:
        return False
    return True


def _plain(value: Any) -> Any:
    if isinstance(value, TheirConfig):
        return value.as_dict()
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value


def _default(value: Any) -> Any:
    if isinstance(value, (list, dict)):
        return Field(default_factory=functools.partial(copy.deepcopy, value))
    return Field(default=value, validate_default=True)


def _changed(before: Any, after: Any) -> Any:
    """Returns what differs between two nested dicts, as nested dicts of the new values."""
    changed = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := _changed(old, value):
                changed[name] = inner
        elif name not in before or value != old or isinstance(value, bool) != isinstance(old, bool):
            changed[name] = value
    return changed


def _with_tuples(changed: dict[str, Any], theirs: Any) -> dict[str, Any]:
    """Returns new values with tuples where theirs are: a config of ours has lists, and their code may add tuples."""
    typed: dict[str, Any] = {}
    for name, value in changed.items():
        now = getattr(theirs, name, None)
        if isinstance(value, dict) and isinstance(now, TheirConfig):
            typed[name] = _with_tuples(value, now)
        else:
            typed[name] = tuple(value) if isinstance(value, list) and isinstance(now, tuple) else value
    return typed


def _mistakes(theirs: TheirConfig, error: ValidationError) -> list[Mistake]:
    found = []
    for one in error.errors(include_url=False):
        path = ".".join(str(part) for part in one["loc"])
        problems = one["ctx"]["broken"] if one["type"] == "rules" else [(path, one["msg"])]
        origin = f"{type(theirs).__module__}.{type(theirs).__name__}"
        found += [Mistake(name, message, "", origin) for name, message in problems]
    return found
