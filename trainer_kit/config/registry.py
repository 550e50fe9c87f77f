"""A generic registry of names, which may have parts such as `a/b/c`.

A failed lookup lists the nearest names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from trainer_kit.errors import UsageError, suggest_names

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

        A function or class of a notebook replaces itself when its cell runs again.

        Raises:
          UsageError: When the name is empty, has an empty part, or is taken.
        """
        if not name or any(not part for part in name.split("/")):
            raise UsageError(
                f"{name!r} is not a name for a {self.kind}: use words separated by single slashes"
            )

        def add(entry: Entry) -> Entry:
            if name in self._entries and not is_redefinition(self._entries[name], entry):
                raise UsageError(
                    f"the {self.kind} {name!r} is registered already, by"
                    f" {_format_qualified_name(self._entries[name])};"
                    f" {_format_qualified_name(entry)} needs another name"
                )
            self._entries[name] = entry
            return entry

        return add

    def lookup(self, name: str) -> Entry:
        """Returns the entry called `name`.

        Raises:
          UsageError: When there is none. The message contains the nearest names.
        """
        if name not in self._entries:
            raise UsageError(
                f"no {self.kind} is called {name!r}; {suggest_names(name, self.names())}"
            )
        return self._entries[name]

    def names(self) -> list[str]:
        """Returns all registered names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries


def is_redefinition(old: object, new: object) -> bool:
    """Whether `new` redefines `old`, as when a cell of a notebook runs again."""
    new_name = _format_qualified_name(new)
    return new_name.startswith("__main__.") and new_name == _format_qualified_name(old)


def _format_qualified_name(entry: object) -> str:
    # The branch of a choice is known by the function that builds it.
    entry = getattr(entry, "build", entry)
    module = getattr(entry, "__module__", "?")
    name = getattr(entry, "__qualname__", type(entry).__name__)
    return f"{module}.{name}"
