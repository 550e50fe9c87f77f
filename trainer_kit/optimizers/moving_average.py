"""Exponential moving averages of a model's weights: any optimizer, one replica or several."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence

import tensorflow as tf

from trainer_kit.checkpoints.state.variable_names import canonical_paths
from trainer_kit.config.schema.optimization import AVERAGE, EMAConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.per_variable import variable_path
from trainer_kit.runtime.replica_values import native_variable
from trainer_kit.typing import FloatLike, IntLike, Model, Variable


def select_averaged_variables(
    model: Model, config: EMAConfig, trainable: Sequence[Variable] = ()
) -> list[Variable]:
    """Returns the variables of `model` that are averaged, all of floating point.

    Args:
      model: A built model of Keras 3 or tf_keras, or a tf.Module.
      config: The config. Its trainable_weights_only chooses the trainable variables, or all.
      trainable: The variables to choose as trainable ones. Empty: those of the model.
    """
    variables: Sequence[Variable] = trainable
    if not config.trainable_weights_only:
        variables = model.variables
    elif not trainable:
        variables = model.trainable_variables

    selected = []
    for variable in variables:
        dtype = tf.as_dtype(variable.dtype)
        if dtype.is_floating:
            selected.append(variable)
    return selected


def create_average(
    model: Model, config: EMAConfig | None, trainable: Sequence[Variable] = ()
) -> MovingAverage | None:
    """Returns the moving average of a model's weights; runs eagerly, in strategy scope.

    Args:
      model: The built model.
      config: The config of the average. None: no average is created, and the result is None.
      trainable: The variables that were trainable before some were frozen. Frozen ones have no
        average, but they count in the keys. Empty: none were frozen.
    """
    if config is None:
        return None

    variables = select_averaged_variables(model, config, trainable)
    averaged = model.trainable_variables if config.trainable_weights_only else variables
    averaged_ids = {id(variable) for variable in averaged}

    # A variable that is frozen has no average, but a key.
    configs: list[EMAConfig | None] = []
    for variable in variables:
        is_averaged = id(variable) in averaged_ids
        configs.append(config if is_averaged else None)
    return MovingAverage(variables, configs)


def average_keys(variables: Sequence[Variable]) -> list[str]:
    """Returns the keys of the averages of `variables` in a checkpoint.

    The keys are the paths of the variables, without the numbers that depend on earlier models.
    """
    paths = [variable_path(variable) for variable in variables]
    return canonical_paths(unique_names(paths))


@dataclasses.dataclass(frozen=True)
class _AveragedVariable:
    """A variable with its averages.

    Attributes:
      source: The variable.
      key: The key of its averages in checkpoints.
      config_index: The place of its config among the configs.
      averages: The averages by name.
    """

    source: tf.Variable
    key: str
    config_index: int
    averages: dict[str, tf.Variable]


class MovingAverage:
    """Averages of variables: average += (1 - decay) * (variable - average), once for each step.

    The decay is `average_decay`. If dynamic, it is at most (1 + n) / (10 + n) with n = step -
    start_step. Before start_step the average is the variable itself. The rule is Model Garden's,
    but an average begins at the variable's value and not at zero. Each of `more_decays` gives one
    more average of every variable, by the same rule. Created eagerly, in the scope of the strategy.

    Args:
      variables: Floating-point variables of Keras 3, of a tf_keras model, or tf.Variables. See
        `select_averaged_variables`.
      config: The decays and their start. Or one config for each variable, all with the same
        `evaluate`. A variable with None is not averaged. It counts in the keys, so that the keys
        do not depend on what is averaged.

    Attributes:
      weights_to_evaluate: What evaluations use: names of averages, or "weights".

    Raises:
      UsageError: when there are no variables, or they belong to another strategy than the current
        one.
    """

    # The sections of a checkpoint.
    section = "average"
    more_section = "more_averages"

    def __init__(
        self, variables: Sequence[Variable], config: EMAConfig | Sequence[EMAConfig | None]
    ) -> None:
        if isinstance(config, EMAConfig):
            variable_configs: list[EMAConfig | None] = [config] * len(variables)
        else:
            variable_configs = list(config)
        configs = [section for section in variable_configs if section is not None]
        if not configs:
            raise UsageError("there are no variables to average; build the model first")

        # Equal configs are stored once, so that each decay is computed once in a step.
        self._configs: list[EMAConfig] = []
        for section in configs:
            if section not in self._configs:
                self._configs.append(section)
        first_config = configs[0]
        self.weights_to_evaluate = tuple(first_config.evaluate)
        self._strategy = tf.distribute.get_strategy()

        keys = average_keys(variables)
        self._averaged_variables: list[_AveragedVariable] = []
        for variable, key, variable_config in zip(variables, keys, variable_configs, strict=True):
            if variable_config is not None:
                source = native_variable(variable)
                averaged = self._new_averages(source, key, variable_config)
                self._averaged_variables.append(averaged)

        self._active_average = ""

        # Each average has its own functions, which are traced at their first calls.
        self._exchange_functions: dict[str, Callable[[], None]] = {}
        self._copy_functions: dict[str, Callable[[], None]] = {}
        for name in self.names:
            exchange_function = self._in_graph(self._swap_average_and_weights, name)
            copy_function = self._in_graph(self._set_average_to_weights, name)
            self._exchange_functions[name] = exchange_function
            self._copy_functions[name] = copy_function

    @property
    def names(self) -> list[str]:
        """The names of the averages: "average" for average_decay, and those of more_decays."""
        names: dict[str, None] = {}
        for averaged in self._averaged_variables:
            names |= dict.fromkeys(averaged.averages)
        return list(names)

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The averages with the decay average_decay by key, for the checkpoint."""
        return self._by_key(AVERAGE)

    @property
    def more_variables(self) -> dict[str, dict[str, tf.Variable]]:
        """The averages with the decays of `more_decays` by name and key, for the checkpoint."""
        averages = {}
        for name in self.names:
            if name != AVERAGE:
                averages[name] = self._by_key(name)
        return averages

    @property
    def active_average(self) -> str:
        """The name of the average that the model contains now; "" while it contains the weights."""
        return self._active_average

    def update(self, step: IntLike) -> None:
        """Moves the averages towards the variables.

        Runs eagerly or in graph, in a replica or in cross-replica context.

        Args:
          step: The number of steps taken, including the latest one; an integer, or an integer
            scalar.
        """
        decays = [_decays_at(config, step) for config in self._configs]
        context = tf.distribute.get_replica_context()
        if tf.distribute.has_strategy() and context is not None:
            context.merge_call(self._move_each, args=(decays,))
        else:
            with self._strategy.scope():
                self._move_each(self._strategy, decays)

    def initialize(self) -> None:
        """Sets the averages to the weights where no checkpoint is restored; runs eagerly."""
        self.reset()

    def reset(
        self, names: Collection[str] | None = None, keys: Collection[str] | None = None
    ) -> None:
        """Makes averages equal to the variables, as after a restore of weights alone.

        Runs eagerly, on the host.

        Args:
          names: The names of the averages. None: all.
          keys: The keys of the variables. None: all.
        """
        if names is None:
            names = self.names
        for name in names:
            if keys is None:
                self._copy_functions[name]()
            else:
                self._set_average_to_weights(name, keys)

    def swap(self, name: str = AVERAGE) -> None:
        """Exchanges variables and averages, on every replica, exactly; a second call undoes it.

        Runs eagerly, on the host.

        Args:
          name: The name of the average. A variable without such an average keeps its value.
        """
        is_exchangeable = self._active_average in ("", name)
        assert is_exchangeable, f"{self._active_average} is in place of the weights, not {name}"
        self._exchange_functions[name]()
        self._active_average = "" if self._active_average else name

    def _new_averages(self, source: tf.Variable, key: str, config: EMAConfig) -> _AveragedVariable:
        if not self._strategy.extended.variable_created_in_scope(source):
            raise UsageError(
                f"{source.name} belongs to another strategy; make the average in the scope of that"
                " strategy"
            )
        # The averages of one variable begin at the same value.
        value = tf.convert_to_tensor(source)
        averages = {}
        for name in _decays(config):
            averages[name] = tf.Variable(value, trainable=False, name=name)
        config_index = self._configs.index(config)
        return _AveragedVariable(source, key, config_index, averages)

    def _by_key(self, name: str) -> dict[str, tf.Variable]:
        averages = {}
        for averaged in self._averaged_variables:
            if name in averaged.averages:
                averages[averaged.key] = averaged.averages[name]
        return averages

    def _in_graph(self, function: Callable[[str], None], name: str) -> Callable[[], None]:
        bound_function = functools.partial(function, name)
        return tf.function(bound_function, autograph=False)

    def _move_each(
        self, strategy: tf.distribute.Strategy, decays: Sequence[Sequence[FloatLike]]
    ) -> None:
        for averaged in self._averaged_variables:
            averages = averaged.averages.values()
            first, *others = averages
            value = _merge_replica_values(averaged.source)
            variable_decays = decays[averaged.config_index]
            arguments = (others, value, variable_decays)
            strategy.extended.update(first, _move, args=arguments, group=False)

    def _set_average_to_weights(self, name: str, keys: Collection[str] | None = None) -> None:
        with self._strategy.scope():
            for averaged in self._averaged_variables:
                has_average = name in averaged.averages
                is_selected = keys is None or averaged.key in keys
                if not has_average or not is_selected:
                    continue
                average = averaged.averages[name]
                value = _merge_replica_values(averaged.source)
                self._strategy.extended.update(average, _copy, args=(value,), group=False)

    def _swap_average_and_weights(self, name: str) -> None:
        averages = []
        sources = []
        for averaged in self._averaged_variables:
            if name in averaged.averages:
                averages.append(averaged.averages[name])
                sources.append(averaged.source)
        exchange(self._strategy, averages, sources)


def _decays(config: EMAConfig) -> dict[str, float]:
    return {AVERAGE: config.average_decay, **config.more_decays}


def _decays_at(config: EMAConfig, step: IntLike) -> Sequence[FloatLike]:
    """Returns the decay of each average at a step."""
    # Decays that never change are numbers, so that no step computes them.
    decays_by_name = _decays(config)
    constant_decays = list(decays_by_name.values())
    if not config.dynamic_decay and config.start_step == 0:
        return constant_decays

    start_step = float(config.start_step)
    averaged_steps = tf.cast(step, tf.float32)
    averaged_steps -= start_step
    decays = [tf.constant(decay, tf.float32) for decay in constant_decays]

    if config.dynamic_decay:
        numerator = 1.0 + averaged_steps
        denominator = 10.0 + averaged_steps
        largest = numerator / denominator
        decays = [tf.minimum(decay, largest) for decay in decays]

    if config.start_step != 0:
        decays = [tf.where(averaged_steps < 0.0, 0.0, decay) for decay in decays]
    return decays


def _move(
    first: tf.Variable,
    others: Sequence[tf.Variable],
    value: tf.Tensor | tf.Variable,
    decays: Sequence[FloatLike],
) -> None:
    """Moves the averages of one variable on one replica; the variable is read once."""
    value = tf.convert_to_tensor(value)
    averages = [first, *others]
    for average, decay in zip(averages, decays, strict=True):
        share = tf.cast(decay, value.dtype)
        difference = average - value
        average.assign(value + share * difference)


def _copy(average: tf.Variable, value: tf.Tensor | tf.Variable) -> None:
    tensor = tf.convert_to_tensor(value)
    average.assign(tensor)


def exchange(
    strategy: tf.distribute.Strategy,
    variables: Sequence[tf.Variable],
    others: Sequence[tf.Variable],
) -> None:
    """Exchanges the values of variables, one by one, on every replica, exactly.

    Runs in graph, in cross-replica context.
    """
    with strategy.scope():
        for variable, other in zip(variables, others, strict=True):
            strategy.extended.update(variable, _exchange, args=(other,), group=False)


def _exchange(average: tf.Variable, source: tf.Variable) -> None:
    average_value = average.read_value()
    average.assign(source.read_value())
    source.assign(average_value)


def _merge_replica_values(source: tf.Variable) -> tf.Tensor | tf.Variable:
    """Returns the value to average.

    It is the mean of a variable that differs between replicas, else the variable itself.
    """
    differs = source.synchronization == tf.VariableSynchronization.ON_READ
    if differs:
        return tf.convert_to_tensor(source)
    return source


def unique_names(paths: Sequence[str]) -> list[str]:
    """Numbers paths that repeat, as those of a tf.Module may."""
    repetitions: dict[str, int] = {}
    names = []
    for path in paths:
        number = repetitions.get(path, 0)
        repetitions[path] = number + 1
        name = f"{path}_{number}" if number else path
        names.append(name)
    return names
