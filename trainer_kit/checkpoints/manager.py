"""Saves, rotates and restores the checkpoints of a run.

What happens in a run, in this order:

1. `prepare_folder` finishes what a dead process has begun, and chooses the checkpoint to resume
   from.
2. `restore_or_initialize` restores it, or initializes the trainer.
3. `save` starts a save in the background. It lets TensorFlow copy the variables and returns.
4. `_commit` runs in the thread of the save, when TensorFlow has written the files. It writes the
   reports to the disk, records the checkpoint, moves it into place and removes older ones.
5. `sync` waits for that thread, and raises the error of a save that was not committed. The next
   `save` calls it first, so at most one save is in flight.
6. `__exit__` waits for the last save and ends the thread.

A run that goes back to an earlier step also calls `archive_later_checkpoints` before its first
step, and `finish_rewind` when its reports have gone back too.

A kill at any moment leaves whole checkpoints, and files that the next `prepare_folder` moves into
place or removes. commit.py describes them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import os
import shutil
import time
from types import TracebackType
from typing import Any, Protocol

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints, list_checkpoint_files, parse_step
from trainer_kit.checkpoints import startup_scan
from trainer_kit.checkpoints.commit import (
    begin_save,
    describe_foreign_checkpoint,
    fail_save,
    finish_interrupted_saves,
    finish_save,
    is_commit_pending,
    read_commit_record,
)
from trainer_kit.checkpoints.retention import Retention, remove_old_checkpoints
from trainer_kit.checkpoints.state import strict_restore
from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.config.schema import durations
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.errors import DivergedError, StorageError
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.runtime.collectives import broadcast_int, is_chief, worker_index
from trainer_kit.runtime.tensorflow_internals import stop_async_saver
from trainer_kit.typing import IntLike

_LOG = logging.getLogger(__name__)


class SavedTrainer(Protocol):
    """What a manager needs of a trainer. See BaseTrainer."""

    checkpoint: tf.train.Checkpoint
    global_step: tf.Variable
    strategy: tf.distribute.Strategy
    can_train: bool
    state: TrainState

    def initialize(self) -> None:
        """Called when there is no checkpoint to restore."""

    def before_save(self, prefix: str) -> None:
        """Called before each save of a training run, with the temporary prefix of its files."""

    def after_restore(self, path: str) -> None:
        """Called after each restore, with the prefix of the checkpoint."""


class Reports(Protocol):
    """The reports of a run, which must not be older than its checkpoints."""

    def flush_to_disk(self, step: int) -> dict[str, Any]:
        """Writes all reports to the disk.

        Returns how far they reach at `step`, for the checkpoint's record.
        """


@dataclasses.dataclass
class SaveInFlight:
    """A save that has begun, and that `sync` has not waited for yet.

    `save` creates it. `_commit` sets `is_committed` as its last act, in the thread of the save.
    `sync` waits for that thread, so a save that is not committed then has failed.

    Attributes:
      prefix: The prefix of the checkpoint's files.
      is_committed: Whether the checkpoint is in place and older ones are removed.
    """

    prefix: str
    is_committed: bool = False


class CheckpointManager(tf.train.CheckpointManager):
    """Saves in the background with commit records, rotates, and restores strictly.

    Everything is implemented with `tf.train.Checkpoint.write`. The class derives from
    `tf.train.CheckpointManager` only because Orbit's Controller asserts that type. It overrides
    every public name, and the state of TensorFlow's class does not exist. Creating a manager
    changes no file. `prepare_folder` does.

    Files: The chief saves to the run's folder. Rotation counts and removes only checkpoints with a
    record of this run. A file `ckpt-<step>.pin` protects a checkpoint. Workers that are not the
    chief save too, since reading a variable can involve all workers. They save to
    `workers/<worker>/checkpoints`, where each save replaces the last one. Nobody reads that folder,
    and it is removed at the end. Every worker restores from the run's folder.

    Threads: The methods run eagerly on the host. One thread at a time calls them, for which the
    Controller has a lock. `save` blocks that thread only while the variables are copied. `_commit`
    and what it calls run in the thread of the save.

    Workers: Every worker calls the public methods in the same order, since some of them broadcast a
    value of the chief. Only the chief repairs, archives and rotates the run's folder.

    Errors: A save that failed raises a StorageError on its own worker only. That worker has to end,
    as it does in `run_experiment`, since its `saved_step` now differs from that of the others.
    Their collective operations then fail too.

    Args:
      trainer: The trainer whose state the checkpoints contain. One that trains restores at the
        start, and a restore must use all that a checkpoint contains. Neither applies to evaluation.
      run_directory: The run's directory, which contains the `ckpt-<step>` files and a manifest that
        identifies the run.
      options: How many checkpoints to keep, and how often to save.
      reports: The reports to write to the disk before a checkpoint is in place.
      retention: Protects older checkpoints from rotation. With None only pins do.
      asynchronous: Whether saves run in the background.
      allow_partial: Whether to restore what fits and list what does not.

    Attributes:
      saved_step: The step of the last checkpoint that a save has begun for, or that was restored.
        It is -1 before the first, and after a save that failed.
      saved_path: The prefix of that checkpoint, or None if `saved_step` is -1.
      checkpoint_interval: The steps between saves, or 1 if a time decides, since Orbit's Controller
        saves nothing without an interval.
      rewind_step: The step that the run goes back to by request, or None without a rewind. A dead
        process may have begun the rewind and not finished it.
      restore_folder: The run's folder, which every worker restores from.
    """

    saved_step: int = -1
    saved_path: str | None = None
    checkpoint_interval: int = 1
    rewind_step: int | None = None

    def __init__(
        self,
        trainer: SavedTrainer,
        run_directory: RunDirectory,
        options: TrainerConfig,
        *,
        reports: Reports | None = None,
        retention: Retention | None = None,
        asynchronous: bool = True,
        allow_partial: bool = False,
    ) -> None:
        self._trainer = trainer
        self._run_directory = run_directory
        self._asynchronous = asynchronous
        self._allow_partial = allow_partial
        # A negative number of trials turns the check of restored values off.
        self._checks_values = options.recovery_max_trials >= 0

        # The interval between saves is either a number of steps or a time. With steps the seconds
        # are 0.
        if isinstance(options.checkpoint_interval, int):
            self.checkpoint_interval = options.checkpoint_interval
        self._interval_seconds = durations.get_seconds(options.checkpoint_interval)
        # The time.monotonic() of the last restore or attempt to save, from which a time counts
        self._interval_start = time.monotonic()

        self.restore_folder = run_directory.path
        self._is_chief = is_chief(trainer.strategy)
        if self._is_chief:
            self._save_folder = run_directory.path
            self._newest_to_keep = options.max_to_keep
            self._reports = reports
            self._retention = retention
        else:
            worker = str(worker_index(trainer.strategy))
            self._save_folder = os.path.join(run_directory.path, "workers", worker, "checkpoints")
            self._newest_to_keep = 1
            self._reports = None
            self._retention = None

        # None when every save has been waited for
        self._save_in_flight: SaveInFlight | None = None
        # The checkpoint that `prepare_folder`, or a later `restore_or_initialize`, has chosen
        self._resume_path: str | None = None
        # The global step at the end of the last `restore_or_initialize`
        self._restored_step: int | None = None

    @property
    def directory(self) -> str:
        """The folder that this worker saves to.

        It is the run's folder, or one below it on workers that are not the chief.
        """
        return self._save_folder

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """The checkpoint object that is saved and restored."""
        return self._trainer.checkpoint

    @property
    def latest_checkpoint(self) -> str | None:
        """The prefix of the newest checkpoint that is complete."""
        paths = complete_checkpoints(self._save_folder).values()
        return next(reversed(paths), None)

    @property
    def checkpoints(self) -> list[str]:
        """The prefixes of the complete checkpoints, the oldest first.

        The list is empty for evaluation, where another process removes checkpoints.
        """
        if not self._trainer.can_train:
            return []
        return list(complete_checkpoints(self._save_folder).values())

    @property
    def is_new_run(self) -> bool:
        """Whether there was no checkpoint to resume from.

        True before `prepare_folder`, which looks for one.
        """
        return self._resume_path is None

    # ---- start

    def prepare_folder(self, from_step: int | None = None) -> None:
        """Repairs the run's folder and chooses the checkpoint to resume from.

        Dead processes may have left the folder unfinished. The run calls this once on every worker,
        when it holds the lock of the folder. For evaluation it changes nothing.

        Args:
          from_step: The step of the checkpoint to resume from instead of the newest, or 0 to start
            again. Later checkpoints stay in place until `archive_later_checkpoints`, since the
            named checkpoint may not fit.

        Raises:
          UsageError: when there is no checkpoint of the step to go back to.
          StorageError: when no checkpoint is whole, or another run saved the newest.
        """
        if not self._trainer.can_train:
            return

        if self._is_chief:
            finish_interrupted_saves(self.restore_folder)
            if from_step is None:
                from_step = startup_scan.find_unfinished_rewind(self.restore_folder)
            if from_step is not None:
                run_id = self._run_directory.run_id
                startup_scan.check_from_step(self.restore_folder, from_step, run_id)
        else:
            self._remove_own_folder()

        # Only the chief has looked for an unfinished rewind. Numbers are broadcast, so -1 stands
        # for None.
        rewind_step = self._broadcast(-1 if from_step is None else from_step)
        if rewind_step >= 0:
            self.rewind_step = rewind_step
            # A run that goes back to step 0 starts again without a checkpoint.
            if rewind_step > 0:
                self._resume_path = os.path.join(self.restore_folder, f"ckpt-{rewind_step}")
            return

        self._resume_path = self.find_newest()
        if self._resume_path and self._is_chief:
            # A process that died may have left one checkpoint too many.
            self._rotate()

    # ---- restore

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint with finite values, or initializes the trainer.

        It does nothing for evaluation. A second call before the run has taken a step returns the
        same prefix. After a step it restores the newest checkpoint, as TensorFlow's manager does.
        Runs in the scope of the strategy.

        Returns:
          The prefix of the checkpoint, or None if there was nothing to restore.

        Raises:
          UsageError: when the checkpoint does not fit the model.
          StorageError: when no checkpoint is whole.
          DivergedError: when no checkpoint has finite values.
        """
        if self._restored_step is not None:
            # This is not the first call.
            if not self._trainer.can_train or self._step == self._restored_step:
                return self._resume_path
            self._resume_path = self.find_newest()

        if self._resume_path is None:
            if self._trainer.can_train:
                self._trainer.initialize()
        elif not self._checks_values:
            self.restore(self._resume_path)
        else:
            self._resume_path = self.restore_finite(self._resume_path)
            if self._resume_path is None:
                raise DivergedError(
                    f"every checkpoint in {self.restore_folder} holds weights that are not finite; "
                    f"they were moved to {startup_scan.DIVERGED}/: "
                    "start again with --from_step=0, and a lower learning rate or gradient clipping"
                )

        self._restored_step = self._step
        return self._resume_path

    def restore_finite(self, path: str | None) -> str | None:
        """Restores the checkpoint at `path`, or else the newest one with finite values.

        Checkpoints with other values are moved to `diverged/`. Runs in the scope of the strategy.

        Returns:
          The prefix of the restored checkpoint, or None if none is left.

        Raises:
          UsageError, StorageError: as in `restore` and `find_newest`.
        """
        while path is not None:
            self.restore(path)
            if self._trainer.state.all_finite():
                return path
            _LOG.warning(
                "%s holds weights that are not finite; it is moved to %s/ and not used",
                path,
                startup_scan.DIVERGED,
            )
            if self._is_chief:
                startup_scan.set_aside(path, startup_scan.DIVERGED)
            path = self.find_newest()
        return None

    def restore(self, path: str) -> None:
        """Restores one checkpoint. Runs in the scope of the strategy.

        If a time decides, the next save is due one interval later.

        Raises:
          UsageError: when the checkpoint does not fit the model.
          StorageError: when its files are missing or damaged.
        """
        strict_restore.restore(
            self.checkpoint,
            path,
            strict=self._trainer.can_train,
            allow_partial=self._allow_partial,
            optional_sections=self._trainer.state.optional_sections,
        )

        self.saved_step = self._step
        self.saved_path = path
        self._interval_start = time.monotonic()
        self._trainer.after_restore(path)

    def find_newest(self) -> str | None:
        """Waits for the save in flight and returns the prefix of the newest whole checkpoint.

        Every worker gets the prefix that the chief finds, or None if there is no checkpoint.

        Raises:
          StorageError: when the save failed, when no checkpoint is whole, or when another run saved
            the newest.
        """
        self.sync()
        newest = None
        if self._is_chief:
            newest = startup_scan.recover_newest_checkpoint(
                self.restore_folder, self._run_directory.run_id
            )

        # Numbers are broadcast, so the step stands for the prefix, and -1 for None.
        step = self._broadcast(parse_step(newest) if newest else -1)
        if step < 0:
            return None
        return os.path.join(self.restore_folder, f"ckpt-{step}")

    # ---- rewind

    def archive_later_checkpoints(self) -> None:
        """Moves checkpoints after `rewind_step` to `archived/`, if the run goes back.

        Raises:
          StorageError: when they cannot be moved.
        """
        if self.rewind_step is not None and self._is_chief:
            startup_scan.archive_later_checkpoints(self.restore_folder, self.rewind_step)

    def finish_rewind(self) -> None:
        """Records that the rewind is complete, reports and ledger included."""
        if self._is_chief and self.rewind_step is not None:
            startup_scan.finish_rewind(self.restore_folder)
        self.rewind_step = None

    # ---- save

    def is_due(self, since: int, step: int) -> bool:
        """Whether a checkpoint is due at `step`, on every worker.

        It is due if the steps after `since` contain a multiple of the interval, or if the time
        between saves has passed since the last restore or attempt to save, by the chief's clock.
        With a time, every worker has to call this, since the answer of the chief is broadcast.

        Args:
          since: A global step up to which nothing is due. With -1 a checkpoint is due in any case.
          step: The current global step.
        """
        if not self._interval_seconds:
            return durations.is_due(since, step, self.checkpoint_interval)

        elapsed_seconds = time.monotonic() - self._interval_start
        is_due = since < 0 or elapsed_seconds >= self._interval_seconds
        return bool(self._broadcast(int(is_due)))

    def save(
        self,
        checkpoint_number: IntLike | None = None,
        check_interval: bool = True,
        options: tf.train.CheckpointOptions | None = None,
        overwrite: bool = False,
    ) -> str | None:
        """Starts a save unless it is too early or this step is already saved.

        A save replaces no checkpoint of another run. A checkpoint without a record, of another
        program, is moved to `archived/`.

        Args:
          checkpoint_number: The number in the names of the files. None is the global step.
          check_interval: Whether it can be too early since the last save.
          options: TensorFlow's options of the write. They are not changed.
          overwrite: Whether to write the checkpoint of a saved step once more.

        Returns:
          The prefix of the files, or None if no save was started.

        Raises:
          StorageError: when this save, or the previous background save, cannot be written, when the
            folder is no longer that of the run, or when another run has saved this step there.
        """
        step = self._step
        previous_step = self.saved_step
        previous_path = self.saved_path
        # `is_due` may broadcast, so no worker decides by its own `saved_step` whether to call it.
        is_early = check_interval and not self.is_due(previous_step, step)
        if not overwrite and (step == previous_step or is_early):
            return None

        # Wait for the previous save, so that its failure is reported under its own name.
        self.sync()
        self._run_directory.check_run_id()

        if checkpoint_number is None:
            checkpoint_number = step
        prefix = os.path.join(self._save_folder, f"ckpt-{int(checkpoint_number)}")
        if message := describe_foreign_checkpoint(prefix, self._run_directory.run_id):
            raise StorageError(message)
        if (
            list_checkpoint_files(prefix)
            and read_commit_record(prefix) is None
            and not is_commit_pending(prefix)
        ):
            archive_folder = startup_scan.set_aside(prefix, startup_scan.ARCHIVED)
            _LOG.warning(
                "%s already existed, but this run did not save it; it was moved to %s",
                prefix,
                archive_folder,
            )

        try:
            temporary_prefix = begin_save(prefix)
            if self._trainer.can_train:
                self._trainer.before_save(temporary_prefix)
            # For fault injection, which kills the process or fails the write here. Does nothing in
            # other runs.
            files.report_write_point("checkpoint.save", prefix)

            # The step counts as saved from here on, although its files are not written yet.
            self.saved_step = step
            self.saved_path = prefix
            self._interval_start = time.monotonic()
            self._save_in_flight = SaveInFlight(prefix)
            self.checkpoint.save_counter.assign_add(1)

            if options:
                write_options = copy.copy(options)
            else:
                write_options = tf.train.CheckpointOptions(enable_async=self._asynchronous)
            # TensorFlow calls `_commit` when it has written the files: in the background if the
            # save runs there, and otherwise inside `write`.
            write_options.experimental_write_callbacks = [
                *(write_options.experimental_write_callbacks or []),
                functools.partial(self._commit, self._save_in_flight),
            ]
            self.checkpoint.write(temporary_prefix, write_options)
        except (tf.errors.OpError, OSError, StorageError) as error:
            raise self._discard_failed_save(prefix, error) from error
        except BaseException:
            # Other code has failed, such as `before_save` of a user. Nothing is being written that
            # `sync` could wait for, and the previous checkpoint is still the last one.
            self._save_in_flight = None
            self.saved_step = previous_step
            self.saved_path = previous_path
            raise
        return prefix

    def sync(self) -> None:
        """Waits for the save in flight.

        Raises:
          StorageError: when the save failed. TensorFlow itself would report that at the next save,
            or never.
        """
        self.checkpoint.sync()

        # The thread of the save is idle now, so a save that is not committed has failed.
        save = self._save_in_flight
        if save is not None and not save.is_committed:
            error = stop_async_saver(self.checkpoint)
            raise self._discard_failed_save(save.prefix, error) from error
        self._save_in_flight = None

    def _commit(self, save: SaveInFlight) -> None:
        """Records the written checkpoint, moves it into place and rotates older ones.

        Runs in the thread of the save. TensorFlow keeps an error for `sync`, which takes it from
        `stop_async_saver`.
        """
        prefix = save.prefix
        files.report_write_point("checkpoint.written", prefix)
        # TensorFlow creates a folder again that was moved.
        self._run_directory.check_run_id()

        entries: dict[str, Any] = {"time": round(time.time())}
        if run_id := self._run_directory.run_id:
            entries["run_id"] = run_id
        # A run can resume from the checkpoint once it is in place, so the reports are written to
        # the disk before.
        if self._reports is not None:
            extent = self._reports.flush_to_disk(parse_step(prefix))
            if extent:
                entries["recorded"] = extent

        finish_save(prefix, **entries)
        files.report_write_point("checkpoint.pointer", prefix)
        self._rotate()
        save.is_committed = True

    def _rotate(self) -> None:
        """Lists the checkpoints in the pointer file and removes older ones.

        Runs in the thread of the save, or at the start of the run in the thread of the caller.
        """
        remove_old_checkpoints(
            self._save_folder, self._newest_to_keep, self._run_directory.run_id, self._retention
        )

    def _discard_failed_save(self, prefix: str, error: Exception | None) -> StorageError:
        """Removes the files of a failed save and returns the error to raise.

        No step counts as saved then, not even the one before: the save may have replaced files of
        that checkpoint. So the same step can be saved again.
        """
        self._save_in_flight = None
        self.saved_step = -1
        self.saved_path = None
        return fail_save(prefix, error)

    # ---- end

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits for the save in flight, ends its thread and removes a worker's own folder.

        Raises:
          StorageError: when the save failed. If the run ended with another error, that is raised,
            and the failed save is only logged.
        """
        try:
            self.sync()
        except StorageError as save_error:
            if kind is None:
                raise
            _LOG.warning("%s", save_error)
        finally:
            stop_async_saver(self.checkpoint)
            self._remove_own_folder()

    def _remove_own_folder(self) -> None:
        """Removes what this worker, or a dead process of it, has saved. Not on the chief."""
        if not self._is_chief:
            shutil.rmtree(self._save_folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(self._save_folder))

    # ---- of the trainer and its workers

    @property
    def _step(self) -> int:
        """The current global step."""
        return int(self._trainer.global_step.numpy())

    def _broadcast(self, number: int) -> int:
        """Returns the chief's `number` on every worker. All workers have to call it."""
        return broadcast_int(self._trainer.strategy, number)
