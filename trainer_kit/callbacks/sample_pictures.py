"""SamplePictures: writes a picture of what a generator makes after each evaluation, as a callback."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

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
        """Tries to draw a picture, so that mistakes are reported before the first step.

        Raises:
          UsageError: when the task or its model cannot draw.
        """
        if not hasattr(run.task, "picture") or not hasattr(run.model, "latent_size"):
            raise UsageError(
                f"the callback sample_pictures: {type(run.task).__name__} has no method picture(samples), or its model "
                "no latent_size; it is for a trainer_kit.GanTask"
            )
        self._draw(run)

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Writes the picture of this step."""
        del logs
        if run.evaluation is not None and run.evaluation.replayed:
            return
        import tensorflow as tf

        path = os.path.join(run.directory, FOLDER, f"step-{run.step:08}.png")
        write_bytes(path, tf.io.encode_png(self._draw(run)).numpy())

    def _draw(self, run: Run) -> np.ndarray:
        import tensorflow as tf

        latents = tf.random.stateless_normal([self._count, run.model.latent_size], [self._seed, 0])
        with run.trainer.averaged_weights():
            samples = run.task.inference_step(latents, run.model).numpy()
        picture, name = run.task.picture(samples), type(run.task).__name__
        if picture is None:
            raise UsageError(
                f"the callback sample_pictures: {name}.picture draws images, and the generated examples have the shape "
                f"{samples.shape[1:]}; define picture(samples) in {name}"
            )
        if not (isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.ndim == 3):
            kind = f"{picture.dtype} {list(picture.shape)}" if isinstance(picture, np.ndarray) else repr(picture)[:60]
            raise UsageError(
                f"the callback sample_pictures: {name}.picture returned {kind}; return a NumPy array of uint8, "
                "[height, width, 3]"
            )
        return picture
