"""Values that an optimizer has for each of its variables, and what patterns of variables' paths find."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import keras
import tensorflow as tf

from trainer_kit.distribution.keras_internals import variable_index
from trainer_kit.errors import UsageError, near_names

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class PerVariable(Generic[Value]):
    """A value for each variable of an optimizer, in the order in which the optimizer was built with them.

    TensorFlow would track a tuple that is an attribute of an optimizer, but not this.
    """

    values: tuple[Value, ...]

    def of(self, optimizer: keras.Optimizer, variable: Any) -> Value:
        """Returns the value of `variable`; also of a replica's part of it, inside `update_step`."""
        return self.values[variable_index(optimizer, variable)]


def native_variable(variable: Any) -> tf.Variable:
    """Returns the tf.Variable behind a Keras 3 variable; any other variable unchanged."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def variable_path(variable: Any) -> str:
    """Returns the path of a Keras 3 variable, or the name of a tf.Variable without its ":0"."""
    return str(getattr(variable, "path", None) or variable.name.split(":")[0])


def similar_paths(pattern: str, paths: Sequence[str], most: int = 8) -> list[str]:
    """Returns the paths that a pattern without a match was most likely meant for; the first ones if none is similar."""
    parts = {part for path in paths for part in (path, *path.split("/"))}
    words = [word for word in re.split(r"[^\w/]+", pattern) if word]
    near = {name for word in words for name in near_names(word, parts)}
    found = [path for path in paths if path in near or near & set(path.split("/"))]
    return list(found or paths)[:most]


def check_patterns(option: str, patterns: Iterable[str], paths: Sequence[str], of: str = "the model") -> None:
    """Checks that each pattern is found in one of the paths.

    Args:
      option: The flag or the path of the config value that gives the patterns, for messages.
      patterns: Regular expressions.
      paths: The paths of the variables.
      of: Whose variables these are, for messages.

    Raises:
      UsageError: when a pattern is not found.
    """
    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            near = ", ".join(similar_paths(pattern, paths))
            raise UsageError(f"{option}: no variable of {of} matches {pattern!r}; similar ones are: {near}")
