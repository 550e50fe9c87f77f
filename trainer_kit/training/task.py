"""Task: the model, data, losses, metrics and the two steps of an experiment.

A task describes them as one replica sees them. It knows nothing of strategies, files or the
trainer. Four methods are enough to train: build_model, build_inputs, build_losses and
build_metrics. The other methods have defaults. Names and meanings are TF Model Garden's.
"""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import keras
import tensorflow as tf

from trainer_kit.config.schema.experiment import DataConfig, TaskConfig
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
from trainer_kit.typing import Metric, Model, TaskLike, Variable


class StatefulTask(Protocol):
    """A task that saves plain values in checkpoints."""

    def state(self) -> Any:
        """Returns the values, in JSON types."""

    def restore(self, state: Any) -> None:
        """Restores the values that `state` returned."""


class Task(abc.ABC):
    """A learning task: model, data, losses, metrics, and the steps of training and validation.

    Args:
      params: The task's config.
      logging_dir: The folder of the run's files, the same as model_dir.
      name: The task's name. By default it is `params.name`, else the class's name.
    """

    # The key of the loss in the logs of train_step and validation_step.
    loss = "loss"
    # The name of the validation set that is evaluated now. Steps are traced for each set.
    validation_set = ""
    # The number of tokens in an example, for reports of tokens per second. 0: it is not known.
    tokens_per_example = 0

    def __init__(
        self, params: TaskConfig, logging_dir: str | None = None, name: str | None = None
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
        """The folder of the run's files. Empty outside a run."""
        return self._logging_dir

    @classmethod
    def create_optimizer(
        cls, optimizer_config: OptimizationConfig, runtime_config: RuntimeConfig | None = None
    ) -> Any:
        """Returns the optimizer: a Keras 3 optimizer, or a dict of them by name.

        Called in strategy scope.

        Raises:
          UsageError: when the config names no optimizer.
        """
        dtype = None
        loss_scale = None
        if runtime_config:
            dtype = runtime_config.mixed_precision_dtype
            loss_scale = runtime_config.loss_scale
        return create_optimizer(
            optimizer_config,
            mixed_precision_dtype=dtype,
            loss_scale=loss_scale,
            random_seed=getattr(runtime_config, "random_seed", 0),
        )

    def optimizer_variables(
        self, model: keras.Model | tf.Module
    ) -> Mapping[str, Sequence[Variable]]:
        """Returns the variables that each of several optimizers updates, by the optimizer's name.

        By default it returns none. The optimizers are those of `trainer.optimizers`, or those of
        `create_optimizer` if it returns a dict. Where `trainer.optimizers` has patterns, these
        count instead. Called in strategy scope, with the built model.
        """
        del model
        return {}

    def hyper_parameters(self) -> Mapping[str, tf.Variable]:
        """Returns the hyper-parameters that can be changed during a run.

        They are scalar variables by name. By default there are none. Create the variables in
        build_model, as attributes of the task, so that checkpoints contain them. Callbacks set them
        between training loops. See docs/guides/hyper_parameters.md. Called eagerly, on the host.
        """
        return {}

    def build_callbacks(self) -> Sequence[Any]:
        """Returns callbacks of trainer_kit that belong to the task, new ones for each run.

        By default there are none. Runs that train call them before the callbacks of the config and
        of the caller. Called eagerly, on the host.
        """
        return ()

    def initialize(self, model: keras.Model | tf.Module) -> None:
        """Loads `task_config.init_checkpoint` into `model`.

        The field is a path or a list of sections. Does nothing if it is empty. Called eagerly, on
        the host, only when model_dir has no checkpoint.

        Raises:
          UsageError: when the checkpoint does not exist, or it lacks a chosen variable or has
            another shape for it.
        """
        init_checkpoint = getattr(self.task_config, "init_checkpoint", "")
        if init_checkpoint:
            load_initial_weights(model, init_checkpoint)

    @abc.abstractmethod
    def build_model(self) -> keras.Model | tf.Module:
        """Returns the model, of Keras 3 or tf_keras, or a tf.Module. Called in strategy scope.

        A model without variables is built afterwards: the task calls it in a graph on the specs of
        a batch.
        """

    def build_inputs(
        self, params: DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset | Source:
        """Returns the data of `params`, in batches for one replica.

        Not called where `params.dataset` names a registered dataset.

        Args:
          params: The config's train_data or validation_data: a DataConfig, or the task's own kind
            of data config.
          input_context: This worker's place. `get_per_replica_batch_size` gives the batch size.
            None: one replica.

        Raises:
          UsageError: when the task does not override this method.
        """
        del params, input_context
        raise UsageError(
            f"{type(self).__name__} has no build_inputs; define it, or name a registered dataset "
            "in task.train_data.dataset.type and task.validation_data.dataset.type"
        )

    @tf.autograph.experimental.do_not_convert
    def build_losses(
        self, labels: Any, model_outputs: Any, aux_losses: Sequence[tf.Tensor] | None = None
    ) -> tf.Tensor:
        """Returns the total loss, a float scalar. By default it is the sum of `aux_losses`.

        Runs in graph, on a replica.

        Args:
          labels: The labels of the batch.
          model_outputs: The outputs of `inference_step` or of the model.
          aux_losses: `model.losses`, the losses that layers added. An override has to add them to
            the total.
        """
        del labels, model_outputs
        return tf.add_n(list(aux_losses)) if aux_losses else tf.constant(0.0)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns new Keras metrics, for training or for validation. By default there are none.

        Called in strategy scope.
        """
        del training
        return []

    @tf.autograph.experimental.do_not_convert
    def process_metrics(
        self, metrics: Sequence[Metric], labels: Any, model_outputs: Any, **kwargs: Any
    ) -> None:
        """Updates the metrics of `build_metrics` with one batch. Runs in graph, on a replica."""
        del kwargs
        for metric in metrics:
            try:
                apply_autograph(metric.update_state)(labels, model_outputs)
            except Exception as error:
                batch = describe_values({"labels": labels, "model_outputs": model_outputs})
                kind = type(metric).__name__
                add_note(error, f"the metric {metric.name} ({kind}) got this batch: {batch}")
                raise

    @tf.autograph.experimental.do_not_convert
    def process_compiled_metrics(
        self,
        model: keras.Model,
        features: Any,
        labels: Any,
        model_outputs: Any,
        sample_weight: tf.Tensor | None = None,
    ) -> None:
        """Updates the metrics of the model's `compile` with one batch.

        Runs in graph, on a replica.
        """
        apply_autograph(model.compute_metrics)(
            x=features, y=labels, y_pred=model_outputs, sample_weight=sample_weight
        )

    @tf.autograph.experimental.do_not_convert
    def train_step(
        self,
        inputs: Any,
        model: keras.Model | tf.Module,
        optimizer: Any,
        metrics: Sequence[Metric] | None = None,
    ) -> dict[str, Any]:
        """Runs one forward and backward pass and updates the weights.

        Runs in graph, on a replica. The gradient is that of the mean loss over all replicas, and
        includes the losses of layers once.

        An override has to divide its loss by the number of replicas, because gradients are summed
        over replicas. With float16 it also has to scale the loss with `optimizer.scale_loss`.
        `apply_gradients` undoes that.

        Args:
          inputs: One batch: (features, labels), or features that are their own labels. For a
            compiled model also (features, labels, weights of the examples).
          model: The model of build_model.
          optimizer: The optimizer of create_optimizer.
          metrics: The metrics of build_metrics.

        Returns:
          Logs. The key `self.loss` contains the loss before scaling. Each other scalar is reported
          as its mean over the loop, weighted by examples, and each metric as its result. A scalar
          with the name of a metric of build_metrics is left out, since the metric is reported.
        """
        features, labels, weights = _split_weighted(inputs, model)
        with tf.GradientTape() as tape:
            outputs = full_precision(apply_autograph(model)(features, training=True))
            loss = self.batch_loss(model, features, labels, outputs, **weights)

            # A division by 1 costs 2 % of a step of 0.1 ms.
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            share = loss / replicas if replicas > 1 else loss
            replica_loss = scale_loss(optimizer, share)

        variables = model.trainable_variables
        gradients = tape.gradient(replica_loss, variables)
        apply_gradients(optimizer, list(zip(gradients, variables, strict=True)))
        self.update_metrics(metrics, model, features, labels, outputs, **weights)
        return {self.loss: loss}

    @tf.autograph.experimental.do_not_convert
    def validation_step(
        self,
        inputs: Any,
        model: keras.Model | tf.Module,
        metrics: Sequence[Metric] | None = None,
    ) -> dict[str, Any]:
        """Runs one forward pass and updates the metrics.

        Runs in graph, on a replica.

        Returns:
          Logs. The key `self.loss`, if present, contains the mean loss over the batch. Each metric
          is reported as its result, and each other scalar as its mean over the evaluation, weighted
          by examples, unless the task aggregates logs.
        """
        features, labels, weights = _split_weighted(inputs, model)
        outputs = full_precision(apply_autograph(self.inference_step)(features, model))
        loss = self.batch_loss(model, features, labels, outputs, **weights)
        self.update_metrics(metrics, model, features, labels, outputs, **weights)
        return {self.loss: loss}

    @tf.autograph.experimental.do_not_convert
    def inference_step(self, inputs: Any, model: keras.Model | tf.Module) -> Any:
        """Returns the model's outputs for `inputs` in inference mode.

        Runs in graph, on a replica.

        Args:
          inputs: The features of a batch, without labels.
          model: The model of build_model.
        """
        return apply_autograph(model)(inputs, training=False)

    def preprocess(self, inputs: Any) -> Any:
        """Returns the features of the model for the inputs of an export. By default, the inputs.

        Override it together with `serving_examples`, so that those who use an export need not do
        what `build_inputs` does. Runs in graph.
        """
        return inputs

    def postprocess(self, outputs: Any) -> Any:
        """Returns what an export gives for outputs of `inference_step`. By default, the outputs.

        Runs in graph.
        """
        return outputs

    def serving_examples(self) -> Any:
        """Returns one batch of inputs of `preprocess`. Called eagerly, on the host.

        They show the shapes and dtypes of the inputs, and an export is compared with the model on
        them. None, the default: exports take the features of the validation data.
        """
        return None

    def aggregate_logs(self, state: Any, step_logs: Mapping[str, Any]) -> Any:
        """Returns `state` with the logs of a validation step added.

        Runs eagerly, on the host. Override this method together with `reduce_aggregated_logs` for
        metrics that a Keras metric cannot compute. The default keeps no state.

        Args:
          state: The state before the step. None at first.
          step_logs: The logs, whose values are tuples with one entry for each replica.
        """
        del state, step_logs
        return None

    def reduce_aggregated_logs(
        self, aggregated_logs: Any, global_step: tf.Tensor | None = None
    ) -> dict[str, Any]:
        """Returns metrics computed from the aggregated logs at the end of an evaluation.

        Runs eagerly, on the host.
        """
        del aggregated_logs, global_step
        return {}

    def aggregates(self) -> bool:
        """Whether this task aggregates logs over an evaluation."""
        return type(self).aggregate_logs is not Task.aggregate_logs

    @tf.autograph.experimental.do_not_convert
    def batch_loss(
        self,
        model: keras.Model | tf.Module,
        features: Any,
        labels: Any,
        outputs: Any,
        sample_weight: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the loss of one batch, a float32 scalar.

        It is the loss of build_losses, and that of the model's `compile`. Runs in graph, on a
        replica.

        Args:
          model: The model, just called on the batch. What its layers added is part of the loss.
          features: The features of the batch.
          labels: Its labels.
          outputs: The outputs of the model.
          sample_weight: The weights of the examples, for the loss of a model's `compile`. None: all
            count alike.

        Raises:
          UsageError: when the loss is not a scalar.
        """
        layer_losses = list(getattr(model, "losses", None) or [])
        build_losses = apply_autograph(self.build_losses)

        with skip_replica_loss_scaling():
            if is_compiled(model):
                # Keras' own loss contains what the layers added.
                weights = {} if sample_weight is None else {"sample_weight": sample_weight}
                loss = apply_autograph(model.compute_loss)(
                    x=features, y=labels, y_pred=outputs, **weights
                )
                loss += build_losses(labels=labels, model_outputs=outputs, aux_losses=None)
            else:
                loss = build_losses(labels=labels, model_outputs=outputs, aux_losses=layer_losses)

        # A loss per example is refused: its gradient would be that of the sum.
        loss = scalar_loss(loss, f"{type(self).__name__}.build_losses")
        return tf.cast(loss, tf.float32)

    @tf.autograph.experimental.do_not_convert
    def update_metrics(
        self,
        metrics: Sequence[Metric] | None,
        model: keras.Model | tf.Module,
        features: Any,
        labels: Any,
        outputs: Any,
        **weights: tf.Tensor,
    ) -> None:
        """Updates the metrics of build_metrics and of the model's `compile` with one batch.

        Runs in graph, on a replica.

        Args:
          metrics: All metrics, those of the model's `compile` among them.
          model: The model.
          features: The features of the batch.
          labels: Its labels.
          outputs: The outputs of the model.
          **weights: `sample_weight`, the weights of the examples, for the metrics of `compile`.
            Nothing without them.
        """
        compiled = is_compiled(model)

        # The metrics of `compile` get the examples' weights, so they are updated separately.
        model_metric_ids = {id(metric) for metric in model.metrics} if compiled else set()
        task_metrics = metrics
        if model_metric_ids:
            task_metrics = [
                metric for metric in metrics or () if id(metric) not in model_metric_ids
            ]

        if task_metrics:
            apply_autograph(self.process_metrics)(task_metrics, labels, outputs)
        if compiled:
            apply_autograph(self.process_compiled_metrics)(
                model, features, labels, outputs, **weights
            )


@tf.autograph.experimental.do_not_convert
def scalar_loss(loss: object, method: str) -> tf.Tensor:
    """Returns the loss, which has to be a scalar, as a tensor.

    Args:
      loss: The loss that `method` returned. If its rank is not known before the step runs, the step
        checks it.
      method: The name of the method that returned the loss, for the message.

    Raises:
      UsageError: when the loss is not a scalar.
    """
    try:
        tensor = tf.convert_to_tensor(loss)
    except (TypeError, ValueError):
        # None, or a dict.
        tensor = None

    if tensor is None or tensor.dtype in (tf.string, tf.bool):
        description = f"{loss!r:.80}, which is not a number"
    elif tensor.shape.rank in (0, None):
        return tensor if tensor.shape.rank == 0 else tf.ensure_shape(tensor, [])
    else:
        description = f"a tensor of shape {tensor.shape}; reduce it with tf.reduce_mean"
    raise UsageError(f"{method} has to return a scalar; it returned {description}")


@tf.autograph.experimental.do_not_convert
def step_loss(task: TaskLike, logs: object) -> tf.Tensor:
    """Returns the loss from the logs of a training step. Runs in graph, on a replica.

    A `Task` has to return a scalar. Tasks of Model Garden may return a loss per example, whose mean
    is reported.

    Raises:
      TrainerKitError: when the logs contain no loss.
      UsageError: when the loss of a `Task` is not a scalar.
    """
    method = f"{type(task).__name__}.train_step"
    if not isinstance(logs, Mapping) or task.loss not in logs:
        if isinstance(logs, Mapping):
            names = ", ".join(map(str, logs)) or "nothing"
            description = f"a dict of {names}"
        else:
            description = repr(logs)
        raise TrainerKitError(
            f"{method} has to return a dict with the loss, {{self.loss: loss}}; "
            f"it returned {description}"
        )

    loss = logs[task.loss]
    if isinstance(task, Task):
        return scalar_loss(loss, f"under the key {task.loss!r}, {method}")
    return loss


@tf.autograph.experimental.do_not_convert
def split_batch(inputs: Any) -> tuple[Any, Any]:
    """Returns (features, labels) of a batch. Without labels, the features are their own labels."""
    if isinstance(inputs, tuple) and len(inputs) == 2:
        return inputs
    return inputs, inputs


@tf.autograph.experimental.do_not_convert
def _split_weighted(inputs: Any, model: Model) -> tuple[Any, Any, dict[str, tf.Tensor]]:
    """Returns the features and labels of a batch, and its weights as keyword arguments.

    Only a compiled model gets weights. They have the name `sample_weight`.
    """
    if isinstance(inputs, tuple) and len(inputs) == 3 and is_compiled(model):
        return inputs[0], inputs[1], {"sample_weight": inputs[2]}
    return *split_batch(inputs), {}


@tf.autograph.experimental.do_not_convert
def full_precision(outputs: Any) -> Any:
    """Returns nested `outputs` with float16 and bfloat16 tensors cast to float32.

    Losses and metrics need float32.
    """
    low_precision = (tf.float16, tf.bfloat16)

    def cast_output(output: object) -> object:
        # An output may be anything, such as a ragged tensor, a text or None.
        if getattr(output, "dtype", None) in low_precision:
            return tf.cast(output, tf.float32)
        return output

    return tf.nest.map_structure(cast_output, outputs)


@tf.autograph.experimental.do_not_convert
def is_compiled(model: Model) -> bool:
    """Whether `model` is a Keras model, of either version, that has a loss from `compile`."""
    # Keras 3.
    if hasattr(model, "compiled"):
        return bool(model.compiled)
    # tf_keras.
    return getattr(model, "compiled_loss", None) is not None


def has_state_methods(task: object) -> TypeGuard[StatefulTask]:
    """Whether a task has methods `state()` and `restore(state)`.

    They save its plain values in checkpoints.
    """
    return all(callable(getattr(task, name, None)) for name in ("state", "restore"))


@contextlib.contextmanager
def preserve_task_states(tasks: Iterable[TaskLike]) -> Iterator[None]:
    """Restores the own state of tasks at the end of this context.

    Tasks without methods for it stay as they are.
    """
    # A task may evaluate several sets.
    unique_tasks = {id(task): task for task in tasks}.values()
    states = [
        (task, copy.deepcopy(task.state())) for task in unique_tasks if has_state_methods(task)
    ]
    yield
    for task, state in states:
        if state is not None:
            task.restore(state)
