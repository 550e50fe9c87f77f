"""HyperParameters: the values of a run that can be changed while it trains, by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

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

_LOG = logging.getLogger(__name__)
RATE, FACTOR, RECOVERY_FACTOR = (
    "learning_rate",
    "learning_rate_factor",
    "recovery_learning_rate_factor",
)


class HyperParameters:
    """Reads and changes hyper-parameters between training loops. Runs eagerly, on the host, on every worker.

    A single optimizer has the names `learning_rate` and `learning_rate_factor`, and
    `optimizer.<attribute>` for each attribute that is a variable. One of several has `<its
    name>.learning_rate` and so on. The task's names are those of its method `hyper_parameters`. A
    change takes effect with the next loop. The factor multiplies what the config says, a constant
    or a schedule. It is part of the training step only once it is used, and the loop is traced
    again then.

    The variables of optimizers and tasks are in the checkpoint as such; the factors, which belong
    to neither, are in its Python state.

    Args:
      task: The task.
      optimizer: The optimizer, or a dict of optimizers by name; None: there is none.
      python_state: The state of the run that is not in variables.

    Attributes:
      has_new_factor: Whether there is a factor that the training step does not have yet. A trainer
        that traces the step again sets it to False.
    """

    def __init__(self, task: Any, optimizer: Any, python_state: PythonState) -> None:
        self._task = task
        self._optimizer = optimizer
        self._strategy = tf.distribute.get_strategy()
        self._unreported: dict[str, tuple[float, str]] = {}
        self.has_new_factor = False
        python_state.add("hyper-parameters", self._state, self._restore)

    @property
    def names(self) -> list[str]:
        """The names of all hyper-parameters that can be changed."""
        found = list(self._get_task_variables())
        for name, optimizer in self._get_optimizers().items():
            if _is_float(get_base_rate(optimizer)):
                found.append(_join_name(name, RATE))
            if isinstance(optimizer, keras.Optimizer):
                found.append(_join_name(name, FACTOR))
            public = {
                key: value for key, value in vars(optimizer).items() if not key.startswith("_")
            }
            found += [
                f"{name or 'optimizer'}.{key}" for key, value in public.items() if _is_float(value)
            ]
        return found

    @property
    def factors(self) -> list[tf.Variable]:
        """The factors of all learning rates."""
        return [
            one
            for optimizer in self._get_optimizers().values()
            for one in learning_rate_factors(optimizer).values()
        ]

    def variable(self, name: str) -> Any:
        """Returns the variable of a hyper-parameter, a scalar; adds the factor of a learning rate when first asked.

        Raises:
          UsageError: when there is no such hyper-parameter, or it is not a variable.
        """
        of_task = self._get_task_variables()
        if name in of_task:
            return of_task[name]
        place, _, attribute = name.rpartition(".")
        optimizers = self._get_optimizers()
        optimizer = optimizers.get("" if place == "optimizer" else place)
        if optimizer is None:
            raise UsageError(
                f"there is no hyper-parameter {name!r}; {suggest_names(name, self.names)}"
            )
        if attribute in (FACTOR, RECOVERY_FACTOR):
            return self._factor(optimizer, attribute)
        value = (
            get_base_rate(optimizer) if attribute == RATE else getattr(optimizer, attribute, None)
        )
        if _is_float(value):
            return value
        if attribute == RATE and callable(value):
            raise UsageError(
                f"{name} is a schedule, which the training step computes; change"
                f" {_join_name(place, FACTOR)}, which multiplies it"
            )
        if isinstance(value, (bool, int, float)):
            raise UsageError(
                f"{name} is the Python number {value} in {type(optimizer).__name__}, a constant of"
                " the training step and not a variable, so it cannot be changed;"
                f" {suggest_names(name, self.names)}"
            )
        raise UsageError(f"there is no hyper-parameter {name!r}; {suggest_names(name, self.names)}")

    def factor_names(self, factor: str) -> list[str]:
        """Returns the name of a factor for each optimizer."""
        return [_join_name(name, factor) for name in self._get_optimizers()]

    def value(self, name: str) -> float:
        """Returns the current value of a hyper-parameter."""
        return float(tf.convert_to_tensor(self.variable(name)))

    def change(self, name: str, value: float, step: int, reason: str) -> None:
        """Sets a hyper-parameter, and logs and notes the change for the next report if there is one.

        Args:
          name: The name of the hyper-parameter.
          value: The new value.
          step: The global step.
          reason: What changes it, for the log and the report.

        Raises:
          UsageError: when there is no such hyper-parameter, or its variable cannot hold the value.
        """
        before = self.value(name)
        self.check(name, value)
        self.set(name, value)
        if self.value(name) != before:
            self._unreported[name] = float(value), reason
            _LOG.info(
                "step %d: %s is %g from here, it was %g (%s)", step, name, value, before, reason
            )

    def check(self, name: str, value: float) -> None:
        """Raises UsageError when there is no such hyper-parameter, or its variable cannot hold the value.

        A learning rate below 0 would raise the loss.
        """
        dtype = tf.as_dtype(self.variable(name).dtype)
        lowest, highest = (np.asarray(bound).item() for bound in (dtype.min, dtype.max))
        if not lowest <= value <= highest:  # never so of NaN
            raise UsageError(
                f"{name}: {value!r:.60} is not a finite number of the dtype {dtype.name}"
            )
        if (
            value < 0
            and name not in self._get_task_variables()
            and name.rpartition(".")[2] in (RATE, FACTOR, RECOVERY_FACTOR)
        ):
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
        variable.assign(tf.cast(value, variable.dtype))

    def take_changes(self) -> dict[str, tuple[float, str]]:
        """Returns the changes that are not reported yet, (new value, reason) by name, and forgets them."""
        taken, self._unreported = self._unreported, {}
        return taken

    def _factor(self, optimizer: Any, name: str) -> tf.Variable:
        if name not in learning_rate_factors(optimizer):
            with self._strategy.scope():
                add_learning_rate_factor(optimizer, name)
            self.has_new_factor = True
        return learning_rate_factors(optimizer)[name]

    def _get_optimizers(self) -> dict[str, Any]:
        """Returns the optimizers by name, without those around them; a single one has the name ""."""
        by_name = self._optimizer if isinstance(self._optimizer, Mapping) else {"": self._optimizer}
        return {
            name: unwrap_optimizer(optimizer)
            for name, optimizer in by_name.items()
            if optimizer is not None
        }

    def _get_task_variables(self) -> dict[str, Any]:
        """Returns the variables of the task by name.

        Raises:
          UsageError: when one is not a scalar variable.
        """
        method = getattr(self._task, "hyper_parameters", None)
        given = {} if method is None else dict(method())
        for name, value in given.items():
            if not _is_scalar(value):
                kind = type(self._task).__name__
                raise UsageError(
                    f"{kind}.hyper_parameters: {name} is {value!r:.60}; return scalar variables by"
                    " name"
                )
        return given

    def _changed_factors(self) -> dict[str, float]:
        of_optimizers = {
            _join_name(name, FACTOR): learning_rate_factors(one)
            for name, one in self._get_optimizers().items()
        }
        return {
            name: float(tf.convert_to_tensor(one[FACTOR]))
            for name, one in of_optimizers.items()
            if FACTOR in one
        }

    def _state(self) -> dict[str, Any] | None:
        factors = self._changed_factors()
        return (
            {"factors": factors, "unreported": self._unreported}
            if factors or self._unreported
            else None
        )

    def _restore(self, state: Mapping[str, Any] | None) -> None:
        saved = state or {"factors": {}, "unreported": {}}
        # Earlier versions saved the value alone.
        self._unreported = {
            name: (one[0], one[1]) if isinstance(one, list) else (one, "")
            for name, one in saved["unreported"].items()
        }
        for name, value in {
            **dict.fromkeys(self._changed_factors(), 1.0),
            **saved["factors"],
        }.items():
            self.set(name, value)


def _join_name(optimizer: str, attribute: str) -> str:
    return f"{optimizer}.{attribute}" if optimizer else attribute


def _is_scalar(value: Any) -> bool:
    """Whether a value is a variable of one number."""
    return isinstance(value, (keras.Variable, tf.Variable)) and tuple(value.shape) == ()


def _is_float(value: Any) -> bool:
    """Whether a value is a variable of one float; integers of an optimizer, such as iterations, are its state."""
    return _is_scalar(value) and tf.as_dtype(value.dtype).is_floating
