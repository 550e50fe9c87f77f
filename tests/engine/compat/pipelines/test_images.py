"""preprocess_image: the crop, the size, the values and the shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.compat.pipelines import preprocess_image
from trainer_kit.errors import UsageError


def test_the_middle_of_an_image_is_taken() -> None:
    image = np.zeros((4, 8, 1), "uint8")
    image[:, 2:6] = 255

    np.testing.assert_array_equal(preprocess_image(image, 4), np.ones((4, 4, 1)))
    assert np.mean(preprocess_image(image, (4, 8))) == 0.5


@pytest.mark.parametrize("shape", [(4, 8, 3), (8, 4, 3), (2, 2, 3), (1, 9, 3)])
def test_every_image_gets_the_size(shape: tuple[int, ...]) -> None:
    image = preprocess_image(tf.cast(tf.fill(shape, 51), tf.uint8), 4)
    np.testing.assert_allclose(image, np.full((4, 4, 3), 0.2), rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "largest"), [("uint8", 255), ("uint16", 65535), ("float32", 1.0)]
)
def test_values_are_scaled_by_their_dtype(dtype: str, largest: float) -> None:
    image = preprocess_image(np.full((4, 4, 1), largest, dtype), 2)
    assert (image.dtype, float(image[0, 0, 0])) == (tf.float32, 1.0)


def test_an_image_of_unknown_shape_gets_a_known_one() -> None:
    png = tf.io.encode_png(np.zeros((5, 7, 3), "uint8"))

    def read_shape(channels: int) -> Any:
        dataset = tf.data.Dataset.from_tensors(png).map(
            lambda data: preprocess_image(tf.image.decode_image(data, channels=channels), 4)
        )
        return dataset.element_spec.shape.as_list()

    assert read_shape(3) == [4, 4, 3]
    assert read_shape(1) == [4, 4, 1]
    assert read_shape(0) == [4, 4, None]


@pytest.mark.parametrize("size", [None, 0, (4,), (4, -1), 4.0, "4"])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(UsageError, match="give a positive number of pixels"):
        preprocess_image(np.zeros((4, 4, 3)), size)
