"""A compiled model as an experiment, for the command line, configs, sidecars and the supervisor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer_kit.compat.keras.task_config import TRAINER, KerasExperiment, KerasTaskConfig
from trainer_kit.config.experiment_registry import register_experiment, register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import (
    DataConfig,
    ExperimentConfig,
    TaskConfig,
    TrainerConfig,
)
from trainer_kit.errors import UsageError

if TYPE_CHECKING:
    from trainer_kit.compat.keras.keras_types import Callbacks, CompiledModel


def register_keras_experiment(
    name: str,
    build_fn: Callable[[], CompiledModel],
    data_fn: Callable[[DataConfig], object],
    *,
    batch_size: int = 32,
    epochs: int = 1,
    callbacks: Callable[[], Callbacks] = list,
) -> None:
    """Registers a compiled Keras model as an experiment.

    The run trains the model with its own train_step, losses, metrics and optimizers. After each
    epoch it evaluates the model and saves a checkpoint. Every field of the config can be changed as
    in any experiment. Nothing here needs TensorFlow.

    Args:
      name: The name of the experiment.
      build_fn: Returns the compiled model. Called in the scope of the strategy, after seeds and
        precision are set.
      data_fn: Gets a DataConfig and returns its data: (x, y), (x, y, sample_weight), a
        tf.data.Dataset of global batches or a PyDataset. `params.is_training` distinguishes
        training data from validation data.
      batch_size: The number of examples in a batch of arrays, over all replicas.
      epochs: The number of epochs.
      callbacks: Returns callbacks of Keras and of trainer_kit, new ones for each run. Called when a
        run begins that trains. Their state is in checkpoints, as in `fit`. The metrics of such a
        run are those of the epoch so far.

    Raises:
      UsageError: When the name is taken, when one name is the beginning of the other, or when
        callbacks is no function.
    """
    if not callable(callbacks):
        raise UsageError(
            f"callbacks={callbacks!r:.60}: each run needs callbacks of its own; give a function"
            " that returns the list, such as callbacks=lambda: [keras.callbacks.EarlyStopping()]"
        )

    @configclass
    class ExperimentTaskConfig(KerasTaskConfig):
        """The section `task` of this experiment."""

    def make_task(params: TaskConfig, logging_dir: str | None = None) -> Any:
        # This module imports TensorFlow.
        from trainer_kit.compat.keras.keras_task import ExperimentTask

        experiment = KerasExperiment(build_fn, data_fn, callbacks)
        return ExperimentTask(params, logging_dir, experiment)

    register_task(ExperimentTaskConfig, make_task, trainer=TRAINER)

    @register_experiment(name)
    def experiment() -> ExperimentConfig:
        train_data = DataConfig(global_batch_size=batch_size, is_training=True)
        validation_data = DataConfig(
            global_batch_size=batch_size, is_training=False, drop_remainder=False
        )
        return ExperimentConfig(
            task=ExperimentTaskConfig(train_data=train_data, validation_data=validation_data),
            trainer=TrainerConfig(
                train_steps=f"{epochs} epochs",
                steps_per_loop="1 epochs",
                checkpoint_interval="1 epochs",
                validation_interval="1 epochs",
            ),
        )
