"""A compiled model of Keras 3 or tf_keras as a task, with its own steps, metrics and optimizers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.callbacks.callback import Callback
from trainer_kit.compat.keras.dataset_passes import DatasetPasses
from trainer_kit.compat.keras.keras_callbacks import KerasCallbacks, split_callbacks
from trainer_kit.compat.keras.keras_types import CompiledModel
from trainer_kit.compat.keras.program_changes import describe_changes
from trainer_kit.compat.keras.step_preparation import (
    apply_keras_autograph,
    flatten_logs,
    prepare_step,
)
from trainer_kit.compat.keras.task_config import KerasExperiment, KerasTaskConfig
from trainer_kit.compat.keras.training_data import (
    DatasetEpochs,
    TrainingData,
    build_training_data,
    build_validation_data,
)
from trainer_kit.config.schema.experiment import DataConfig, TaskConfig
from trainer_kit.errors import UsageError
from trainer_kit.inputs.sources.source_protocol import Source
from trainer_kit.optimizers.learning_rate import unwrap_optimizer
from trainer_kit.runtime.keras_internals import install_global_clipping
from trainer_kit.training.task import Task
from trainer_kit.typing import Metric, Optimizers

_LOG = logging.getLogger(__name__)


class KerasTask(Task):
    """Trains a compiled model with its own `train_step` and evaluates it with its `test_step`.

    A subclass has the methods `build_model`, which returns the compiled model, and `build_inputs`,
    which returns data in global batches.

    Attributes:
      train_log_specs, eval_log_specs: The specs of what the steps return, by name. Empty if that
        is the results of the model's metrics. `prepare` sets them.
      model_description: The texts that describe the model, before it is trained.
    """

    train_log_specs: Mapping[str, tf.TensorSpec] = {}
    eval_log_specs: Mapping[str, tf.TensorSpec] = {}
    model_description: Mapping[str, str] = {}
    # The model that is prepared for training, and the one that is prepared for an evaluation.
    _prepared_for_training: Any = None
    _prepared_for_evaluation: Any = None

    def prepare(self, model: CompiledModel, *, trains: bool, evaluates: bool) -> Any:
        """Creates all variables that the steps need, once, and returns the optimizers.

        Called in strategy scope, on the host.

        Args:
          model: The compiled model.
          trains: Whether the model is going to be trained.
          evaluates: Whether it is going to be evaluated.

        Returns:
          The optimizer. A dict by the names of the model's attributes if there are several, or
          none. None unless `trains`.
        """
        if trains and self._prepared_for_training is not model:
            data = self.build_inputs(self.task_config.train_data)
            self.train_log_specs = prepare_step(model.train_step, model, data)
            self._prepared_for_training = model
        if evaluates and self._prepared_for_evaluation is not model:
            data = self.build_inputs(self.task_config.validation_data)
            self.eval_log_specs = prepare_step(model.test_step, model, data)
            self._prepared_for_evaluation = model
        if not trains:
            return None

        # Optimizers of Keras 3 and of tf_keras have no common class.
        optimizers: dict[str, Any] = {}
        for name, value in vars(model).items():
            is_optimizer = hasattr(value, "apply_gradients") and hasattr(value, "iterations")
            is_new = not any(value is optimizer for optimizer in optimizers.values())
            if is_optimizer and getattr(value, "built", True) and is_new:
                optimizers[name.lstrip("_")] = value
                install_global_clipping(unwrap_optimizer(value))

        if list(optimizers) == ["optimizer"]:
            return optimizers["optimizer"]
        return optimizers

    @tf.autograph.experimental.do_not_convert
    def train_step(
        self,
        inputs: Any,
        model: CompiledModel,
        optimizer: Optimizers,
        metrics: Sequence[Metric] | None = None,
    ) -> dict[str, Any]:
        """Runs the model's own training step, with its own optimizers, in graph, on a replica."""
        del optimizer, metrics
        step = apply_keras_autograph(model.train_step, model)
        return dict(step(inputs))

    @tf.autograph.experimental.do_not_convert
    def validation_step(
        self, inputs: Any, model: CompiledModel, metrics: Sequence[Metric] | None = None
    ) -> dict[str, Any]:
        """Runs the model's own evaluation step. Runs in graph, on a replica."""
        del metrics
        step = apply_keras_autograph(model.test_step, model)
        return dict(step(inputs))

    def state(self) -> dict[str, Any]:
        """Returns what the model was made of."""
        return {"program": self.model_description}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Warns where the model differs from that of the run that saved the checkpoint."""
        phrases = describe_changes(state["program"], self.model_description)
        if phrases:
            _LOG.warning(
                "the program has changed since the checkpoint: %s. The run goes on with the weights"
                " and the optimizer of the checkpoint; a changed learning rate is used from here"
                " on. Give another model_dir to start from the beginning",
                "; ".join(phrases),
            )


class FitTask(KerasTask):
    """The model and the data of a fit.

    Args:
      model: The compiled model.
      data: The training data.
      validation: The validation data in global batches. None: there are none.
      model_dir: The folder of the run.
      validation_name: The name of the validation data in the records of evaluations.

    Attributes:
      model, data, validation: The arguments.
    """

    config_class: type[KerasTaskConfig] = KerasTaskConfig

    def __init__(
        self,
        model: CompiledModel,
        data: TrainingData,
        validation: tf.data.Dataset | Source | None,
        model_dir: str,
        validation_name: str = "",
    ) -> None:
        params = self.config_class(
            train_data=DataConfig(global_batch_size=data.batch_size, is_training=True),
            validation_data=DataConfig(
                input_path=validation_name, drop_remainder=False, is_training=False
            ),
        )
        super().__init__(params, os.fspath(model_dir))
        self.model = model
        self.data = data
        self.validation = validation

    def build_model(self) -> CompiledModel:
        """Returns the model."""
        return self.model

    def build_inputs(
        self, params: DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset | Source:
        """Returns the data of `params`, in global batches."""
        del input_context
        data: tf.data.Dataset | Source = self.validation
        if params.is_training:
            data = self.data.batches
        return data

    def get_evaluation_metric_names(self) -> list[str]:
        """Returns the names of the single numbers that an evaluation gives.

        They are those of an evaluation while the model is trained. Called in strategy scope.
        """
        self.prepare(self.model, trains=True, evaluates=True)
        values = self.eval_log_specs or flatten_logs(self.model.get_metrics_result())
        names = []
        for name, value in values.items():
            shape = tf.TensorShape(getattr(value, "shape", ()))
            if not shape.rank:
                names.append(name)
        return names

    def state(self) -> dict[str, Any]:
        """Returns also what passes over the data draw from. See KerasTask."""
        batches = self.data.batches
        orders = None
        if isinstance(batches, DatasetPasses):
            orders = batches.state()
        return {**super().state(), "orders": orders}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues with the orders of the run that saved the checkpoint. See KerasTask."""
        batches = self.data.batches
        if isinstance(batches, DatasetPasses):
            batches.restore(state["orders"])
        super().restore(state)


class ExperimentTask(KerasTask):
    """The task of an experiment of `register_keras_experiment`.

    Args:
      params: The task's config.
      logging_dir: The folder of the run's files.
      experiment: What makes model, data and callbacks.
    """

    def __init__(
        self, params: TaskConfig, logging_dir: str | None, experiment: KerasExperiment
    ) -> None:
        super().__init__(params, logging_dir)
        self._experiment = experiment

    def build_model(self) -> Any:
        """Returns a compiled model."""
        return self._experiment.build_fn()

    def build_callbacks(self) -> list[Callback]:
        """Returns the callbacks of the task.

        Those of Keras are together in one callback of trainer_kit.
        """
        native_callbacks, keras_callbacks = split_callbacks(self._experiment.callbacks())
        if not keras_callbacks:
            return native_callbacks
        return [KerasCallbacks(keras_callbacks), *native_callbacks]

    def build_inputs(
        self, params: DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset | Source:
        """Returns the data of `params`, in global batches.

        Raises:
          UsageError: When there is no data, or it does not tell the length of an epoch.
        """
        del input_context
        examples = self._experiment.data_fn(params)
        size = params.global_batch_size or None
        if examples is None:
            raise UsageError(
                f"data_fn returned None for params.is_training={params.is_training}; return (x, y),"
                " (x, y, sample_weight), a tf.data.Dataset of batches or a PyDataset"
            )

        if not params.is_training:
            validation: tf.data.Dataset | Source = build_validation_data(examples, size)
            return validation

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(examples)
        data = build_training_data(x, y, sample_weight, batch_size=size, seed=params.seed or 0)
        if isinstance(data.batches, Source):
            return data.batches
        return DatasetEpochs(data.batches, data.steps_per_epoch)
