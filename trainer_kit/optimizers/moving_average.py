"""The exponential moving average of a model's weights, with any optimizer, on one replica or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.optimization import EMAConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.per_variable import variable_path


def averaged_variables(model: Any, config: EMAConfig) -> list[Any]:
    """Returns the variables of `model` that are averaged: the trainable ones, or all of floating point.

    Args:
      model: A built model of Keras 3 or tf_keras, or a tf.Module.
      config: The config; its trainable_weights_only chooses the variables.
    """
    variables = model.trainable_variables if config.trainable_weights_only else model.variables
    return [variable for variable in variables if tf.as_dtype(variable.dtype).is_floating]


def create_average(model: Any, config: EMAConfig | None) -> MovingAverage | None:
    """Returns the moving average of a model's weights; None where the config asks for none. Eager, in scope."""
    return None if config is None else MovingAverage(averaged_variables(model, config), config)


class Averages:
    """Moving averages of groups of variables, each with its own decay, as one moving average.

    Args:
      groups: The averages by the names of the groups.
    """

    section = "average"  # of a checkpoint

    def __init__(self, groups: Mapping[str, MovingAverage]) -> None:
        self._groups = dict(groups)

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The averages by group and path of their variables; for the checkpoint."""
        return {f"{name}/{path}": one for name, group in self._groups.items() for path, one in group.variables.items()}

    @property
    def swapped(self) -> bool:
        """Whether the model holds the averages now, and `variables` the weights."""
        return any(group.swapped for group in self._groups.values())

    def update(self, step: Any) -> None:
        """Moves the averages towards the variables; see MovingAverage."""
        for group in self._groups.values():
            group.update(step)

    def begin(self) -> None:
        """Sets the averages to the weights; called when there was no checkpoint to restore; eager."""
        self.reset()

    def reset(self) -> None:
        """Makes the averages equal to the variables; eager, on the host."""
        for group in self._groups.values():
            group.reset()

    def swap(self) -> None:
        """Exchanges variables and averages, on every replica; a second call undoes it; eager, on the host."""
        for group in self._groups.values():
            group.swap()


class MovingAverage:
    """Averages of variables: average += (1 - decay) * (variable - average), once for each step.

    The decay is `average_decay`; if dynamic, at most (1 + n) / (10 + n) with n = step - start_step. Before start_step
    the average is the variable itself. The rule is Model Garden's, but an average begins at the variable's value and
    not at zero. Made eagerly, in the scope of the strategy.

    Args:
      variables: Floating-point variables of Keras 3, of a tf_keras model, or tf.Variables; see `averaged_variables`.
      config: The decay and its start.

    Raises:
      UsageError: when there are no variables, or they belong to another strategy than the current one.
    """

    def __init__(self, variables: Sequence[Any], config: EMAConfig) -> None:
        if not variables:
            raise UsageError("there are no variables to average; build the model first")
        self._config = config
        self._strategy = tf.distribute.get_strategy()
        self._sources = [_native(variable) for variable in variables]
        for source in self._sources:
            if not self._strategy.extended.variable_created_in_scope(source):
                raise UsageError(
                    f"{source.name} belongs to another strategy; make the average in the scope of that strategy"
                )
        self._averages = [
            tf.Variable(tf.convert_to_tensor(source), trainable=False, name=f"average_{index}")
            for index, source in enumerate(self._sources)
        ]
        self._names = unique_names([variable_path(variable) for variable in variables])
        self._swapped = False
        self._exchange_all = tf.function(self._exchange_each, autograph=False)
        self._copy_all = tf.function(self._copy_each, autograph=False)

    section = "average"  # of a checkpoint

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The averages by the paths of their variables; for the checkpoint."""
        return dict(zip(self._names, self._averages, strict=True))

    @property
    def swapped(self) -> bool:
        """Whether the model holds the averages now, and `variables` the weights."""
        return self._swapped

    def update(self, step: Any) -> None:
        """Moves the averages towards the variables; eager or in graph, in a replica or in cross-replica context.

        Args:
          step: The number of steps taken, the one just applied included; an integer, or an integer scalar.
        """
        decay = self._decay(tf.cast(step, tf.float32))
        context = tf.distribute.get_replica_context()
        if tf.distribute.has_strategy() and context is not None:
            context.merge_call(self._move_each, args=(decay,))
        else:
            with self._strategy.scope():
                self._move_each(self._strategy, decay)

    def begin(self) -> None:
        """Sets the averages to the weights; called when there was no checkpoint to restore; eager."""
        self.reset()

    def reset(self) -> None:
        """Makes the averages equal to the variables, as after restoring weights alone; eager, on the host."""
        self._copy_all()

    def swap(self) -> None:
        """Exchanges variables and averages, on every replica, exactly; a second call undoes it; eager, on the host."""
        self._exchange_all()
        self._swapped = not self._swapped

    def _decay(self, step: tf.Tensor) -> tf.Tensor:
        averaged = step - float(self._config.start_step)
        decay = tf.constant(self._config.average_decay, tf.float32)
        if self._config.dynamic_decay:
            decay = tf.minimum(decay, (1.0 + averaged) / (10.0 + averaged))
        return tf.where(averaged < 0.0, 0.0, decay)

    def _move_each(self, strategy: tf.distribute.Strategy, decay: Any) -> None:
        for average, source in zip(self._averages, self._sources, strict=True):
            strategy.extended.update(average, _move, args=(_one_value(source), decay), group=False)

    def _copy_each(self) -> None:
        with self._strategy.scope():
            self._move_each(self._strategy, tf.constant(0.0))

    def _exchange_each(self) -> None:
        exchange(self._strategy, self._averages, self._sources)


def _move(average: tf.Variable, value: Any, decay: tf.Tensor) -> None:
    value = tf.convert_to_tensor(value)
    average.assign(value + tf.cast(decay, value.dtype) * (average - value))


def exchange(strategy: tf.distribute.Strategy, ones: Sequence[tf.Variable], others: Sequence[tf.Variable]) -> None:
    """Exchanges the values of variables, one by one, on every replica, exactly; in graph, in cross-replica context."""
    with strategy.scope():
        for one, other in zip(ones, others, strict=True):
            strategy.extended.update(one, _exchange, args=(other,), group=False)


def _exchange(average: tf.Variable, source: tf.Variable) -> None:
    held = average.read_value()
    average.assign(source.read_value())
    source.assign(held)


def _one_value(source: tf.Variable) -> Any:
    """Returns the value to average: the mean of a variable that differs between replicas; else the variable itself."""
    differs = source.synchronization == tf.VariableSynchronization.ON_READ
    return tf.convert_to_tensor(source) if differs else source


def _native(variable: Any) -> tf.Variable:
    return variable if isinstance(variable, tf.Variable) else variable.value


def unique_names(paths: Sequence[str]) -> list[str]:
    """Numbers paths that repeat, as those of a tf.Module may."""
    seen: dict[str, int] = {}
    names = []
    for path in paths:
        seen[path] = seen.get(path, -1) + 1
        names.append(f"{path}_{seen[path]}" if seen[path] else path)
    return names
