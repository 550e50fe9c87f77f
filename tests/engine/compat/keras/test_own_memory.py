"""Batches that Python makes: what a step does with them leaves the arrays of the user alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.compat.keras.py_dataset_epochs import copy_batch
from trainer_kit.compat.keras.training_data import build_training_data, build_validation_data

BATCHES = 5
BATCH = 20
ALIGNMENT = 64


def aligned_ones() -> np.ndarray:
    """Returns ones whose memory TensorFlow takes over without a copy; float32 [100, 8]."""
    memory = np.ones(BATCHES * BATCH * 8 + ALIGNMENT, np.float32)
    begin = -memory.ctypes.data % ALIGNMENT // memory.itemsize
    return memory[begin : begin + BATCHES * BATCH * 8].reshape(-1, 8)


class Views(keras.utils.PyDataset):
    """Batches that are views of an array, as those of most loaders are."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__()
        self.array = array

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, number: int) -> Any:
        part = self.array[number * BATCH : (number + 1) * BATCH]
        return part, part[:, :1]


def yield_views(array: np.ndarray) -> Iterator[Any]:
    """Yields the same views."""
    yield from (Views(array)[number] for number in range(BATCHES))


def refill_buffer() -> Iterator[Any]:
    """Yields one buffer again and again, with other values."""
    buffer = aligned_ones()[:BATCH]
    for number in range(BATCHES):
        buffer[:] = number
        yield buffer, buffer[:, :1]


def read_for_training(data: Any) -> Any:
    return open_dataset(build_training_data(data, steps_per_epoch=BATCHES).batches)


def read_for_validation(data: Any) -> Any:
    return open_dataset(build_validation_data(data, steps=BATCHES))


def open_dataset(batches: Any) -> Any:
    return batches if isinstance(batches, tf.data.Dataset) else batches.at(0)


@pytest.mark.parametrize("make", [Views, yield_views])
@pytest.mark.parametrize(("read", "passes"), [(read_for_training, 1), (read_for_validation, 2)])
def test_a_step_on_split_batches_does_not_change_arrays(make: Any, read: Any, passes: int) -> None:
    array = aligned_ones()
    dataset = read(make(array)).rebatch(BATCH // 2)  # as a strategy splits the batches
    step = tf.function(lambda iterator: next(iterator)[0] * 3.0 + 1.0)
    for _ in range(passes):  # a batch that is kept for the next evaluation is as it was, too
        iterator = iter(dataset)
        for _ in range(2 * BATCHES):
            assert float(step(iterator)[0, 0]) == 4.0

    np.testing.assert_array_equal(array, 1.0)


@pytest.mark.parametrize("read", [read_for_training, read_for_validation])
def test_a_generator_may_refill_one_buffer(read: Any) -> None:
    first = [float(batch[0][0, 0]) for batch in read(refill_buffer())]
    assert first == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_ragged_and_sparse_parts_and_texts_are_copied() -> None:
    batch = {
        "ragged": tf.ragged.constant([[1], [2, 3]]),
        "sparse": tf.sparse.from_dense([[0, 4]]),
        "text": tf.constant(["a"]),
        "none": None,
        "list": [5],
    }

    copied = copy_batch(batch)

    assert copied["ragged"].to_list() == [[1], [2, 3]]
    assert copied["ragged"].dtype == tf.int32
    assert tf.sparse.to_dense(copied["sparse"]).numpy().tolist() == [[0, 4]]
    assert copied["text"].numpy().tolist() == [b"a"]
    assert copied["none"] is None
    assert copied["list"] == [5]
