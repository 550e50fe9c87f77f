"""The types of objects that several libraries provide.

A model comes from Keras 3 or tf_keras, or it is a tf.Module. A task is one of trainer_kit or of
TF Model Garden. The protocols state what the engine needs of each. They serve readers and type
checkers: nothing is checked against them at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import keras
import tensorflow as tf

from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.config.schema.runtime import RuntimeConfig

# A variable of TensorFlow, Keras 3 or a tf.distribute strategy.
Variable: TypeAlias = tf.Variable | keras.Variable
# A dataset of one replica, or one that a strategy has distributed.
Dataset: TypeAlias = tf.data.Dataset | tf.distribute.DistributedDataset
# A function that takes the logs of a training loop or of an evaluation, as in Orbit.
Action: TypeAlias = Callable[[Any], None]
# Anything that TensorFlow converts to a scalar tensor of floats.
FloatLike: TypeAlias = float | tf.Tensor | tf.Variable
# Anything that TensorFlow converts to a scalar tensor of integers.
IntLike: TypeAlias = int | tf.Tensor | tf.Variable


class Model(Protocol):
    """A model of Keras 3 or tf_keras, or a tf.Module.

    What only Keras models have, such as `layers`, is read by `getattr`.
    """

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def variables(self) -> Sequence[Variable]:
        """All variables."""

    @property
    def trainable_variables(self) -> Sequence[Variable]:
        """The variables that the optimizer updates."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs for a batch."""


class Metric(Protocol):
    """A metric of Keras 3 or tf_keras, or a class with the same methods."""

    name: str

    @property
    def variables(self) -> Sequence[Variable]:
        """The variables that contain its state."""

    def update_state(self, *args: Any, **kwargs: Any) -> Any:
        """Adds a batch. Runs in a replica, in a graph."""

    def result(self) -> Any:
        """Returns the value so far: a scalar tensor, or a dict of them."""

    def reset_state(self) -> None:
        """Forgets all batches."""


class Optimizer(Protocol):
    """An optimizer of Keras 3 or tf_keras, or one of trainer_kit's that wraps such a one."""

    iterations: tf.Variable
    learning_rate: Any

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the slot variables for `variables`."""

    def apply_gradients(self, grads_and_vars: Sequence[tuple[tf.Tensor, Variable]]) -> Any:
        """Updates variables by their gradients. Runs in a replica, in a graph or eagerly."""


# The optimizer of a task, or several optimizers by name.
Optimizers: TypeAlias = Optimizer | Mapping[str, Optimizer]


class TaskLike(Protocol):
    """A Task of trainer_kit or of TF Model Garden. See trainer_kit.Task for the meanings."""

    name: str
    loss: str

    @property
    def task_config(self) -> Any:
        """The section of the task."""

    @property
    def logging_dir(self) -> str | None:
        """The folder of the run's files."""

    def create_optimizer(self, optimizer_config: Any, runtime_config: Any = None) -> Optimizers:
        """Returns the optimizer, or a dict of optimizers by name."""

    def initialize(self, model: Model) -> None:
        """Loads the initial weights."""

    def build_model(self) -> Model:
        """Returns the model."""

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        """Returns the dataset or the Source of a section."""

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        """Returns the loss of a batch."""

    def build_metrics(self, training: bool = True) -> list[Metric]:
        """Returns the metrics of training or validation."""

    def train_step(
        self,
        inputs: Any,
        model: Model,
        optimizer: Any,
        metrics: Sequence[Metric] | None = None,
    ) -> dict[str, Any]:
        """Trains on one batch of a replica and returns its logs."""

    def validation_step(
        self, inputs: Any, model: Model, metrics: Sequence[Metric] | None = None
    ) -> dict[str, Any]:
        """Evaluates one batch of a replica and returns its logs."""

    def inference_step(self, inputs: Any, model: Model) -> Any:
        """Returns the outputs of the model for one batch of a replica."""

    def aggregate_logs(self, state: Any, step_logs: Mapping[str, Any]) -> Any:
        """Returns the state of the evaluation after one more step."""

    def reduce_aggregated_logs(
        self, aggregated_logs: Any, global_step: tf.Tensor | None = None
    ) -> dict[str, Any]:
        """Returns the results of an evaluation from its last state."""


class ExperimentLike(Protocol):
    """The config of an experiment, or the sections of one of TF Model Garden.

    See ExperimentConfig for the meanings.
    """

    @property
    def task(self) -> Any:
        """The section of the task."""

    @property
    def trainer(self) -> TrainerConfig:
        """The section of the trainer."""

    @property
    def runtime(self) -> RuntimeConfig:
        """The section of the runtime."""


class CheckpointExporter(Protocol):
    """Keeps the best checkpoint of a run: one of trainer_kit, of the caller or of Model Garden."""

    @property
    def best_ckpt_logs(self) -> Mapping[str, Any] | None:
        """The metrics of the best evaluation so far."""

    def maybe_export_checkpoint(
        self, checkpoint: tf.train.Checkpoint, eval_logs: Mapping[str, Any], step: int, /
    ) -> Any:
        """Writes the checkpoint if the logs are the best so far."""


# An iterator over a Dataset. Loops wrap it in iterators that act like it.
DataIterator: TypeAlias = tf.data.Iterator | tf.distribute.DistributedIterator
# The spec of any structure of tensors, such as that of a batch.
NestedSpec: TypeAlias = "tf.TypeSpec | Sequence[NestedSpec] | Mapping[str, NestedSpec]"
