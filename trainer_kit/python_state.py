"""What plain Python code changes beside its return value: in a graph that happens once, while it is traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_LARGE = 1000  # items of a container that is not searched for others: a data set, hardly what is being aggregated
_ABSENT = object()


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


def _put_back(one: Any, before: dict[str, Any]) -> Iterator[str]:
    """Puts attributes back one by one, since other threads may read them, and yields the names of those it had to."""
    attributes = vars(one)
    for name in {*attributes, *before}:
        value = before.get(name, _ABSENT)
        if attributes.get(name, _ABSENT) is value:
            continue
        if value is _ABSENT:
            del attributes[name]
        else:
            attributes[name] = value
        yield f"{type(one).__name__}.{name}"


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
