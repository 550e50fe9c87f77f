"""What components read from a record, and how an image becomes the input of a model."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.preprocessing.image import smart_resize

from trainer_kit.errors import UsageError

TFRECORD_FEATURES: dict[str, Any] = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.string),
}
"""The features of a record for `tf.io.parse_single_example`: an encoded image, and a label as in labels.txt."""


def preprocess_image(image: Any, size: int | tuple[int, int]) -> tf.Tensor:
    """Returns a decoded image as the input of a model: scaled to [0, 1], cropped at its centre, resized.

    The largest part in the middle with the proportions of `size` is resized, bilinearly. In graph or eager.

    Args:
      image: Tensor or array, [height, width, channels]. Integers are scaled by the largest value of their dtype, as
        `tf.image.convert_image_dtype` does; floats are in [0, 1] already. The shape may be unknown, as that of
        `tf.image.decode_image`.
      size: The height and the width of the result; one number for a square.

    Returns:
      float32 [height, width, channels].

    Raises:
      UsageError: when `size` is neither a positive number nor two, or the shape is known to be another one.
    """
    target = _target(size)
    image = tf.convert_to_tensor(image)
    if image.shape.rank not in (None, 3):
        raise UsageError(
            f"preprocess_image takes one image, [height, width, channels], but got the shape {image.shape}; decode "
            "with expand_animations=False, or call it in `map`, before the images are in batches"
        )
    channels = _channels(image)
    image = tf.ensure_shape(image, [None, None, channels])
    image = smart_resize(tf.image.convert_image_dtype(image, tf.float32), target)
    return tf.ensure_shape(image, [*target, channels])


def _channels(image: tf.Tensor) -> int | None:
    """Returns the number of channels; None if it is not known. XLA needs it, and `tf.image.decode_image` hides it."""
    if image.shape.rank is not None:
        return image.shape[-1]
    decodes = not tf.executing_eagerly() and image.op.type == "DecodeImage"
    return (image.op.get_attr("channels") or None) if decodes else None


def _target(size: Any) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2 or not all(isinstance(one, int) and one > 0 for one in pair):
        raise UsageError(
            f"preprocess_image: size={size!r}; give a positive number of pixels, or (height, width); a model whose "
            "input has no fixed size does not tell it by get_model_input_size()"
        )
    return pair
