"""KerasMetrics: the results of a compiled model's own metrics, or what its step has returned last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.compat.keras.preparation import flattened, with_autograph
from trainer_kit.training.metrics import MetricSet


class KerasMetrics(MetricSet):
    """The metrics of a compiled model, as `Model.fit` reports them. Created in the scope of the strategy.

    Of a metric it reports the result. If the step returns other logs than the results of the model's metrics, it
    reports those of the last step, as Keras does: a mean over replicas.

    Args:
      loss_name: The name under which the run reports the model's "loss".
      model: The compiled model; its metrics have all their variables.
      logs: The specs of what the model's step returns; empty if that is the results of its metrics.
    """

    def __init__(self, loss_name: str, model: Any, logs: Mapping[str, tf.TensorSpec]) -> None:
        super().__init__(loss_name, [])
        self._model, self._loss_name = model, loss_name
        each = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.MEAN}
        self._last = {
            name: tf.Variable(tf.zeros(spec.shape, spec.dtype), trainable=False, **each) for name, spec in logs.items()
        }

    @tf.autograph.experimental.do_not_convert
    def update_with_step(self, task: Any, logs: Any, inputs: Any, share: Any = None) -> None:
        """Keeps what a training step has returned; runs in graph, on a replica. Its metrics are updated already."""
        self.update_step_values(task, logs, inputs)

    @tf.autograph.experimental.do_not_convert
    def without_metrics(self, task: Any, step: Callable[..., Any], model: Any = None) -> Callable[..., Any]:
        """Returns `step` unchanged: a step of Keras returns results of metrics, which are reported as Keras does."""
        return step

    @tf.autograph.experimental.do_not_convert
    def update_loss(self, loss: tf.Tensor, inputs: Any = None, share: Any = None) -> None:
        """Does nothing: the model's own loss tracker has the loss."""

    @tf.autograph.experimental.do_not_convert
    def update_step_values(self, task: Any, logs: Mapping[str, Any], inputs: Any) -> None:
        """Keeps what a step has returned; runs in graph, on a replica."""
        if self._last:
            values = flattened(logs)
            for name, variable in self._last.items():
                variable.assign(tf.cast(values[name], variable.dtype))

    @tf.autograph.experimental.do_not_convert
    def reset(self) -> None:
        """Resets all metrics; runs eagerly or in graph, in cross-replica context."""
        super().reset()
        self._model.reset_metrics()

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns all results by name; called in cross-replica context."""
        found = {name: tf.convert_to_tensor(one) for name, one in self._last.items()}
        if not found:
            of_model = with_autograph(self._model.get_metrics_result, self._model)()
            found = {name: tf.convert_to_tensor(one) for name, one in flattened(of_model).items()}
        return {
            **super().results(),
            **{(self._loss_name if name == "loss" else name): one for name, one in found.items()},
        }

    def variables(self) -> list[Any]:
        """Returns the variables of all metrics, always in the same order."""
        of_model = [variable for metric in self._model.metrics for variable in metric.variables]
        return [*super().variables(), *of_model, *self._last.values()]

    def names(self) -> list[str] | None:
        """Returns the names of the results; runs eagerly."""
        return list(self.results())
