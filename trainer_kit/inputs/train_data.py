"""The training data of a run, from the run's position on, also after restarts and rollbacks."""

from __future__ import annotations

import functools
import glob
import logging
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from trainer_kit.errors import StorageError, UsageError
from trainer_kit.inputs.autotune_off import without_idle_tuner
from trainer_kit.inputs.batch_position import Position
from trainer_kit.inputs.dataset_iterator import DatasetIterator
from trainer_kit.inputs.dataset_resume import Examination, Resumption, examine, resume_method, source_resumption
from trainer_kit.inputs.dataset_structure import never_ends
from trainer_kit.inputs.failed_read import holds_failed_read
from trainer_kit.inputs.fused_batches import stacked, stacked_at
from trainer_kit.inputs.sources.base import Source, made_inputs, positioned
from trainer_kit.inputs.sources.tfrecords import reporting_damage

_LOG = logging.getLogger(__name__)
_NO_POSITION = (
    "task.train_data: resume is not exact: a ready-made {} has no position, so each start and each rollback reads it "
    "from its beginning; {}"
)
_BEGUN_AGAIN = (
    "task.train_data: resume is not exact: the same dataset is read a second time, and {} then draws another order; "
    "let build_inputs make a new dataset at each call"
)
_BEFORE_IT_WAS_SET = (
    "task.train_data: resume is not exact: the run goes back to step {}, and its dataset was set at step {}, so the "
    "dataset is read from its beginning; return the data from build_inputs instead"
)
_AHEAD = (
    "task.train_data: a checkpoint inside a stack of trainer.fuse_steps batches is resumed by reading the data from "
    "its start; make trainer.steps_per_loop and the intervals multiples of fuse_steps, or return a Source"
)
_TOO_SLOW = (
    "task.train_data: the run stops while batches are still being made, so this checkpoint is resumed by reading the "
    "data from its start; if batches come slowly, lower trainer.fuse_steps"
)
_FAILED_AHEAD = (
    "task.train_data: a batch that was read ahead had failed when this checkpoint was saved; to read that "
    "batch again, this run reads the data from its start"
)
_GLANCE = 0.1  # seconds
_SAVING = "data position"


class TrainData:
    """Knows the position of the next batch and hands out the iterator that begins there.

    Args:
      make: A function that returns the distributed dataset; it gets a function (build_inputs, params, input_context)
        that opens the data of one worker at the position.
      step: A function that returns the global step.
      given: A ready-made dataset to use instead. A tf.data.Dataset is treated as one that build_inputs returned,
        with two limits: a shuffle needs a seed of its own to be the same in the next process, and it draws other
        orders when the dataset is read again in this process. Any other dataset, such as one over several replicas, has
        no position: each start and each rollback reads it from its beginning.
      one_iterator: Whether the dataset is a plain one for one replica, whose iterator can be saved.
      deterministic_ops: whether TensorFlow's op determinism is on.
      require_exact: whether data that cannot be resumed exactly is refused.
      batch_size: The number of examples in a global batch; 0: not known.
      restarts: Whether a tf.data.Dataset that ends starts again, with the next order of its shuffles.
      instead: The advice about a ready-made dataset without a position, for the warning.

    Attributes:
      feed: The DatasetIterator of the data.
      stack: The number of batches in one element, as made by inputs.fused_batches; 1 means single batches.
    """

    def __init__(
        self,
        make: Callable[[Callable[..., Any]], Any],
        step: Callable[[], int],
        given: Any = None,
        *,
        one_iterator: bool = False,
        deterministic_ops: bool = False,
        require_exact: bool = False,
        batch_size: int = 0,
        restarts: bool = False,
        instead: str = "return the data from build_inputs instead",
    ) -> None:
        self._instead = instead
        self._batch_size = batch_size
        self.feed = DatasetIterator(
            "train_data", lambda: make(self._open), given, begin=self._begin, replaced=self._replaced
        )
        self._step, self._require_exact = step, require_exact
        self._one_iterator, self._deterministic_ops = one_iterator, deterministic_ops
        self._since, self._start = 0, Position()  # the position that the run had at a step
        self._set_at = 0  # the step at which the dataset took the place of another that was read
        self._opened: Any = None  # the data that the next iterator is made of, and that the last one was
        self._read: Any = None
        self._left_out: tuple[int, ...] = ()  # in this process
        self._saves_iterator, self._saved_iterator = False, ""
        self._reported: set[str] = set()
        self._restarts = restarts
        self.stack = 1

    @property
    def saves_position(self) -> bool:
        """Whether checkpoints hold the state of the iterator."""
        return self._saves_iterator

    @property
    def made(self) -> Any:
        """The last return value of the task's build_inputs; None before the first call."""
        return self._opened

    @property
    def position(self) -> Position:
        """The position of the next batch in the stream of all batches."""
        return self._start.after(self._step() - self._since)

    def batch_of(self, step: int) -> int:
        """Returns the index of the batch that step number `step`, counted from 1, uses or has used."""
        return self._start.nth(step - 1 - self._since)

    def iterator(self) -> Any:
        """Returns the iterator, at the position.

        Raises:
          UsageError: when the data cannot be resumed exactly, and require_exact is set.
          StorageError: when the saved state of the iterator belongs to other data.
        """
        iterator = self.feed.iterator()
        self._read = self._opened
        if self._saved_iterator and self._saves_iterator:
            try:
                tf.train.Checkpoint(iterator=iterator).read(self._saved_iterator).assert_consumed()
            except (tf.errors.OpError, AssertionError) as error:
                raise StorageError(
                    f"{self._saved_iterator} does not hold the state of this data's iterator: {error}; if the data "
                    "has changed, remove the files of that name: the data is then read from its start"
                ) from error
        self._saved_iterator = ""
        return iterator

    def reporting_damage(self) -> AbstractContextManager[None]:
        """Turns an error of data that cannot be read into a DataError; drops the iterator, which may hold it."""
        return reporting_damage(lambda: (self.made, self.feed.dataset), self.feed.forget)

    def leave_out(self, batch: int) -> None:
        """Leaves out the batch of this index from now on.

        Raises:
          UsageError: for a ready-made dataset: its order may differ when it is read again.
        """
        if self.feed.given is not None:
            raise UsageError(
                "trainer.recovery_policy=skip cannot leave out a batch of a ready-made dataset; return the data from "
                "build_inputs instead, or set recovery_policy to retry or lower_learning_rate"
            )
        self._left_out = (*self._left_out, batch)
        self._since, self._start = self._step(), self.position.without(batch)
        self._saved_iterator = ""
        self.feed.forget()

    def put_in_stacks(self, size: int) -> None:
        """Puts `size` batches into one element, from the next iterator on; 1 means single batches."""
        if size != self.stack:
            self._saved_iterator = ""  # it is of other elements
        self.stack = size
        self.feed.forget()

    def state(self) -> dict[str, Any]:
        """Returns the position, for the checkpoint."""
        stack = {"stack": self.stack} if self.stack > 1 else {}
        size = {"batch_size": self._batch_size} if self._batch_size else {}
        return {"batch": self.position.batch, "left_out": list(self.position.left_out), **stack, **size}

    def put_state(self, state: dict[str, Any] | None) -> None:
        """Moves to the position of a checkpoint; without one, to the batch of the global step.

        Batches that were left out since that checkpoint stay left out.
        """
        self._since = self._step()
        here: dict[str, Any] = {"batch": self._since, "left_out": (), "stack": self.stack}
        if not state or "batch" not in state:  # earlier releases kept a position for each of several tasks
            state = here
        batch, left_out = state["batch"], state["left_out"]
        size = state.get("batch_size", 0)
        if size and self._batch_size not in (0, size):  # continue after as many examples; batches are others now
            batch, left_out = batch * size // self._batch_size, ()
        self._start = Position(batch, (*left_out, *self._left_out))
        self.feed.forget()
        if state.get("stack", 1) != self.stack:
            self._saved_iterator = ""  # it is of other elements
        if self._since < self._set_at:
            self._report(Resumption("inexact", (_BEFORE_IT_WAS_SET.format(self._since, self._set_at),)))
            self._begin_at_the_start()

    def restored(self, path: str | None) -> None:
        """Notes the path of the iterator's state that belongs to the restored checkpoint; None if there is none."""
        self._saved_iterator = path if path and os.path.exists(f"{path}.index") else ""
        if self._saved_iterator and holds_failed_read(self._saved_iterator):
            self._saved_iterator = ""
            self._report(Resumption("skip", (_FAILED_AHEAD,)))

    def save_iterator(self, prefix: str, *, at_place: bool = True, give_up: Callable[[], bool] = lambda: False) -> None:
        """Saves the state of the iterator to files that begin with `prefix`, for data that needs it. Runs eagerly.

        Waits for the elements that the pipeline is making: for stacks of batches that come slowly, many seconds.

        Args:
          prefix: The path that the names of the files begin with.
          at_place: Whether the iterator is at the run's position. If it is ahead, nothing is saved, and a resume
            reads the data from its start.
          give_up: A function that is called while the save takes long; when it returns True, nothing is saved, and a
            resume reads the data from its start.
        """
        if not self._saves_iterator or not self.feed.started:
            return
        if not at_place:
            self._report(Resumption("skip", (_AHEAD,)))
            return
        checkpoint, done = tf.train.Checkpoint(iterator=self.feed.iterator()), Future[str]()
        folder = f"{prefix}_temp"  # as TensorFlow calls its own, so that it goes when the run is started again
        write = lambda: checkpoint.write(os.path.join(folder, "position"))  # noqa: E731
        threading.Thread(target=_fulfil, args=(done, write), name=_SAVING).start()
        while not wait((done,), _GLANCE).done:
            if give_up():
                self._report(Resumption("skip", (_TOO_SLOW,)))
                return
        written = done.result()
        for path in sorted(glob.glob(f"{glob.escape(written)}.*")):  # the index, by which it is found, comes last
            os.replace(path, prefix + path.removeprefix(written))
        shutil.rmtree(folder)

    def _open(self, build_inputs: Callable[..., Any], params: Any, input_context: Any) -> tf.data.Dataset:
        made = made_inputs(build_inputs, params, input_context)
        self._opened, self._saves_iterator = made, False
        if self._restarts and not isinstance(made, Source) and not never_ends(made):
            made = made.repeat()
        data = without_idle_tuner(made) if self.stack > 1 else made
        if not isinstance(made, Source):
            seen = examine(made)
            self._choose_method(seen)
            if self._saves_iterator and self._saved_iterator:
                return stacked(data, self.stack) if self.stack > 1 else data
            if self._opened is self._read and seen.new_orders:
                self._report(Resumption("inexact", (_BEGUN_AGAIN.format(", ".join(seen.new_orders)),)))
            # The state of an iterator that began elsewhere would not fit the dataset as it is made.
            self._saves_iterator = self._saves_iterator and self.position.batch == 0
        if self.stack > 1:
            data = stacked_at(data, self.position, self.stack, input_context)
        else:
            data = positioned(lambda _: data, params, self.position, input_context)
        if isinstance(made, Source):
            find = getattr(made, "resumption", functools.partial(source_resumption, data))
            resumption = find(deterministic_ops=self._deterministic_ops)
            if resumption is not None:
                self._report_found(resumption)
        return data

    def _begin(self, given: Any) -> Any:
        """Returns a ready-made dataset from the position on, if it has one."""
        if isinstance(given, tf.data.Dataset):
            return self._open(lambda _: given, None, None)
        self._opened, self._saves_iterator = given, False
        self._report(Resumption("inexact", (_NO_POSITION.format(type(given).__name__, self._instead),)))
        return given

    def _replaced(self) -> None:
        """A dataset set before the first batch was read is the run's data; one set later follows it, from its start."""
        if self._read is not None:
            self._begin_at_the_start()

    def _begin_at_the_start(self) -> None:
        self._since = self._set_at = self._step()
        self._start, self._left_out, self._saved_iterator = Position(), (), ""

    def _choose_method(self, seen: Examination) -> None:
        """Decides how a plain dataset gets back to its place."""
        no_iterator = "" if self._one_iterator else "an iterator over several replicas cannot be saved"
        if self._start.left_out:
            no_iterator = "a batch is left out, which the state of an iterator does not record"
        found = resume_method(seen, no_iterator=no_iterator, deterministic_ops=self._deterministic_ops)
        self._saves_iterator = found.method == "iterator"
        self._report_found(found)

    def _report_found(self, found: Resumption) -> None:
        slow = found.method == "skip"  # but exact, and for most runs quick enough
        self._report(found, logging.INFO if slow else logging.WARNING)

    def _report(self, found: Resumption, level: int = logging.WARNING) -> None:
        """Logs once that a resume is slow or not exact.

        Raises:
          UsageError: when the resume cannot be exact, and require_exact is set.
        """
        if found.method == "inexact" and self._require_exact:
            raise UsageError("\n  ".join(("trainer.require_exact_resume:", *found.reasons)))
        for reason in found.reasons:
            if reason not in self._reported:
                self._reported.add(reason)
                _LOG.log(level, "%s", reason)


def open_whole(build_inputs: Callable[..., Any], params: Any, input_context: Any) -> tf.data.Dataset:
    """Opens the data of one worker at its beginning; for validation."""
    made = without_idle_tuner(made_inputs(build_inputs, params, input_context))
    if never_ends(made):  # the dataset that a strategy makes of several tells only their cardinality
        made = made.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return positioned(lambda _: made, params, Position(), input_context)


def is_still_saving() -> bool:
    """Whether a thread still waits for batches, to save an iterator that was given up; it cannot be stopped."""
    return any(thread.name == _SAVING for thread in threading.enumerate())


def _fulfil(future: Future[str], call: Callable[[], str]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # for the thread that waits, whatever it is
        future.set_exception(error)
