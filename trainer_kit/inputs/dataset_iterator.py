"""A dataset and its iterator, made when first needed: after a checkpoint has been restored.

The destructor of a tf.data iterator can wait for a minute. It tells tf.data's tuner to stop while
the tuner sleeps. The tuner, woken too early to see it, sleeps again, each time twice as long as
before. An evaluation of 0.7 s took 50 s that way, and the end of a process on two replicas two
minutes.

So iterators are deleted in threads, and those of one pass as soon as it ends, while the pauses are
short. Iterators that live to the end of the process are not deleted at all: without that, half of
the processes ended 4 s later after 6 s of training. No milder way works: Python clears modules and
cycles as it ends, and gc.freeze() would also keep the files of users from being written out.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import ctypes
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

from trainer_kit.errors import DataError
from trainer_kit.errors.user_frames import find_user_frames
from trainer_kit.inputs.dataset_structure import is_infinite
from trainer_kit.process.error_report import format_reason

if TYPE_CHECKING:
    from trainer_kit.inputs.worker_pipeline import OnePassPipeline, WorkerPipeline
    from trainer_kit.typing import Dataset

# tf.data.INFINITE_CARDINALITY
_INFINITE = -1
_FILE_ERRORS = (
    FileNotFoundError,
    PermissionError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    # Dataset.list_files raises it for a pattern without a match.
    tf.errors.InvalidArgumentError,
)
_NO_MATCH = re.compile(r"No files matched pattern: [^'\"\n]*")
_ALIVE: weakref.WeakSet[DatasetIterator] = weakref.WeakSet()


class Inputs(Protocol):
    """Opens the data of a task. A trainer has one."""

    def distribute(self, pipeline: WorkerPipeline) -> Dataset:
        """Returns the dataset of a WorkerPipeline over the replicas. Runs eagerly."""


class DatasetIterator(abc.ABC):
    """Hands out the iterator of one dataset, which is opened when it is first needed.

    Args:
      name: The dotted path of the config's section below `task`, for messages.
      prebuilt_dataset: A ready-made dataset to use instead of the task's. `reset` does not drop it.

    Attributes:
      prebuilt_dataset: The ready-made dataset, or None.
    """

    def __init__(self, name: str, prebuilt_dataset: Dataset | None = None) -> None:
        self.name = name
        self.prebuilt_dataset = prebuilt_dataset
        self._dataset: Any = None
        self._iterator: Any = None
        _ALIVE.add(self)

    @abc.abstractmethod
    def open(self) -> Any:
        """Returns the dataset that iterators are made of. Opens it if it is not open.

        Raises:
          DataError: when a file that the dataset needs is missing.
        """

    @property
    def dataset(self) -> Any:
        """The dataset. A ready-made one is unchanged.

        Raises:
          DataError: when a file that the dataset needs is missing.
        """
        if self.prebuilt_dataset is None:
            return self.open()
        return self.prebuilt_dataset

    @property
    def has_iterator(self) -> bool:
        """Whether the iterator exists."""
        return self._iterator is not None

    def check_not_empty(self) -> None:
        """Raises DataError when the dataset is known to contain no batch.

        Many empty datasets are only recognised when they are read.
        """
        if _cardinality(self.dataset) == 0:
            raise self.create_empty_error()

    def create_empty_error(self) -> DataError:
        """Returns the error to raise when the dataset contains no batch."""
        return DataError(describe_empty_data(self.name))

    def replace(self, dataset: Dataset) -> None:
        """Uses `dataset` for the next iterator, which is made at the next call of `iterator`."""
        self.prebuilt_dataset = dataset
        self.reset()

    def reset(self) -> None:
        """Drops the iterator and the opened dataset, because their position is no longer valid."""
        self._dataset = None
        self._release_iterator()

    def _release_iterator(self) -> None:
        if self._iterator is not None:
            # The destructor may wait for tf.data's tuner, so the thread drops the last reference.
            last_reference = [self._iterator]
            self._iterator = None
            threading.Thread(target=last_reference.clear).start()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._release_iterator()


class ValidationData(DatasetIterator):
    """The dataset and the iterator of a validation set.

    Args:
      name: The dotted path of the config's section below `task`.
      inputs: The inputs of the trainer.
      pipeline: The pipeline of the section, a OnePassPipeline.
      prebuilt_dataset: A ready-made dataset to use instead, or None.
    """

    def __init__(
        self,
        name: str,
        inputs: Inputs,
        pipeline: OnePassPipeline,
        prebuilt_dataset: Dataset | None = None,
    ) -> None:
        super().__init__(name, prebuilt_dataset)
        self._inputs = inputs
        self._pipeline = pipeline
        self._is_single_pass = False

    def open(self) -> Any:
        """Returns the dataset over the replicas. See DatasetIterator."""
        if self.prebuilt_dataset is not None:
            return self.prebuilt_dataset
        if self._dataset is None:
            with explain_missing_files(self.name):
                self._dataset = self._inputs.distribute(self._pipeline)
        return self._dataset

    def check_has_end(self, steps_field: str) -> None:
        """Raises DataError when the dataset is known to have no end.

        Args:
          steps_field: The field of the config that asks for all of the dataset.
        """
        if is_endless(self.dataset):
            raise DataError(describe_endless_data(self.name, steps_field))

    def cardinality(self) -> int | None:
        """Returns the number of elements in the dataset of the task. Callable from any thread.

        Under several replicas an element is the batch of one replica. None before the dataset is
        made, when its length is unknown, and for a ready-made dataset, which may be distributed in
        any way.
        """
        if self.prebuilt_dataset is not None or self._dataset is None:
            return None
        cardinality = _cardinality(self._dataset)
        return None if cardinality is None or cardinality < 0 else cardinality

    def iterator(self, *, fresh: bool = False) -> Any:
        """Returns the iterator.

        Args:
          fresh: Whether to return a new iterator at the first example, which `end_pass` drops.
        """
        self._is_single_pass = fresh
        if fresh:
            self._release_iterator()
        if self._iterator is None:
            self._iterator = iter(self.open())
        return self._iterator

    def end_pass(self) -> None:
        """Drops the iterator if it is one for a single evaluation. Called after each evaluation."""
        if self._is_single_pass:
            self._release_iterator()


def _cardinality(dataset: Dataset) -> int | None:
    """Returns the number of elements, or a negative constant of tf.data. None if not known."""
    # A method, or a property of a distributed dataset.
    cardinality = getattr(dataset, "cardinality", None)
    if callable(cardinality):
        cardinality = cardinality()
    if cardinality is None:
        return None
    return int(cardinality)


def is_endless(dataset: Dataset) -> bool:
    """Whether a dataset, distributed or not, is known to have no end."""
    return _cardinality(dataset) == _INFINITE or is_infinite(dataset)


@atexit.register
def _leak_iterators_at_exit() -> None:
    """Leaves iterators to the operating system.

    With one more reference, no destructor runs as Python ends.
    """
    for owner in list(_ALIVE):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner._iterator))


@contextlib.contextmanager
def explain_missing_files(section: str, note: str = "") -> Iterator[None]:
    """Turns an error about a missing or unreadable file into a DataError.

    The error names the section of the data.

    Args:
      section: The name of the config's section, such as train_data.
      note: The last line of the message.

    Raises:
      DataError: instead of the error about the file.
    """
    try:
        yield
    except _FILE_ERRORS as error:
        unmatched = _NO_MATCH.search(str(error))
        if isinstance(error, tf.errors.InvalidArgumentError) and not unmatched:
            raise

        problem = format_reason(error)[0]
        if unmatched:
            problem = unmatched.group()
        frames = find_user_frames(error)[-1:]
        place = "".join(f"\n  {frame}: {frame.code}" for frame in frames)
        last_line = f"\n  {note}" if note else ""
        raise DataError(f"task.{section} cannot be opened: {problem}{place}{last_line}") from error


def describe_empty_data(section: str) -> str:
    """Returns the message for a section of data without a batch."""
    return (
        f"task.{section} has no batch: it has no files, no examples, or fewer examples than a batch"
    )


def describe_endless_data(section: str, steps_field: str) -> str:
    """Returns the message for endless validation data when `steps_field` asks for all of it."""
    return (
        f"task.{section} never ends, but {steps_field}=-1 evaluates all of it; set {steps_field} to"
        " a number of batches, or make the data end: remove repeat() from build_inputs, and set"
        f" task.{section}.is_training=false for a Source"
    )
