"""SamplePictures: writes a picture of generated examples after each evaluation, as a callback."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import numpy as np

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.errors import UsageError
from trainer_kit.files import write_bytes

# In model_dir.
FOLDER = "samples"
# Pixels between images.
_MARGIN = 2
# Pixels. Smaller images are enlarged to about this height.
_LEAST_HEIGHT = 32


class SamplePictures(Callback):
    """Draws generated examples after each evaluation: `samples/step-<step>.png` in model_dir.

    The weights are those that were evaluated, and the random numbers are the same in all pictures.
    The callback is for a GanTask, or a task whose model has `latent_size` and generates from
    latents. Images, float [n, height, width, 1 or 3] in -1..1, are put into a grid. For other
    examples the task has a method `picture(samples)`, which returns a picture, uint8 [height,
    width, 3]. Runs eagerly, on the host, on the chief.

    Args:
      count: The number of examples in a picture.
      seed: The seed of the random numbers.
    """

    name: str = "sample_pictures"

    def __init__(self, count: int = 64, seed: int = 0) -> None:
        self._count = count
        self._seed = seed

    def run_begin(self, run: Run) -> None:
        """Tries to draw a picture, so that mistakes are reported before the first step.

        Raises:
          UsageError: when the examples or the picture of the task cannot be drawn.
        """
        if not hasattr(run.model, "latent_size"):
            raise UsageError(
                f"the callback sample_pictures: the model of {type(run.task).__name__} has no"
                " latent_size; it is for a trainer_kit.GanTask"
            )
        self._draw(run)

    def evaluation_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Writes the picture of this step."""
        del logs
        if run.evaluation is not None and run.evaluation.is_replayed:
            return

        import tensorflow as tf

        name = f"step-{run.step:08}.png"
        path = os.path.join(run.directory, FOLDER, name)
        picture = self._draw(run)
        png = tf.io.encode_png(picture)
        write_bytes(path, png.numpy())

    def _draw(self, run: Run) -> np.ndarray:
        import tensorflow as tf

        # The random numbers are the same in all pictures.
        shape = [self._count, run.model.latent_size]
        latents = tf.random.stateless_normal(shape, seed=[self._seed, 0])
        with run.trainer.use_weights():
            tensor = run.task.inference_step(latents, run.model)
            samples = tensor.numpy()

        task = type(run.task).__name__
        if not hasattr(run.task, "picture"):
            samples_shape = samples.shape
            if len(samples_shape) != 4 or samples_shape[-1] not in (1, 3):
                raise UsageError(
                    "the callback sample_pictures: it draws images, and the generated examples"
                    f" have the shape {samples_shape[1:]}; define picture(samples) in {task}"
                )
            return image_grid(samples)

        picture = run.task.picture(samples)
        is_array = isinstance(picture, np.ndarray)
        is_picture = is_array and picture.dtype == np.uint8 and picture.ndim == 3
        if not is_picture:
            kind = repr(picture)[:60]
            if is_array:
                shape = list(picture.shape)
                kind = f"{picture.dtype} {shape}"
            raise UsageError(
                f"the callback sample_pictures: {task}.picture returned {kind}; return a NumPy"
                " array of uint8, [height, width, 3]"
            )
        return picture


def image_grid(images: np.ndarray) -> np.ndarray:
    """Returns images in a square grid, row by row, as one picture.

    Pixels of small images become squares.

    Args:
      images: Float images in -1..1, [n, height, width, channels].

    Returns:
      A picture of uint8, [grid height, grid width, channels].
    """
    image_height = images.shape[1]
    times = max(1, _LEAST_HEIGHT // image_height)
    images = images.repeat(times, axis=1)
    images = images.repeat(times, axis=2)
    values = (images + 1.0) * 127.5
    values = np.clip(values, 0, 255)
    pixels = values.round().astype(np.uint8)

    # Each image has a margin below it and to its right.
    no_padding = (0, 0)
    margin = (0, _MARGIN)
    pixels = np.pad(pixels, [no_padding, margin, margin, no_padding])

    count = len(pixels)
    side = math.sqrt(count)
    columns = math.ceil(side)
    rows = math.ceil(count / columns)
    # Black images fill the last row.
    missing = rows * columns - count
    pixels = np.pad(pixels, [(0, missing), no_padding, no_padding, no_padding])

    _, height, width, channels = pixels.shape
    grid = pixels.reshape(rows, columns, height, width, channels)
    # Each line of pixels crosses all images of its row.
    grid = grid.swapaxes(1, 2)
    picture = grid.reshape(rows * height, columns * width, channels)
    # The last images need no margin.
    return picture[:-_MARGIN, :-_MARGIN]
