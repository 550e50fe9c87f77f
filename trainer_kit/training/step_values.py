"""StepValues: the means of the scalars that a step returns in addition to its loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError

_LIMIT = 64


class StepValues:
    """Means over a loop or an evaluation, weighted by examples. Created in the scope of the strategy.

    The names are known when a step is traced, too late to create variables for checkpoints: so one variable has a row
    for each of at most 64 names, in the order in which steps report them.

    Args:
      taken: The names that are reported already, such as those of metrics: a step's value of such a name is left out.
      dtype: The dtype of the sums.
    """

    def __init__(self, taken: Collection[str], dtype: str) -> None:
        self._taken, self._names, self._fields = frozenset(taken), list[str](), dict[str, str]()
        replicas = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
        zeros = tf.zeros([_LIMIT, 2], dtype)  # of each name the sum of its values times examples, and of the examples
        self._sums = tf.Variable(zeros, trainable=False, name="step_values", **replicas)

    def refuse(self, fields: Mapping[str, str]) -> None:
        """Refuses scalars of names that something else reports: `fields` has the field of the config for each name."""
        self._fields.update(fields)

    @property
    def variables(self) -> list[tf.Variable]:
        """The variable of the sums."""
        return [self._sums]

    @tf.autograph.experimental.do_not_convert
    def update(self, logs: Mapping[Any, Any], examples: tf.Tensor | float) -> None:
        """Adds the scalars of one step; runs in graph, on a replica.

        Args:
          logs: The values by name. Values that are not single real numbers are left out.
          examples: The number of examples in the replica's batch: a float scalar, or a float above 0. Values of no
            examples are left out.

        Raises:
          UsageError: when steps have returned more than 64 different scalars, or a scalar of a name that was refused.
        """
        found = {str(name): _number(value) for name, value in logs.items() if str(name) not in self._taken}
        numbers = {name: tf.cast(value, self._sums.dtype) for name, value in found.items() if value is not None}
        if not numbers:
            return
        for name in numbers:
            self._check_name(name)
        values, weight = tf.stack(list(numbers.values())), tf.cast(examples, self._sums.dtype)
        if not isinstance(examples, float):
            values = tf.where(weight > 0, values, tf.zeros_like(values))  # the mean of no examples is NaN
        added = tf.stack([values * weight, tf.fill([len(numbers)], weight)], axis=1)
        self._sums.assign_add(tf.scatter_nd([[self._row(name)] for name in numbers], added, [_LIMIT, 2]))

    @tf.autograph.experimental.do_not_convert
    def reset(self) -> None:
        """Sets the sums to zero; runs eagerly or in graph, in cross-replica context."""
        self._sums.assign(tf.zeros_like(self._sums))

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, tf.Tensor]:
        """Returns the means since the last reset by name, float32 scalars; called in cross-replica context."""
        if not self._names:
            return {}
        sums = tf.convert_to_tensor(self._sums)
        return {name: tf.cast(sums[row, 0] / sums[row, 1], tf.float32) for row, name in enumerate(self._names)}

    def _check_name(self, name: str) -> None:
        if name in self._fields:
            raise UsageError(
                f"the step returns a scalar called {name!r}, and {self._fields[name]} reports one of this name; give "
                f"the scalar another name, or unset {self._fields[name]}"
            )

    def _row(self, name: str) -> int:
        if name not in self._names:
            if len(self._names) == _LIMIT:
                raise UsageError(
                    f"the steps return more than {_LIMIT} scalars in addition to the loss; {name!r} is one too many: "
                    "return tensors with an axis for values that need no curve"
                )
            self._names.append(name)
        return self._names.index(name)


def _number(value: Any) -> tf.Tensor | None:
    """Returns a value as a tensor if it is a single real number; else None."""
    if isinstance(value, (Mapping, str, bytes)) or value is None or hasattr(value, "update_state"):
        return None
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        return None
    is_number = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype == tf.bool
    return tensor if is_number and tensor.shape.rank == 0 else None
