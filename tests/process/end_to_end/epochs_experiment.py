"""Two epochs of 103 examples in batches of 10, from a Source and from a dataset that ends; a
callback of epochs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

import trainer_kit
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.testing import TinyConfig
from trainer_kit.testing.tiny_task import tiny_arrays


@trainer_kit.configclass
class EpochsConfig(TinyConfig):
    """The tiny task with dropout.

    Attributes:
      plain: Whether the training data is a tf.data.Dataset that ends, with a smaller last batch.
    """

    dropout: float = 0.3
    plain: bool = False
    train_data: trainer_kit.DataConfig = trainer_kit.DataConfig(
        is_training=True, global_batch_size=10, seed=7
    )


@trainer_kit.register_task(EpochsConfig)
class EpochsTask(LinearTask):
    """Trains on either kind of data."""

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        """Returns an ArraySource, or a shuffled dataset of 11 batches."""
        if params.is_training and self.task_config.plain:
            examples = tf.data.Dataset.from_tensor_slices(tiny_arrays(True))
            return examples.shuffle(103, seed=5).batch(10)
        return super().build_inputs(params, input_context)


@trainer_kit.register_callback("note_epochs")
class NoteEpochs(trainer_kit.Callback):
    """Appends each epoch event with the step to epochs.txt."""

    def epoch_begin(self, run: Any, epoch: int) -> None:
        self._note(run, f"begin {epoch} at {run.step}")

    def epoch_end(self, run: Any, epoch: int, logs: Any) -> None:
        values = f"{logs['training_loss']:.9g} {logs['accuracy']:.9g}"
        self._note(run, f"end {epoch} at {run.step}: {values}")

    def _note(self, run: Any, text: str) -> None:
        with Path(run.directory, "epochs.txt").open("a") as stream:
            stream.write(f"{text}\n")


@trainer_kit.register_experiment("epochs")
def epochs() -> Any:
    """Two epochs, an evaluation after each, a checkpoint every 4 steps."""
    config = linear_experiment(
        train_steps="2 epochs",
        steps_per_loop=2,
        summary_interval=2,
        checkpoint_interval=4,
        validation_interval="1 epoch",
        callbacks=[{"name": "note_epochs"}],
    )
    return config.replace(task=EpochsConfig())
