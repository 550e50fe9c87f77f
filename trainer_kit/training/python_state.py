"""What plain Python code changes beside its return value: in a graph that happens once, while it is traced."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer_kit.errors.user_frames import is_framework

_LARGE = 1000  # items of a container that is not searched for others: a data set, hardly what is being aggregated
_COMPARED = 100  # items of a container that are compared, those of nested ones included: it is done for each loop
_ABSENT: Any = object()


class PythonState:
    """Remembers the attributes of objects, and what the lists, dicts and sets in them hold, nested ones included.

    Args:
      objects: whose attributes are remembered.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._attributes = [(one, dict(vars(one))) for one in objects]
        self._contents = [(*found, _items(found[1])) for one in objects for found in _containers(one)]

    def restore(self) -> list[str]:
        """Undoes what has changed since, and returns the names of the attributes that had."""
        changed = [name for one, before in self._attributes for name in _put_back(one, before)]
        for name, container, before in self._contents:
            if not _same(_items(container), before):
                changed.append(name)
                container.clear()
                container.extend(before) if isinstance(container, list) else container.update(before)
        return sorted(set(changed))


def _put_back(one: Any, before: dict[str, Any]) -> list[str]:
    """Puts attributes back one by one, since other threads may read them; returns the names of those it had to."""
    now = vars(one)
    names = [name for name in {*now, *before} if now.get(name, _ABSENT) is not before.get(name, _ABSENT)]
    for name in names:
        if name in before:
            now[name] = before[name]
        else:
            del now[name]
    return [f"{type(one).__name__}.{name}" for name in names]


def _containers(one: Any) -> Iterator[tuple[str, Any]]:
    """Yields every container in the attributes, once, with the name of its attribute."""
    seen: set[int] = set()
    left = [(f"{type(one).__name__}.{name}", value) for name, value in vars(one).items()]
    while left:
        name, value = left.pop()
        if not isinstance(value, (list, dict, set, tuple)) or id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, tuple):
            yield name, value
        if len(value) <= _LARGE:
            left += [(name, item) for item in (value.values() if isinstance(value, dict) else value)]


def _items(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _same(one: Any, other: Any) -> bool:
    """Whether both hold the same objects; by identity, since what they hold may not be comparable."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


class PlainValues:
    """Watches the numbers, texts and containers of such that an object holds in its attributes.

    What appears, or was None, is no change: so do caches begin. Of objects in the attributes, those of the user's own
    classes are looked into as well.

    Args:
      one: the object.
    """

    def __init__(self, one: Any) -> None:
        self._one = one
        self._values = _plain_values(one)

    def changed(self) -> list[str]:
        """Returns the names of the attributes whose values have changed since the last call."""
        before, self._values = self._values, _plain_values(self._one)
        both = before.keys() & self._values.keys()
        return sorted(f"{type(self._one).__name__}.{name}" for name in both if before[name] != self._values[name])


def _plain_values(one: Any, depth: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in _attributes(one).items():
        plain = _plain(value, [_COMPARED])
        if plain is not _ABSENT and value is not None:
            found[name] = plain
        elif depth and _is_users(type(value)):
            found.update((f"{name}.{inner}", plain) for inner, plain in _plain_values(value, depth - 1).items())
    return found


def _attributes(one: Any) -> dict[str, Any]:
    """Returns the attributes of an object by name, with those that its own class gives a first value."""
    classes = [vars(kind) for kind in reversed(type(one).__mro__) if _is_users(kind)]
    first = {name: value for one in classes for name, value in one.items() if not name.startswith("__")}
    return {**first, **getattr(one, "__dict__", {})}


def _plain(value: Any, left: list[int]) -> Any:
    """Returns a copy of a plain value that can be compared, _ABSENT for any other.

    Args:
      value: of an attribute.
      left: how many more items may be copied; of a container with more, its length is returned.
    """
    left[0] -= 1
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value if value == value else "NaN"  # NaN is not equal to itself
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        items: Any = (part for pair in value.items() for part in pair)
    elif type(value) in (list, tuple, set):
        items = value
    elif type(value).__module__ == "numpy" and getattr(value, "nbytes", _LARGE) < _LARGE:
        return (value.shape, value.tobytes())
    else:
        return _ABSENT
    if len(value) > left[0]:
        return _ABSENT if any(_plain(part, [1]) is _ABSENT for part in itertools.islice(items, 2)) else len(value)
    parts = [_plain(part, left) for part in (sorted(items, key=repr) if isinstance(value, set) else items)]
    return _ABSENT if any(part is _ABSENT for part in parts) else parts


def _is_users(kind: type) -> bool:
    """Whether a class is neither TensorFlow's, Keras' or Python's own nor made from one of TensorFlow or Keras."""
    tops = {one.__module__.partition(".")[0] for one in kind.__mro__}
    return not tops & {"tensorflow", "keras", "tf_keras"} and not is_framework(kind.__module__)
