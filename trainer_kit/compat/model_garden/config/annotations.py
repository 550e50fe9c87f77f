"""Translates the annotations of Model Garden's config classes into those of trainer_kit's."""

from __future__ import annotations

import collections.abc
import functools
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from official.modeling.hyperparams.base_config import Config as TheirConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError

_ARBITRARY = ConfigDict(arbitrary_types_allowed=True)
_SCALARS = (int, float, bool, str, type(None))


@functools.cache
def hints_of(section_class: type[TheirConfig]) -> dict[str, Any]:
    """Returns the annotations of a Model Garden config class by field; cached, because finding them is costly."""
    return get_type_hints(section_class)


def is_optional(hint: Any) -> bool:
    """Whether `hint` is a union that includes None."""
    return _is_union(hint) and type(None) in get_args(hint)


def optional_section(hint: Any) -> type[TheirConfig] | None:
    """Returns the class of a section that may be None; None for any other field, and for a class without fields."""
    arms = [arm for arm in get_args(hint) if arm is not type(None)] if is_optional(hint) else [hint]
    return arms[0] if len(arms) == 1 and _is_section(arms[0]) and arms[0] is not TheirConfig else None


def listed_section(hint: Any) -> type[TheirConfig] | None:
    """Returns the class of the sections in a list; None if `hint` is not a list of sections."""
    arms = get_args(hint) if is_optional(hint) else (hint,)
    items = [get_args(arm)[0] for arm in arms if get_origin(arm) in (list, tuple, collections.abc.Sequence)]
    return items[0] if len(items) == 1 and _is_section(items[0]) else None


def beside_section(hint: Any) -> list[Any]:
    """Returns the annotations of the alternatives that `hint` allows in place of a section, None included."""
    return [annotation(arm) for arm in get_args(hint) if not _is_section(arm)] if _is_union(hint) else []


def annotation(hint: Any) -> Any:
    """Returns `hint` without Model Garden's own types: a section becomes a mapping, any other object becomes Any."""
    origin, args = get_origin(hint), get_args(hint)
    if _is_union(hint):
        return Union[tuple(annotation(arg) for arg in args)]  # noqa: UP007
    if origin is tuple:
        return types.GenericAlias(tuple, tuple(arg if arg is Ellipsis else annotation(arg) for arg in args))
    if origin in (list, collections.abc.Sequence):
        return types.GenericAlias(list, (annotation(args[0]),))
    if _is_section(hint):
        return dict[str, Any]
    return hint if hint in _SCALARS else Any


def fits(value: Any, hint: Any) -> bool:
    """Whether `value` matches a translated annotation."""
    try:
        TypeAdapter(hint, config=_ARBITRARY).validate_python(value)
    except ValidationError:
        return False
    return True


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, TheirConfig)
