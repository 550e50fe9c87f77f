"""Examines the data of a task without a model: its speed, its stages and its values.

All functions run eagerly, on the host.
"""

from __future__ import annotations

import itertools
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


@dataclass
class TensorSummary:
    """The values of one tensor of the batches.

    Attributes:
      lowest, highest: The lowest and the highest finite value so far.
      num_not_finite: The number of values that are NaN or infinite so far.
      first_place: The batch and the row of the first of them. They count from 0.
    """

    lowest: float = math.inf
    highest: float = -math.inf
    num_not_finite: int = 0
    first_place: tuple[int, int] | None = None

    def add(self, values: np.ndarray, batch: int) -> None:
        """Adds the values of a batch, whose first dimension counts the examples."""
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


def measure_speed(dataset: tf.data.Dataset, elements: int, seconds: float) -> tuple[float, float]:
    """Reads a dataset and does nothing else.

    Args:
      dataset: The dataset.
      elements: The number of elements to read after the first one, at most.
      seconds: The time after which no further element is read.

    Returns:
      The seconds until the first element came, and the mean seconds between the next ones. Both are
      equal if there was only one element.

    Raises:
      DataError: when the dataset is empty.
    """
    iterator = iter(dataset)
    begin = time.perf_counter()
    if next(iterator, None) is None:
        raise DataError("the data has no batch")
    first_time = time.perf_counter()
    first_seconds = first_time - begin

    count = 0
    next_seconds = 0.0
    for _ in itertools.islice(iterator, elements):
        count += 1
        next_seconds = time.perf_counter() - first_time
        if next_seconds > seconds:
            break
    if count == 0:
        return first_seconds, first_seconds
    return first_seconds, next_seconds / count


def measure_stages(
    stages: dict[str, tf.data.Dataset], elements: int, seconds: float
) -> dict[str, float]:
    """Returns the seconds that each stage takes for a batch, on one thread.

    Each dataset is read alone. The time of a stage is what it adds to the stages before it. That of
    the order is left out: its elements may have the indices of several batches.

    Args:
      stages: The datasets after each stage, by its name. See Source.
      elements, seconds: The limits for each stage. See `measure_speed`.
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
        _, batch_seconds = measure_speed(serial, elements, seconds)
        seconds_by_stage[name] = max(0.0, batch_seconds - previous_seconds)
        previous_seconds = batch_seconds
    return seconds_by_stage


def iterate_tensors(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name of each tensor of a batch, such as "features/image", and the tensor."""
    has_parts = isinstance(batch, tuple) and len(batch) <= len(_PARTS)
    for path, tensor in keras.tree.flatten_with_path(batch):
        names = [str(key) for key in path]
        if has_parts:
            names[0] = _PARTS[path[0]]
        yield "/".join(names) or _PARTS[0], tensor


def summarize_batches(dataset: tf.data.Dataset, batches: int) -> dict[str, TensorSummary]:
    """Returns the values of each dense tensor of numbers over the first batches, by its name."""
    summaries: dict[str, TensorSummary] = {}
    for number, batch in enumerate(dataset.take(batches)):
        for name, tensor in iterate_tensors(batch):
            # Texts and sparse tensors are left out.
            if not isinstance(tensor, tf.Tensor):
                continue
            is_number = tensor.dtype.is_floating or tensor.dtype.is_integer
            if is_number:
                values = tensor.numpy()
                summary = summaries.setdefault(name, TensorSummary())
                summary.add(values, number)
    return summaries


def find_example(order: tf.data.Dataset, position: int) -> int:
    """Returns the index of the example at a position in the stage "order" of a Source."""
    # Seeds may follow the indices.
    batches = order.map(lambda *parts: parts[0])
    indices = batches.unbatch()
    remaining = indices.skip(position)
    return int(next(iter(remaining)))
