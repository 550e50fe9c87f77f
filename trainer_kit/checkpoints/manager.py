"""Manages the run's checkpoints: saves them in the background with records, rotates them, restores the newest sound."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoint_names import RECORD, complete_checkpoints, step_of
from trainer_kit.checkpoints.commit import commit, is_own
from trainer_kit.checkpoints.pointer_file import PointerFile
from trainer_kit.checkpoints.startup_scan import (
    DIVERGED,
    archive_later,
    check_from_step,
    done_going_back,
    going_back,
    make_room,
    newest_whole,
    not_written,
    remove_checkpoint,
    remove_debris,
    remove_unfinished,
    set_aside,
)
from trainer_kit.checkpoints.state.strict_restore import restore
from trainer_kit.checkpoints.unfinished import mark, unmark
from trainer_kit.checkpoints.write_before_save import WrittenAfter
from trainer_kit.config.schema.durations import exact_steps
from trainer_kit.distribution.tensorflow_internals import end_saver
from trainer_kit.errors import DivergedError, StorageError, UsageError

_LOG = logging.getLogger(__name__)


class CheckpointManager(tf.train.CheckpointManager):
    """Saves in the background with commit records, rotates, and restores strictly.

    It implements everything with `tf.train.Checkpoint.write` and a pointer file in TensorFlow's format. It derives from
    tf.train.CheckpointManager only because Orbit's Controller asserts that type: it overrides every public name, and
    the state of TensorFlow's class does not exist.

    A save blocks only while the variables are copied; at most one save is in flight, and the next one waits for it.
    Rotation counts and removes only checkpoints with a record of this run; a file `ckpt-<step>.pin` protects one.

    Args:
      checkpoint: The checkpoint that `training_checkpoint` returns.
      directory: The folder of the `ckpt-<step>` files; workers that are not the chief only read from it.
      max_to_keep: The number of newest checkpoints to keep.
      step_counter: The global step.
      checkpoint_interval: The number of steps between saves; None: a time decides.
      seconds: The seconds between saves, if a time decides.
      init_fn: A function that is called when there is no checkpoint to restore.
      asynchronous: Whether saves run in the background.
      for_training: Whether the run trains: it then restores at the start, and a restore must use all that a checkpoint
        holds. Both do not apply to evaluation.
      keeps: False on workers that are not the chief. Reading a variable can involve all workers, so they save too, but
        to `workers/<worker>/checkpoints`, where each save replaces the last one. The folder is removed at the end.
      worker: The index of this worker.
      check_folder: Called before each save; raises StorageError when the folder is no longer that
        of the run.
      before_save: Called with the prefix before each save, on the caller's thread.
      after_restore: Called with the prefix after each restore.
      before_files: Called in the save's thread before the variables are written. A run can resume from a checkpoint as
        soon as all its files exist, so it writes to disk whatever must not be older than the checkpoint.
      recorded: Returns how far history and ledger reach at a step, for the checkpoint's record; called after
        `before_files`.
      sound: Returns whether the restored values are finite; a checkpoint that is not is moved to `diverged/`.
      agree: Returns the chief's number on every worker.
      spared: Takes the steps of checkpoints that rotation is about to remove and returns those that must stay.
      partial: Whether to restore what fits and list what does not.
      loose: The sections that are restored as far as both the checkpoint and the run have them.
      run_id: Returns the identity of the run for the records; "" while the run has none.
      from_step: The step of the checkpoint to resume from instead of the newest; 0 starts again. Later checkpoints stay
        in place until `archive_later`, since the named checkpoint may not fit.

    Raises:
      UsageError: when max_to_keep is below 1, or there is no checkpoint of the step to go back to.

    Attributes:
      saved_step: The step of the last saved or restored checkpoint; -1 before the first.
      saved_path: The prefix of that checkpoint.
      goes_back_to: `from_step`, or the step of a rewind that a dead process did not finish; None without a rewind.
    """

    saved_step: int = -1
    saved_path: str | None = None
    goes_back_to: int | None
    _saving = ""  # the prefix of the save in flight, and what its record will hold
    _noted: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str,
        *,
        max_to_keep: int,
        step_counter: tf.Variable,
        checkpoint_interval: int | None,
        seconds: float = 0.0,
        init_fn: Callable[[], Any] | None = None,
        asynchronous: bool = True,
        for_training: bool = True,
        keeps: bool = True,
        worker: int = 0,
        check_folder: Callable[[], None] = lambda: None,
        before_save: Callable[[str], None] = lambda _: None,
        after_restore: Callable[[str], None] = lambda _: None,
        before_files: Callable[[], None] = lambda: None,
        recorded: Callable[[int], dict[str, Any]] = lambda _: {},
        sound: Callable[[], bool] = lambda: True,
        agree: Callable[[int], int] = lambda number: number,
        spared: Callable[[Sequence[int]], set[int]] = lambda _: set(),
        partial: bool = False,
        loose: Collection[str] = (),
        run_id: Callable[[], str] = str,
        from_step: int | None = None,
    ) -> None:
        self.source = directory
        self._folder = directory if keeps else os.path.join(directory, "workers", str(worker), "checkpoints")
        self._keeps, self._for_training, self._partial, self._loose = keeps, for_training, partial, loose
        self._keep_newest = _at_least_one(max_to_keep) if keeps else 1
        self._in_flight, self._asynchronous = "", asynchronous
        self._check_folder = check_folder
        self._before_save, self._before_files, self._recorded = before_save, before_files, recorded
        self._sound, self._agree, self._spared, self._run_id = sound, agree, spared, run_id
        self._after_restore, self.goes_back_to, self._begun, self._begun_at = after_restore, None, False, -1
        self._start = self._first(from_step) if for_training else None
        self._tracked, self._steps, self._initialize = checkpoint, step_counter, init_fn
        self._interval, self._seconds, self._saved_at = checkpoint_interval, seconds, time.monotonic()
        self._remove_own_folder()
        self._pointer = PointerFile(self._folder)
        self._follow_folder()
        if self._start and keeps and self.goes_back_to is None:
            self._rotate()  # a process that died may have left one too many

    @property
    def directory(self) -> str:
        """The folder that saves go to: the run's folder, or one below it on workers that are not the chief."""
        return self._folder

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """The checkpoint object that is saved and restored."""
        return self._tracked

    @property
    def checkpoint_interval(self) -> int | None:
        """Steps between saves; None: a time decides."""
        return self._interval

    def time_is_over(self) -> bool:
        """Whether the time between saves is over since the last save or restore, by the chief's clock."""
        return bool(self._agree(int(time.monotonic() - self._saved_at >= self._seconds)))

    @property
    def latest_checkpoint(self) -> str | None:
        """The prefix of the newest checkpoint that is complete."""
        return self._pointer.newest

    @property
    def checkpoints(self) -> list[str]:
        """The prefixes of the checkpoints in the pointer file, the oldest first."""
        return self._pointer.listed

    def save(
        self,
        checkpoint_number: Any = None,
        check_interval: bool = True,
        options: tf.train.CheckpointOptions | None = None,
    ) -> str | None:
        """Starts a save unless it is too early or this step is already saved; returns the prefix of its files.

        Raises:
          StorageError: when this save, or the previous background save, cannot be written, or the
            folder is no longer that of the run.
        """
        step, last = self._step, self.saved_step
        if last >= 0 and (step == last or (check_interval and self._is_early(step))):
            return None
        self.sync()  # waits for the previous save, so that its failure is reported under its own name
        self._check_folder()
        prefix = os.path.join(self._folder, f"ckpt-{step if checkpoint_number is None else int(checkpoint_number)}")
        try:
            os.makedirs(self._folder, exist_ok=True)
            if self._keeps:
                make_room(prefix, self._run_id())
                mark([prefix], self._run_id())
            with contextlib.suppress(FileNotFoundError):
                os.remove(prefix + RECORD)  # of a checkpoint that is written over
            self._before_save(prefix)
            files.reach("checkpoint.save", prefix)
            self._saving = prefix
            self.saved_step, self.saved_path, self._saved_at = step, prefix, time.monotonic()
            self.checkpoint.save_counter.assign_add(1)
            self._in_flight = prefix  # until `_point_to` has ended
            self.checkpoint.write(prefix, self._options(options))
        except (tf.errors.OpError, OSError, StorageError) as error:
            raise self._failed(prefix, error) from error
        except BaseException:
            self._in_flight = ""  # nothing is being written that `sync` could wait for
            self.saved_step = last
            raise
        return prefix

    def forget_saved_step(self) -> None:
        """Makes the next `save` write the checkpoint of this step again, though there is one already."""
        self.saved_step = -1

    def _is_early(self, step: int) -> bool:
        if self._interval is None:
            return not self.time_is_over()
        return step < self.saved_step + exact_steps(self._interval)

    def _options(self, given: tf.train.CheckpointOptions | None) -> tf.train.CheckpointOptions:
        """Returns the save options with our callbacks before and after the files are written."""
        options = copy.copy(given) if given else tf.train.CheckpointOptions(enable_async=self._asynchronous)
        callbacks = [self._commit] if self._keeps else options.experimental_write_callbacks or []
        options.experimental_write_callbacks = [*callbacks, self._point_to]
        if self._keeps:
            shards = options.experimental_sharding_callback
            options.experimental_sharding_callback = WrittenAfter(self._write_first, shards)
        return options

    def sync(self) -> None:
        """Waits for the save in flight.

        Raises:
          StorageError: when it failed. TensorFlow itself would report that at the next save, or never.
        """
        self.checkpoint.sync()
        if asked := self._in_flight:
            error = end_saver(self.checkpoint)
            raise self._failed(asked, error) from error

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Waits for the save in flight. If the run ended with an error, a failed save is only logged."""
        try:
            self.sync()
        except StorageError as second:
            if kind is None:
                raise
            _LOG.warning("%s", second)
        finally:
            end_saver(self.checkpoint)
            self._remove_own_folder()

    def _remove_own_folder(self) -> None:
        """Removes what a worker that is not the chief has saved, also before a kill; nobody reads it."""
        if not self._keeps:
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(self._folder))

    @property
    def is_new_run(self) -> bool:
        """Whether there was no checkpoint to resume from."""
        return self._start is None

    def restore_or_initialize(self) -> str | None:
        """Restores the newest sound checkpoint and returns its prefix, or calls init_fn; does nothing for evaluation.

        A second call before the run has taken a step returns the same prefix. After a step it restores the newest
        checkpoint, as TensorFlow's manager does.

        Raises:
          UsageError: when the checkpoint does not fit the model.
          StorageError: when no checkpoint is whole.
          DivergedError: when no checkpoint is sound.
        """
        if self._begun and (not self._for_training or self._step == self._begun_at):
            return self._start
        path, self._start = self.newest() if self._begun else self._start, None
        self._begun = True
        try:
            return self._restore_sound(path)
        finally:
            self._begun_at = self._step

    def _restore_sound(self, path: str | None) -> str | None:
        """Restores the checkpoint at `path`, or the newest sound one before it, or calls init_fn."""
        while path is not None:
            self.restore(path)
            if self._sound():
                self._start = path
                return path
            _LOG.warning("%s holds weights that are not finite; it is moved to %s/ and not used", path, DIVERGED)
            path = self.discard(path)
            if path is None:
                raise DivergedError(
                    f"every checkpoint in {self.source} holds weights that are not finite; they were moved to "
                    f"{DIVERGED}/: start again with --from_step=0, and a lower learning rate or gradient clipping"
                )
        if self._for_training and self._initialize is not None:
            self._initialize()
        return None

    def restore(self, path: str) -> None:
        """Restores one checkpoint; the next save is due one interval later."""
        restore(self.checkpoint, path, whole=self._for_training, partial=self._partial, loose=self._loose)
        self.saved_step, self.saved_path, self._saved_at = self._step, path, time.monotonic()
        self._after_restore(path)

    def discard(self, path: str) -> str | None:
        """Moves the checkpoint at `path` to `diverged/`; returns the newest remaining one on every worker."""
        if self._keeps:
            set_aside(path, DIVERGED)
        newest = self._newest()
        self._follow_folder()
        return newest

    def archive_later(self) -> None:
        """Moves checkpoints after the step that the run goes back to, if it goes back, to `archived/`.

        Raises:
          StorageError: when they cannot be moved.
        """
        if self.goes_back_to is None:
            return
        moved = archive_later(self.source, self.goes_back_to) if self._keeps else []
        if moved:
            _LOG.warning("the run goes back to step %d; later ones were moved: %s", self.goes_back_to, ", ".join(moved))
        self._follow_folder()

    def done_going_back(self) -> None:
        """Records that the rewind is complete."""
        if self._keeps and self.goes_back_to is not None:
            done_going_back(self.source)
        self.goes_back_to = None

    def newest(self) -> str | None:
        """Waits for the save in flight and returns the prefix of the newest whole checkpoint, on every worker."""
        self.sync()
        return self._newest()

    @property
    def _step(self) -> int:
        return int(self._steps.numpy())

    def _first(self, from_step: int | None) -> str | None:
        """Returns the prefix of the checkpoint that the run resumes from, on every worker."""
        if self._keeps:
            remove_debris(self.source, self._run_id())
            from_step = going_back(self.source) if from_step is None else from_step
            if from_step is not None:
                check_from_step(self.source, from_step, self._run_id())
        step = self._agree(-1 if from_step is None else from_step)
        if step < 0:
            return self._newest()
        self.goes_back_to = step
        return os.path.join(self.source, f"ckpt-{step}") if step else None

    def _newest(self) -> str | None:
        found = newest_whole(self.source, self._run_id()) if self._keeps else None
        step = self._agree(step_of(found) if found else -1)
        return os.path.join(self.source, f"ckpt-{step}") if step >= 0 else None

    def _follow_folder(self) -> None:
        """Updates the list for the pointer file from the folder; the next save writes the file."""
        there = complete_checkpoints(self._folder).values()
        self._pointer.follow(there, list_them=self._keeps and self._for_training)

    def _write_first(self) -> None:
        """Prepares the save's record before the variables are written; runs in the save's thread."""
        self._before_files()
        recorded = self._recorded(step_of(self._saving))
        self._noted = {"recorded": recorded} if recorded else {}

    def _commit(self, prefix: str) -> None:
        """Writes the commit record when the files are in place; runs in the save's thread."""
        files.reach("checkpoint.written", prefix)
        run_id = self._run_id()
        identity = {"run_id": run_id} if run_id else {}
        commit(prefix, time=round(time.time()), **identity, **self._noted)
        unmark([prefix], run_id)
        files.reach("checkpoint.pointer", prefix)

    def _point_to(self, prefix: str) -> None:
        """Adds the checkpoint to the pointer file and rotates older ones; runs last in the save's thread."""
        self._pointer.add(prefix)
        self._rotate()
        self._in_flight = ""

    def _rotate(self) -> None:
        """Removes all but the newest, pinned and spared checkpoints; runs in the save's thread.

        A checkpoint leaves the pointer file before any of its files is removed.
        """
        there, run_id = complete_checkpoints(self._folder), self._run_id()
        own = [path for path in there.values() if not self._keeps or is_own(path, run_id)]
        old = [path for path in own[: -self._keep_newest] if not os.path.exists(f"{path}.pin")]
        spared = self._spared([step_of(path) for path in old]) if self._keeps else set()
        old = [path for path in old if step_of(path) not in spared]
        self._pointer.drop([*old, *(path for path in self._pointer.listed if step_of(path) not in there)])
        for path in old:
            remove_checkpoint(path, run_id)

    def _failed(self, prefix: str, error: Exception | None) -> StorageError:
        """Removes the files of a failed save and returns the error to raise."""
        self._in_flight = ""
        self.saved_step = -1  # else the same step would not be tried again
        what = "was not written"
        if os.path.exists(prefix + RECORD):
            what = "was written, but its pointer file was not, or an older checkpoint was not removed"
        remove_unfinished(prefix)
        unmark([prefix], self._run_id())
        return not_written(f"the checkpoint {prefix} {what}", os.path.dirname(prefix), error)


def _at_least_one(max_to_keep: int) -> int:
    if max_to_keep < 1:
        raise UsageError(f"max_to_keep={max_to_keep}: at least one checkpoint must be kept; give 1 or more")
    return max_to_keep
