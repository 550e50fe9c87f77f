"""KerasTask: a compiled Keras model, of Keras 3 or tf_keras, with its own steps, losses, metrics and optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.callbacks.base import Callback
from trainer_kit.compat.keras.array_epochs import ArrayEpochs
from trainer_kit.compat.keras.keras_callbacks import KerasCallbacks, split_callbacks
from trainer_kit.compat.keras.preparation import flattened, traced_logs, with_autograph
from trainer_kit.compat.keras.program_changes import changes, description
from trainer_kit.compat.keras.py_dataset_epochs import PyDatasetEpochs
from trainer_kit.compat.keras.training_data import DatasetEpochs, training_data, validation_dataset
from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import UsageError
from trainer_kit.inputs.sources.base import Source
from trainer_kit.optimizers.learning_rate import innermost
from trainer_kit.runtime.keras_internals import clip_after_sum
from trainer_kit.training.task import Task

_LOG = logging.getLogger(__name__)


class KerasTask(Task):
    """Trains a compiled model with its own `train_step` and evaluates it with its `test_step`.

    Args:
      params: The task's config.
      logging_dir: The folder of the run's files.
      build: A function that returns the compiled model; called in the scope of the strategy.
      data: A function that returns the data of a DataConfig, in global batches.
      ordered: The PyDataset whose orders checkpoints hold; None: there is none.
      callbacks: A function that returns callbacks of Keras and of trainer_kit for a run that trains.

    Attributes:
      train_logs, eval_logs: The specs of what the steps return, by name; empty if that is the results of the model's
        metrics. `prepare_training` and `prepare_evaluation` set them.
    """

    def __init__(
        self,
        params: Any,
        logging_dir: str | None = None,
        *,
        build: Callable[[], Any],
        data: Callable[[Any], Any],
        ordered: PyDatasetEpochs | None = None,
        callbacks: Callable[[], Any] = list,
    ) -> None:
        super().__init__(params, logging_dir)
        self._build = build
        self._data = data
        self._ordered = ordered
        self._callbacks = callbacks
        self._program: dict[str, Any] = {}
        self.train_logs: dict[str, tf.TensorSpec] = {}
        self.eval_logs: dict[str, tf.TensorSpec] = {}
        self._trains: Any = None  # the model that is prepared for training
        self._evaluates: Any = None  # and for an evaluation

    def build_model(self) -> Any:
        """Returns the compiled model."""
        model = self._build()
        self._program = description(model)
        return model

    def build_callbacks(self) -> list[Callback]:
        """Returns the callbacks of the task; those of Keras are together in one callback of trainer_kit."""
        native, of_keras = split_callbacks(self._callbacks())
        return [*([KerasCallbacks(of_keras)] if of_keras else []), *native]

    def prepare_training(self, model: Any) -> Any:
        """Creates all variables that the training step needs; returns the model's optimizers. Called in strategy scope.

        Returns:
          The optimizer; a dict by the names of the model's attributes if there are several, or none.
        """
        if self._trains is not model:
            self.train_logs = traced_logs(model.train_step, model, self._batch(self.task_config.train_data))
            self._trains = model
        optimizers: dict[str, Any] = {}
        for name, value in vars(model).items():  # of either Keras
            is_optimizer = hasattr(value, "apply_gradients") and hasattr(value, "iterations")
            if is_optimizer and getattr(value, "built", True) and not any(value is one for one in optimizers.values()):
                optimizers[name.lstrip("_")] = value
                clip_after_sum(innermost(value))
        return optimizers["optimizer"] if list(optimizers) == ["optimizer"] else optimizers

    def prepare_evaluation(self, model: Any) -> None:
        """Creates all variables that the evaluation step needs, once. Called in strategy scope."""
        if self._evaluates is not model:
            self.eval_logs = traced_logs(model.test_step, model, self._batch(self.task_config.validation_data))
            self._evaluates = model

    def evaluation_names(self, model: Any) -> list[str]:
        """Returns the names of the single numbers that an evaluation gives while the model is trained.

        Called in strategy scope.
        """
        self.prepare_training(model)
        self.prepare_evaluation(model)
        values = self.eval_logs or flattened(model.get_metrics_result())
        return [name for name, value in values.items() if not tf.TensorShape(getattr(value, "shape", ())).rank]

    def build_inputs(
        self, params: DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset | Source:
        """Returns the data of `params`, in global batches."""
        del input_context
        data: tf.data.Dataset | Source = self._data(params)
        return data

    @tf.autograph.experimental.do_not_convert
    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Runs the model's own training step, with its own optimizers, in graph, on a replica."""
        del optimizer, metrics
        return dict(with_autograph(model.train_step, model)(inputs))

    @tf.autograph.experimental.do_not_convert
    def validation_step(self, inputs: Any, model: Any, metrics: Sequence[Any] | None = None) -> dict[str, Any]:
        """Runs the model's own evaluation step, in graph, on a replica."""
        del metrics
        return dict(with_autograph(model.test_step, model)(inputs))

    def state(self) -> dict[str, Any]:
        """Returns what the model was made of, and the orders of the batches of a PyDataset."""
        return {"program": self._program, "orders": None if self._ordered is None else self._ordered.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with the orders of the run that saved the checkpoint, and warns where its model was another."""
        if self._ordered is not None and state["orders"] is not None:
            self._ordered.restore(state["orders"])
        phrases = changes(state["program"], self._program)
        if phrases:
            _LOG.warning(
                "the program has changed since the checkpoint: %s. The run goes on with the weights and the optimizer "
                "of the checkpoint; a changed learning rate is used from here on. Give another model_dir "
                "to start from the beginning",
                "; ".join(phrases),
            )

    def _batch(self, params: Any) -> Any:
        """Returns the spec of a replica's batch; as in Keras only a dataset tells the number of its examples."""
        data = self.build_inputs(params)
        tells_size = not isinstance(data, ArrayEpochs)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync

        def spec_of_replica(spec: Any) -> Any:
            if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
                return spec
            is_known = tells_size and spec.shape[0] and spec.shape[0] % replicas == 0
            return tf.TensorSpec([spec.shape[0] // replicas if is_known else None, *spec.shape[1:]], spec.dtype)

        spec = getattr(data, "element_spec", None) or data.at(0).element_spec
        return tf.nest.map_structure(spec_of_replica, spec)


def data_of_experiment(data_fn: Callable[[Any], Any], params: DataConfig) -> tf.data.Dataset | Source:
    """Returns the data of a registered experiment in global batches. Runs eagerly, in scope, on the host.

    Args:
      data_fn: See register_keras_experiment.
      params: The data's section of the config.

    Raises:
      UsageError: when there is no data, or it does not tell the length of an epoch.
    """
    examples = data_fn(params)
    size = params.global_batch_size or None
    if examples is None:
        raise UsageError(
            f"data_fn returned None for params.is_training={params.is_training}; return (x, y), (x, y, sample_weight), "
            "a tf.data.Dataset of batches or a PyDataset"
        )
    if not params.is_training:
        return validation_dataset(examples, size)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(examples)
    data = training_data(x, y, sample_weight, batch_size=size, seed=params.seed or 0)
    return data.batches if isinstance(data.batches, Source) else DatasetEpochs(data.batches, data.steps_per_epoch)
