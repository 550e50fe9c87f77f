"""The training metrics of several tasks: one metric set per task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.training.losses import LOSS
from trainer_kit.training.metrics import MetricSet, task_metrics

TOTAL = "total_loss"


class TaskMetrics:
    """Metric sets by task, with the interface of one MetricSet. Created in strategy scope.

    Args:
      tasks: Model Garden's tasks by name.
      total: Whether there is also a total loss of all tasks.
    """

    def __init__(self, tasks: Mapping[str, Any], *, total: bool) -> None:
        # In float32 TensorFlow would fuse the sums, and their order, and so the last bit, would vary.
        self._sets = {TOTAL: MetricSet(LOSS, [], exact=True)} if total else {}
        self._sets |= {name: MetricSet(LOSS, task_metrics(task, True)) for name, task in tasks.items()}

    @property
    def losses(self) -> dict[str, Any]:
        """The metrics of the losses by task, including the total loss if there is one."""
        return {name: one.loss for name, one in self._sets.items()}

    @property
    def loss(self) -> Any:
        """The metric of the total loss; None if there is none."""
        return self.losses.get(TOTAL)

    @property
    def metrics(self) -> dict[str, list[Any]]:
        """The metrics by task, without the losses."""
        return {name: one.metrics for name, one in self._sets.items() if name != TOTAL}

    @tf.autograph.experimental.do_not_convert
    def update_losses(self, losses: Mapping[str, tf.Tensor]) -> None:
        """Adds the losses of one batch, by task; in graph, on a replica.

        Raises:
          UsageError: for a loss with an unknown name.
        """
        for name, loss in losses.items():
            if name not in self._sets:
                known = ", ".join(self._sets)
                raise UsageError(
                    f"the training step returned a loss named {name!r}; it may return the total loss and one for each "
                    f"task: {known}"
                )
            self._sets[name].update_loss(loss)

    @tf.autograph.experimental.do_not_convert
    def reset(self) -> None:
        """Resets all metrics; eager or in graph, in cross-replica context."""
        for one in self._sets.values():
            one.reset()

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns task name -> results; in cross-replica context."""
        return {name: one.results() for name, one in self._sets.items()}

    def variables(self) -> list[Any]:
        """Returns the variables of all metrics, always in the same order."""
        return [variable for one in self._sets.values() for variable in one.variables()]
