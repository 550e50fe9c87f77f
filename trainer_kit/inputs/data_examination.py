"""Examines the data of a task without a model: its speed, its stages and its values.

All functions run eagerly, on the host.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.errors import DataError

# The stage whose elements are the indices of the examples.
ORDER = "order"
# The parts of a batch that is a tuple.
_PARTS = ("features", "labels", "weights")


@dataclass(frozen=True)
class Speed:
    """The speed of a dataset.

    Attributes:
      first_seconds: The seconds until the first element came.
      mean_seconds: The mean seconds between the next elements. `first_seconds` if there are none.
    """

    first_seconds: float
    mean_seconds: float


@dataclass
class TensorSummary:
    """The values of one tensor of the batches.

    Attributes:
      is_number: Whether the tensor has numbers. A text or a sparse tensor has none.
      lowest, highest: The lowest and the highest finite value so far.
      num_not_finite: The number of values that are NaN or infinite so far.
      first_place: The batch and the row of the first of them. They count from 0.
    """

    is_number: bool = False
    lowest: float = math.inf
    highest: float = -math.inf
    num_not_finite: int = 0
    first_place: tuple[int, int] | None = None

    def add(self, values: np.ndarray, batch: int) -> None:
        """Adds the values of a batch, whose first dimension counts the examples."""
        self.is_number = True
        is_finite = np.isfinite(values)
        finite_values = values[is_finite]
        if finite_values.size:
            lowest = float(finite_values.min())
            highest = float(finite_values.max())
            self.lowest = min(self.lowest, lowest)
            self.highest = max(self.highest, highest)

        places = np.argwhere(~is_finite)
        self.num_not_finite += len(places)
        if self.first_place is None and len(places):
            row = int(places[0, 0])
            self.first_place = (batch, row)


def measure_speed(dataset: tf.data.Dataset, seconds: float) -> Speed:
    """Reads a dataset, does nothing else, and returns its speed.

    Args:
      dataset: The dataset.
      seconds: The time after the first element, after which no further one is read.

    Raises:
      DataError: when the dataset is empty.
    """
    iterator = iter(dataset)
    begin = time.perf_counter()
    if next(iterator, None) is None:
        raise DataError("the data has no batch")
    first_seconds = time.perf_counter() - begin

    count = 0
    next_seconds = 0.0
    chunk = tf.constant(1)
    with contextlib.suppress(tf.errors.OutOfRangeError):
        # The function is traced.
        skip_elements(iterator, chunk)
        begin = time.perf_counter()
        while next_seconds < seconds:
            skip_elements(iterator, chunk)
            next_seconds = time.perf_counter() - begin
            count += int(chunk)
            chunk *= 2
    mean_seconds = first_seconds
    if count:
        mean_seconds = next_seconds / count
    return Speed(first_seconds, mean_seconds)


@tf.function
def skip_elements(iterator: tf.data.Iterator, count: tf.Tensor) -> None:
    """Takes elements as a training loop does: in graph, without Python between them."""
    for _ in tf.range(count):
        next(iterator)


def measure_stages(stages: dict[str, tf.data.Dataset], seconds: float) -> dict[str, float]:
    """Returns the seconds that each stage takes for a batch, on one thread.

    Each dataset is read alone. The time of a stage is what it adds to the stages before it. That of
    the order is left out: its elements may have the indices of several batches.

    Args:
      stages: The datasets after each stage, by its name. See Source.
      seconds: The limit for each stage. See `measure_speed`.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1

    seconds_by_stage = {}
    previous_seconds = 0.0
    for name, dataset in stages.items():
        if name == ORDER:
            continue
        serial = dataset.with_options(options)
        speed = measure_speed(serial, seconds)
        added_seconds = speed.mean_seconds - previous_seconds
        seconds_by_stage[name] = max(0.0, added_seconds)
        previous_seconds = speed.mean_seconds
    return seconds_by_stage


def iterate_tensors(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name of each tensor of a batch, such as "features/image", and the tensor."""
    parts = batch
    if isinstance(batch, tuple) and len(batch) <= len(_PARTS):
        parts = dict(zip(_PARTS, batch, strict=False))
    for path, tensor in keras.tree.flatten_with_path(parts):
        name = "/".join(map(str, path))
        yield name or _PARTS[0], tensor


def summarize_batches(dataset: tf.data.Dataset, batches: int) -> dict[str, TensorSummary]:
    """Returns the values of each tensor over the first batches, by its name."""
    summaries: dict[str, TensorSummary] = {}
    for number, batch in enumerate(dataset.take(batches)):
        for name, tensor in iterate_tensors(batch):
            summary = summaries.setdefault(name, TensorSummary())
            # Texts and sparse tensors are no arrays of numbers.
            values = np.asarray(tensor)
            if values.dtype != object:
                summary.add(values, number)
    return summaries


def find_example(order: tf.data.Dataset, position: int) -> int:
    """Returns the index of the example at a position in the stage "order" of a Source."""
    # Seeds may follow the indices.
    batches = order.map(lambda *parts: parts[0])
    indices = batches.unbatch()
    remaining = indices.skip(position)
    return int(next(iter(remaining)))
