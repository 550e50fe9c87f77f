"""Examines the data of a task without a model: its speed, its stages and its values.

All functions run eagerly, on the host.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.errors import DataError


@dataclass
class TensorSummary:
    """The values of one tensor of the batches.

    Attributes:
      description: The dtype and the shape of the first one.
      lowest: The lowest finite value so far. A tensor that is not examined has none.
      highest: The highest finite value so far.
      bad_place: The row and the batch of the first value that is NaN or infinite, in words. They
        count from 0. "" if all values are finite so far.
    """

    description: str
    lowest: float = math.inf
    highest: float = -math.inf
    bad_place: str = ""

    def add(self, values: np.ndarray, batch: int) -> None:
        """Adds the values of a batch, whose first dimension counts the examples."""
        numbers = np.atleast_1d(values).astype(np.float64)
        is_finite = np.isfinite(numbers)
        self.lowest = numbers.min(initial=self.lowest, where=is_finite)
        self.highest = numbers.max(initial=self.highest, where=is_finite)
        places = np.argwhere(~is_finite)
        if len(places) and not self.bad_place:
            row = places[0, 0]
            self.bad_place = f"row {row} of batch {batch}"


def measure_seconds(dataset: tf.data.Dataset, limit: float) -> float:
    """Reads a dataset, does nothing else, and returns the mean seconds between two elements.

    Args:
      dataset: The dataset.
      limit: The seconds after the first element, after which no further one is read.

    Raises:
      DataError: when the dataset has no second element.
    """
    times: list[float] = []
    for _ in dataset:
        now = time.perf_counter()
        times.append(now)
        if now > times[0] + limit:
            break
    if len(times) < 2:
        raise DataError("the data has fewer than two batches, so its speed cannot be measured")
    seconds = times[-1] - times[0]
    pauses = len(times) - 1
    return seconds / pauses


def measure_stages(stages: dict[str, tf.data.Dataset], limit: float) -> dict[str, float]:
    """Returns the seconds that each stage takes for a batch, on one thread.

    Each dataset is read alone. The time of a stage is what it adds to the stages before it.

    Args:
      stages: The datasets after each stage, by its name. See Source.
      limit: The limit for each stage. See `measure_seconds`.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1

    seconds_by_stage = {}
    previous_seconds = 0.0
    for name, dataset in stages.items():
        serial = dataset.with_options(options)
        seconds = measure_seconds(serial, limit)
        seconds_by_stage[name] = seconds - previous_seconds
        previous_seconds = seconds
    return seconds_by_stage


def summarize_batches(dataset: tf.data.Dataset, batches: int) -> dict[str, TensorSummary]:
    """Returns the values of each tensor over the first batches.

    A tensor is named by its place, such as "batch/0/image" for `batch[0]["image"]`.
    """
    summaries: dict[str, TensorSummary] = {}
    for number, batch in enumerate(dataset.take(batches)):
        named_tensors = keras.tree.flatten_with_path(batch)
        for path, tensor in named_tensors:
            if tensor is None:
                continue
            keys = ["batch", *path]
            name = "/".join(map(str, keys))
            shape = tuple(tensor.shape)
            description = f"{tensor.dtype.name} {shape}"

            # Strings, ragged and sparse tensors become arrays of objects.
            values = np.asarray(tensor)
            is_examined = values.dtype != object
            if not is_examined:
                description += ", not examined"
            summary = summaries.setdefault(name, TensorSummary(description))
            if is_examined:
                summary.add(values, number)
    return summaries
