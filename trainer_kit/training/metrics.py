"""MetricSet: everything that the steps of a loop report as numbers, which is reset and read together.

A value of a step gets here in one of two ways. A scalar is added to the sums of the set: those that a step returns, and
the norms of its gradients. A metric is updated: the task's, those of the config, and those that a step returns.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.config.schema.metrics import KerasMetricConfig, MetricConfig
from trainer_kit.errors import UsageError, suggestion
from trainer_kit.inputs.autograph import converted
from trainer_kit.process.error_report import described
from trainer_kit.telemetry.scalars import flat_scalars
from trainer_kit.training.task import Task, step_loss

_LOG = logging.getLogger(__name__)
_MOST_SCALARS = 64  # that steps return


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

    The names of the scalars that steps return are known when a step is traced, too late to create variables for
    checkpoints: so one variable has a row for each of at most 64 names, in the order in which steps report them.

    Metrics that steps return are known only then, too, and the loop resets its metrics before its first step. So these
    metrics are reset from Python, after the results of a loop have been read.

    Args:
      loss_name: The name under which the mean loss is reported.
      metrics: Keras metrics, of either version.
      exact: Whether to sum the loss and the scalars in float64. In float32 the mean over a million examples in batches
        of 32 is off by 3 millionths.

    Attributes:
      loss: The mean loss.
      metrics: The argument of this name.
      returned: The metrics that steps return, by the name under which they do.

    Raises:
      UsageError: when two metrics have the same name.
    """

    def __init__(self, loss_name: str, metrics: Sequence[Any], *, exact: bool = False) -> None:
        dtype = "float64" if exact else "float32"
        self.loss = _Loss(loss_name, dtype=dtype)
        self.metrics = list(metrics)
        counts = Counter(metric.name for metric in [*self.metrics, self.loss])
        if twice := [name for name, count in counts.items() if count > 1]:
            raise UsageError(f"several metrics are called {', '.join(twice)}; give each metric a different name")

        self._names = frozenset(counts)
        self._reserved: dict[str, str] = {}
        self._tensor_metrics: list[Any] = []
        self.returned: dict[str, Any] = {}
        self._warned: set[str] = set()
        self._scalars: list[str] = []
        self._sums = tf.Variable(  # of each scalar the sum of its values times examples, and that of the examples
            tf.zeros([_MOST_SCALARS, 2], dtype),
            trainable=False,
            name="step_values",
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def add_tensor_metric(self, metric: Any, field: str) -> None:
        """Adds a metric that a tensor of the step updates, and not the step itself.

        Args:
          metric: The metric.
          field: The field of the config that asks for it.

        Raises:
          UsageError: when another metric has its name.
        """
        if metric.name in self._reserved:
            raise UsageError(f"{field}: another metric is called {metric.name!r} too; give each args.name its own")
        self.reserve(metric.name, field)
        self._tensor_metrics.append(metric)

    def reserve(self, name: str, field: str) -> None:
        """Keeps a name for a result of the engine's own: a step that returns such a scalar is refused.

        Args:
          name: The name of the result.
          field: The field of the config that asks for it.

        Raises:
          UsageError: when a metric has the name.
        """
        if any(metric.name == name for metric in self.metrics):
            raise UsageError(f"a metric is called {name}, which trainer_kit reports itself; give it another name")
        self._reserved[name] = field

    @tf.autograph.experimental.do_not_convert
    def take_metrics(self, task: Any, logs: Any, model: Any = None) -> Any:
        """Records the metrics that a step returned, and returns what else it returned; runs in graph, on a replica.

        Warns of a scalar that has the name of a metric in an attribute of the task, or of a metric of the model that
        the step uses: it may be the metric's result.

        Args:
          task: The task of the step. What tasks of Model Garden return stays as it is.
          logs: What the step returned; anything but a mapping stays as it is.
          model: The model of the step.

        Raises:
          UsageError: when a step returns another metric of the same name than before.
        """
        if not isinstance(task, Task) or not isinstance(logs, Mapping):
            return logs
        scalars = {name: value for name, value in logs.items() if not _is_metric(value)}
        for name, metric in logs.items():
            if name in scalars or str(name) in self._names:
                continue
            if self.returned.setdefault(str(name), metric) is not metric:
                raise UsageError(
                    f"a step returned a new metric object named {str(name)!r}; create it once, in the task's __init__ "
                    "or in build_model, and return the same object in each step"
                )

        metrics = {metric.name for metric in (*_metrics_of(task), *_used_metrics_of(model))}
        for name in sorted((metrics & scalars.keys()) - self._names - self._warned):
            self._warned.add(name)
            _LOG.warning(
                "the step returns the scalar %r, and the task or the model holds a metric of this name; the mean of "
                "the scalar is reported, and nothing resets the metric: return the metric to report its result%s",
                name,
                " under another name than the loss" if name == "loss" else "",
            )
        return scalars

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
        loss = step_loss(task, logs)
        weight = _examples(inputs) if share is None else share
        if isinstance(task, Task) and not isinstance(weight, float):
            self.update_loss(loss, inputs)
        else:
            self.update_loss(loss, share=share)
        self.update_step_values(task, logs, inputs)

    @tf.autograph.experimental.do_not_convert
    def update_loss(self, loss: tf.Tensor, inputs: Any = None, share: Any = None) -> None:
        """Adds the loss of one batch; runs in graph, on a replica.

        Args:
          loss: The mean loss over the batch, or a loss for each example, each of which counts as one.
          inputs: The batch; its number of examples is the weight of the loss, so that ragged and empty batches count
            correctly. None: every batch has the same weight.
          share: The micro-batch's share of its batch, for the loss of one; without `inputs`. A float above 0, or a
            float32 scalar that may be 0.
        """
        weight = 1.0 if share is None else share
        if inputs is not None:
            weight = _examples(inputs)
        loss = tf.cast(loss, self.loss.dtype)
        if loss.shape.rank:
            self.loss.update_state(loss)
        else:
            self.loss.update_state(_without_nan_of_no_examples(loss, weight), sample_weight=weight)

    @tf.autograph.experimental.do_not_convert
    def update_step_values(self, task: Any, logs: Mapping[Any, Any], inputs: Any) -> None:
        """Adds the scalars that a step returned in addition to the loss; runs in graph, on a replica.

        Args:
          task: The task of the step. What tasks of Model Garden return is not reported.
          logs: What the step returned. Values that are not single real numbers are left out.
          inputs: The batch; its number of examples is the weight of the values.

        Raises:
          UsageError: when steps have returned more than 64 different scalars, or one of a name that is reserved.
        """
        if not isinstance(task, Task):
            return
        others = {str(name): value for name, value in logs.items() if name != task.loss}
        numbers = {name: _number(value) for name, value in others.items() if name not in self._names}
        scalars = {name: value for name, value in numbers.items() if value is not None}
        if not scalars:
            return

        for name in scalars.keys() & self._reserved.keys():
            raise UsageError(
                f"the step returns a scalar called {name!r}, and {self._reserved[name]} reports one of this name; give "
                f"the scalar another name, or unset {self._reserved[name]}"
            )
        self.add_scalars(scalars, _examples(inputs))

    @tf.autograph.experimental.do_not_convert
    def add_scalars(self, scalars: Mapping[str, Any], weight: Any = 1.0) -> None:
        """Adds scalars, of which the loop reports the weighted means; runs in graph, on a replica.

        Args:
          scalars: The scalars by name.
          weight: A float above 0, or a scalar that may be 0.

        Raises:
          UsageError: when a loop has more than 64 scalars.
        """
        rows = [[self._row(name)] for name in scalars]
        values = tf.stack([tf.cast(value, self._sums.dtype) for value in scalars.values()])
        values = _without_nan_of_no_examples(values, weight)
        weight = tf.cast(weight, self._sums.dtype)
        added = tf.stack([values * weight, tf.fill([len(rows)], weight)], axis=1)
        self._sums.assign_add(tf.scatter_nd(rows, added, self._sums.shape))

    def was_added(self, name: str) -> bool:
        """Whether a scalar was added to since the last reset; runs eagerly, on the host."""
        return name in self._scalars and bool(tf.convert_to_tensor(self._sums)[self._scalars.index(name), 1] > 0)

    def _row(self, name: str) -> int:
        """Returns the row of a scalar, which is new when the step is first traced."""
        if name not in self._scalars:
            if len(self._scalars) == _MOST_SCALARS:
                raise UsageError(
                    f"the steps return more than {_MOST_SCALARS} scalars in addition to the loss; {name!r} is one too "
                    "many: return tensors with an axis for values that need no curve"
                )
            self._scalars.append(name)
        return self._scalars.index(name)

    @tf.autograph.experimental.do_not_convert
    def reset(self) -> None:
        """Resets all metrics but those that steps return; runs eagerly or in graph, in cross-replica context."""
        for metric in [*self.metrics, *self._tensor_metrics, self.loss]:
            metric.reset_state()
        self._sums.assign(tf.zeros_like(self._sums))

    def reset_returned(self, whole: bool = True) -> None:
        """Resets the metrics that steps return, after the results have been read; runs eagerly, on the host.

        Args:
          whole: Whether the loop has come to its end; one that was stopped in the middle goes on with their state.
        """
        for metric in self.returned.values() if whole else ():
            metric.reset_state()

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns all results by name, with the loss if a step reported one; called in cross-replica context."""
        logs: dict[str, Any] = {}
        sums = tf.convert_to_tensor(self._sums)
        for row, name in enumerate(self._scalars):
            logs[name] = tf.cast(sums[row, 0] / sums[row, 1], tf.float32)
        metrics = {metric.name: metric for metric in [*self._tensor_metrics, *self.metrics]}
        for name, metric in [*metrics.items(), *self.returned.items()]:
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
        of_tensors = [variable for metric in self._tensor_metrics for variable in metric.variables]
        return [*of_metrics, self._sums, *of_tensors]

    @property
    def returned_variables(self) -> list[Any]:
        """The variables of the metrics that steps return; a checkpoint has them as other state of the step."""
        return [variable for metric in self.returned.values() for variable in metric.variables]

    def names(self) -> list[str] | None:
        """Returns the names of the scalars in `results`, nested names joined by `|`; runs eagerly.

        Returns None if they are not known yet: the first batch builds the metrics of a compiled model.
        """
        if any(getattr(metric, "built", True) is False for metric in self.metrics):
            return None
        scalars = flat_scalars(to_numpy(self.results()), "|")
        return [*(name for name in scalars if name != self.loss.name), self.loss.name]


def training_metrics(task: Any, model: Any, config: Any, *, wanted: bool) -> MetricSet:
    """Returns the metrics of training: the task's, those of the config, and those of a compiled model; called in scope.

    Args:
      task: The task.
      model: The task's model.
      config: The experiment's config.
      wanted: Whether the trainer will train; if not, the set holds only the loss.
    """
    return MetricSet("training_loss", _metrics(task, model, config, training=True) if wanted else [])


def validation_metrics(task: Any, model: Any, config: Any, *, wanted: bool) -> MetricSet:
    """Returns the metrics of evaluation, with the loss summed in float64; see `training_metrics`."""
    metrics = _metrics(task, model, config, training=False) if wanted else []
    return MetricSet("validation_loss", metrics, exact=True)


def _metrics(task: Any, model: Any, config: Any, training: bool) -> list[Any]:
    configured = [metric for metric, _, _ in configured_metrics(config)]
    return [*task_metrics(task, training), *configured, *model_metrics(model)]


def model_metrics(model: Any) -> list[Any]:
    """Returns the metrics of a compiled model, without the tracker of its loss."""
    return [metric for metric in getattr(model, "metrics", None) or [] if metric.name != "loss"]


def task_metrics(task: Any, training: bool) -> list[Any]:
    """Returns the metrics that `task.build_metrics` makes; called in strategy scope.

    Raises:
      UsageError: when it does not return a list of metrics.
    """
    metrics = task.build_metrics(training=training)
    if not isinstance(metrics, (list, tuple)):
        kind = "None" if metrics is None else f"a {type(metrics).__name__}"
        raise UsageError(f"{type(task).__name__}.build_metrics returned {kind}; return a list of metrics")
    for metric in metrics:
        check_metric(metric, f"{type(task).__name__}.build_metrics returned a list with")
    return list(metrics)


def configured_metrics(config: Any, of_tensors: bool = False) -> list[tuple[Any, str, str]]:
    """Returns new metrics for entries of `trainer.metrics`, each with its tensor and its field; called in scope.

    Args:
      config: The experiment's config.
      of_tensors: Whether to return the metrics of entries that name a tensor, instead of those that name none.

    Raises:
      UsageError: when a metric cannot be made.
    """
    metrics = []
    for place, section in enumerate(getattr(config.trainer, "metrics", ())):
        if bool(section.tensor) == of_tensors:
            field = f"trainer.metrics[{place}]"
            registered = section.type in MetricConfig.registry
            build = MetricConfig.registry.lookup(str(section.type)).build if registered else _keras_metric
            metric = build(section.get())
            check_metric(metric, f"{field}: {section.type} built")
            metrics.append((metric, section.tensor, field))
    return metrics


def _keras_metric(config: KerasMetricConfig) -> Any:
    kind = getattr(keras.metrics, config.metric, None)
    if not (isinstance(kind, type) and issubclass(kind, keras.metrics.Metric)):
        known = [name for name in dir(keras.metrics) if isinstance(getattr(keras.metrics, name), type)]
        raise UsageError(f"trainer.metrics: keras.metrics has no {config.metric!r}; {suggestion(config.metric, known)}")
    try:
        return kind(**config.args)
    except (TypeError, ValueError) as error:
        raise UsageError(f"trainer.metrics: keras.metrics.{config.metric} refuses its args: {error}") from error


def check_metric(metric: Any, where: str) -> None:
    """Raises UsageError when an object is not a metric; `where` says in the message where it comes from."""
    if isinstance(metric, type) or not hasattr(metric, "result"):
        kind = f"the class {metric.__name__}" if isinstance(metric, type) else repr(metric)
        raise UsageError(
            f"{where} {kind}, which is not a metric; return metric objects, such as "
            "keras.metrics.SparseCategoricalAccuracy()"
        )


def reported_values(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results of a loop without those that the engine reads itself."""
    return {name: value for name, value in results.items() if not name.startswith("trainer_kit/")}


def to_numpy(values: Any) -> Any:
    """Returns nested dicts of tensors as nested dicts of NumPy values."""
    if isinstance(values, Mapping):
        return {name: to_numpy(value) for name, value in values.items()}
    return values.numpy() if hasattr(values, "numpy") else values


def _is_metric(value: Any) -> bool:
    return hasattr(value, "update_state") and hasattr(value, "result")


def _metrics_of(task: Any) -> Iterator[Any]:
    """Yields the metrics in the attributes of a task, and in lists there."""
    for value in vars(task).values():
        yield from filter(_is_metric, value if isinstance(value, (list, tuple)) else [value])


def _used_metrics_of(model: Any) -> Iterator[Any]:
    """Yields the metrics of a model that the graph of a step reads or writes; none in eager mode."""
    used = {id(tensor) for tensor, _ in getattr(tf.compat.v1.get_default_graph(), "captures", ())}
    for metric in getattr(model, "metrics", None) or ():
        native = [variable if isinstance(variable, tf.Variable) else variable.value for variable in metric.variables]
        if any(id(variable.handle) in used for variable in native):
            yield metric


def _number(value: Any) -> tf.Tensor | None:
    """Returns a value as a tensor if it is a single real number; else None."""
    if isinstance(value, (Mapping, str, bytes)) or value is None or _is_metric(value):
        return None
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        return None
    is_number = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype == tf.bool
    return tensor if is_number and tensor.shape.rank == 0 else None


def _without_nan_of_no_examples(values: tf.Tensor, weight: Any) -> tf.Tensor:
    """Returns `values`, or zeros if the weight is 0: the mean of no examples is NaN. A float is never 0."""
    return values if isinstance(weight, float) else tf.where(weight > 0, values, tf.zeros_like(values))


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
