"""The training metrics of several tasks: those of each task under its name, and the loss of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.training.metrics import MetricSet
from trainer_kit.training.task import step_loss

_STEPS = "steps"


class MultiTaskMetrics(MetricSet):
    """A metric set for each task, and the mean loss of all steps. Created in the scope of the strategy.

    Args:
      sets: The metrics of each task, by its name.
      count_steps: Whether to report the steps of a loop that trained a task, and to leave out tasks without any.

    Attributes:
      sets: The argument of this name.

    Raises:
      UsageError: when a metric has the name under which the steps are reported.
    """

    def __init__(self, sets: Mapping[str, MetricSet], *, count_steps: bool) -> None:
        # In float32 TensorFlow would fuse the sums, and their order, and so the last bit, would vary.
        super().__init__("training_loss", [], exact=True)
        self.sets = dict(sets)
        for one in self.sets.values() if count_steps else ():
            one.reserve({_STEPS: "task.training=interleaving"})
        self._steps = {name: tf.Variable(0, trainable=False, dtype=tf.int64) for name in sets} if count_steps else {}

    @tf.autograph.experimental.do_not_convert
    def update_with_step(self, task: Any, logs: Any, inputs: Any, share: Any = None) -> None:
        """Adds the loss and the other scalars of a joint step; runs in graph, on a replica.

        Args:
          task: The MultiTask.
          logs: What its step returned, with the logs of each task under its name.
          inputs: The batches by task.
          share: Not used: batches of several tasks are not split.
        """
        own = {name: value for name, value in logs.items() if name not in self.sets}
        self.update_loss(step_loss(task, own))  # batches of several tasks have no common number of examples
        self.update_step_values(task, own, next(iter(inputs.values())))
        for name, metrics in self.sets.items():
            if name in logs:
                of_task = task.tasks[name]
                metrics.update_with_step(of_task, metrics.returned.noted(of_task, logs[name]), inputs[name])

    @tf.autograph.experimental.do_not_convert
    def update_with_task(self, name: str, task: Any, logs: Any, inputs: Any) -> None:
        """Adds the loss and the other scalars of a step of one task; runs in graph, on a replica.

        Args:
          name: The name of the task, one of those in `sets`.
          task: The task.
          logs: What its step returned.
          inputs: Its batch.
        """
        self.sets[name].update_with_step(task, logs, inputs)
        self.update_loss(step_loss(task, logs))

    @tf.autograph.experimental.do_not_convert
    def count_step(self, name: str) -> None:
        """Counts a step of the task `name`; runs in graph, in cross-replica context."""
        self._steps[name].assign_add(1)

    @tf.autograph.experimental.do_not_convert
    def reset(self) -> None:
        """Resets all metrics; runs eagerly or in graph, in cross-replica context."""
        super().reset()
        for one in self.sets.values():
            one.reset()
        for count in self._steps.values():
            count.assign(0)

    def reset_returned(self, whole: bool = True) -> None:
        """Resets the metrics that the steps of the tasks return; see MetricSet."""
        super().reset_returned(whole)
        for one in self.sets.values():
            one.reset_returned(whole)

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns the results of each task by its name, and those of all; called in cross-replica context."""
        found: dict[str, Any] = {name: dict(one.results()) for name, one in self.sets.items()}
        for name, count in self._steps.items():
            found[name][_STEPS] = tf.cast(count, tf.float64)  # int64 has a transfer of its own
        return {**found, **super().results()}

    def reported(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the results of a loop without those of tasks that no step trained; runs eagerly, on the host."""
        steps = {name: int(results[name][_STEPS]) for name in self._steps}
        trained = {name: {**results[name], _STEPS: count} for name, count in steps.items() if count}
        return {**trained, **{name: value for name, value in results.items() if name not in steps}}

    def variables(self) -> list[Any]:
        """Returns the variables of all metrics, always in the same order."""
        of_sets = [variable for one in self.sets.values() for variable in one.variables()]
        return [*super().variables(), *of_sets, *self._steps.values()]
