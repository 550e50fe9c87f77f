"""Copies the batches that Python makes, since TensorFlow may write into their memory."""

from __future__ import annotations

from types import GeneratorType
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def with_own_memory(batch: Any) -> Any:
    """Returns a batch with copies of its arrays and tensors, for a tf.data.Dataset.from_generator. Runs on the host.

    TensorFlow does not copy what a generator yields if its memory is aligned. When it then splits the batch over the
    replicas, an operation such as dropout may write its result into a part: without the copies, into the arrays of the
    user, and into batches that are kept for later evaluations.
    """
    return tf.nest.map_structure(_copied, batch, expand_composites=True)


def with_own_batches(data: Any) -> Any:
    """Returns a PyDataset or a generator whose batches have their own memory; other data unchanged."""
    if isinstance(data, keras.utils.PyDataset):
        return OwnMemoryBatches(data)
    return (with_own_memory(batch) for batch in data) if isinstance(data, GeneratorType) else data


def _copied(part: Any) -> Any:
    if isinstance(part, np.ndarray):
        return part.copy()
    with tf.device("CPU:0"):
        return tf.constant(part.numpy(), part.dtype) if isinstance(part, tf.Tensor) else part


class OwnMemoryBatches(keras.utils.PyDataset):
    """The batches of a PyDataset, each with copies of its arrays; see `with_own_memory`."""

    def __init__(self, dataset: keras.utils.PyDataset) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset

    @property
    def num_batches(self) -> int | None:
        """The number of batches; None if there is no end."""
        count: int | None = self._dataset.num_batches
        return count

    def __getitem__(self, index: int) -> Any:
        return with_own_memory(self._dataset[index])
