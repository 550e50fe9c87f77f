"""MetricSet: everything that the steps of a loop report as numbers.

The numbers are reset and read together.

A step reports a value in one way: it updates a metric. `MetricSet.update` does so with the loss and
the scalars that a step returns, `step_tensors` with tensors that are requested by name, and
`gradient_reports` with norms of gradients.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.config.schema.metric_configs import KerasMetricConfig, MetricConfig
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.process.error_report import describe_structure
from trainer_kit.telemetry.scalars import flatten_scalars
from trainer_kit.training.task import Task, step_loss
from trainer_kit.typing import (
    ExperimentLike,
    FloatLike,
    Metric,
    Model,
    TaskLike,
    Variable,
)

_LOG = logging.getLogger(__name__)
# The number of scalars that steps may return, in addition to the loss.
_MOST_SCALARS = 64


class StepMean(keras.metrics.Mean):
    """A mean that knows whether a step has been traced that updates it.

    A user's step may update the loss directly.

    Attributes:
      is_updated: Whether such a step has been traced.
    """

    is_updated = False
    # The name of Keras 2, which trainers of Model Garden use.
    reset_states = keras.metrics.Metric.reset_state

    @tf.autograph.experimental.do_not_convert
    def update_state(self, values: FloatLike, sample_weight: FloatLike | None = None) -> None:
        """Adds values to the mean. Runs in graph, on a replica.

        A sum is added to the variable by one operation, and not as Keras adds it. TensorFlow may
        regroup an addition with those that computed the loss, as total + (a + b), and not in each
        process in the same way.
        """
        self.is_updated = True
        weight = 1.0 if sample_weight is None else sample_weight
        # Keras also computes means with a weight for each value.
        weight_tensor = tf.convert_to_tensor(weight)
        if weight_tensor.shape.rank != 0:
            super().update_state(values, weight)
            return

        values = tf.cast(values, self.dtype)
        values = _without_nan_of_no_examples(values, weight)
        weight = tf.cast(weight, self.dtype)
        total = tf.reduce_sum(values)
        size = tf.size(values)
        count = tf.cast(size, self.dtype)

        weighted_total = weight * total
        self.total.value.assign_add(weighted_total)
        weighted_count = weight * count
        self.count.value.assign_add(weighted_count)


class ScalarMeans(keras.metrics.Metric):
    """The means of the scalars that steps return, each weighted by the examples.

    Created in strategy scope. The names of the scalars are known when a step is traced, too late to
    create variables for checkpoints. So one variable has a row for each of at most 64 names, in the
    order in which steps report them.

    Args:
      dtype: The dtype of the sums.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__(name="scalars", dtype=dtype)
        self._scalars: list[str] = []
        # For each scalar the sum of its values times examples, and the sum of the examples.
        self._sums = self.add_variable([_MOST_SCALARS, 2], "zeros", dtype, name="step_values")

    @tf.autograph.experimental.do_not_convert
    def update_state(self, scalars: Mapping[str, tf.Tensor], weight: FloatLike) -> None:
        """Adds scalars by name. Runs in graph, on a replica.

        Raises:
          UsageError: when steps have returned more than 64 different scalars.
        """
        new_names = [name for name in scalars if name not in self._scalars]
        self._scalars += new_names
        if len(self._scalars) > _MOST_SCALARS:
            raise UsageError(
                f"the steps return more than {_MOST_SCALARS} scalars in addition to the loss; "
                f"{self._scalars[_MOST_SCALARS]!r} is one too many: "
                "return tensors with an axis for values that need no curve"
            )

        # One row for each scalar. Rows of scalars that this step does not return stay as they are.
        rows = [[self._scalars.index(name)] for name in scalars]
        values = [tf.cast(value, self.dtype) for value in scalars.values()]
        stacked_values = tf.stack(values)
        stacked_values = _without_nan_of_no_examples(stacked_values, weight)

        weight = tf.cast(weight, self.dtype)
        sums = stacked_values * weight
        counts = tf.fill([len(rows)], weight)
        row_increments = tf.stack([sums, counts], axis=1)
        increments = tf.scatter_nd(rows, row_increments, self._sums.shape)
        self._sums.value.assign_add(increments)

    @tf.autograph.experimental.do_not_convert
    def result(self) -> dict[str, tf.Tensor]:
        """Returns the means by name, as float32 scalars. Called in cross-replica context."""
        sums = tf.convert_to_tensor(self._sums)
        means = {}
        for row, name in enumerate(self._scalars):
            total = sums[row, 0]
            count = sums[row, 1]
            mean = total / count
            means[name] = tf.cast(mean, tf.float32)
        return means


class MetricSet:
    """What the steps of a loop report, which is reset and read together.

    Created in strategy scope. Metrics that steps return are known when a step is traced, and the
    loop resets its metrics before its first step. So these metrics are reset from Python, after the
    results of a loop have been read.

    Args:
      loss_name: The name under which the mean loss is reported.
      metrics: Keras metrics, of either version.
      exact: Whether to sum the loss and the scalars in float64. In float32 the mean over a million
        examples in batches of 32 is off by 3 millionths.

    Attributes:
      loss: The mean loss.
      metrics: The argument of this name.
      returned_metrics: The metrics that steps return, by the name under which they return them.

    Raises:
      UsageError: when two metrics have the same name.
    """

    def __init__(self, loss_name: str, metrics: Sequence[Metric], *, exact: bool = False) -> None:
        dtype = "float64" if exact else "float32"
        self.loss = StepMean(loss_name, dtype=dtype)
        self.metrics = list(metrics)

        all_metrics = [*self.metrics, self.loss]
        names = [metric.name for metric in all_metrics]
        counts = Counter(names)
        duplicates = [name for name, count in counts.items() if count > 1]
        if duplicates:
            raise UsageError(
                f"several metrics are called {', '.join(duplicates)}; "
                "give each metric a different name"
            )

        self._names = frozenset(counts)
        self._reserved: dict[str, str] = {}
        self._scalar_means = ScalarMeans(dtype)
        # The metrics of the engine, which the task's steps do not see.
        self._engine_metrics: list[Metric] = [self._scalar_means]
        self.returned_metrics: dict[str, Metric] = {}
        self._warned: set[str] = set()

    def add_metric(self, metric: Metric, field: str) -> None:
        """Adds a metric that the engine updates, and not the task's step.

        Args:
          metric: The metric.
          field: The field of the config that asks for it.

        Raises:
          UsageError: when another metric has its name.
        """
        self.reserve(metric.name, field)
        self._engine_metrics.append(metric)

    def reserve(self, name: str, field: str) -> None:
        """Reserves a name for a result of the engine. A step that returns such a scalar is refused.

        Args:
          name: The name of the result.
          field: The field of the config that asks for it.

        Raises:
          UsageError: when a metric, or another result, has the name.
        """
        metric_names = [metric.name for metric in self.metrics]
        if name in self._reserved or name in metric_names:
            raise UsageError(
                f"{field}: another metric is called {name!r} too; give each metric a different name"
            )
        self._reserved[name] = field

    @tf.autograph.experimental.do_not_convert
    def extract_metrics(self, task: TaskLike, logs: object, model: Model | None = None) -> Any:
        """Records the metrics that a step returned, and returns what else it returned.

        Runs in graph, on a replica. Warns of a scalar that has the name of a metric in an attribute
        of the task, or of a metric of the model: it may be the metric's result.

        Args:
          task: The task of the step. What tasks of Model Garden return stays as it is.
          logs: What the step returned. Anything but a mapping stays as it is.
          model: The model of the step.

        Raises:
          UsageError: when a step returns another metric of the same name than before.
        """
        if not isinstance(task, Task) or not isinstance(logs, Mapping):
            return logs

        scalars = {}
        for name, value in logs.items():
            if not _is_metric(value):
                scalars[name] = value
                continue

            metric_name = str(name)
            if metric_name not in self._names:
                metric = self.returned_metrics.setdefault(metric_name, value)
                if metric is not value:
                    raise UsageError(
                        f"a step returned a new metric object named {metric_name!r}; "
                        "create it once, in the task's __init__ or in build_model, "
                        "and return the same object in each step"
                    )

        # Metrics are looked for in attributes of the task that are metrics or lists of metrics.
        compiled_metrics = getattr(model, "metrics", None)
        attributes = [*vars(task).values(), compiled_metrics]
        candidates: list[Any] = []
        for value in attributes:
            is_list = isinstance(value, (list, tuple))
            candidates += value if is_list else [value]

        names = {candidate.name for candidate in candidates if _is_metric(candidate)}
        reported_names = names & scalars.keys()
        unreset_names = reported_names - self._names - self._warned
        for name in sorted(unreset_names):
            self._warned.add(name)
            advice = " under another name than the loss" if name == "loss" else ""
            _LOG.warning(
                "the step returns the scalar %r, and the task or the model holds a metric of this "
                "name; the mean of the scalar is reported, and nothing resets the metric: "
                "return the metric to report its result%s",
                name,
                advice,
            )
        return scalars

    @tf.autograph.experimental.do_not_convert
    def update_with_step(
        self, task: TaskLike, logs: Any, inputs: Any, share: float | tf.Tensor = 1.0
    ) -> None:
        """Adds what a training step returned. Runs in graph, on a replica.

        Args:
          task: The task of the step.
          logs: What the step returned.
          inputs: The batch, or micro-batch.
          share: The micro-batch's share of its batch. It is the weight of a loss of Model Garden's
            tasks, whose batches may not show how many examples they have.

        Raises:
          TrainerKitError: when the logs contain no loss.
        """
        loss = step_loss(task, logs)
        weight = None if isinstance(task, Task) else share
        checked_logs = {**logs, task.loss: loss}
        self.update(task, checked_logs, inputs, weight)

    @tf.autograph.experimental.do_not_convert
    def update(
        self,
        task: TaskLike,
        logs: Mapping[Any, Any],
        inputs: Any,
        weight: FloatLike | None = None,
    ) -> None:
        """Adds the loss and the other scalars that a step returned. Runs in graph, on a replica.

        Args:
          task: The task of the step. Of what tasks of Model Garden return, only the loss is
            reported.
          logs: What the step returned. The loss may be a mean over the batch, or a loss for each
            example, each of which counts as one. Other values that are not single real numbers are
            left out.
          inputs: The batch.
          weight: The weight of the values: a float above 0, or a scalar that may be 0. None: the
            number of examples in the batch, so that ragged and empty batches count correctly.

        Raises:
          UsageError: when steps have returned more than 64 different scalars, or one of a name that
            is reserved.
        """
        scalars: dict[str, tf.Tensor] = {}
        reported_logs = logs if isinstance(task, Task) else {}
        for name, value in reported_logs.items():
            scalar_name = str(name)
            if name == task.loss or scalar_name in self._names:
                continue
            # Only a single real number is a scalar. A log may also be text or None.
            try:
                tensor = tf.convert_to_tensor(value)
            except (TypeError, ValueError):
                continue
            dtype = tensor.dtype
            is_number = dtype.is_floating or dtype.is_integer or dtype == tf.bool
            if is_number and tensor.shape.rank == 0:
                scalars[scalar_name] = tensor

        for name in scalars.keys() & self._reserved.keys():
            raise UsageError(
                f"the step returns a scalar called {name!r}, "
                f"and {self._reserved[name]} reports one of this name; "
                f"give the scalar another name, or unset {self._reserved[name]}"
            )

        if weight is None and (scalars or task.loss in logs):
            weight = _count_examples(inputs)
        if task.loss in logs:
            loss = tf.convert_to_tensor(logs[task.loss])
            # A loss for each example has no common weight: each counts as one.
            loss_weight = None if loss.shape.rank else weight
            self.loss.update_state(loss, loss_weight)
        if scalars:
            self._scalar_means.update_state(scalars, weight)

    @tf.autograph.experimental.do_not_convert
    def reset(self) -> None:
        """Resets all metrics but those that steps return.

        Runs eagerly or in graph, in cross-replica context.
        """
        for metric in [*self._engine_metrics, *self.metrics, self.loss]:
            metric.reset_state()

    def reset_returned_metrics(self) -> None:
        """Resets the metrics that steps return, after the results of a whole loop.

        Runs eagerly, on the host.
        """
        for metric in self.returned_metrics.values():
            metric.reset_state()

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns all results by name, with the loss if a step reported one.

        Called in cross-replica context.
        """
        logs: dict[str, Any] = {}
        own_metrics = [*self._engine_metrics, *self.metrics]
        metrics = [(metric.name, metric) for metric in own_metrics]
        # A metric that a step returns has the name under which it is returned.
        metrics += self.returned_metrics.items()
        for name, metric in metrics:
            compute_result = apply_autograph(metric.result)
            result = compute_result()
            if isinstance(result, Mapping):
                logs.update(result)
            else:
                logs[name] = result

        if self.loss.is_updated:
            loss = self.loss.result()
            logs[self.loss.name] = tf.cast(loss, tf.float32)
        return logs

    def convert_to_logs(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what is reported of the results of a training loop, as NumPy values.

        Runs eagerly, on the host.
        """
        return dict(results)

    def variables(self) -> list[Variable]:
        """Returns the variables of all metrics but those that steps return.

        They are always in the same order.
        """
        variables: list[Variable] = []
        for metric in [*self._engine_metrics, *self.metrics, self.loss]:
            variables += metric.variables
        return variables

    @property
    def returned_variables(self) -> list[Variable]:
        """The variables of the metrics that steps return.

        A checkpoint contains them as other state of the step.
        """
        variables: list[Variable] = []
        for metric in self.returned_metrics.values():
            variables += metric.variables
        return variables

    def names(self) -> list[str] | None:
        """Returns the names of the scalars in `results`, nested names joined by `|`.

        Runs eagerly, on the host. Returns None if they are not known yet: the first batch builds
        the metrics of a compiled model.
        """
        for metric in self.metrics:
            if getattr(metric, "built", True) is False:
                return None

        results = to_numpy(self.results())
        scalars = flatten_scalars(results, "|")
        names = [name for name in scalars if name != self.loss.name]
        return [*names, self.loss.name]


def create_training_metrics(
    task: TaskLike, model: Model, config: ExperimentLike, *, enabled: bool
) -> MetricSet:
    """Returns the metrics of training: the task's, the config's, and those of a compiled model.

    Called in strategy scope.

    Args:
      task: The task.
      model: The task's model.
      config: The experiment's config.
      enabled: Whether the trainer will train. If not, the set contains only the loss.
    """
    metrics = _metrics(task, model, config, training=True) if enabled else []
    return MetricSet("training_loss", metrics)


def create_validation_metrics(
    task: TaskLike, model: Model, config: ExperimentLike, *, enabled: bool
) -> MetricSet:
    """Returns the metrics of evaluation, with the loss summed in float64.

    The arguments are those of `create_training_metrics`.
    """
    metrics = _metrics(task, model, config, training=False) if enabled else []
    return MetricSet("validation_loss", metrics, exact=True)


def _metrics(task: TaskLike, model: Model, config: ExperimentLike, training: bool) -> list[Metric]:
    """Returns the metrics of the task, of the config and of the model, in this order."""
    metrics = task_metrics(task, training)
    for metric, _, _ in create_configured_metrics(config):
        metrics.append(metric)
    metrics += model_metrics(model)
    return metrics


def model_metrics(model: Model) -> list[Metric]:
    """Returns the metrics of a compiled model, without the tracker of its loss."""
    # A tf.Module has none.
    metrics = getattr(model, "metrics", None) or []
    return [metric for metric in metrics if metric.name != "loss"]


def task_metrics(task: TaskLike, training: bool) -> list[Metric]:
    """Returns the metrics that `task.build_metrics` creates. Called in strategy scope.

    Raises:
      UsageError: when it does not return a list of metrics.
    """
    metrics: object = task.build_metrics(training=training)
    if not isinstance(metrics, (list, tuple)):
        kind = "None" if metrics is None else f"a {type(metrics).__name__}"
        raise UsageError(
            f"{type(task).__name__}.build_metrics returned {kind}; return a list of metrics"
        )
    origin = f"{type(task).__name__}.build_metrics returned a list with"
    for metric in metrics:
        check_metric(metric, origin)
    return list(metrics)


def create_configured_metrics(
    config: ExperimentLike, for_tensors: bool = False
) -> list[tuple[Metric, str, str]]:
    """Returns new metrics for entries of `trainer.metrics`, each with its tensor and its field.

    Called in strategy scope.

    Args:
      config: The experiment's config.
      for_tensors: Whether to return the metrics of entries that name a tensor, instead of those
        that name none.

    Raises:
      UsageError: when a metric cannot be created.
    """
    metrics = []
    sections = getattr(config.trainer, "metrics", ())
    for place, section in enumerate(sections):
        names_tensor = bool(section.tensor)
        if names_tensor != for_tensors:
            continue

        field = f"trainer.metrics[{place}]"
        if section.type in MetricConfig.registry:
            branch = MetricConfig.registry.lookup(str(section.type))
            metric = branch.build(section.get())
        else:
            metric = _keras_metric(section.get())
        check_metric(metric, f"{field}: {section.type} built")
        metrics.append((metric, section.tensor, field))
    return metrics


def _keras_metric(config: KerasMetricConfig) -> keras.metrics.Metric:
    """Returns a new metric of keras.metrics, by the name of its class."""
    kind = getattr(keras.metrics, config.metric, None)
    if not (isinstance(kind, type) and issubclass(kind, keras.metrics.Metric)):
        class_names = []
        for name in dir(keras.metrics):
            member = getattr(keras.metrics, name)
            if isinstance(member, type):
                class_names.append(name)
        advice = suggest_names(config.metric, class_names)
        raise UsageError(f"trainer.metrics: keras.metrics has no {config.metric!r}; {advice}")

    try:
        return kind(**config.args)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"trainer.metrics: keras.metrics.{config.metric} refuses its args: {error}"
        ) from error


def check_metric(metric: object, where: str) -> None:
    """Checks that an object is a metric.

    Args:
      metric: The object.
      where: Where it comes from, for the message.

    Raises:
      UsageError: when the object is not a metric.
    """
    if isinstance(metric, type) or not hasattr(metric, "result"):
        kind = repr(metric)
        if isinstance(metric, type):
            kind = f"the class {metric.__name__}"
        raise UsageError(
            f"{where} {kind}, which is not a metric; return metric objects, such as "
            "keras.metrics.SparseCategoricalAccuracy()"
        )


def remove_engine_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results of a loop without those that the engine reads itself."""
    reported_results = {}
    for name, value in results.items():
        if not name.startswith("trainer_kit/"):
            reported_results[name] = value
    return reported_results


def to_numpy(values: Any) -> Any:
    """Returns nested dicts of tensors as nested dicts of NumPy values."""
    if isinstance(values, Mapping):
        return {name: to_numpy(value) for name, value in values.items()}
    # NumPy values and Python numbers stay as they are.
    if not hasattr(values, "numpy"):
        return values
    return values.numpy()


def _is_metric(value: object) -> bool:
    return hasattr(value, "update_state") and hasattr(value, "result")


def _without_nan_of_no_examples(values: tf.Tensor, weight: FloatLike) -> tf.Tensor:
    """Returns `values`, or zeros if the weight is 0: the mean of no examples is NaN."""
    # A float is never 0.
    if isinstance(weight, float):
        return values
    zeros = tf.zeros_like(values)
    return tf.where(weight > 0, values, zeros)


def _count_examples(inputs: Any) -> tf.Tensor | float:
    """Returns the number of examples in a replica's batch.

    It is the first dimension of the labels, or of the whole batch. Features may contain scalars and
    tables, so the labels count where a batch is a tuple with labels. The number is a float if it is
    known beforehand and not 0, else a float32 scalar. If tensors that count differ in their first
    dimension, the step fails when it runs.
    """
    labels = None
    if isinstance(inputs, tuple) and len(inputs) in (2, 3):
        labels = inputs[1]
    leaves = _with_axes(labels) or _with_axes(inputs)
    if not leaves:
        return 1.0

    # A size that is unknown or 0 is counted when the step runs.
    sizes = []
    for leaf in leaves:
        if not leaf.shape[0]:
            size = tf.shape(leaf)[0]
            sizes.append(size)
    if not sizes:
        # Each batch has the same size, so that any weight is right.
        first_shape = leaves[0].shape
        return float(first_shape[0])

    if len(sizes) > 1:
        message = (
            "the tensors of a batch differ in their first dimension, so its examples cannot be "
            f"counted: {describe_structure(inputs)}; "
            "return (features, labels) from build_inputs: the labels are then counted"
        )
        all_sizes = tf.stack(sizes)
        tf.debugging.assert_equal(all_sizes, sizes[0], message)
    return tf.cast(sizes[0], tf.float32)


def _with_axes(values: Any) -> list[Any]:
    """Returns the tensors among nested values that have a first dimension."""
    leaves = []
    for leaf in tf.nest.flatten(values):
        if hasattr(leaf, "shape") and leaf.shape.rank:
            leaves.append(leaf)
    return leaves
