"""SamplePictures: writes a picture of what a generator makes after each evaluation, as a callback."""

from __future__ import annotations

import os
from typing import Any

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.errors import UsageError
from trainer_kit.files import write_bytes

FOLDER = "samples"  # in model_dir


class SamplePictures(Callback):
    """Draws generated examples after each evaluation: `samples/step-<step>.png` in model_dir.

    The weights are those that were evaluated, the random numbers the same in all pictures, and the task's `picture`
    draws. For a GanTask, or a task with the same method whose model generates from latents.

    Args:
      count: The number of examples in a picture.
      seed: The seed of the random numbers.
    """

    name: str = "sample_pictures"

    def __init__(self, count: int = 64, seed: int = 0) -> None:
        self._count, self._seed = count, seed

    def run_begin(self, run: Run) -> None:
        """Checks the task.

        Raises:
          UsageError: when the task has no method `picture`, or its model does not generate from latents.
        """
        if not hasattr(run.task, "picture") or not hasattr(run.model, "latent_size"):
            raise UsageError(
                f"the callback sample_pictures: {type(run.task).__name__} has no method picture(samples), or its model "
                "no latent_size; it is for a trainer_kit.GanTask"
            )

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Writes the picture of this step."""
        del logs
        if run.evaluation is not None and run.evaluation.replayed:
            return
        import tensorflow as tf

        shape = [self._count, run.model.latent_size]
        latents = tf.random.stateless_normal(shape, [self._seed, 0])
        with run.trainer.averaged_weights():
            samples = run.task.inference_step(latents, run.model).numpy()
        if (picture := run.task.picture(samples)) is not None:
            path = os.path.join(run.directory, FOLDER, f"step-{run.step:08}.png")
            write_bytes(path, tf.io.encode_png(picture).numpy())
