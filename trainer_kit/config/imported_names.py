"""Imports the object that a config names as "module:name", such as a callback, a trainer or a function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from trainer_kit.errors import UsageError, suggest_names


def import_object(field: str, name: str, is_expected_kind: Callable[[Any], bool], kind: str) -> Any:
    """Returns the object that `name` names; its module is imported.

    Args:
      field: The field of the config, for messages.
      name: The name, "module:name".
      is_expected_kind: Whether an object is of the kind that the field takes.
      kind: This kind, for messages: "subclass of trainer_kit.Callback".

    Raises:
      UsageError: when the name has another form, or there is no such module, or no such object in
        it.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute) or module.startswith("."):
        raise UsageError(f"{field}: {name!r} names no {kind}; write it as module:name")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports something that is not
        raise UsageError(
            f"{field}: there is no module {module!r} ({error}); write {kind} as module:name"
        ) from None
    if not is_expected_kind(found):
        names = [
            each for each, value in vars(sys.modules[module]).items() if is_expected_kind(value)
        ]
        raise UsageError(
            f"{field}: {module} has no {kind} called {attribute!r}; {suggest_names(attribute, names)}"
        )
    return found
