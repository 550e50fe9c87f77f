"""Counts the parameters of a model.

Works with Keras 3 and tf_keras models and plain `tf.Module`, without importing any of them. It
reads the attributes `trainable_weights` and `non_trainable_weights`, or `trainable_variables` and
`variables`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_kit.typing import Model, Variable


@dataclass(frozen=True)
class ParameterCount:
    """The number of values in a model's weights.

    Attributes:
      trainable: The number of values in weights that the optimizer changes.
      non_trainable: The number of values in frozen weights and in statistics such as those of batch
        normalisation.
      problem: Why nothing can be counted. Empty without a problem.
    """

    trainable: int
    non_trainable: int
    problem: str = ""

    @property
    def total(self) -> int:
        """The number of all values, as Keras's `count_params` returns it."""
        return self.trainable + self.non_trainable

    def __str__(self) -> str:
        if self.problem:
            return f"parameters unknown: {self.problem}"
        return f"{self.total:,} parameters, {self.trainable:,} of them trainable"


def count_parameters(model: Model) -> ParameterCount:
    """Counts the values in the weights of `model`.

    Each variable counts once. Random seeds and metrics are not included. A Keras model that is not
    built has no weights yet, and the result's `problem` says so.
    """
    if not getattr(model, "built", True):
        return ParameterCount(0, 0, "the model is not built yet; call it on a batch first")

    # The weights of a Keras model are its variables without random seeds and metrics.
    variables: Sequence[Variable]
    if hasattr(model, "trainable_weights"):
        trainable_variables = model.trainable_weights
        variables = [*trainable_variables, *getattr(model, "non_trainable_weights", ())]
    else:
        trainable_variables = model.trainable_variables
        variables = model.variables

    trainable = _deduplicate(trainable_variables)
    trainable_ids = {id(variable) for variable in trainable}
    all_variables = _deduplicate(variables)
    frozen = [variable for variable in all_variables if id(variable) not in trainable_ids]
    trainable_size = sum(map(_size, trainable))
    frozen_size = sum(map(_size, frozen))
    return ParameterCount(trainable_size, frozen_size)


def _deduplicate(variables: Iterable[Variable]) -> list[Variable]:
    # Variables are compared by their identity.
    variables_by_id = {id(variable): variable for variable in variables}
    return list(variables_by_id.values())


def _size(variable: Variable) -> int:
    return math.prod(int(size) for size in variable.shape)
