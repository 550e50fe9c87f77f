"""The training data of a run, from the run's position on, also after restarts and rollbacks."""

from __future__ import annotations

import glob
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from trainer_kit.errors import StorageError, UsageError
from trainer_kit.inputs.batch_position import Position
from trainer_kit.inputs.dataset_iterator import DatasetIterator, Inputs, explain_missing_files
from trainer_kit.inputs.dataset_resume import ResumePolicy, Resumption
from trainer_kit.inputs.failed_read import has_failed_read
from trainer_kit.inputs.sources.tfrecords import explain_read_errors
from trainer_kit.inputs.worker_pipeline import (
    DataSection,
    OpenedData,
    PositionedPipeline,
    TrainingStart,
    open_at,
)

if TYPE_CHECKING:
    from trainer_kit.typing import Dataset

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
_POLL_SECONDS = 0.1
_SAVE_THREAD_NAME = "data position"


class TrainData(DatasetIterator):
    """Knows the position of the next batch and makes the iterator that begins there.

    Args:
      inputs: The inputs of the trainer. None if the data is ready-made.
      section: The section of the data. None if the data is ready-made.
      policy: Decides and reports how the run resumes in the data.
      global_step: The number of steps that have taken a batch, an int64 scalar.
      prebuilt_dataset: A ready-made dataset to use instead of the task's. A tf.data.Dataset is
        treated as one that build_inputs returned, with two limits. A shuffle needs an explicit seed
        to be the same in the next process. It draws other orders when the dataset is read again in
        this process. Any other dataset, such as one over several replicas, has no position: each
        start and each rollback reads it from its beginning.
      batch_size: The number of examples in a global batch. 0 if it is not known.
      advice: The advice about a ready-made dataset without a position, for the warning.

    Attributes:
      stack_size: The number of batches in one element, as made by inputs.fused_batches. 1 means
        single batches.
    """

    def __init__(
        self,
        inputs: Inputs | None,
        section: DataSection | None,
        policy: ResumePolicy,
        global_step: tf.Variable,
        prebuilt_dataset: Dataset | None = None,
        *,
        batch_size: int = 0,
        advice: str = "return the data from build_inputs instead",
    ) -> None:
        super().__init__("train_data", prebuilt_dataset)
        self._inputs = inputs
        self._section = section
        self._policy = policy
        self._global_step = global_step
        self._batch_size = batch_size
        self._advice = advice

        # The run had the position _start_position at the step _start_step.
        self._start_position = Position()
        self._start_step = 0
        # The step at which the dataset took the place of another that was read.
        self._replaced_at_step = 0
        # The batches that this process leaves out.
        self._skipped_batches: tuple[int, ...] = ()

        # The path of the state that the next iterator gets.
        self._saved_iterator_path = ""
        # The data that was opened last.
        self._opened_data: OpenedData | None = None
        # The data that the last iterator was made of.
        self._last_read_source: Any = None
        self.stack_size = 1

    def iterator(self) -> Any:
        """Returns the iterator at the run's position. Runs eagerly, on the host.

        Raises:
          UsageError: when the data cannot be resumed exactly, but has to be.
          DataError: when a file that the data needs is missing.
          StorageError: when the saved state of the iterator belongs to other data.
        """
        if self._iterator is not None:
            return self._iterator

        iterator = iter(self.open())
        self._last_read_source = self.source
        if self._saved_iterator_path and self.needs_iterator_state:
            checkpoint = tf.train.Checkpoint(iterator=iterator)
            try:
                checkpoint.read(self._saved_iterator_path).assert_consumed()
            except (tf.errors.OpError, AssertionError) as error:
                raise StorageError(
                    f"{self._saved_iterator_path} does not hold the state of this data's iterator:"
                    f" {error}; if the data has changed, remove the files of that name: the data is"
                    " then read from its start"
                ) from error
        self._saved_iterator_path = ""
        self._iterator = iterator
        return iterator

    def open(self) -> Any:
        """Returns the dataset over the replicas, which begins at the position. Runs eagerly.

        Opens the dataset if it is not open.

        Raises:
          UsageError, DataError: See `iterator`.
        """
        if self._dataset is not None:
            return self._dataset

        start = TrainingStart(
            self.position, self.stack_size, bool(self._saved_iterator_path), self._last_read_source
        )
        if self.prebuilt_dataset is None:
            assert self._inputs is not None and self._section is not None
            pipeline = PositionedPipeline(self._section, start, self._policy)
            with explain_missing_files(self.name):
                self._dataset = self._inputs.distribute(pipeline)
            self._opened_data = pipeline.opened_data
            return self._dataset

        if isinstance(self.prebuilt_dataset, tf.data.Dataset):
            self._opened_data = open_at(self.prebuilt_dataset, start, self._policy)
        else:
            text = _NO_POSITION.format(type(self.prebuilt_dataset).__name__, self._advice)
            self._policy.report(Resumption("inexact", (text,)))
            self._opened_data = OpenedData(self.prebuilt_dataset, self.prebuilt_dataset)
        self._dataset = self._opened_data.dataset
        return self._dataset

    @property
    def source(self) -> Any:
        """What the data that was opened last is made of. None before the first opening.

        It is what build_inputs returned, or a ready-made dataset.
        """
        return self._opened_data.source if self._opened_data is not None else None

    @property
    def needs_iterator_state(self) -> bool:
        """Whether checkpoints contain the state of the iterator."""
        return self._opened_data is not None and self._opened_data.needs_iterator_state

    @property
    def position(self) -> Position:
        """The position of the next batch in the stream of all batches."""
        return self._start_position.advance(self._read_step() - self._start_step)

    def get_batch_index(self, step: int) -> int:
        """Returns the index of the batch that step number `step` uses or has used.

        Args:
          step: The number of the step, counted from 1.
        """
        return self._start_position.get_batch_after(step - 1 - self._start_step)

    def explain_read_errors(self) -> AbstractContextManager[None]:
        """Turns an error of data that cannot be read into a DataError.

        It also drops the iterator, which may contain the error.
        """
        return explain_read_errors(lambda: (self.source, self.dataset), self.reset)

    def replace(self, dataset: Dataset) -> None:
        """Uses `dataset` for the next iterator.

        The iterator begins at the position if no batch was read, otherwise at the beginning of
        `dataset`.
        """
        super().replace(dataset)
        if self._last_read_source is not None:
            self._restart_from_beginning()

    def skip_batch(self, batch: int) -> None:
        """Leaves out the batch with the index `batch` from now on.

        Raises:
          UsageError: for a ready-made dataset, since its order may differ when it is read again.
        """
        if self.prebuilt_dataset is not None:
            raise UsageError(
                "trainer.recovery_policy=skip cannot leave out a batch of a ready-made dataset;"
                " return the data from build_inputs instead, or set recovery_policy to retry or"
                " lower_learning_rate"
            )

        # The position depends on the start, so it is read before the start moves.
        self._skipped_batches = (*self._skipped_batches, batch)
        position = self.position.with_skipped_batch(batch)
        self._start_step = self._read_step()
        self._start_position = position
        self._saved_iterator_path = ""
        self.reset()

    def set_stack_size(self, size: int) -> None:
        """Puts `size` batches into one element, from the next iterator on.

        A size of 1 means single batches.
        """
        if size != self.stack_size:
            # The saved state is that of an iterator over other elements.
            self._saved_iterator_path = ""
        self.stack_size = size
        self.reset()

    def state(self) -> dict[str, Any]:
        """Returns the position, for the checkpoint."""
        stack = {"stack": self.stack_size} if self.stack_size > 1 else {}
        size = {"batch_size": self._batch_size} if self._batch_size else {}
        return {
            "batch": self.position.batch,
            "left_out": list(self.position.skipped_batches),
            **stack,
            **size,
        }

    def restore(self, state: dict[str, Any] | None) -> None:
        """Moves to the position of a checkpoint. Without one, to the batch of the global step.

        Batches that were left out since that checkpoint stay left out.
        """
        self._start_step = self._read_step()
        # Earlier releases stored a position for each of several tasks, without "batch".
        if not state or "batch" not in state:
            state = {"batch": self._start_step, "left_out": (), "stack": self.stack_size}

        batch = state["batch"]
        skipped_batches = state["left_out"]
        saved_batch_size = state.get("batch_size", 0)
        if saved_batch_size and self._batch_size not in (0, saved_batch_size):
            # Continue after as many examples. The batches are others now, so none is left out.
            batch = batch * saved_batch_size // self._batch_size
            skipped_batches = ()
        self._start_position = Position(batch, (*skipped_batches, *self._skipped_batches))
        self.reset()

        if state.get("stack", 1) != self.stack_size:
            # The saved state is that of an iterator over other elements.
            self._saved_iterator_path = ""
        if self._start_step < self._replaced_at_step:
            text = _BEFORE_IT_WAS_SET.format(self._start_step, self._replaced_at_step)
            self._policy.report(Resumption("inexact", (text,)))
            self._restart_from_beginning()

    def prepare_iterator_restore(self, path: str | None) -> None:
        """Sets the path of the iterator's state that belongs to the restored checkpoint.

        Args:
          path: The prefix of the state's files. None if the checkpoint has no such state.
        """
        self._saved_iterator_path = ""
        if path and os.path.exists(f"{path}.index"):
            self._saved_iterator_path = path
        if self._saved_iterator_path and has_failed_read(self._saved_iterator_path):
            self._saved_iterator_path = ""
            self._policy.report(Resumption("skip", (_FAILED_AHEAD,)))

    def save_iterator(
        self,
        prefix: str,
        *,
        is_at_position: bool = True,
        should_give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Saves the state of the iterator, for data that needs it. Runs eagerly.

        Waits for the elements that the pipeline is making. For stacks of batches that come slowly,
        that takes many seconds.

        Args:
          prefix: The path that the names of the files begin with.
          is_at_position: Whether the iterator is at the run's position. If it is ahead, nothing is
            saved, and a resume reads the data from its start.
          should_give_up: A function that is called while the save takes long. When it returns True,
            nothing is saved, and a resume reads the data from its start.
        """
        if not self.needs_iterator_state or not self.has_iterator:
            return
        if not is_at_position:
            self._policy.report(Resumption("skip", (_AHEAD,)))
            return

        checkpoint = tf.train.Checkpoint(iterator=self._iterator)
        # TensorFlow gives its own temporary folders such a name, and a restarted run removes them.
        folder = f"{prefix}_temp"
        done = Future[str]()

        def write() -> None:
            try:
                done.set_result(checkpoint.write(os.path.join(folder, "position")))
            except BaseException as error:
                # The thread that waits gets any error.
                done.set_exception(error)

        threading.Thread(target=write, name=_SAVE_THREAD_NAME).start()
        while not wait((done,), _POLL_SECONDS).done:
            if should_give_up():
                self._policy.report(Resumption("skip", (_TOO_SLOW,)))
                return

        written_prefix = done.result()
        # The state is found by its index, which sorts last and so is moved last.
        for path in sorted(glob.glob(f"{glob.escape(written_prefix)}.*")):
            os.replace(path, prefix + path.removeprefix(written_prefix))
        shutil.rmtree(folder)

    def _restart_from_beginning(self) -> None:
        step = self._read_step()
        self._start_step = step
        self._replaced_at_step = step
        self._start_position = Position()
        self._skipped_batches = ()
        self._saved_iterator_path = ""

    def _read_step(self) -> int:
        return int(self._global_step.numpy())


def is_still_saving() -> bool:
    """Whether a thread still waits for batches, to save an iterator that was given up.

    Such a thread cannot be stopped.
    """
    return any(thread.name == _SAVE_THREAD_NAME for thread in threading.enumerate())
