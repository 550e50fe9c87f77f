"""Pictures of generated examples. NumPy only."""

from __future__ import annotations

import math

import numpy as np

_MARGIN = 2  # pixels between images
_LEAST = 32  # pixels: smaller images are enlarged to about this height


def image_grid(images: np.ndarray) -> np.ndarray:
    """Returns images in a square grid, row by row, as one picture of uint8, [height, width, channels].

    Pixels of small images become squares.

    Args:
      images: Float images in -1..1, [n, height, width, channels].
    """
    times = max(1, _LEAST // images.shape[1])
    images = images.repeat(times, axis=1).repeat(times, axis=2)
    count, height, width, channels = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    tall, wide = height + _MARGIN, width + _MARGIN
    grid = np.zeros((rows * tall - _MARGIN, columns * wide - _MARGIN, channels), np.uint8)
    for place, image in enumerate(np.clip((images + 1.0) * 127.5, 0, 255).round().astype(np.uint8)):
        top, left = place // columns * tall, place % columns * wide
        grid[top : top + height, left : left + width] = image
    return grid
