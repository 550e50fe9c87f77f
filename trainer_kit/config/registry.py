"""A generic registry of names; a failed lookup lists the nearest names.

Names may have parts, such as `a/b/c`. A name that another one begins with (`a/b` and `a/b/c`) is refused, so that a
lookup never meets a folder where an object is expected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from trainer_kit.errors import UsageError, suggestion

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Maps names to objects of one kind.

    Args:
      kind: The kind of the entries, for messages: "experiment", "task".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Returns a decorator that registers what it decorates under `name`.

        Raises:
          UsageError: when the name is empty or taken, or one name is the beginning of the other.
        """
        if not name or any(not part for part in name.split("/")):
            raise UsageError(f"{name!r} is not a name for a {self.kind}: use words separated by single slashes")

        def add(entry: Entry) -> Entry:
            if name in self._entries:
                raise UsageError(
                    f"the {self.kind} {name!r} is registered already, by {_whence(self._entries[name])}; "
                    f"{_whence(entry)} needs another name"
                )
            for other in self._entries:
                if other.startswith(name + "/") or name.startswith(other + "/"):
                    raise UsageError(
                        f"the {self.kind} name {name!r} clashes with {other!r}: one would be inside the other"
                    )
            self._entries[name] = entry
            return entry

        return add

    def lookup(self, name: str) -> Entry:
        """Returns the entry called `name`.

        Raises:
          UsageError: when there is none; the message has the nearest names.
        """
        if name in self._entries:
            return self._entries[name]
        inside = [known for known in self.names() if known.startswith(name + "/")]
        if inside:
            raise UsageError(f"{name!r} is not a whole {self.kind} name; these begin with it: {', '.join(inside[:5])}")
        raise UsageError(f"no {self.kind} is called {name!r}; {suggestion(name, self.names())}")

    def names(self) -> list[str]:
        """Returns all registered names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries


def _whence(entry: object) -> str:
    return f"{getattr(entry, '__module__', '?')}.{getattr(entry, '__qualname__', type(entry).__name__)}"
