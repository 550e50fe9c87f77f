"""train_loop: the functions of a loop by hand on trainer_kit's engine, as a task."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.compat.keras.dataset_passes import DatasetPasses, needs_new_iterators
from trainer_kit.compat.keras.keras_task import FitTask
from trainer_kit.compat.keras.keras_trainer import KerasTrainer
from trainer_kit.compat.keras.keras_types import Callbacks, CompiledModel, History
from trainer_kit.compat.keras.model_fit import check_arguments, run_fit
from trainer_kit.compat.keras.task_config import KerasTaskConfig
from trainer_kit.compat.keras.training_data import TrainingData, build_training_data
from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.runtime.replica_values import native_variable
from trainer_kit.runtime.variable_creation import trace_concrete_function
from trainer_kit.training.metric_set import MetricSet
from trainer_kit.typing import ExperimentLike, Metric, Model, Optimizers, Variable

_LOG = logging.getLogger(__name__)


def train_loop(
    train_step: Callable[..., object],
    train_ds: Any,
    *,
    epochs: int,
    model: CompiledModel,
    optimizer: Optimizers,
    metrics: Sequence[Metric] | None = None,
    test_step: Callable[..., object] | None = None,
    val_dataset: tf.data.Dataset | None = None,
    val_metrics: Sequence[Metric] | None = None,
    model_dir: str,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    callbacks: Callbacks = None,
    verbose: str | int = "auto",
    best: str | bool | None = None,
    best_mode: str = "auto",
    **options: Any,
) -> History:
    """Trains with the functions of a loop by hand, in a folder from which a stopped run resumes.

    Does what `for epoch ...: for batch in train_ds: train_step(*batch)` does. Runs eagerly, on the
    host. The functions run in graph, decorated with tf.function or not, with the parts of a batch
    as their arguments. They use the model, optimizer, loss and metrics of the code around them,
    which are trained in place.

    Args:
      train_step: Trains on a batch and returns its loss, `(loss, ...)`, or a dict of scalars to
        report with "loss".
      train_ds: A tf.data.Dataset of batches, read from its start in each epoch, also with
        steps_per_epoch. Or whatever else `fit` takes as x.
      epochs: The total number of epochs, including those before a restart.
      model: The model that train_step trains: a Keras model.
      optimizer: The optimizer that train_step applies. A dict of optimizers by name if there are
        several.
      metrics: The metrics that train_step updates. They are reset where an epoch begins.
      test_step: Evaluates a batch. It may return the same as train_step.
      val_dataset: A tf.data.Dataset of batches for test_step, read once at the end of each epoch.
      val_metrics: The metrics that test_step updates. They are reset before each evaluation.
      model_dir: The folder of the run.
      steps_per_epoch, validation_steps, validation_freq, callbacks, verbose: See `fit`.
      best: See `fit`. None: "val_loss" if test_step returns a loss.
      best_mode, **options: See `fit`.

    Returns:
      A History with `loss`, the metrics by name, and `val_` before those of the evaluation, for all
      epochs of the run. `loss` and other scalars are means over the examples of the epoch.

    Raises:
      UsageError: When an argument cannot be used.
      PreemptedError, InterruptedRunError: When SIGTERM or Ctrl-C stopped the run, after it saved.
    """
    check_arguments(train_loop, train_ds, epochs, options)
    if (test_step is None) != (val_dataset is None):
        missing = "val_dataset" if val_dataset is None else "test_step"
        raise UsageError(
            f"{missing} is missing: an evaluation needs test_step and val_dataset; give both or"
            " none"
        )

    with _strategy_of_one_replica(model).scope():
        data = _build_loop_data(train_ds, steps_per_epoch)
        train_metrics = tuple(metrics or ())
        test_metrics = tuple(val_metrics or ())
        loop = HandWrittenLoop(train_step, test_step, optimizer, train_metrics, test_metrics)
        task = LoopTask(model, data, val_dataset, model_dir, loop)
        task.prepare(model, trains=True, evaluates=test_step is not None)
    options["runtime"] = {"enable_xla": False, **(options.get("runtime") or {})}

    # Callbacks look for the learning rate in the optimizer of the model. One with averages is left
    # out: at the end of the training the weights would become averages, as in `fit` and not in a
    # loop by hand.
    has_no_optimizer = getattr(model, "optimizer", None) is None
    if callbacks and has_no_optimizer and not isinstance(optimizer, Mapping):
        if not getattr(optimizer, "use_ema", False):
            model.optimizer = optimizer

    return run_fit(
        task,
        epochs,
        validation_steps=validation_steps,
        validation_freq=validation_freq,
        callbacks=callbacks,
        verbose=verbose,
        best=best,
        best_mode=best_mode,
        **options,
    )


def _strategy_of_one_replica(model: CompiledModel) -> tf.distribute.Strategy:
    """Returns the strategy of the model.

    Raises:
      UsageError: When it is no Keras model, or has several replicas. A function that was written
        for one replica does not divide its loss by their number, and would train with a multiple
        of the gradient.
    """
    if not hasattr(model, "distribute_strategy"):
        raise UsageError(
            f"model is a {type(model).__name__}; train_loop takes a Keras model. Make it one, by"
            " subclassing keras.Model; or write a trainer_kit.Task, which trains a tf.Module, too"
        )

    strategy: tf.distribute.Strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync > 1:
        raise UsageError(
            f"the model is on {strategy.num_replicas_in_sync} replicas; train_loop runs the"
            " functions of a loop by hand on one. Make the model outside of the strategy's scope;"
            " or override train_step of the model and call fit, which divides the loss by the"
            " number of replicas"
        )
    return strategy


def _build_loop_data(train_ds: Any, steps_per_epoch: int | None) -> TrainingData:
    """Returns the epochs of a loop by hand over the data.

    A loop makes one iterator in each epoch, `Model.fit` two, so that fit reads every second order
    of a shuffle. A loop that leaves an epoch after some steps begins the next one at the start of
    the data. Data without end continues.
    """
    data = build_training_data(train_ds, steps_per_epoch=steps_per_epoch)
    if not isinstance(train_ds, tf.data.Dataset):
        return data

    is_finite = int(train_ds.cardinality()) != tf.data.INFINITE_CARDINALITY
    epoch = train_ds
    if steps_per_epoch and is_finite:
        epoch = train_ds.take(steps_per_epoch)
    if is_finite and needs_new_iterators(epoch):
        passes = DatasetPasses(epoch, data.steps_per_epoch, original_dataset=train_ds)
        return dataclasses.replace(data, batches=passes)
    return dataclasses.replace(data, batches=epoch.repeat())


@dataclasses.dataclass(frozen=True)
class HandWrittenLoop:
    """The parts of a loop by hand.

    Attributes:
      train_step: Trains on a batch and returns its loss, a tuple that begins with the loss, or a
        dict with "loss".
      test_step: Evaluates a batch, and returns the same or None. None if there is no evaluation.
      optimizer: The optimizer, or a dict of optimizers by name.
      metrics: The metrics that train_step updates.
      val_metrics: The metrics that test_step updates.
    """

    train_step: Callable[..., object]
    test_step: Callable[..., object] | None
    optimizer: Optimizers
    metrics: Sequence[Metric]
    val_metrics: Sequence[Metric]


@configclass
class LoopTaskConfig(KerasTaskConfig):
    """The section `task` of a loop by hand."""


class LoopTask(FitTask):
    """Trains with the functions of a loop by hand.

    Args:
      model, data, validation, model_dir: See FitTask.
      loop: The loop.

    Attributes:
      loop: The argument.
    """

    config_class = LoopTaskConfig

    def __init__(
        self,
        model: CompiledModel,
        data: TrainingData,
        validation: tf.data.Dataset | None,
        model_dir: str,
        loop: HandWrittenLoop,
    ) -> None:
        super().__init__(model, data, validation, model_dir)
        self.loop = loop
        # The trace of test_step sets it.
        self._test_step_returns_loss = False

    def prepare(self, model: CompiledModel, *, trains: bool, evaluates: bool) -> Any:
        """Traces the functions once, so that all variables exist, and returns the optimizer.

        Called in strategy scope, on the host.

        Raises:
          UsageError: When a function does not accept a batch or returns something else than a
            loss, or when an evaluation has no result.
        """
        if trains and self._prepared_for_training is not model:
            self._trace("train_step", self.data.batches, "metrics")
            self._prepared_for_training = model
        if evaluates and self._prepared_for_evaluation is not model:
            self._trace("test_step", self.validation, "val_metrics")
            self._prepared_for_evaluation = model
            if not self.get_evaluation_metric_names():
                raise UsageError(
                    "test_step returns no loss and there are no val_metrics, so an evaluation has"
                    " no result; return the loss from test_step, or give val_metrics=[...], the"
                    " metrics that test_step updates"
                )
        return self.loop.optimizer

    def get_evaluation_metric_names(self) -> list[str]:
        """Returns the names of the single numbers that an evaluation gives, after `prepare`."""
        names = [metric.name for metric in self.loop.val_metrics]
        if self._test_step_returns_loss:
            names.insert(0, "loss")
        return names

    def _trace(self, name: str, data: Any, argument: str) -> None:
        """Traces a function, and warns of metrics that it updates without being told of them.

        Nothing resets a metric that is not in the argument for it, so that a step that returns its
        result would report a wrong one.

        Args:
          name: The name of the function: train_step or test_step.
          data: The data whose batches it gets.
          argument: The argument of `train_loop` for its metrics.
        """
        function = trace_concrete_function(
            lambda batch: self._run_step(name, batch) and None, data.element_spec
        )
        updated_ids = {id(variable) for variable in function.graph.variables}
        listed_ids: set[int] = set()
        for metric in getattr(self.loop, argument):
            listed_ids.update(id(variable) for variable in metric.variables)

        # The metrics of the caller are in no collection, and may be of either Keras.
        keras_2 = sys.modules.get("tf_keras", keras)
        metric_classes = (keras.metrics.Metric, keras_2.metrics.Metric)
        all_metrics = [
            value for value in gc.get_objects() if issubclass(type(value), metric_classes)
        ]
        for metric in all_metrics:
            other_ids = set()
            for variable in metric.variables:
                if id(variable) not in listed_ids:
                    other_ids.add(id(native_variable(variable)))
            if updated_ids & other_ids:
                _LOG.warning(
                    "%s updates the metric %r, which is not in %s; it is not reported, and nothing"
                    " resets it: add it there",
                    name,
                    metric.name,
                    argument,
                )

    @tf.autograph.experimental.do_not_convert
    def _run_step(self, step_name: str, batch: Any) -> dict[str, Any]:
        """Runs a function on a batch and returns its results by name.

        Runs in graph. The result "loss" is a float scalar.

        Raises:
          UsageError: When the function does not accept the batch, or train_step returns no loss.
        """
        step: Any = getattr(self.loop, step_name)

        # As a loop by hand calls it: with the parts of a tuple, or with the batch itself.
        parts = batch if isinstance(batch, tuple) else (batch,)
        signature = inspect.signature(step)
        if _accepts(signature, parts):
            arguments = parts
        elif _accepts(signature, (batch,)):
            arguments = (batch,)
        else:
            raise UsageError(
                f"{step_name}{signature} cannot be called with a batch, which has {len(parts)}"
                " parts; give it one parameter for each part, or one for the whole batch"
            )

        returned = apply_autograph(step)(*arguments)
        if isinstance(returned, Sequence):
            returned = returned[0] if returned else None
            if returned is None or tf.convert_to_tensor(returned).shape.rank != 0:
                raise UsageError(
                    f"{step_name} returned a tuple that does not begin with the loss;"
                    ' return {"loss": loss}'
                )
        by_name = returned if isinstance(returned, Mapping) else {"loss": returned}
        logs: dict[str, Any] = {}
        for key, value in by_name.items():
            if value is not None:
                logs[str(key)] = value

        if "loss" in logs:
            losses = tf.convert_to_tensor(logs["loss"])
            logs["loss"] = tf.reduce_mean(losses)
        elif step_name == "train_step":
            raise UsageError(
                'train_step returned no loss; add `return loss`, or return a dict with "loss"'
            )

        if step_name == "test_step":
            self._test_step_returns_loss = "loss" in logs
        return logs

    @tf.autograph.experimental.do_not_convert
    def train_step(
        self,
        inputs: Any,
        model: CompiledModel,
        optimizer: Optimizers,
        metrics: Sequence[Metric] | None = None,
    ) -> dict[str, Any]:
        """Runs the caller's train_step, in graph."""
        return self._run_step("train_step", inputs)

    @tf.autograph.experimental.do_not_convert
    def validation_step(
        self, inputs: Any, model: CompiledModel, metrics: Sequence[Metric] | None = None
    ) -> dict[str, Any]:
        """Runs the caller's test_step, in graph."""
        return self._run_step("test_step", inputs)


def _accepts(signature: inspect.Signature, arguments: tuple[object, ...]) -> bool:
    """Whether a function with this signature can be called with these positional arguments."""
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


class LoopMetrics(MetricSet):
    """The mean loss of an epoch and the metrics of the caller.

    Created in the scope of the strategy. A batch counts as much as it has examples. A metric of the
    caller that is called "loss" replaces the mean loss.
    """

    def variables(self) -> list[Variable]:
        """Returns the variables of all metrics.

        Their order is that of the checkpoints of earlier releases.
        """
        variables: list[Variable] = []
        for metric in [*self.metrics, self.loss, *self._engine_metrics]:
            variables += metric.variables
        return variables

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns all results by name. Called in cross-replica context."""
        results = super().results()
        if "loss" in results:
            results[self.loss.name] = results.pop("loss")
        return results


class LoopTrainer(KerasTrainer):
    """Trains a LoopTask. See KerasTrainer."""

    def _build_training_metrics(
        self, config: ExperimentLike, task: Any, model: Model, enabled: bool
    ) -> MetricSet:
        return LoopMetrics("training_loss", task.loop.metrics)

    def _build_evaluation_metrics(
        self, config: ExperimentLike, task: Any, model: Model, enabled: bool
    ) -> MetricSet:
        return LoopMetrics("validation_loss", task.loop.val_metrics)


register_task(
    LoopTaskConfig, LoopTask, trainer="trainer_kit.compat.keras.hand_written_loop:LoopTrainer"
)
