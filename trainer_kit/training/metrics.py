"""MetricSet: a loss and the task's metrics, which are reset and read together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import converted
from trainer_kit.process.error_report import described
from trainer_kit.telemetry.scalars import flat_scalars
from trainer_kit.training.returned_metrics import ReturnedMetrics
from trainer_kit.training.step_values import StepValues
from trainer_kit.training.task import Task, step_loss


class _Loss(keras.metrics.Mean):
    """A mean that knows whether a step has reported a loss; a user's step may update it directly."""

    reported = False

    def update_state(self, values: Any, sample_weight: Any = None) -> Any:
        """Adds values to the mean; runs in graph, on a replica.

        A sum is added to the variable by one operation, and not as Keras adds it: TensorFlow may regroup an addition
        with those that made the loss (total + (a + b)), and not in each process in the same way.
        """
        self.reported = True
        if tf.convert_to_tensor(1.0 if sample_weight is None else sample_weight).shape.rank != 0:
            return super().update_state(values, sample_weight)
        weight = tf.cast(1.0 if sample_weight is None else sample_weight, self.dtype)
        values = tf.cast(values, self.dtype)
        self.total.value.assign_add(weight * tf.reduce_sum(values))
        self.count.value.assign_add(weight * tf.cast(tf.size(values), self.dtype))
        return None

    reset_states = keras.metrics.Metric.reset_state  # the name of Keras 2, which trainers of Model Garden use


class MetricSet:
    """The metrics of training or of validation, with the loss. Created in the scope of the strategy.

    Args:
      loss_name: The name under which the mean loss is reported.
      metrics: Keras metrics, of either version.
      exact: Whether to sum the loss in float64. In float32 its mean over a million examples in batches of 32 is off by
        3 millionths.

    Attributes:
      loss: The mean loss.
      metrics: The argument of this name.
      returned: The metrics that steps return.

    Raises:
      UsageError: when two metrics have the same name.
    """

    def __init__(self, loss_name: str, metrics: Sequence[Any], *, exact: bool = False) -> None:
        self.loss = _Loss(loss_name, dtype="float64" if exact else "float32")
        self.metrics = list(metrics)
        names = Counter(metric.name for metric in [*self.metrics, self.loss])
        if twice := [name for name, count in names.items() if count > 1]:
            raise UsageError(f"several metrics are called {', '.join(twice)}; give each metric a different name")
        self._step_values = StepValues(names, "float64" if exact else "float32")
        self.returned = ReturnedMetrics(names)
        self._parts: list[Any] = []

    def add_part(self, part: Any) -> None:
        """Adds an object with `reset()`, `results()`, `variables` and `names`.

        `names` maps the name of each result to the field of the config that asks for it. A step that returns a scalar
        of such a name is refused when it is traced.

        Raises:
          UsageError: when a metric has one of the names.
        """
        self.reserve(part.names)
        self._parts.append(part)

    def reserve(self, names: Mapping[str, str]) -> None:
        """Keeps names for results that something else reports: a step that returns such a scalar is refused.

        Args:
          names: The field of the config that asks for the result, by the name of the result.

        Raises:
          UsageError: when a metric has one of the names.
        """
        if taken := [metric.name for metric in self.metrics if metric.name in names]:
            raise UsageError(f"a metric is called {taken[0]}, which trainer_kit reports itself; give it another name")
        self._step_values.refuse(names)

    @tf.autograph.experimental.do_not_convert
    def update_with_step(self, task: Any, logs: Any, inputs: Any, share: Any = None) -> None:
        """Adds the loss and the other scalars of one training step; runs in graph, on a replica.

        Args:
          task: The task of the step.
          logs: What the step returned.
          inputs: The batch, or micro-batch. If the number of its examples is known only in graph, batches may differ
            in it, and it is the weight of the loss. Losses of Model Garden's tasks have no weights.
          share: See `update_loss`.
        """
        loss, known = step_loss(task, logs), _examples(inputs) if share is None else share
        if isinstance(task, Task) and not isinstance(known, float):
            self.update_loss(loss, inputs)
        else:
            self.update_loss(loss, share=share)
        self.update_step_values(task, logs, inputs)

    @tf.autograph.experimental.do_not_convert
    def update_loss(self, loss: tf.Tensor, inputs: Any = None, share: Any = None) -> None:
        """Adds the loss of one batch; runs in graph, on a replica.

        Args:
          loss: The mean loss over the batch.
          inputs: The batch; its number of examples is the weight of the loss, so that ragged and empty batches count
            correctly. None: every batch has the same weight.
          share: The micro-batch's share of its batch, for the loss of one; without `inputs`. A float above 0, or a
            float32 scalar that may be 0.
        """
        if inputs is None and share is None:
            self.loss.update_state(loss)
            return
        if inputs is None:
            self._update_loss_of_micro_batch(tf.convert_to_tensor(loss), share)
            return
        examples = _examples(inputs)
        loss = tf.cast(loss, self.loss.dtype)
        if loss.shape.rank:  # a loss for each example, each of which counts as one
            self.loss.update_state(loss)
            return
        if not isinstance(examples, float):
            loss = tf.where(examples > 0, loss, tf.zeros_like(loss))  # the mean of no examples is NaN
        self.loss.update_state(loss, sample_weight=examples)

    def _update_loss_of_micro_batch(self, loss: tf.Tensor, share: Any) -> None:
        """Adds the loss of a micro-batch, so that the losses of a batch count as one; runs in graph, on a replica."""
        if loss.shape.rank != 0:  # a loss for each example, each of which counts as one
            self.loss.update_state(loss)
        elif isinstance(share, float):
            self.loss.update_state(loss, sample_weight=share)
        else:
            self.loss.update_state(tf.where(share > 0, loss, tf.zeros_like(loss)), sample_weight=share)

    @tf.autograph.experimental.do_not_convert
    def update_step_values(self, task: Any, logs: Mapping[Any, Any], inputs: Any) -> None:
        """Adds the scalars that a step returned in addition to the loss; runs in graph, on a replica.

        Args:
          task: The task of the step. What tasks of Model Garden return is not reported.
          logs: What the step returned.
          inputs: The batch; its number of examples is the weight of the values.
        """
        if isinstance(task, Task):
            others = {name: value for name, value in logs.items() if name != task.loss}
            self._step_values.update(others, _examples(inputs))

    @tf.autograph.experimental.do_not_convert
    def without_metrics(self, task: Any, step: Callable[..., Any], model: Any = None) -> Callable[..., Any]:
        """Returns a step that notes the metrics that `step` returns, and returns the rest; runs in graph, on a replica.

        Args:
          task: The task of the step. What tasks of Model Garden return stays as it is.
          step: The function that runs the step.
          model: The model of the step.
        """

        def noted_step(*arguments: Any, **named: Any) -> Any:
            logs = step(*arguments, **named)
            return self.returned.noted(task, logs, model) if isinstance(logs, Mapping) else logs

        return noted_step if isinstance(task, Task) else step

    @tf.autograph.experimental.do_not_convert
    def reset(self) -> None:
        """Resets all metrics but those that steps return; runs eagerly or in graph, in cross-replica context."""
        for metric in [*self.metrics, self.loss]:
            metric.reset_state()
        for part in (self._step_values, *self._parts):
            part.reset()

    def reset_returned(self, whole: bool = True) -> None:
        """Resets the metrics that steps return, after the results have been read; runs eagerly, on the host.

        Args:
          whole: Whether the loop has come to its end; one that was stopped in the middle goes on with their state.
        """
        if whole:
            self.returned.reset()

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns all results by name, with the loss if a step reported one; called in cross-replica context."""
        logs: dict[str, Any] = dict(self._step_values.results())
        for part in self._parts:
            logs.update(part.results())
        for name, metric in [*((metric.name, metric) for metric in self.metrics), *self.returned.items()]:
            result = converted(metric.result)()
            logs.update(result if isinstance(result, Mapping) else {name: result})
        if self.loss.reported:
            logs[self.loss.name] = tf.cast(self.loss.result(), tf.float32)
        return logs

    def reported(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what is reported of the results of a training loop, as NumPy values; runs eagerly, on the host."""
        return dict(results)

    def variables(self) -> list[Any]:
        """Returns the variables of all metrics but those that steps return, always in the same order."""
        of_metrics = [variable for metric in [*self.metrics, self.loss] for variable in metric.variables]
        of_parts = [variable for part in self._parts for variable in part.variables]
        return [*of_metrics, *self._step_values.variables, *of_parts]

    def names(self) -> list[str] | None:
        """Returns the names of the scalars in `results`, nested names joined by `|`; runs eagerly.

        Returns None if they are not known yet: the first batch builds the metrics of a compiled model.
        """
        if any(getattr(metric, "built", True) is False for metric in self.metrics):
            return None
        found = flat_scalars(to_numpy(self.results()), "|")
        return [*(name for name in found if name != self.loss.name), self.loss.name]


def training_metrics(task: Any, model: Any, *, wanted: bool, configured: Sequence[Any] = ()) -> MetricSet:
    """Returns the metrics of training: the task's, those of the config, and those of a compiled model; called in scope.

    Args:
      task: The task.
      model: The task's model.
      wanted: Whether the trainer will train; if not, the set holds only the loss.
      configured: New metrics of the config.
    """
    found = [*task_metrics(task, True), *configured, *model_metrics(model)] if wanted else []
    return MetricSet("training_loss", found)


def validation_metrics(task: Any, model: Any, *, wanted: bool, configured: Sequence[Any] = ()) -> MetricSet:
    """Returns the metrics of evaluation, with the loss summed in float64; see `training_metrics`."""
    found = [*task_metrics(task, False), *configured, *model_metrics(model)] if wanted else []
    return MetricSet("validation_loss", found, exact=True)


def model_metrics(model: Any) -> list[Any]:
    """Returns the metrics of a compiled model, without the tracker of its loss."""
    return [metric for metric in getattr(model, "metrics", None) or [] if metric.name != "loss"]


def task_metrics(task: Any, training: bool) -> list[Any]:
    """Returns the metrics that `task.build_metrics` makes; called in strategy scope.

    Raises:
      UsageError: when it does not return a list of metrics.
    """
    made = task.build_metrics(training=training)
    if not isinstance(made, (list, tuple)):
        kind = "None" if made is None else f"a {type(made).__name__}"
        raise UsageError(f"{type(task).__name__}.build_metrics returned {kind}; return a list of metrics")
    for one in made:
        check_metric(one, f"{type(task).__name__}.build_metrics returned a list with")
    return list(made)


def check_metric(one: Any, where: str) -> None:
    """Raises UsageError when an object is not a metric; `where` says in the message where it comes from."""
    if isinstance(one, type) or not hasattr(one, "result"):
        kind = f"the class {one.__name__}" if isinstance(one, type) else repr(one)
        raise UsageError(
            f"{where} {kind}, which is not a metric; return metric objects, such as "
            "keras.metrics.SparseCategoricalAccuracy()"
        )


def to_numpy(values: Any) -> Any:
    """Returns nested dicts of tensors as nested dicts of NumPy values."""
    if isinstance(values, Mapping):
        return {name: to_numpy(value) for name, value in values.items()}
    return values.numpy() if hasattr(values, "numpy") else values


def _examples(inputs: Any) -> tf.Tensor | float:
    """Returns the number of examples in a replica's batch: the first dimension of its labels, or of the whole batch.

    It is a float if it is known beforehand and not 0, else a float32 scalar. Features may contain scalars and tables,
    so the labels count where a batch is a tuple with labels. If tensors that count differ in their first dimension,
    the step fails when it runs.
    """
    labels = inputs[1] if isinstance(inputs, tuple) and len(inputs) in (2, 3) else None
    leaves = _with_axes(labels) or _with_axes(inputs)
    sizes = [tf.shape(leaf)[0] for leaf in leaves if not leaf.shape[0]]
    if not sizes:  # each batch has the same size, so that any weight is right
        return float(leaves[0].shape[0]) if leaves else 1.0
    if len(sizes) > 1:
        message = (
            f"the tensors of a batch differ in their first dimension, so its examples cannot be counted: "
            f"{described(inputs)}; return (features, labels) from build_inputs: the labels are then counted"
        )
        tf.debugging.assert_equal(tf.stack(sizes), sizes[0], message)
    return tf.cast(sizes[0], tf.float32)


def _with_axes(values: Any) -> list[Any]:
    """Returns the tensors among nested values that have a first dimension."""
    return [leaf for leaf in tf.nest.flatten(values) if hasattr(leaf, "shape") and leaf.shape.rank]
