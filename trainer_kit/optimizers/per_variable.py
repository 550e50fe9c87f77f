"""Values that an optimizer has for each of its variables, and patterns of variables' paths."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import keras

from trainer_kit.errors import UsageError, find_similar_names
from trainer_kit.runtime.keras_internals import get_variable_index
from trainer_kit.typing import Variable

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class PerVariable(Generic[Value]):
    """A value for each variable of an optimizer, in the order of `build`.

    TensorFlow would track a tuple that is an attribute of an optimizer, but not this class.
    """

    values: tuple[Value, ...]

    def get_value(self, optimizer: keras.Optimizer, variable: Variable) -> Value:
        """Returns the value of `variable`; also of a replica's part of it, inside `update_step`."""
        index = get_variable_index(optimizer, variable)
        return self.values[index]


def variable_path(variable: Variable) -> str:
    """Returns the path of a Keras 3 variable, or the name of a tf.Variable without its ":0"."""
    path = getattr(variable, "path", None)
    if not path:
        path = variable.name.split(":")[0]
    return str(path)


def matches_any(path: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns, regular expressions, is found in a path."""
    return any(re.search(pattern, path) for pattern in patterns)


def is_found(pattern: str, paths: Iterable[str]) -> bool:
    """Whether a pattern, a regular expression, is found in one of the paths."""
    return any(re.search(pattern, path) for path in paths)


def similar_paths(pattern: str, paths: Sequence[str], limit: int = 8) -> list[str]:
    """Returns the paths that a pattern without a match was most likely meant for.

    If no path is similar, these are the first paths.
    """
    parts: set[str] = set()
    for path in paths:
        parts.add(path)
        parts.update(path.split("/"))

    # The words of a pattern are what is between its special characters.
    similar_parts: set[str] = set()
    for word in re.split(r"[^\w/]+", pattern):
        if word:
            similar_parts.update(find_similar_names(word, parts))

    similar = []
    for path in paths:
        path_parts = {path, *path.split("/")}
        if path_parts & similar_parts:
            similar.append(path)
    listed_paths = list(similar or paths)
    return listed_paths[:limit]


def check_patterns(
    option: str, patterns: Iterable[str], paths: Sequence[str], owner: str = "the model"
) -> None:
    """Checks that each pattern is found in one of the paths.

    Args:
      option: The flag or the path of the config value that gives the patterns, for messages.
      patterns: Regular expressions.
      paths: The paths of the variables.
      owner: The owner of the variables, for messages.

    Raises:
      UsageError: when a pattern is not found.
    """
    for pattern in patterns:
        if not is_found(pattern, paths):
            near_paths = similar_paths(pattern, paths)
            near = ", ".join(near_paths)
            raise UsageError(
                f"{option}: no variable of {owner} matches {pattern!r}; similar ones are: {near}"
            )


class SlotOptimizer(keras.optimizers.Optimizer):
    """An optimizer with named slots, which begin at 0.

    Attributes:
      slot_names: The names of the slots of a variable.
      argument_names: The names of the arguments of the subclass, which are attributes too, for
        `get_config`.
    """

    slot_names: ClassVar[tuple[str, ...]] = ()
    argument_names: ClassVar[tuple[str, ...]] = ()

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the slots for `variables`; called in strategy scope."""
        if self.built:
            return
        super().build(variables)
        slot_names = list(self.slot_names)
        slots_by_name = self.add_optimizer_variables(variables, slot_names)
        self.slots = [list(slots) for slots in slots_by_name]

    def get_slots(self, variable: Variable) -> list[keras.Variable]:
        """Returns the slots of a variable, in the order of `slot_names`.

        Also inside `update_step`, on a replica.
        """
        index = get_variable_index(self, variable)
        return [slots[index] for slots in self.slots]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        config = super().get_config()
        for name in self.argument_names:
            config[name] = getattr(self, name)
        return config
