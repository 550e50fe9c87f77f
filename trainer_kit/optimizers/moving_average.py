"""Exponential moving averages of a model's weights, with any optimizer, on one replica or several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.optimization import AVERAGE, EMAConfig
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
    """Moving averages of groups of variables, each with its own decays, as one moving average.

    Args:
      groups: The averages by the names of the groups; all have the same `evaluated`.
    """

    section, more_section = "average", "more_averages"  # of a checkpoint

    def __init__(self, groups: Mapping[str, MovingAverage]) -> None:
        self._groups = dict(groups)
        self.evaluated = next(iter(self._groups.values())).evaluated

    @property
    def names(self) -> list[str]:
        """The names of the averages that every group has."""
        first, *others = self._groups.values()
        return [name for name in first.names if all(name in other.names for other in others)]

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The averages by group and path of their variables; for the checkpoint."""
        return {f"{name}/{path}": one for name, group in self._groups.items() for path, one in group.variables.items()}

    @property
    def more_variables(self) -> dict[str, dict[str, tf.Variable]]:
        """The averages with the decays of `more_decays`, by name, and by group and path; for the checkpoint."""
        found: dict[str, dict[str, tf.Variable]] = {}
        for group_name, group in self._groups.items():
            for name, variables in group.more_variables.items():
                found.setdefault(name, {}).update({f"{group_name}/{path}": one for path, one in variables.items()})
        return found

    @property
    def swapped(self) -> str:
        """The name of the average that the model holds now; "" while it holds the weights."""
        return next((group.swapped for group in self._groups.values() if group.swapped), "")

    def update(self, step: Any) -> None:
        """Moves the averages towards the variables; see MovingAverage."""
        for group in self._groups.values():
            group.update(step)

    def begin(self) -> None:
        """Sets the averages to the weights; called when there was no checkpoint to restore; eager."""
        self.reset()

    def reset(self, names: Collection[str] | None = None) -> None:
        """Makes averages equal to the variables, those of `names` or all; eager, on the host."""
        for group in self._groups.values():
            group.reset(names)

    def swap(self, name: str = AVERAGE) -> None:
        """Exchanges variables and averages, on every replica; a second call undoes it; eager, on the host."""
        for group in self._groups.values():
            group.swap(name)


class MovingAverage:
    """Averages of variables: average += (1 - decay) * (variable - average), once for each step.

    The decay is `average_decay`; if dynamic, at most (1 + n) / (10 + n) with n = step - start_step. Before start_step
    the average is the variable itself. The rule is Model Garden's, but an average begins at the variable's value and
    not at zero. Each of `more_decays` gives one more average of every variable, by the same rule. Made eagerly, in the
    scope of the strategy.

    Args:
      variables: Floating-point variables of Keras 3, of a tf_keras model, or tf.Variables; see `averaged_variables`.
      config: The decays and their start.

    Attributes:
      evaluated: What evaluations use: names of averages, or "weights".

    Raises:
      UsageError: when there are no variables, or they belong to another strategy than the current one.
    """

    section, more_section = "average", "more_averages"  # of a checkpoint

    def __init__(self, variables: Sequence[Any], config: EMAConfig) -> None:
        if not variables:
            raise UsageError("there are no variables to average; build the model first")
        self._config, self.evaluated = config, tuple(config.evaluate)
        self._strategy = tf.distribute.get_strategy()
        self._sources = [_native(variable) for variable in variables]
        for source in self._sources:
            if not self._strategy.extended.variable_created_in_scope(source):
                raise UsageError(
                    f"{source.name} belongs to another strategy; make the average in the scope of that strategy"
                )
        self._decays = {AVERAGE: config.average_decay, **config.more_decays}
        self._averages = {name: self._new_average(name) for name in self._decays}
        self._paths = unique_names([variable_path(variable) for variable in variables])
        self._swapped = ""
        self._exchange_all = {name: self._in_graph(self._exchange_each, name) for name in self._decays}
        self._copy_all = {name: self._in_graph(self._copy_each, name) for name in self._decays}

    @property
    def names(self) -> list[str]:
        """The names of the averages: "average" for that of average_decay, and those of more_decays."""
        return list(self._averages)

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The averages with the decay average_decay, by the paths of their variables; for the checkpoint."""
        return dict(zip(self._paths, self._averages[AVERAGE], strict=True))

    @property
    def more_variables(self) -> dict[str, dict[str, tf.Variable]]:
        """The averages with the decays of `more_decays`, by name and path of their variables; for the checkpoint."""
        others = {name: averages for name, averages in self._averages.items() if name != AVERAGE}
        return {name: dict(zip(self._paths, averages, strict=True)) for name, averages in others.items()}

    @property
    def swapped(self) -> str:
        """The name of the average that the model holds now; "" while it holds the weights."""
        return self._swapped

    def update(self, step: Any) -> None:
        """Moves the averages towards the variables; eager or in graph, in a replica or in cross-replica context.

        Args:
          step: The number of steps taken, the one just applied included; an integer, or an integer scalar.
        """
        decays = self._decays_at(step)
        context = tf.distribute.get_replica_context()
        if tf.distribute.has_strategy() and context is not None:
            context.merge_call(self._move_each, args=(decays,))
        else:
            with self._strategy.scope():
                self._move_each(self._strategy, decays)

    def begin(self) -> None:
        """Sets the averages to the weights; called when there was no checkpoint to restore; eager."""
        self.reset()

    def reset(self, names: Collection[str] | None = None) -> None:
        """Makes averages equal to the variables, as after restoring weights alone; eager, on the host.

        Args:
          names: The names of the averages; None: all.
        """
        for name in self._averages if names is None else names:
            if name in self._averages:
                self._copy_all[name]()

    def swap(self, name: str = AVERAGE) -> None:
        """Exchanges variables and averages, on every replica, exactly; a second call undoes it; eager, on the host.

        Args:
          name: The name of the average.
        """
        assert self._swapped in ("", name), f"{self._swapped} is in place of the weights, not {name}"
        self._exchange_all[name]()
        self._swapped = "" if self._swapped else name

    def _new_average(self, name: str) -> list[tf.Variable]:
        return [
            tf.Variable(tf.convert_to_tensor(source), trainable=False, name=f"{name}_{index}")
            for index, source in enumerate(self._sources)
        ]

    def _in_graph(self, function: Callable[[str], None], name: str) -> Callable[[], None]:
        return tf.function(functools.partial(function, name), autograph=False)

    def _decays_at(self, step: Any) -> list[Any]:
        """Returns the decay of each average at a step: numbers where it never changes, so that no step computes it."""
        options = self._config
        if not options.dynamic_decay and options.start_step == 0:
            return list(self._decays.values())
        averaged = tf.cast(step, tf.float32) - float(options.start_step)
        decays = [tf.constant(decay, tf.float32) for decay in self._decays.values()]
        if options.dynamic_decay:
            most = (1.0 + averaged) / (10.0 + averaged)
            decays = [tf.minimum(decay, most) for decay in decays]
        return decays if options.start_step == 0 else [tf.where(averaged < 0.0, 0.0, decay) for decay in decays]

    def _move_each(self, strategy: tf.distribute.Strategy, decays: Sequence[Any]) -> None:
        for source, first, *others in zip(self._sources, *self._averages.values(), strict=True):
            strategy.extended.update(first, _move, args=(others, _one_value(source), decays), group=False)

    def _copy_each(self, name: str) -> None:
        with self._strategy.scope():
            for average, source in zip(self._averages[name], self._sources, strict=True):
                self._strategy.extended.update(average, _copy, args=(_one_value(source),), group=False)

    def _exchange_each(self, name: str) -> None:
        exchange(self._strategy, self._averages[name], self._sources)


def _move(first: tf.Variable, others: Sequence[tf.Variable], value: Any, decays: Sequence[Any]) -> None:
    """Moves the averages of one variable on one replica; the variable is read once."""
    value = tf.convert_to_tensor(value)
    for average, decay in zip([first, *others], decays, strict=True):
        average.assign(value + tf.cast(decay, value.dtype) * (average - value))


def _copy(average: tf.Variable, value: Any) -> None:
    average.assign(tf.convert_to_tensor(value))


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
