"""A dataset and its iterator, made when first needed: after a checkpoint has been restored.

The destructor of a tf.data iterator can wait for a minute: it tells tf.data's tuner to stop while
the tuner sleeps, and the tuner, woken too early to see it, sleeps on, each time twice as long as
before. (An evaluation of 0.7 s took 50 s that way, the end of a process on two replicas two
minutes.) So iterators are deleted in threads, those of one pass as soon as it ends, while the
pauses are short; and those that live to the end of the process are not deleted at all: after 6 s of
training half of the processes ended 4 s later without that. Nothing milder does: Python clears
modules and cycles as it ends, and gc.freeze() would keep the files of users, too, from being
written out.
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
from typing import Any, Protocol

import tensorflow as tf

from trainer_kit.errors import DataError
from trainer_kit.errors.user_frames import find_user_frames
from trainer_kit.inputs.dataset_structure import is_infinite
from trainer_kit.process.error_report import format_reason

_INFINITE = -1  # tf.data.INFINITE_CARDINALITY
_FILE_ERRORS = (
    FileNotFoundError,
    PermissionError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.InvalidArgumentError,  # Dataset.list_files raises it for a pattern without a match
)
_NO_MATCH = re.compile(r"No files matched pattern: [^'\"\n]*")
_ALIVE: weakref.WeakSet[DatasetIterator] = weakref.WeakSet()


class Inputs(Protocol):
    """Opens the data of a task; a trainer has one."""

    def distribute(self, pipeline: Any) -> Any:
        """Returns the dataset of a WorkerPipeline over the replicas; runs eagerly."""


class DatasetIterator(abc.ABC):
    """Hands out the iterator of one dataset, which is opened when it is first needed.

    Args:
      name: The dotted path of the config's section below `task`, for messages.
      prebuilt_dataset: A ready-made dataset to use instead of the task's; `reset` keeps it.

    Attributes:
      prebuilt_dataset: The ready-made dataset; None if there is none.
    """

    def __init__(self, name: str, prebuilt_dataset: Any = None) -> None:
        self.name = name
        self.prebuilt_dataset = prebuilt_dataset
        self._dataset: Any = None
        self._iterator: Any = None
        _ALIVE.add(self)

    @abc.abstractmethod
    def open(self) -> Any:
        """Returns the dataset that iterators are made of; opens it if it is not open.

        Raises:
          DataError: when a file that it needs is missing.
        """

    @property
    def dataset(self) -> Any:
        """The dataset; a ready-made one is unchanged. Raises DataError when a file that it needs is missing."""
        return self.open() if self.prebuilt_dataset is None else self.prebuilt_dataset

    @property
    def has_iterator(self) -> bool:
        """Whether there is an iterator."""
        return self._iterator is not None

    def check_not_empty(self) -> None:
        """Raises DataError when the dataset is known to hold no batch; many show it only when they are read."""
        if _cardinality(self.dataset) == 0:
            raise DataError(describe_empty_data(self.name))

    def replace(self, dataset: Any) -> None:
        """Uses `dataset` for the next iterator, which is made at the next call of `iterator`."""
        self.prebuilt_dataset = dataset
        self.reset()

    def reset(self) -> None:
        """Drops the iterator and the dataset that was opened, because their position is no longer valid."""
        self._dataset = None
        self._release_iterator()

    def _release_iterator(self) -> None:
        if self._iterator is not None:
            last_reference, self._iterator = [self._iterator], None
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
      prebuilt_dataset: A ready-made dataset to use instead; None: there is none.
    """

    def __init__(
        self, name: str, inputs: Inputs, pipeline: Any, prebuilt_dataset: Any = None
    ) -> None:
        super().__init__(name, prebuilt_dataset)
        self._inputs = inputs
        self._pipeline = pipeline
        self._is_single_pass = False

    def open(self) -> Any:
        """Returns the dataset over the replicas; see DatasetIterator."""
        if self.prebuilt_dataset is not None:
            return self.prebuilt_dataset
        if self._dataset is None:
            with explain_missing_files(self.name):
                self._dataset = self._inputs.distribute(self._pipeline)
        return self._dataset

    def check_has_end(self, steps_field: str) -> None:
        """Raises DataError when the dataset is known to have no end; `steps_field` asks for all of it."""
        if is_endless(self.dataset):
            raise DataError(describe_endless_data(self.name, steps_field))

    def cardinality(self) -> int | None:
        """Returns the number of elements in the dataset made of the task's data; callable from any thread.

        Under several replicas an element is the batch of one replica. None before the dataset is
        made, when its length is unknown, and for a ready-made dataset, which may be distributed in
        any way.
        """
        if self.prebuilt_dataset is not None or self._dataset is None:
            return None
        cardinality = _cardinality(self._dataset)
        return None if cardinality is None or cardinality < 0 else cardinality

    def iterator(self, *, fresh: bool = False) -> Any:
        """Returns the iterator; if `fresh`, a new one at the first example, which `end_pass` drops."""
        self._is_single_pass = fresh
        if fresh:
            self._release_iterator()
        if self._iterator is None:
            self._iterator = iter(self.open())
        return self._iterator

    def end_pass(self) -> None:
        """Drops the iterator if it is one for a single evaluation (`fresh`); called after each evaluation."""
        if self._is_single_pass:
            self._release_iterator()


def _cardinality(dataset: Any) -> int | None:
    known = getattr(dataset, "cardinality", None)  # a method; of a distributed dataset a property
    known = known() if callable(known) else known
    return None if known is None else int(known)


def is_endless(dataset: Any) -> bool:
    """Whether a dataset, distributed or not, is known to have no end."""
    return _cardinality(dataset) == _INFINITE or is_infinite(dataset)


@atexit.register
def _leak_iterators_at_exit() -> None:
    """Leaves iterators to the operating system: with one reference more, no destructor runs as Python ends."""
    for alive in list(_ALIVE):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(alive._iterator))


@contextlib.contextmanager
def explain_missing_files(section: str, note: str = "") -> Iterator[None]:
    """Turns an error about a missing or unreadable file into a DataError that names the section of the data.

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
        problem = unmatched.group() if unmatched else format_reason(error)[0]
        place = "".join(f"\n  {frame}: {frame.code}" for frame in find_user_frames(error)[-1:])
        last = f"\n  {note}" if note else ""
        raise DataError(f"task.{section} cannot be opened: {problem}{place}{last}") from error


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
