"""HyperParameters: the values of a run that can be changed while it trains, by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypedDict

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.checkpoints.state.python_state import PythonState
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.optimizers.learning_rate import (
    add_learning_rate_factor,
    get_base_rate,
    learning_rate_factors,
    unwrap_optimizer,
)
from trainer_kit.typing import Optimizer, Optimizers, TaskLike, Variable

_LOG = logging.getLogger(__name__)
# The last parts of the names of a learning rate and its factors.
RATE = "learning_rate"
FACTOR = "learning_rate_factor"
RECOVERY_FACTOR = "recovery_learning_rate_factor"


class HyperParameterState(TypedDict):
    """The hyper-parameters in the Python state of a checkpoint.

    Attributes:
      factors: The values of the factors that exist, by name.
      unreported: The new value and the reason of each change since the last report, by name.
    """

    factors: dict[str, float]
    unreported: dict[str, tuple[float, str]]


class HyperParameters:
    """Reads and changes hyper-parameters between training loops.

    Runs eagerly, on the host, on every worker. A change takes effect with the next loop.

    A single optimizer has the names `learning_rate` and `learning_rate_factor`, and
    `optimizer.<attribute>` for each attribute that is a variable. An optimizer among several has
    `<its name>.learning_rate` and so on. The task's names are those of its method
    `hyper_parameters`.

    The factor multiplies what the config says, a constant or a schedule. It is part of the training
    step only once it is used, and the loop is traced again then.

    Checkpoints contain the variables of optimizers and tasks as such. The factors, which belong to
    neither, are in the checkpoint's Python state.

    Args:
      task: The task.
      optimizer: The optimizer, or a dict of optimizers by name. None: there is none.
      python_state: The state of the run that is not in variables.

    Attributes:
      has_new_factor: Whether a factor exists that the training step does not have yet. A trainer
        that traces the step again sets it to False.
    """

    def __init__(
        self, task: TaskLike, optimizer: Optimizers | None, python_state: PythonState
    ) -> None:
        self._task = task
        self._optimizer = optimizer
        self._strategy = tf.distribute.get_strategy()
        # The new value and the reason of each change since the last report, by name.
        self._unreported: dict[str, tuple[float, str]] = {}
        self.has_new_factor = False
        python_state.add("hyper-parameters", self._state, self._restore)

    @property
    def names(self) -> list[str]:
        """The names of all hyper-parameters that can be changed."""
        names = list(self._get_task_variables())
        optimizers = self._get_optimizers()
        for name, optimizer in optimizers.items():
            base_rate = get_base_rate(optimizer)
            if _is_float(base_rate):
                names.append(_join_name(name, RATE))
            if isinstance(optimizer, keras.Optimizer):
                names.append(_join_name(name, FACTOR))

            place = name or "optimizer"
            for attribute, value in vars(optimizer).items():
                is_public = not attribute.startswith("_")
                if is_public and _is_float(value):
                    names.append(f"{place}.{attribute}")
        return names

    @property
    def factors(self) -> list[tf.Variable]:
        """The factors of all learning rates."""
        variables: list[tf.Variable] = []
        for optimizer in self._get_optimizers().values():
            factors = learning_rate_factors(optimizer)
            variables += factors.values()
        return variables

    def variable(self, name: str) -> Variable:
        """Returns the variable of a hyper-parameter, a scalar.

        Adds the factor of a learning rate when it is first requested.

        Raises:
          UsageError: when the hyper-parameter does not exist, or is not a variable.
        """
        task_variables = self._get_task_variables()
        if name in task_variables:
            return task_variables[name]

        place, _, attribute = name.rpartition(".")
        # A single optimizer has no name, and its attributes have the place "optimizer".
        optimizer_name = "" if place == "optimizer" else place
        optimizers = self._get_optimizers()
        optimizer = optimizers.get(optimizer_name)
        if optimizer is None:
            suggestion = suggest_names(name, self.names)
            raise UsageError(f"there is no hyper-parameter {name!r}; {suggestion}")

        if attribute in (FACTOR, RECOVERY_FACTOR):
            factors = learning_rate_factors(optimizer)
            if attribute not in factors:
                with self._strategy.scope():
                    add_learning_rate_factor(optimizer, attribute)
                self.has_new_factor = True
                factors = learning_rate_factors(optimizer)
            return factors[attribute]

        # The factors around a rate are separate hyper-parameters.
        is_rate = attribute == RATE
        value = get_base_rate(optimizer) if is_rate else getattr(optimizer, attribute, None)
        if _is_float(value):
            return value

        # A name that exists gets a message with the reason why it cannot be changed.
        if is_rate and callable(value):
            raise UsageError(
                f"{name} is a schedule, which the training step computes; "
                f"change {_join_name(place, FACTOR)}, which multiplies it"
            )
        suggestion = suggest_names(name, self.names)
        if isinstance(value, (bool, int, float)):
            class_name = type(optimizer).__name__
            raise UsageError(
                f"{name} is the Python number {value} in {class_name}, "
                "a constant of the training step and not a variable, so it cannot be changed; "
                f"{suggestion}"
            )
        raise UsageError(f"there is no hyper-parameter {name!r}; {suggestion}")

    def factor_names(self, factor: str) -> list[str]:
        """Returns the name of a factor for each optimizer."""
        return [_join_name(name, factor) for name in self._get_optimizers()]

    def value(self, name: str) -> float:
        """Returns the current value of a hyper-parameter."""
        variable = self.variable(name)
        tensor = tf.convert_to_tensor(variable)
        return float(tensor)

    def change(self, name: str, value: float, step: int, reason: str) -> None:
        """Sets a hyper-parameter, and logs the change and notes it for the next report.

        Does neither if the value stays the same.

        Args:
          name: The name of the hyper-parameter.
          value: The new value.
          step: The global step.
          reason: What changes it, for the log and the report.

        Raises:
          UsageError: when the hyper-parameter does not exist, or its variable cannot contain the
            value.
        """
        old_value = self.value(name)
        self.check(name, value)
        self.set(name, value)
        new_value = self.value(name)
        if new_value != old_value:
            self._unreported[name] = float(value), reason
            _LOG.info(
                "step %d: %s is %g from here, it was %g (%s)", step, name, value, old_value, reason
            )

    def check(self, name: str, value: float) -> None:
        """Checks a value before it is set.

        A learning rate below 0 would raise the loss.

        Raises:
          UsageError: when the hyper-parameter does not exist, or its variable cannot contain the
            value.
        """
        variable = self.variable(name)
        dtype = tf.as_dtype(variable.dtype)
        lowest = np.asarray(dtype.min)
        highest = np.asarray(dtype.max)
        # The comparison is never true of NaN.
        if not lowest.item() <= value <= highest.item():
            raise UsageError(
                f"{name}: {value!r:.60} is not a finite number of the dtype {dtype.name}"
            )

        _, _, attribute = name.rpartition(".")
        is_rate = attribute in (RATE, FACTOR, RECOVERY_FACTOR)
        # A variable of the task may have any name and any sign.
        is_negative_rate = value < 0 and is_rate
        if is_negative_rate and name not in self._get_task_variables():
            raise UsageError(
                f"{name}: {value!r} is below 0; a learning rate and its factor are 0 or more"
            )
        if dtype.is_integer and value != int(value):
            raise UsageError(
                f"{name} is a whole number, of the dtype {dtype.name}; it cannot be {value!r}"
            )

    def set(self, name: str, value: float) -> None:
        """Sets a hyper-parameter without a report."""
        variable = self.variable(name)
        new_value = tf.cast(value, variable.dtype)
        variable.assign(new_value)

    def take_changes(self) -> dict[str, tuple[float, str]]:
        """Returns the changes that are not reported yet, and forgets them.

        Returns:
          The new value and the reason of each change, by name.
        """
        changes = self._unreported
        self._unreported = {}
        return changes

    def _get_optimizers(self) -> dict[str, Optimizer]:
        """Returns the optimizers by name, without those around them.

        A single optimizer has the name "".
        """
        by_name = self._optimizer if isinstance(self._optimizer, Mapping) else {"": self._optimizer}
        optimizers = {}
        for name, optimizer in by_name.items():
            if optimizer is not None:
                optimizers[name] = unwrap_optimizer(optimizer)
        return optimizers

    def _get_task_variables(self) -> dict[str, Variable]:
        """Returns the variables of the task by name.

        Raises:
          UsageError: when a value is not a scalar variable.
        """
        method = getattr(self._task, "hyper_parameters", None)
        if method is None:
            return {}

        variables = dict(method())
        for name, value in variables.items():
            if not _is_scalar(value):
                kind = type(self._task).__name__
                raise UsageError(
                    f"{kind}.hyper_parameters: {name} is {value!r:.60}; "
                    "return scalar variables by name"
                )
        return variables

    def _changed_factors(self) -> dict[str, float]:
        """Returns the values of the factors that exist, by name."""
        values = {}
        optimizers = self._get_optimizers()
        for name, optimizer in optimizers.items():
            factors = learning_rate_factors(optimizer)
            if FACTOR in factors:
                factor = tf.convert_to_tensor(factors[FACTOR])
                factor_name = _join_name(name, FACTOR)
                values[factor_name] = float(factor)
        return values

    def _state(self) -> HyperParameterState | None:
        factors = self._changed_factors()
        if not factors and not self._unreported:
            return None
        return {"factors": factors, "unreported": self._unreported}

    def _restore(self, state: HyperParameterState | None) -> None:
        saved = state or HyperParameterState(factors={}, unreported={})
        self._unreported = {}
        changes: dict[str, Any] = dict(saved["unreported"])
        for name, change in changes.items():
            # Earlier versions saved the value alone. JSON has lists instead of tuples.
            if isinstance(change, list):
                value, reason = change
                self._unreported[name] = value, reason
            else:
                self._unreported[name] = change, ""

        # A factor that the checkpoint lacks had no effect when it was saved.
        changed_factors = self._changed_factors()
        unused_factors = dict.fromkeys(changed_factors, 1.0)
        factors = {**unused_factors, **saved["factors"]}
        for name, value in factors.items():
            self.set(name, value)


def _join_name(optimizer: str, attribute: str) -> str:
    return f"{optimizer}.{attribute}" if optimizer else attribute


def _is_scalar(value: object) -> bool:
    """Whether a value is a variable of one number."""
    if not isinstance(value, (keras.Variable, tf.Variable)):
        return False
    return tuple(value.shape) == ()


def _is_float(value: Any) -> bool:
    """Whether a value is a variable of one float.

    Integers of an optimizer, such as iterations, are its state.
    """
    if not _is_scalar(value):
        return False
    dtype = tf.as_dtype(value.dtype)
    return bool(dtype.is_floating)
