"""Nested dicts of logs: one leaf by its path, and every leaf cast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainer_kit.errors import suggestion


def get_leaf_nested_dict(d: dict[str, Any], keys: Sequence[str]) -> Any:
    """Returns the leaf of nested dicts that a path of keys leads to.

    Args:
      d: the outermost dict.
      keys: one for each dict on the way, the outermost first.

    Raises:
      KeyError: when there is no such path, with the near names where it ends, or when it leads to a dict.
    """
    leaf: Any = d
    for depth, key in enumerate(keys):
        if not isinstance(leaf, dict):
            raise _no_path(keys, f"{_path(keys[:depth])} is {leaf!r}, which has no entry {key!r}")
        if key not in leaf:
            advice = suggestion(str(key), [str(known) for known in leaf])
            raise _no_path(keys, f"there is no {key!r} in {_path(keys[:depth]) or 'the dict'}; {advice}")
        leaf = leaf[key]
    if isinstance(leaf, dict):
        advice = f"it has: {', '.join(map(str, leaf))}" if leaf else "it is empty"
        reason = f"{_path(keys) or 'the path'} leads to a dict, not to a value; {advice}"
        raise KeyError(f"The value extracted with keys {list(keys)} is not a leaf: {reason}")
    return leaf


def _no_path(keys: Sequence[str], reason: str) -> KeyError:
    return KeyError(f"Path not exist while traversing the dictionary with keys {list(keys)}: {reason}")


def cast_leaf_nested_dict(d: dict[str, Any], cast_fn: Callable[[Any], Any]) -> dict[str, Any]:
    """Replaces every leaf of nested dicts by what `cast_fn` makes of it, in place, and returns `d` itself."""
    for key, value in d.items():
        d[key] = cast_leaf_nested_dict(value, cast_fn) if isinstance(value, dict) else cast_fn(value)
    return d


def _path(keys: Sequence[str]) -> str:
    return "|".join(map(str, keys))
