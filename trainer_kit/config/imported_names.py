"""Imports the object that a config names as "module:name", such as a callback or a trainer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from trainer_kit.errors import UsageError, suggest_names


def import_object(
    field: str, name: str, is_expected_kind: Callable[[object], bool], kind: str
) -> Any:
    """Returns the object that `name` names. Its module is imported.

    Args:
      field: The field of the config, for messages.
      name: The name, "module:name".
      is_expected_kind: Whether an object is of the kind that the field takes.
      kind: This kind, for messages: "subclass of trainer_kit.Callback".

    Raises:
      UsageError: When the name has another form, there is no such module, or the module has no such
        object.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute) or module.startswith("."):
        raise UsageError(f"{field}: {name!r} names no {kind}; write it as module:name")

    try:
        imported = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        # The module exists, and imports one that does not.
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"{field}: there is no module {module!r} ({error}); write {kind} as module:name"
        ) from None

    if not is_expected_kind(imported):
        contents = vars(sys.modules[module])
        names = [other for other, value in contents.items() if is_expected_kind(value)]
        raise UsageError(
            f"{field}: {module} has no {kind} called {attribute!r};"
            f" {suggest_names(attribute, names)}"
        )
    return imported
