"""Saves, rotates and restores the checkpoints of a run.

Saves run in the background and end with a commit record. A run resumes from the newest checkpoint
that is whole.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
import time
from types import TracebackType
from typing import Any, Protocol

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints, list_checkpoint_files, parse_step
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
from trainer_kit.checkpoints.startup_scan import (
    ARCHIVED,
    DIVERGED,
    archive_later_checkpoints,
    check_from_step,
    find_unfinished_rewind,
    finish_rewind,
    recover_newest_checkpoint,
    set_aside,
)
from trainer_kit.checkpoints.state.strict_restore import restore
from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.config.schema.durations import get_seconds, is_due
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


class CheckpointManager(tf.train.CheckpointManager):
    """Saves in the background with commit records, rotates, and restores strictly.

    Everything is implemented with `tf.train.Checkpoint.write`. The class derives from
    `tf.train.CheckpointManager` only because Orbit's Controller asserts that type. It overrides
    every public name, and the state of TensorFlow's class does not exist. Creating a manager
    changes no file. `prepare_folder` does.

    A save blocks only while the variables are copied. At most one save is in flight, and the next
    one waits for it. Rotation counts and removes only checkpoints with a record of this run. A file
    `ckpt-<step>.pin` protects a checkpoint.

    Workers that are not the chief save too, since reading a variable can involve all workers. They
    save to `workers/<worker>/checkpoints`, where each save replaces the last one. That folder is
    removed at the end.

    The methods run eagerly on the host. Every worker calls them, since some of them broadcast a
    value.

    Args:
      trainer: The trainer whose state the checkpoints contain. One that trains restores at the
        start, and a restore must use all that a checkpoint contains. Neither applies to evaluation.
      run: The run's directory, which contains the `ckpt-<step>` files and a manifest that
        identifies the run.
      options: How many checkpoints to keep, and how often to save.
      reports: The reports to write to the disk before a checkpoint is in place.
      retention: Protects older checkpoints from rotation. With None only pins do.
      asynchronous: Whether saves run in the background.
      allow_partial: Whether to restore what fits and list what does not.

    Attributes:
      saved_step: The step of the last saved or restored checkpoint, or -1 before the first.
      saved_path: The prefix of that checkpoint.
      checkpoint_interval: The steps between saves, or 1 if a time decides, since Orbit's Controller
        saves nothing without an interval.
      rewind_step: The step that the run goes back to by request, or None without a rewind. A dead
        process may have begun the rewind and not finished it.
    """

    saved_step: int = -1
    saved_path: str | None = None
    checkpoint_interval: int = 1
    rewind_step: int | None = None
    _resume_path: str | None

    def __init__(
        self,
        trainer: SavedTrainer,
        run: RunDirectory,
        options: TrainerConfig,
        *,
        reports: Reports | None = None,
        retention: Retention | None = None,
        asynchronous: bool = True,
        allow_partial: bool = False,
    ) -> None:
        self.restore_folder = run.path
        self._trainer = trainer
        if isinstance(options.checkpoint_interval, int):
            self.checkpoint_interval = options.checkpoint_interval
        self._seconds = get_seconds(options.checkpoint_interval)
        self._checks_values = options.recovery_max_trials >= 0
        self._run = run
        self._asynchronous = asynchronous
        self._allow_partial = allow_partial

        self._is_chief = is_chief(trainer.strategy)
        self._reports = reports if self._is_chief else None
        self._retention = retention if self._is_chief else None
        self._newest_to_keep = options.max_to_keep if self._is_chief else 1
        worker = str(worker_index(trainer.strategy))
        own_folder = os.path.join(run.path, "workers", worker, "checkpoints")
        self._folder = run.path if self._is_chief else own_folder

        self._saved_at = time.monotonic()
        # The prefix of the save that has begun and not ended
        self._in_flight = ""
        self._restored_step: int | None = None

    @property
    def directory(self) -> str:
        """The folder that saves go to.

        It is the run's folder, or one below it on workers that are not the chief.
        """
        return self._folder

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """The checkpoint object that is saved and restored."""
        return self._trainer.checkpoint

    @property
    def latest_checkpoint(self) -> str | None:
        """The prefix of the newest checkpoint that is complete."""
        paths = complete_checkpoints(self._folder).values()
        return next(reversed(paths), None)

    @property
    def checkpoints(self) -> list[str]:
        """The prefixes of the complete checkpoints, the oldest first.

        The list is empty for evaluation, where another process removes checkpoints.
        """
        if not self._trainer.can_train:
            return []
        return list(complete_checkpoints(self._folder).values())

    @property
    def is_new_run(self) -> bool:
        """Whether there was no checkpoint to resume from."""
        return self._resume_path is None

    def prepare_folder(self, from_step: int | None = None) -> None:
        """Repairs the run's folder and finds the checkpoint to resume from.

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
        self._resume_path = None
        if not self._trainer.can_train:
            return

        if self._is_chief:
            finish_interrupted_saves(self.restore_folder)
            if from_step is None:
                from_step = find_unfinished_rewind(self.restore_folder)
            if from_step is not None:
                check_from_step(self.restore_folder, from_step, self._run.run_id)
        else:
            self._remove_own_folder()

        step = self._broadcast(-1 if from_step is None else from_step)
        if step >= 0:
            self.rewind_step = step
            self._resume_path = os.path.join(self.restore_folder, f"ckpt-{step}") if step else None
            return

        self._resume_path = self.find_newest()
        if self._resume_path and self._is_chief:
            # A process that died may have left one checkpoint too many.
            self._rotate()

    # ---- saving

    def is_due(self, since: int, step: int) -> bool:
        """Whether a checkpoint is due at `step`, on every worker.

        It is due if the steps after `since` contain a multiple of the interval, or if the time
        between saves has passed since the last save or restore, by the chief's clock.
        """
        if not self._seconds:
            return is_due(since, step, self.checkpoint_interval)
        has_elapsed = time.monotonic() - self._saved_at >= self._seconds
        return bool(self._broadcast(int(has_elapsed)))

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
        is_early = check_interval and previous_step >= 0 and not self.is_due(previous_step, step)
        if not overwrite and (step == previous_step or is_early):
            return None

        # Wait for the previous save, so that its failure is reported under its own name.
        self.sync()
        self._run.check_run_id()

        number = step if checkpoint_number is None else int(checkpoint_number)
        prefix = os.path.join(self._folder, f"ckpt-{number}")
        if message := describe_foreign_checkpoint(prefix, self._run.run_id):
            raise StorageError(message)
        if (
            list_checkpoint_files(prefix)
            and read_commit_record(prefix) is None
            and not is_commit_pending(prefix)
        ):
            folder = set_aside(prefix, ARCHIVED)
            _LOG.warning(
                "%s already existed, but this run did not save it; it was moved to %s",
                prefix,
                folder,
            )

        try:
            temporary = begin_save(prefix)
            if self._trainer.can_train:
                self._trainer.before_save(temporary)
            files.report_write_point("checkpoint.save", prefix)

            # The step counts as saved from here on. `_commit` ends the save, when TensorFlow has
            # written the files.
            self.saved_step = step
            self.saved_path = prefix
            self._saved_at = time.monotonic()
            self._in_flight = prefix
            self.checkpoint.save_counter.assign_add(1)

            if options:
                write_options = copy.copy(options)
            else:
                write_options = tf.train.CheckpointOptions(enable_async=self._asynchronous)
            write_options.experimental_write_callbacks = [
                *(write_options.experimental_write_callbacks or []),
                self._commit,
            ]
            self.checkpoint.write(temporary, write_options)
        except (tf.errors.OpError, OSError, StorageError) as error:
            raise self._discard_failed_save(prefix, error) from error
        except BaseException:
            # Nothing is being written that `sync` could wait for.
            self._in_flight = ""
            self.saved_step = previous_step
            raise
        return prefix

    def sync(self) -> None:
        """Waits for the save in flight.

        Raises:
          StorageError: when the save failed. TensorFlow itself would report that at the next save,
            or never.
        """
        self.checkpoint.sync()
        if self._in_flight:
            error = stop_async_saver(self.checkpoint)
            raise self._discard_failed_save(self._in_flight, error) from error

    def _commit(self, _: str) -> None:
        """Records the written checkpoint, moves it into place and rotates older ones.

        Runs in the thread of the save.
        """
        prefix = self._in_flight
        files.report_write_point("checkpoint.written", prefix)
        # TensorFlow creates a folder again that was moved.
        self._run.check_run_id()

        entries: dict[str, Any] = {"time": round(time.time())}
        if run_id := self._run.run_id:
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
        self._in_flight = ""

    def _rotate(self) -> None:
        """Lists the checkpoints in the pointer file and removes older ones.

        Runs in the thread of the save, or in the main thread at the start of the run.
        """
        remove_old_checkpoints(
            self._folder, self._newest_to_keep, self._run.run_id, self._retention
        )

    def _discard_failed_save(self, prefix: str, error: Exception | None) -> StorageError:
        """Removes the files of a failed save and returns the error to raise."""
        self._in_flight = ""
        # Otherwise the same step would not be tried again.
        self.saved_step = -1
        return fail_save(prefix, error)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits for the save in flight.

        If the run ended with an error, a failed save is only logged.
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
        """Removes what a worker that is not the chief has saved, also before a kill.

        Nobody reads these files.
        """
        if not self._is_chief:
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(self._folder))

    # ---- restoring

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint with finite values, or initializes the trainer.

        It does nothing for evaluation. A second call before the run has taken a step returns the
        same prefix. After a step it restores the newest checkpoint, as TensorFlow's manager does.

        Returns:
          The prefix of the checkpoint, or None if there was nothing to restore.

        Raises:
          UsageError: when the checkpoint does not fit the model.
          StorageError: when no checkpoint is whole.
          DivergedError: when no checkpoint has finite values.
        """
        if self._restored_step is not None:
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
                    f"they were moved to {DIVERGED}/: "
                    "start again with --from_step=0, and a lower learning rate or gradient clipping"
                )

        self._restored_step = self._step
        return self._resume_path

    def restore_finite(self, path: str | None) -> str | None:
        """Restores the checkpoint at `path`, or else the newest one with finite values.

        Checkpoints with other values are moved to `diverged/`.

        Returns:
          The prefix of the restored checkpoint, or None if none is left.
        """
        while path is not None:
            self.restore(path)
            if self._trainer.state.all_finite():
                return path
            _LOG.warning(
                "%s holds weights that are not finite; it is moved to %s/ and not used",
                path,
                DIVERGED,
            )
            if self._is_chief:
                set_aside(path, DIVERGED)
            path = self.find_newest()
        return None

    def restore(self, path: str) -> None:
        """Restores one checkpoint. The next save is due one interval later."""
        restore(
            self.checkpoint,
            path,
            strict=self._trainer.can_train,
            allow_partial=self._allow_partial,
            optional_sections=self._trainer.state.optional_sections,
        )

        self.saved_step = self._step
        self.saved_path = path
        self._saved_at = time.monotonic()
        self._trainer.after_restore(path)

    def find_newest(self) -> str | None:
        """Waits for the save in flight and returns the prefix of the newest whole checkpoint.

        Every worker gets the prefix that the chief finds, or None if there is no checkpoint.
        """
        self.sync()
        newest = None
        if self._is_chief:
            newest = recover_newest_checkpoint(self.restore_folder, self._run.run_id)

        step = self._broadcast(parse_step(newest) if newest else -1)
        return os.path.join(self.restore_folder, f"ckpt-{step}") if step >= 0 else None

    def archive_later_checkpoints(self) -> None:
        """Moves checkpoints after `rewind_step` to `archived/`, if the run goes back.

        Raises:
          StorageError: when they cannot be moved.
        """
        if self.rewind_step is not None and self._is_chief:
            archive_later_checkpoints(self.restore_folder, self.rewind_step)

    def finish_rewind(self) -> None:
        """Records that the rewind is complete."""
        if self._is_chief and self.rewind_step is not None:
            finish_rewind(self.restore_folder)
        self.rewind_step = None

    @property
    def _step(self) -> int:
        return int(self._trainer.global_step.numpy())

    def _broadcast(self, number: int) -> int:
        return broadcast_int(self._trainer.strategy, number)
