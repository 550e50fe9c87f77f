"""Callbacks that set a hyper-parameter as a function of the step.

SetAtSteps uses a list of steps, and SetByFunction a Python function.
"""

from __future__ import annotations

import math
from collections.abc import Callable as Function
from collections.abc import Sequence

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.config.imported_names import import_object
from trainer_kit.config.schema.durations import EPOCHS, Duration
from trainer_kit.errors import UsageError


class SetAtSteps(Callback):
    """Sets a hyper-parameter when the run reaches the steps of a list.

    Training loops are shortened to end at these steps. Step 0 is before the first step of training,
    and "3 epochs" is where the third epoch has ended. Between the steps of the list the callback
    does nothing, so that other callbacks may change the same hyper-parameter.

    Args:
      parameter: The name of the hyper-parameter.
      steps: Pairs (global step or epochs, value).

    Raises:
      UsageError: when `steps` is not a list of such pairs, or contains a step twice.
    """

    name: str = "set_at_steps"
    # With several workers, each worker sets its own variable.
    chief_only = False

    def __init__(self, parameter: str, steps: Sequence[Sequence[int | float | str]]) -> None:
        self._parameter = parameter
        self._values_by_milestone = _parse_values(steps)
        self.needs_epochs = any(
            isinstance(milestone, Duration) for milestone in self._values_by_milestone
        )
        self._values_by_step: dict[int, float] = {}

    def train_begin(self, run: Run) -> None:
        """Turns epochs into steps, and checks that the hyper-parameter can have the values.

        Raises:
          UsageError: when the hyper-parameter does not exist or cannot have a value, or two entries
            of the list are the same step.
        """
        run.hyper_parameters.variable(self._parameter)
        self._values_by_step = {}
        for milestone, value in self._values_by_milestone.items():
            run.hyper_parameters.check(self._parameter, value)
            step = _resolve_step(run, milestone)
            if step in self._values_by_step:
                # A number of epochs may be the same step as another entry.
                entries = [
                    _format_milestone(entry)
                    for entry in self._values_by_milestone
                    if _resolve_step(run, entry) == step
                ]
                places = " and ".join(entries)
                raise UsageError(f"set_at_steps: {places} are both step {step}; give it one value")
            self._values_by_step[step] = value

    def next_boundary(self, step: int) -> int | None:
        """Returns the next step of the list after `step`, or None."""
        later_steps = [own_step for own_step in self._values_by_step if own_step > step]
        return min(later_steps, default=None)

    def loop_begin(self, run: Run, steps: int) -> None:
        """Sets the value of this step, if the list contains the step."""
        del steps
        if run.step in self._values_by_step:
            value = self._values_by_step[run.step]
            run.change(self._parameter, value, self.name)


class SetByFunction(Callback):
    """Sets a hyper-parameter to the value of a Python function of the step, every so many steps.

    Args:
      parameter: The name of the hyper-parameter.
      function: A function from the global step to a number, or its name as "module:function".
      every: The number of steps between two calls. The first call is before step 1. Training loops
        are shortened to end at these steps.

    Raises:
      UsageError: when the function does not exist, or `every` is not a number of steps.
    """

    name: str = "set_by_function"
    # With several workers, each worker sets its own variable.
    chief_only = False

    def __init__(self, parameter: str, function: Function[[int], float] | str, every: int) -> None:
        if type(every) is not int or every < 1:
            raise UsageError(
                f"set_by_function: every is {every!r:.60}; give a number of steps, 1 or more"
            )
        if isinstance(function, str):
            function = import_object("set_by_function", function, callable, "function")
        if not callable(function):
            raise UsageError(
                f"set_by_function: {function!r:.60} is not a function of the step; give one, or its"
                " name"
            )
        self._parameter = parameter
        self._function = function
        self.every = every

    def train_begin(self, run: Run) -> None:
        """Checks that the hyper-parameter exists.

        Raises:
          UsageError: when it does not.
        """
        run.hyper_parameters.variable(self._parameter)

    def next_boundary(self, step: int) -> int | None:
        """Returns the next multiple of `every`."""
        assert self.every is not None
        completed_periods = step // self.every
        return (completed_periods + 1) * self.every

    def loop_begin(self, run: Run, steps: int) -> None:
        """Sets the value of this step, if it is a multiple of `every`."""
        del steps
        if self.every and run.step % self.every == 0:
            # An object that can be called has the name of its class.
            class_name = type(self._function).__qualname__
            function_name = getattr(self._function, "__qualname__", class_name)
            value = self._function(run.step)
            reason = f"{self.name} {function_name}"
            run.change(self._parameter, float(value), reason)


def _resolve_step(run: Run, milestone: int | Duration) -> int:
    """Returns the global step of an entry."""
    if isinstance(milestone, int):
        return milestone
    # A callback with epochs in its list has needs_epochs, so the run knows its epochs.
    assert run.epochs is not None
    return run.epochs.get_end_step(milestone.amount)


def _format_milestone(milestone: int | Duration) -> str:
    if isinstance(milestone, int):
        return f"step {milestone}"
    return f"'{float(milestone.amount):g} epochs'"


def _parse_values(steps: object) -> dict[int | Duration, float]:
    """Returns the values of `set_at_steps` by milestone, which is a step or a number of epochs.

    Raises:
      UsageError: when `steps` is not a list of pairs of a milestone and a finite number, or
        contains a milestone twice.
    """
    values: dict[int | Duration, float] = {}
    pairs = steps if isinstance(steps, Sequence) else [steps]
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise UsageError(
                f"set_at_steps: {pair!r:.60} is not a pair of a step and a value; write [[0, 0.1],"
                " [1000, 0.01]]"
            )

        entry, value = pair
        milestone: int | Duration = entry
        if type(entry) is not int or entry < 0:
            duration = Duration.parse(entry)
            if duration is None or duration.unit != EPOCHS:
                raise UsageError(
                    f"set_at_steps: {entry!r:.60} is not a step; give a whole number of steps, 0 or"
                    " more, or epochs such as '3 epochs'"
                )
            milestone = duration

        # A bool is an int in Python.
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise UsageError(
                f"set_at_steps: the value {value!r:.60} at step {entry} is not a finite number"
            )
        if milestone in values:
            raise UsageError(
                f"set_at_steps: {_format_milestone(milestone)} is there twice; give it one value"
            )
        values[milestone] = float(value)
    return values
