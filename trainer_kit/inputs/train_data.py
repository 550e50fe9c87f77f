"""The training data of a run, from the run's position on, also after restarts and rollbacks."""

from __future__ import annotations

import glob
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from trainer_kit.errors import StorageError, UsageError
from trainer_kit.inputs.batch_position import Position
from trainer_kit.inputs.dataset_iterator import DatasetIterator, Inputs, missing_files_told
from trainer_kit.inputs.dataset_resume import ResumePolicy, Resumption
from trainer_kit.inputs.failed_read import holds_failed_read
from trainer_kit.inputs.sources.tfrecords import reporting_damage
from trainer_kit.inputs.worker_pipeline import (
    DataSection,
    OpenedData,
    PositionedPipeline,
    TrainingStart,
    open_at,
)

_NO_POSITION = (
    "task.train_data: resume is not exact: a ready-made {} has no position, so each start and each"
    " rollback reads it from its beginning; {}"
)
_BEFORE_IT_WAS_SET = (
    "task.train_data: resume is not exact: the run goes back to step {}, and its dataset was set at"
    " step {}, so the dataset is read from its beginning; return the data from build_inputs instead"
)
_AHEAD = (
    "task.train_data: a checkpoint inside a stack of trainer.fuse_steps batches is resumed by"
    " reading the data from its start; make trainer.steps_per_loop and the intervals multiples of"
    " fuse_steps, or return a Source"
)
_TOO_SLOW = (
    "task.train_data: the run stops while batches are still being made, so this checkpoint is"
    " resumed by reading the data from its start; if batches come slowly, lower trainer.fuse_steps"
)
_FAILED_AHEAD = (
    "task.train_data: a batch that was read ahead had failed when this checkpoint was saved; to"
    " read that batch again, this run reads the data from its start"
)
_GLANCE = 0.1  # seconds
_SAVING = "data position"


class TrainData(DatasetIterator):
    """Knows the position of the next batch and hands out the iterator that begins there.

    Args:
      inputs: The inputs of the trainer; None: the data is ready-made.
      section: The section of the data; None: the data is ready-made.
      policy: Decides and reports how the run resumes in the data.
      global_step: The number of steps that have taken a batch, an int64 scalar.
      given: A ready-made dataset to use instead of the task's. A tf.data.Dataset is treated as one
        that build_inputs returned, with two limits: a shuffle needs a seed of its own to be the
        same in the next process, and it draws other orders when the dataset is read again in this
        process. Any other dataset, such as one over several replicas, has no position: each start
        and each rollback reads it from its beginning.
      batch_size: The number of examples in a global batch; 0: not known.
      instead: The advice about a ready-made dataset without a position, for the warning.

    Attributes:
      stack: The number of batches in one element, as made by inputs.fused_batches; 1 means single
        batches.
    """

    def __init__(
        self,
        inputs: Inputs | None,
        section: DataSection | None,
        policy: ResumePolicy,
        global_step: tf.Variable,
        given: Any = None,
        *,
        batch_size: int = 0,
        instead: str = "return the data from build_inputs instead",
    ) -> None:
        super().__init__("train_data", given)
        self._inputs = inputs
        self._section = section
        self._policy = policy
        self._global_step = global_step
        self._batch_size = batch_size
        self._instead = instead
        self._start = Position()  # the position that the run had at the step _since
        self._since = 0
        self._set_at = 0  # the step at which the dataset took the place of another that was read
        self._left_out: tuple[int, ...] = ()  # in this process
        self._saved_iterator = ""  # the path of the state that the next iterator gets
        self._opened: OpenedData | None = None  # the data that was opened last
        self._read: Any = None  # the data that the last iterator was made of
        self.stack = 1

    def iterator(self) -> Any:
        """Returns the iterator, at the position. Runs eagerly, on the host.

        Raises:
          UsageError: when the data cannot be resumed exactly, but has to be.
          DataError: when a file that the data needs is missing.
          StorageError: when the saved state of the iterator belongs to other data.
        """
        if self._iterator is not None:
            return self._iterator

        iterator = iter(self.open())
        self._read = self.made
        if self._saved_iterator and self.saves_position:
            try:
                tf.train.Checkpoint(iterator=iterator).read(self._saved_iterator).assert_consumed()
            except (tf.errors.OpError, AssertionError) as error:
                raise StorageError(
                    f"{self._saved_iterator} does not hold the state of this data's iterator:"
                    f" {error}; if the data has changed, remove the files of that name: the data is"
                    " then read from its start"
                ) from error
        self._saved_iterator = ""
        self._iterator = iterator
        return iterator

    def open(self) -> Any:
        """Returns the dataset from the position on, over the replicas; opens it if it is not open. Runs eagerly.

        Raises:
          UsageError, DataError: See `iterator`.
        """
        if self._dataset is not None:
            return self._dataset

        start = TrainingStart(self.position, self.stack, bool(self._saved_iterator), self._read)
        if self.given is None:
            assert self._inputs is not None and self._section is not None
            pipeline = PositionedPipeline(self._section, start, self._policy)
            with missing_files_told(self.name):
                self._dataset = self._inputs.distribute(pipeline)
            self._opened = pipeline.opened
            return self._dataset

        if isinstance(self.given, tf.data.Dataset):
            self._opened = open_at(self.given, start, self._policy)
        else:
            text = _NO_POSITION.format(type(self.given).__name__, self._instead)
            self._policy.report(Resumption("inexact", (text,)))
            self._opened = OpenedData(self.given, self.given)
        self._dataset = self._opened.dataset
        return self._dataset

    @property
    def made(self) -> Any:
        """What the data that was opened last is made of: what build_inputs returned, or a ready-made dataset."""
        return self._opened.source if self._opened is not None else None

    @property
    def saves_position(self) -> bool:
        """Whether checkpoints hold the state of the iterator."""
        return self._opened is not None and self._opened.saves_iterator

    @property
    def position(self) -> Position:
        """The position of the next batch in the stream of all batches."""
        return self._start.after(self._read_step() - self._since)

    def batch_of(self, step: int) -> int:
        """Returns the index of the batch that step number `step`, counted from 1, uses or has used."""
        return self._start.nth(step - 1 - self._since)

    def reporting_damage(self) -> AbstractContextManager[None]:
        """Turns an error of data that cannot be read into a DataError; drops the iterator, which may hold it."""
        return reporting_damage(lambda: (self.made, self.dataset), self.forget)

    def replace(self, dataset: Any) -> None:
        """Uses `dataset` for the next iterator: at the position if no batch was read, otherwise from its beginning."""
        super().replace(dataset)
        if self._read is not None:
            self._begin_at_the_start()

    def leave_out(self, batch: int) -> None:
        """Leaves out the batch of this index from now on.

        Raises:
          UsageError: for a ready-made dataset: its order may differ when it is read again.
        """
        if self.given is not None:
            raise UsageError(
                "trainer.recovery_policy=skip cannot leave out a batch of a ready-made dataset;"
                " return the data from build_inputs instead, or set recovery_policy to retry or"
                " lower_learning_rate"
            )
        self._left_out = (*self._left_out, batch)
        self._since, self._start = self._read_step(), self.position.without(batch)
        self._saved_iterator = ""
        self.forget()

    def put_in_stacks(self, size: int) -> None:
        """Puts `size` batches into one element, from the next iterator on; 1 means single batches."""
        if size != self.stack:
            self._saved_iterator = ""  # it is of other elements
        self.stack = size
        self.forget()

    def state(self) -> dict[str, Any]:
        """Returns the position, for the checkpoint."""
        stack = {"stack": self.stack} if self.stack > 1 else {}
        size = {"batch_size": self._batch_size} if self._batch_size else {}
        return {
            "batch": self.position.batch,
            "left_out": list(self.position.left_out),
            **stack,
            **size,
        }

    def put_state(self, state: dict[str, Any] | None) -> None:
        """Moves to the position of a checkpoint; without one, to the batch of the global step.

        Batches that were left out since that checkpoint stay left out.
        """
        self._since = self._read_step()
        here: dict[str, Any] = {"batch": self._since, "left_out": (), "stack": self.stack}
        if (
            not state or "batch" not in state
        ):  # earlier releases kept a position for each of several tasks
            state = here
        batch, left_out = state["batch"], state["left_out"]
        size = state.get("batch_size", 0)
        if size and self._batch_size not in (
            0,
            size,
        ):  # continue after as many examples; batches are others now
            batch, left_out = batch * size // self._batch_size, ()
        self._start = Position(batch, (*left_out, *self._left_out))
        self.forget()
        if state.get("stack", 1) != self.stack:
            self._saved_iterator = ""  # it is of other elements
        if self._since < self._set_at:
            text = _BEFORE_IT_WAS_SET.format(self._since, self._set_at)
            self._policy.report(Resumption("inexact", (text,)))
            self._begin_at_the_start()

    def restored(self, path: str | None) -> None:
        """Notes the path of the iterator's state that belongs to the restored checkpoint; None if there is none."""
        self._saved_iterator = path if path and os.path.exists(f"{path}.index") else ""
        if self._saved_iterator and holds_failed_read(self._saved_iterator):
            self._saved_iterator = ""
            self._policy.report(Resumption("skip", (_FAILED_AHEAD,)))

    def save_iterator(
        self, prefix: str, *, at_place: bool = True, give_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Saves the state of the iterator to files that begin with `prefix`, for data that needs it. Runs eagerly.

        Waits for the elements that the pipeline is making: for stacks of batches that come slowly,
        many seconds.

        Args:
          prefix: The path that the names of the files begin with.
          at_place: Whether the iterator is at the run's position. If it is ahead, nothing is saved,
            and a resume reads the data from its start.
          give_up: A function that is called while the save takes long; when it returns True,
            nothing is saved, and a resume reads the data from its start.
        """
        if not self.saves_position or not self.started:
            return
        if not at_place:
            self._policy.report(Resumption("skip", (_AHEAD,)))
            return
        checkpoint = tf.train.Checkpoint(iterator=self._iterator)
        # As TensorFlow calls its own, so that it goes when the run is started again
        folder = f"{prefix}_temp"
        done = Future[str]()

        def write() -> None:
            try:
                done.set_result(checkpoint.write(os.path.join(folder, "position")))
            except BaseException as error:  # for the thread that waits, whatever it is
                done.set_exception(error)

        threading.Thread(target=write, name=_SAVING).start()
        while not wait((done,), _GLANCE).done:
            if give_up():
                self._policy.report(Resumption("skip", (_TOO_SLOW,)))
                return
        written = done.result()
        for path in sorted(
            glob.glob(f"{glob.escape(written)}.*")
        ):  # the index, by which it is found, comes last
            os.replace(path, prefix + path.removeprefix(written))
        shutil.rmtree(folder)

    def _begin_at_the_start(self) -> None:
        self._since = self._set_at = self._read_step()
        self._start = Position()
        self._left_out = ()
        self._saved_iterator = ""

    def _read_step(self) -> int:
        return int(self._global_step.numpy())


def is_still_saving() -> bool:
    """Whether a thread still waits for batches, to save an iterator that was given up; it cannot be stopped."""
    return any(thread.name == _SAVING for thread in threading.enumerate())
