"""Examines the data of a task without a model: its speed, its stages and its values.

All functions run eagerly, on the host.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.errors import DataError

# The stage whose elements are the indices of the examples.
ORDER = "order"
# Names for the parts of a batch that is a tuple.
_PARTS = ("features", "labels", "weights")
# The number of places of values that are not finite that are kept.
_MAX_PLACES = 5


@dataclass(frozen=True)
class Speed:
    """The speed of a dataset.

    Attributes:
      first_seconds: The seconds until the first element came.
      seconds: The seconds between two of the next elements. None if there was only one element.
    """

    first_seconds: float
    seconds: float | None


@dataclass
class TensorSummary:
    """The values of one tensor over some batches.

    Attributes:
      name: The place of the tensor in a batch, such as "features" or "features/image".
      dtype: Its dtype.
      shape: Its shape in the first batch.
      lowest, highest: Its lowest and its highest finite value. None for other than numbers.
      num_nan, num_infinite: The number of such values.
      places: The first examples with such values, as (batch, row). They count from 0.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    lowest: float | None = None
    highest: float | None = None
    num_nan: int = 0
    num_infinite: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite."""
        return self.num_nan + self.num_infinite == 0


def measure_speed(dataset: tf.data.Dataset, elements: int, seconds: float) -> Speed:
    """Reads a dataset and does nothing else, and returns how fast its elements come.

    Args:
      dataset: The dataset.
      elements: The number of elements to read after the first one, at most.
      seconds: The time after which no further element is read, once there are two.

    Raises:
      DataError: when the dataset is empty.
    """
    begin = time.perf_counter()
    iterator = iter(dataset)
    if next(iterator, None) is None:
        raise DataError("the data has no batch")
    first_time = time.perf_counter()

    count = 0
    now = first_time
    for _ in itertools.islice(iterator, elements):
        count += 1
        now = time.perf_counter()
        if now - first_time > seconds:
            break
    average = (now - first_time) / count if count else None
    return Speed(first_time - begin, average)


def measure_stages(
    stages: dict[str, tf.data.Dataset], batch_size: int, elements: int, seconds: float
) -> dict[str, float]:
    """Returns the seconds that each stage takes for a batch, on one thread.

    Each dataset is read alone. The time of a stage is what it adds to the stages before it.

    Args:
      stages: The datasets after each stage, by its name. See Source.
      batch_size: The number of examples in a batch.
      elements, seconds: The limits for each stage. See `measure_speed`.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1

    seconds_by_stage = {}
    previous_seconds = 0.0
    for name, dataset in stages.items():
        speed = measure_speed(dataset.with_options(options), elements, seconds)
        batch_seconds = speed.first_seconds if speed.seconds is None else speed.seconds
        if name == ORDER:
            # An element may have the indices of several batches.
            indices = _select_indices(next(iter(dataset)))
            batch_seconds *= batch_size / max(1, len(indices))
        seconds_by_stage[name] = max(0.0, batch_seconds - previous_seconds)
        previous_seconds = max(previous_seconds, batch_seconds)
    return seconds_by_stage


def summarize_batches(dataset: tf.data.Dataset, batches: int) -> tuple[list[TensorSummary], int]:
    """Returns the values of each tensor over the first batches, and the number of these batches.

    Args:
      dataset: The dataset.
      batches: The number of batches to read, at most.
    """
    summaries: list[TensorSummary] = []
    count = 0
    for number, batch in enumerate(dataset.take(batches)):
        count = number + 1
        tensors = list(iterate_tensors(batch))
        for name, tensor in tensors[len(summaries) :]:
            shape = tuple(tensor.shape)
            summaries.append(TensorSummary(name, tensor.dtype.name, shape))
        for summary, (_, tensor) in zip(summaries, tensors, strict=True):
            # The values of a ragged or a sparse tensor.
            values = getattr(tensor, "flat_values", getattr(tensor, "values", tensor))
            add_values(summary, values.numpy(), number)
    return summaries, count


def iterate_tensors(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of each tensor of a batch."""
    has_parts = isinstance(batch, tuple) and 2 <= len(batch) <= len(_PARTS)
    for path, tensor in keras.tree.flatten_with_path(batch):
        names = [str(key) for key in path]
        if has_parts:
            names[0] = _PARTS[path[0]]
        yield "/".join(names) or _PARTS[0], tensor


def add_values(summary: TensorSummary, values: np.ndarray, batch: int) -> None:
    """Adds the values of one batch to the summary of a tensor.

    Args:
      summary: The summary.
      values: The values. The first dimension counts the examples.
      batch: The number of the batch.
    """
    if values.dtype == object or values.dtype.kind in "SUbc":
        return
    numbers = values.astype(np.float64)
    is_finite = np.isfinite(numbers)
    finite_numbers = numbers[is_finite]
    if finite_numbers.size:
        lowest = float(finite_numbers.min())
        highest = float(finite_numbers.max())
        summary.lowest = lowest if summary.lowest is None else min(summary.lowest, lowest)
        summary.highest = highest if summary.highest is None else max(summary.highest, highest)
    if is_finite.all():
        return

    num_nan = int(np.isnan(numbers).sum())
    summary.num_nan += num_nan
    summary.num_infinite += int((~is_finite).sum()) - num_nan
    rows = np.argwhere(~is_finite)[:, 0] if numbers.ndim else np.zeros(1, int)
    for row in np.unique(rows).tolist():
        if len(summary.places) < _MAX_PLACES:
            summary.places.append((batch, row))


def find_example(order: tf.data.Dataset, batch_size: int, place: tuple[int, int]) -> int | None:
    """Returns the index of the example at a place, (batch, row), in the order of a Source.

    Returns None if the order ends before it.
    """
    batch, row = place
    position = batch * batch_size + row
    for element in order:
        indices = _select_indices(element)
        if position < len(indices):
            return int(indices[position])
        position -= len(indices)
    return None


def _select_indices(element: Any) -> np.ndarray:
    """Returns the indices of an element of the order. Seeds may follow them."""
    indices = element[0] if isinstance(element, tuple) else element
    return np.asarray(indices)
