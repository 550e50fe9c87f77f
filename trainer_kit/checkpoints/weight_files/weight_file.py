"""WeightFile: the variables in a file of weights, of whatever program, by name."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer_kit.checkpoints.state.variable_names import canonical_paths

# The section of the model in checkpoints of trainer_kit
MODEL = "model/"


class WeightFile(abc.ABC):
    """The variables in a file of weights. Values are read one by one, eagerly, on the host.

    Attributes:
      path: The path of the file, or the prefix of the checkpoint.
      kind: The kind of the file, for messages.
      shapes: The shape of each variable, by name.
      dtypes: The name of each variable's dtype, by name.
      has_user_numbers: Whether the numbers of layers in the names are those that the user gave, or
        else ranks.
    """

    path: str
    kind: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    has_user_numbers: bool = False

    @abc.abstractmethod
    def read_tensor(self, name: str) -> Any:
        """Returns the value of a variable as a NumPy array, or bytes for text.

        Raises:
          StorageError: when the value cannot be read.
        """

    @abc.abstractmethod
    def write_copy(self, path: str, values: Mapping[str, np.ndarray]) -> None:
        """Writes a copy of the file with other values of some variables. Runs eagerly.

        Args:
          path: The path of the copy, or its prefix.
          values: The new values by name.

        Raises:
          StorageError: when a value cannot be read.
        """


def replace_numbers_by_ranks(names: Mapping[str, str]) -> dict[str, str]:
    """Returns names with ranks in place of the numbers that end their parts.

    They are unchanged if two of them would become equal.

    Args:
      names: A dict from name to any value, which goes with the name.
    """
    ranked = dict(zip(canonical_paths(list(names)), names.values(), strict=True))
    if len(ranked) == len(names):
        return ranked
    return dict(names)
