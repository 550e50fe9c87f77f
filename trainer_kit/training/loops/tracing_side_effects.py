"""SideEffects: undoes the changes that Python code made to objects while it was traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_LARGE = 1000  # containers with more items are not searched for nested ones: they are data, not an aggregated state
_ABSENT: Any = object()


class SideEffects:
    """Remembers the attributes of objects, and the contents of the lists, dicts and sets in them, also nested ones.

    Args:
      objects: The objects whose attributes are remembered.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._attributes = [(one, dict(vars(one))) for one in objects]
        self._contents = [(*found, _items(found[1])) for one in objects for found in _containers(one)]

    def restore(self) -> list[str]:
        """Undoes all changes since, and returns the names of the changed attributes."""
        changed = [name for one, before in self._attributes for name in _put_back(one, before)]
        for name, container, before in self._contents:
            if not _same(_items(container), before):
                changed.append(name)
                container.clear()
                container.extend(before) if isinstance(container, list) else container.update(before)
        return sorted(set(changed))


def _put_back(one: Any, before: dict[str, Any]) -> list[str]:
    """Restores changed attributes one by one, since other threads may read them; returns their names."""
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
    """Whether two containers hold the same objects; by identity, since the objects may not be comparable."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
