"""Task: the model, data, losses, metrics and the two steps of an experiment, as one replica sees them.

A task knows nothing of strategies, files or the trainer. Four methods are enough to train:
build_model, build_inputs, build_losses and build_metrics; the other methods have defaults. Names
and meanings are TF Model Garden's.
"""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import TrainerKitError, UsageError, add_note
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.inputs.sources.source_protocol import Source
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.gradients import apply_gradients, scale_loss
from trainer_kit.process.error_report import describe_values
from trainer_kit.runtime.keras_internals import skip_replica_loss_scaling
from trainer_kit.training.initial_weights.weight_loading import load_initial_weights


class Task(abc.ABC):
    """A learning task: builds model, data, losses and metrics, and defines the steps of training and validation.

    Args:
      params: The task's config.
      logging_dir: The folder of the run's files, the same as model_dir.
      name: The task's name; default: `params.name`, else the class's name.
    """

    loss = "loss"  # the key of the loss in the logs of train_step and validation_step
    # The name of the validation set that is evaluated now; steps are traced for each set
    validation_set = ""

    def __init__(
        self, params: Any, logging_dir: str | None = None, name: str | None = None
    ) -> None:
        self._task_config = params
        self._logging_dir = logging_dir or ""
        self.name = name or getattr(params, "name", None) or type(self).__name__

    @property
    def task_config(self) -> Any:
        """The task's config.

        Raises:
          UsageError: when a subclass has an `__init__` that does not call `super().__init__`.
        """
        if not hasattr(self, "_task_config"):
            name = type(self).__name__
            raise UsageError(
                f"{name}.__init__ has to call super().__init__(params, logging_dir=logging_dir)"
            )
        return self._task_config

    @property
    def logging_dir(self) -> str:
        """The folder of the run's files; empty outside a run."""
        return self._logging_dir

    @classmethod
    def create_optimizer(
        cls, optimizer_config: OptimizationConfig, runtime_config: RuntimeConfig | None = None
    ) -> Any:
        """Returns the optimizer: a Keras 3 optimizer, or a dict of them by name. Called in strategy scope.

        Raises:
          UsageError: when the config names no optimizer.
        """
        return create_optimizer(
            optimizer_config,
            mixed_precision_dtype=runtime_config.mixed_precision_dtype if runtime_config else None,
            loss_scale=runtime_config.loss_scale if runtime_config else None,
            random_seed=getattr(runtime_config, "random_seed", 0),
        )

    def optimizer_variables(self, model: Any) -> Mapping[str, Sequence[Any]]:
        """Returns the variables that each of several optimizers updates, by the optimizer's name; none by default.

        The optimizers are those of `trainer.optimizers`, whose patterns count instead where there
        are any, or those of `create_optimizer`, if it returns a dict. Called in strategy scope,
        with the built model.
        """
        del model
        return {}

    def hyper_parameters(self) -> Mapping[str, tf.Variable]:
        """Returns the hyper-parameters that can be changed during a run, scalar variables by name; none by default.

        Make the variables in build_model, as attributes of the task: checkpoints hold them then.
        Callbacks set them between training loops; see docs/guides/hyper_parameters.md. Called
        eagerly, on the host.
        """
        return {}

    def build_callbacks(self) -> Sequence[Any]:
        """Returns callbacks of trainer_kit that belong to the task, new ones for each run; none by default.

        Runs that train call them before the callbacks of the config and of the caller. Called
        eagerly, on the host.
        """
        return ()

    def initialize(self, model: Any) -> None:
        """Loads `task_config.init_checkpoint`, a path or a list of sections, into `model`; does nothing if empty.

        Called, eagerly, only when model_dir has no checkpoint.

        Raises:
          UsageError: when there is no such checkpoint, or it lacks a chosen variable or has another
            shape for it.
        """
        given = getattr(self.task_config, "init_checkpoint", "")
        if given:
            load_initial_weights(model, given)

    @abc.abstractmethod
    def build_model(self) -> Any:
        """Returns the model, of Keras 3 or tf_keras, or a tf.Module. Called in strategy scope.

        A model without variables is built afterwards: the task calls it in a graph on the specs of
        a batch.
        """

    def build_inputs(
        self, params: DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset | Source:
        """Returns the data of `params` (the config's train_data or validation_data), in batches for one replica.

        Args:
          params: A DataConfig, or the task's own kind of data config.
          input_context: This worker's place; `get_per_replica_batch_size` gives the batch size.
            None: one replica.

        Not called where `params.dataset` names a registered dataset.
        """
        del params, input_context
        raise UsageError(
            f"{type(self).__name__} has no build_inputs; define it, or name a registered dataset in"
            " task.train_data.dataset.type and task.validation_data.dataset.type"
        )

    @tf.autograph.experimental.do_not_convert
    def build_losses(
        self, labels: Any, model_outputs: Any, aux_losses: Sequence[tf.Tensor] | None = None
    ) -> tf.Tensor:
        """Returns the total loss, a float scalar; by default the sum of `aux_losses`.

        Args:
          labels: The labels of the batch.
          model_outputs: The outputs of `inference_step` or of the model.
          aux_losses: `model.losses`, the losses that layers added; an override has to add them to
            the total.
        """
        del labels, model_outputs
        return tf.add_n(list(aux_losses)) if aux_losses else tf.constant(0.0)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns new Keras metrics, for training or for validation; none by default."""
        del training
        return []

    @tf.autograph.experimental.do_not_convert
    def process_metrics(
        self, metrics: Sequence[Any], labels: Any, model_outputs: Any, **kwargs: Any
    ) -> None:
        """Updates the metrics of `build_metrics` with one batch; runs in graph, on a replica."""
        del kwargs
        for metric in metrics:
            try:
                apply_autograph(metric.update_state)(labels, model_outputs)
            except Exception as error:
                given = describe_values({"labels": labels, "model_outputs": model_outputs})
                add_note(
                    error,
                    f"the metric {metric.name} ({type(metric).__name__}) got this batch: {given}",
                )
                raise

    @tf.autograph.experimental.do_not_convert
    def process_compiled_metrics(
        self, model: Any, features: Any, labels: Any, model_outputs: Any, sample_weight: Any = None
    ) -> None:
        """Updates the metrics of the model's `compile` with one batch; runs in graph, on a replica."""
        apply_autograph(model.compute_metrics)(
            x=features, y=labels, y_pred=model_outputs, sample_weight=sample_weight
        )

    @tf.autograph.experimental.do_not_convert
    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Runs one forward and backward pass and updates the weights, in graph, on a replica.

        The gradient is that of the mean loss over all replicas, and includes the losses of layers
        once. An override has to divide its loss by the number of replicas, because gradients are
        summed over replicas. With float16 it also has to scale the loss with
        `optimizer.scale_loss`; `apply_gradients` undoes that.

        Args:
          inputs: One batch: (features, labels), or features that are their own labels. For a
            compiled model also (features, labels, weights of the examples).
          model: The model of build_model.
          optimizer: The optimizer of create_optimizer.
          metrics: The metrics of build_metrics.

        Returns:
          Logs; the key `self.loss` holds the loss before scaling. Each other scalar is reported as
          its mean over the loop, weighted by examples, and each metric as its result; one with the
          name of a metric of build_metrics is left out, since that is reported.
        """
        features, labels, weights = _split_weighted(inputs, model)
        with tf.GradientTape() as tape:
            outputs = full_precision(apply_autograph(model)(features, training=True))
            loss = self.batch_loss(model, features, labels, outputs, **weights)
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            share = (
                loss / replicas if replicas > 1 else loss
            )  # a division by 1 costs 2 % of a step of 0.1 ms
            replica_loss = scale_loss(optimizer, share)
        gradients = tape.gradient(replica_loss, model.trainable_variables)
        apply_gradients(optimizer, list(zip(gradients, model.trainable_variables, strict=True)))
        self.update_metrics(metrics, model, features, labels, outputs, **weights)
        return {self.loss: loss}

    @tf.autograph.experimental.do_not_convert
    def validation_step(
        self, inputs: Any, model: Any, metrics: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Runs one forward pass and updates the metrics, in graph, on a replica.

        Returns:
          Logs; the key `self.loss`, if present, holds the mean loss over the batch. Each metric is
          reported as its result, and each other scalar as its mean over the evaluation, weighted by
          examples, unless the task aggregates logs.
        """
        features, labels, weights = _split_weighted(inputs, model)
        outputs = full_precision(apply_autograph(self.inference_step)(features, model))
        loss = self.batch_loss(model, features, labels, outputs, **weights)
        self.update_metrics(metrics, model, features, labels, outputs, **weights)
        return {self.loss: loss}

    @tf.autograph.experimental.do_not_convert
    def inference_step(self, inputs: Any, model: Any) -> Any:
        """Returns the model's outputs for `inputs` (features only) in inference mode; runs in graph, on a replica."""
        return apply_autograph(model)(inputs, training=False)

    def aggregate_logs(self, state: Any, step_logs: Mapping[str, Any]) -> Any:
        """Returns `state` with the logs of a validation step added; it is None at first. Runs eagerly, on the host.

        Values of `step_logs` are tuples with one entry for each replica. Override this method
        together with `reduce_aggregated_logs` for metrics that a Keras metric cannot compute. The
        default keeps no state.
        """
        del state, step_logs
        return None

    def reduce_aggregated_logs(
        self, aggregated_logs: Any, global_step: tf.Tensor | None = None
    ) -> dict[str, Any]:
        """Returns metrics computed from the aggregated logs at the end of an evaluation; runs eagerly, on the host."""
        del aggregated_logs, global_step
        return {}

    def aggregates(self) -> bool:
        """Whether this task aggregates logs over an evaluation."""
        return type(self).aggregate_logs is not Task.aggregate_logs

    @tf.autograph.experimental.do_not_convert
    def batch_loss(
        self, model: Any, features: Any, labels: Any, outputs: Any, sample_weight: Any = None
    ) -> tf.Tensor:
        """Returns the loss of one batch, a float32 scalar: build_losses, and that of the model's `compile`.

        Runs in graph, on a replica.

        Args:
          model: The model, just called on the batch; what its layers added is part of the loss.
          features: The features of the batch.
          labels: Its labels.
          outputs: The outputs of the model.
          sample_weight: The weights of the examples, for the loss of a model's `compile`; None: all
            count alike.
        """
        added, build_losses = (
            list(getattr(model, "losses", None) or []),
            apply_autograph(self.build_losses),
        )
        with skip_replica_loss_scaling():
            if is_compiled(model):  # Keras' own loss holds what the layers added
                weights = {} if sample_weight is None else {"sample_weight": sample_weight}
                loss = apply_autograph(model.compute_loss)(
                    x=features, y=labels, y_pred=outputs, **weights
                )
                loss += build_losses(labels=labels, model_outputs=outputs, aux_losses=None)
            else:
                loss = build_losses(labels=labels, model_outputs=outputs, aux_losses=added)
        return _cast_scalar_loss(loss, type(self).__name__)

    @tf.autograph.experimental.do_not_convert
    def update_metrics(
        self,
        metrics: Sequence[Any] | None,
        model: Any,
        features: Any,
        labels: Any,
        outputs: Any,
        **weights: Any,
    ) -> None:
        """Updates the metrics of build_metrics and of the model's `compile` with one batch.

        Runs in graph, on a replica.

        Args:
          metrics: All metrics, those of the model's `compile` among them.
          model: The model.
          features: The features of the batch.
          labels: Its labels.
          outputs: The outputs of the model.
          **weights: `sample_weight`, the weights of the examples, for the metrics of `compile`;
            nothing without them.
        """
        compiled = is_compiled(model)
        of_model = {id(metric) for metric in model.metrics} if compiled else set()
        others = (
            [metric for metric in metrics or () if id(metric) not in of_model]
            if of_model
            else metrics
        )
        if others:
            apply_autograph(self.process_metrics)(others, labels, outputs)
        if compiled:
            apply_autograph(self.process_compiled_metrics)(
                model, features, labels, outputs, **weights
            )


@tf.autograph.experimental.do_not_convert
def _cast_scalar_loss(loss: Any, task_name: str) -> tf.Tensor:
    """Returns the scalar loss in float32. A loss per example is refused: its gradient would be that of the sum."""
    return tf.cast(scalar_loss(loss, f"{task_name}.build_losses"), tf.float32)


@tf.autograph.experimental.do_not_convert
def scalar_loss(loss: Any, method: str) -> tf.Tensor:
    """Returns the loss, which has to be a scalar, as a tensor.

    Args:
      loss: The loss that `method` returned; if its rank is not known before the step runs, the step
        checks it.
      method: The name of the method that returned the loss, for the message.

    Raises:
      UsageError: when the loss is not a scalar.
    """
    try:
        given = tf.convert_to_tensor(loss)
    except (TypeError, ValueError):  # None, a dict
        given = None
    if given is None or given.dtype in (tf.string, tf.bool):
        returned = f"{loss!r:.80}, which is not a number"
    elif given.shape.rank in (0, None):
        return given if given.shape.rank == 0 else tf.ensure_shape(given, [])
    else:
        returned = f"a tensor of shape {given.shape}; reduce it with tf.reduce_mean"
    raise UsageError(f"{method} has to return a scalar; it returned {returned}")


@tf.autograph.experimental.do_not_convert
def step_loss(task: Any, logs: Any) -> tf.Tensor:
    """Returns the loss from the logs of a training step; runs in graph, on a replica.

    A `Task` has to return a scalar. Tasks of Model Garden may return a loss per example, whose mean
    is reported.

    Raises:
      TrainerKitError: when the logs hold no loss.
      UsageError: when the loss of a `Task` is not a scalar.
    """
    method = f"{type(task).__name__}.train_step"
    if not isinstance(logs, Mapping) or task.loss not in logs:
        given = (
            f"a dict of {', '.join(map(str, logs)) or 'nothing'}"
            if isinstance(logs, Mapping)
            else repr(logs)
        )
        raise TrainerKitError(
            f"{method} has to return a dict with the loss, {{self.loss: loss}}; it returned {given}"
        )
    loss = logs[task.loss]
    return (
        scalar_loss(loss, f"under the key {task.loss!r}, {method}")
        if isinstance(task, Task)
        else loss
    )


@tf.autograph.experimental.do_not_convert
def split_batch(inputs: Any) -> tuple[Any, Any]:
    """Returns (features, labels) of a batch; without labels, the features are their own labels."""
    if isinstance(inputs, tuple) and len(inputs) == 2:
        return inputs
    return inputs, inputs


@tf.autograph.experimental.do_not_convert
def _split_weighted(inputs: Any, model: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Returns features and labels of a batch, and its sample_weight, by that name, if a compiled model gets some."""
    if isinstance(inputs, tuple) and len(inputs) == 3 and is_compiled(model):
        return inputs[0], inputs[1], {"sample_weight": inputs[2]}
    return *split_batch(inputs), {}


@tf.autograph.experimental.do_not_convert
def full_precision(outputs: Any) -> Any:
    """Returns nested `outputs` with float16 and bfloat16 tensors cast to float32, which losses and metrics need."""
    low = (tf.float16, tf.bfloat16)
    return tf.nest.map_structure(
        lambda x: tf.cast(x, tf.float32) if getattr(x, "dtype", None) in low else x, outputs
    )


@tf.autograph.experimental.do_not_convert
def is_compiled(model: Any) -> bool:
    """Whether `model` is a Keras model, of either version, that has a loss from `compile`."""
    if hasattr(model, "compiled"):  # Keras 3
        return bool(model.compiled)
    return getattr(model, "compiled_loss", None) is not None  # tf_keras


def has_state_methods(task: Any) -> bool:
    """Whether a task has methods `state()` and `restore(state)`, which save its plain values in checkpoints."""
    return all(callable(getattr(task, name, None)) for name in ("state", "restore"))


@contextlib.contextmanager
def preserve_task_states(tasks: Iterable[Any]) -> Iterator[None]:
    """Restores the own state of tasks at the end of this context; tasks without methods for it stay as they are."""
    before = [
        (task, copy.deepcopy(task.state()))
        for task in {id(task): task for task in tasks}.values()
        if has_state_methods(task)
    ]
    yield
    for task, state in before:
        if state is not None:
            task.restore(state)
