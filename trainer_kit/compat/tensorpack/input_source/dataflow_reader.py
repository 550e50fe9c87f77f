"""DataflowReader: reads a dataflow pass by pass, so that a resumed run continues at its place."""

from __future__ import annotations

import atexit
import queue
import random
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import trainer_kit.compat.tensorpack.utils.utils as utils
from trainer_kit.compat.tensorpack.dataflow import (
    DataFlow,
    DataFromQueue,
    RemoteDataZMQ,
    RepeatedData,
)

# The package leaves the name out of `imgaug` where OpenCV is not installed.
from trainer_kit.compat.tensorpack.dataflow.imgaug.base import ImageAugmentor
from trainer_kit.compat.tensorpack.program_errors import name_user_line
from trainer_kit.compat.tensorpack.utils import logger
from trainer_kit.errors import DataError

_READ_AHEAD = 50

# What is searched for generators.
_SEEDED = (DataFlow, ImageAugmentor, np.random.RandomState)

# Held while the global generators have the state of a pass.
_GENERATORS_LOCK = threading.Lock()


class DataflowReader:
    """Reads a dataflow. Each pass draws from generators that are seeded by its number.

    Args:
      dataflow: The dataflow.
      is_infinite: Whether another pass follows the last one.
      reads_ahead: Whether a thread reads ahead.
    """

    def __init__(self, dataflow: DataFlow, *, is_infinite: bool, reads_ahead: bool) -> None:
        is_repeated = isinstance(dataflow, RepeatedData) and dataflow.num == -1
        self._dataflow = dataflow.ds if is_repeated else dataflow
        self._is_infinite = is_infinite or is_repeated
        self._reads_ahead = reads_ahead
        # Whether it takes datapoints that others produce, or a dataflow that it contains does.
        source: Any = self._dataflow
        while source is not None and not isinstance(source, (DataFromQueue, RemoteDataZMQ)):
            source = getattr(source, "ds", None)
        self._is_queue = source is not None

        self._is_reset = False
        self._has_started = False
        self._pass = 0
        self._index = 0
        self._datapoints: Iterator[tuple[int, int, Any]] | None = None

    @property
    def ready_count(self) -> int:
        """The number of datapoints that were read ahead."""
        if isinstance(self._datapoints, ReadAhead):
            return self._datapoints.ready_count
        return 0

    def reset_dataflow(self) -> None:
        """Calls the dataflow's reset_state, once."""
        if not self._is_reset:
            self._is_reset = True
            self._dataflow.reset_state()

    def restart(self) -> None:
        """Begins with the first pass again. The first call keeps the place of a checkpoint."""
        if self._has_started:
            self._pass = 0
            self._index = 0
        self._has_started = True
        self._close()

    def state(self) -> list[int]:
        """Returns the place: the number of the pass, and of datapoints that were taken in it."""
        return [self._pass, self._index]

    def restore(self, state: Sequence[int]) -> None:
        """Continues at a place."""
        self._pass, self._index = state
        self._close()

    def next_components(self, names: Sequence[str]) -> list[Any]:
        """Returns the components of the next datapoint, in the order of the inputs.

        Args:
          names: The names of the inputs.

        Raises:
          DataError: When the number of components is not that of the inputs, or the dataflow ends
            before its length.
          OutOfRangeError: At the end of a dataflow that is not infinite.
        """
        if self._datapoints is None:
            self.reset_dataflow()
            self._datapoints = self._read()
            if self._reads_ahead:
                self._datapoints = ReadAhead(self._datapoints, can_wait=not self._is_queue)
        try:
            pass_number, index, datapoint = next(self._datapoints)
        except StopIteration:
            self._datapoints = None
            message = f"{type(self._dataflow).__name__} has ended"
            raise tf.errors.OutOfRangeError(None, None, message) from None
        except BaseException:
            # The thread that reads ahead has ended.
            self._datapoints = None
            raise
        self._pass = pass_number
        self._index = index + 1

        if isinstance(datapoint, Mapping):
            base_names = [name.rpartition("/")[2] for name in names]
            if missing := [name for name in base_names if name not in datapoint]:
                message = (
                    f"a datapoint of {type(self._dataflow).__name__} has the components"
                    f" {', '.join(map(str, datapoint))}, and the model also has the input"
                    f" {missing[0]!r}; yield a component of this name"
                )
                raise DataError(name_user_line(message))
            datapoint = [datapoint[name] for name in base_names]
        if len(datapoint) != len(names):
            message = (
                f"a datapoint of {type(self._dataflow).__name__} has {len(datapoint)} components,"
                f" and the model has {len(names)} inputs ({', '.join(names)}); yield one component"
                " for each input"
            )
            raise DataError(name_user_line(message))
        return list(datapoint)

    def _read(self) -> Iterator[tuple[int, int, Any]]:
        """Yields (number of the pass, index, datapoint) from the place on."""
        pass_number = self._pass
        # The datapoints of a queue are gone once they are taken.
        first = 0 if self._is_queue else self._index
        while True:
            seed_generators(self._dataflow, pass_number)
            count = 0
            datapoints: Iterator[Any] = iter(self._dataflow)
            # It may wait for its next datapoint without end, and no other reader could go on.
            if not self._is_queue:
                datapoints = read_with_own_generators(datapoints, pass_number)
            for datapoint in datapoints:
                if count >= first:
                    yield pass_number, count, datapoint
                count += 1
            self._check_length(count)
            if not self._is_infinite:
                return
            pass_number += 1
            first = 0

    def _check_length(self, count: int) -> None:
        name = type(self._dataflow).__name__
        if count == 0:
            raise DataError(f"{name} has no datapoint; check its source")
        try:
            length = len(self._dataflow)
        except NotImplementedError:
            return
        if count < length and not self._is_infinite:
            message = (
                f"{name} ended after {count} datapoints, and its __len__() returns {length}; the"
                " two have to be the same"
            )
            raise DataError(name_user_line(message))
        if count != length:
            logger.warn(
                f"{name}.__len__() returns {length}, and a pass had {count} datapoints; the two"
                " have to be the same, or epochs and evaluations count wrong"
            )

    def _close(self) -> None:
        if isinstance(self._datapoints, ReadAhead):
            self._datapoints.close()
        self._datapoints = None


class ReadAhead:
    """Reads an iterator ahead in a thread.

    Args:
      items: The iterator.
      can_wait: Whether its next item comes without others.
    """

    def __init__(self, items: Iterator[Any], can_wait: bool) -> None:
        self._items = items
        self._can_wait = can_wait
        self._queue: queue.Queue[Any] = queue.Queue(_READ_AHEAD)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="QueueInput", daemon=True)
        self._thread.start()
        # Python aborts at its end if the thread runs in TensorFlow then.
        atexit.register(self.close)

    @property
    def ready_count(self) -> int:
        """The number of items that were read ahead."""
        return self._queue.qsize()

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        item, error = self._queue.get()
        if error is not None:
            raise error
        return item

    def close(self) -> None:
        """Ends the thread. Waits for its end if the next item comes."""
        atexit.unregister(self.close)
        self._is_closed.set()
        while self._can_wait and self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue

    def _run(self) -> None:
        try:
            for item in self._items:
                if self._is_closed.is_set():
                    return
                self._queue.put((item, None))
            self._queue.put((None, StopIteration()))
        except BaseException as error:
            # The thread that takes the item raises it.
            self._queue.put((None, error))


def read_with_own_generators(datapoints: Iterator[Any], number: int) -> Iterator[Any]:
    """Yields the datapoints of a pass, which draw from their own NumPy and Python generators.

    The global generators belong to the whole process. Here they have the state of this pass while
    a datapoint is made, so that what is drawn between two datapoints changes nothing. Other readers
    wait meanwhile.

    Args:
      datapoints: The datapoints.
      number: The number of the pass.
    """
    numpy_state = np.random.RandomState(_compute_seed("numpy", number)).get_state()
    python_state = random.Random(_compute_seed("python", number)).getstate()
    while True:
        with _GENERATORS_LOCK:
            outer_numpy_state = np.random.get_state()
            outer_python_state = random.getstate()
            np.random.set_state(numpy_state)
            random.setstate(python_state)
            try:
                datapoint = next(datapoints)
            except StopIteration:
                return
            finally:
                numpy_state = np.random.get_state()
                python_state = random.getstate()
                np.random.set_state(outer_numpy_state)
                random.setstate(outer_python_state)
        yield datapoint


def seed_generators(dataflow: DataFlow, number: int) -> None:
    """Seeds the generators in the attributes of a dataflow for a pass.

    Args:
      dataflow: The dataflow. Its inner dataflows and augmentors are searched for attributes that
        are np.random.RandomState.
      number: The number of the pass.
    """
    visited: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", dataflow)]
    while waiting:
        path, item = waiting.pop()
        if id(item) in visited:
            continue
        visited.add(id(item))
        if isinstance(item, np.random.RandomState):
            item.seed(_compute_seed(path, number))
        elif isinstance(item, (list, tuple)) and item and isinstance(item[0], _SEEDED):
            for index, child in enumerate(item):
                waiting.append((f"{path}/{index}", child))
        elif isinstance(item, _SEEDED):
            attributes = vars(item)
            for name, child in sorted(attributes.items()):
                waiting.append((f"{path}/{name}", child))


def _compute_seed(path: str, number: int) -> int:
    text = f"{path} {number}"
    # What fix_rng_seed of Tensorpack sets.
    if utils._RNG_SEED is not None:
        text += f" {utils._RNG_SEED}"
    return zlib.crc32(text.encode())
