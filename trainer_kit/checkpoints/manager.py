"""The run's checkpoints: saved in the background with a record, the newest kept, the newest sound one restored."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoint_names import RECORD, complete_checkpoints, step_of
from trainer_kit.checkpoints.commit import commit, is_own
from trainer_kit.checkpoints.folder import (
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
from trainer_kit.checkpoints.state.restore import end_saver, restore
from trainer_kit.checkpoints.unfinished import mark, unmark
from trainer_kit.checkpoints.write_first import WrittenAfter
from trainer_kit.errors import DivergedError, StorageError
from trainer_kit.held_folder import check_held, remove_made_again

_LOG = logging.getLogger(__name__)


class CheckpointManager(tf.train.CheckpointManager):
    """TensorFlow's manager, with asynchronous saves, commit records, rotation of our own and a strict restore.

    A save blocks for the copy of the variables only; one save at most is in flight, the next one waits for it. Rotation
    counts and removes only checkpoints that have a record of this run; one with a file `ckpt-<step>.pin` stays.

    Args:
      checkpoint: of `training_checkpoint`.
      directory: where `ckpt-<step>` files go, and come from; on another worker than the chief, they only come from it.
      max_to_keep: how many of the newest stay.
      step_counter: the global step.
      checkpoint_interval: steps between saves.
      init_fn: called when there is no checkpoint to restore.
      asynchronous: whether saves run in the background.
      for_training: whether a restore has to find a place for all that a checkpoint holds, and happens at the start;
        for evaluation neither.
      keeps: False on workers that are not the chief: reading a variable can take all workers, so they save too, but to
        a folder of their own, which goes with the process.
      before_save: called with the prefix before each save, on the caller's thread.
      after_restore: called with the prefix after each restore.
      before_files: called before the variables of a save are written, in the thread of the save. A checkpoint that has
        all its files is gone on from, with its record or without; what it must not be ahead of is on the disk before.
      recorded: returns how far history and ledger reach at a step, for the checkpoint's record; called after
        `before_files`.
      sound: whether what was restored is finite; a checkpoint that is not is moved to `diverged/`.
      agree: returns the chief's number on every worker.
      spared: given the steps of checkpoints that are about to be rotated away, returns those that have to stay.
      partial: restore what fits and list what does not.
      loose: sections that are restored as far as both sides have them.
      run_id: returns the identity of the run, which each record holds; "" as long as it has none.
      from_step: of the checkpoint to go on from, in place of the newest; 0: begin anew. The later ones stay where they
        are until `archive_later`: the one that is named may not fit.

    Attributes:
      saved_step: the step of the checkpoint that was saved or restored last; -1 before the first.
      saved_path: its prefix.
      goes_back_to: `from_step`, or that of a process which died before it was done with it; None: to none.
    """

    _last_checkpoint_step: int | None
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
        checkpoint_interval: int,
        init_fn: Callable[[], Any] | None = None,
        asynchronous: bool = True,
        for_training: bool = True,
        keeps: bool = True,
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
        self._own_folder = None if keeps else tempfile.TemporaryDirectory(prefix="trainer_kit_worker_")
        self._keeps, self._for_training, self._partial, self._loose = keeps, for_training, partial, loose
        self._keep_newest, self._in_flight, self._asynchronous = max_to_keep, "", asynchronous
        self._before_save, self._before_files, self._recorded = before_save, before_files, recorded
        self._sound, self._agree, self._spared, self._run_id = sound, agree, spared, run_id
        self._after_restore, self.goes_back_to, self._begun, self._begun_at = after_restore, None, False, -1
        self._start = self._first(from_step) if for_training else None
        with tempfile.TemporaryDirectory() as nothing:  # TensorFlow goes by the pointer file, and fails on an empty one
            counts = {"step_counter": step_counter, "checkpoint_interval": checkpoint_interval}
            super().__init__(checkpoint, nothing, max_to_keep=max_to_keep, init_fn=init_fn, **counts)
        self._directory = self._own_folder.name if self._own_folder else directory
        self._checkpoint_prefix = os.path.join(self._directory, "ckpt")
        self._follow_folder()
        if self._start and keeps and self.goes_back_to is None:
            self._sweep()  # a process that died may have left one too many

    def save(
        self,
        checkpoint_number: Any = None,
        check_interval: bool = True,
        options: tf.train.CheckpointOptions | None = None,
    ) -> str | None:
        """Saves unless it is too early or this step is saved already; returns the prefix, whose files come later.

        Raises:
          StorageError: when this save, or the one before it in the background, cannot be written.
        """
        step = int(self._step_counter.numpy())
        last = self._last_checkpoint_step
        if last is not None and (step == last or (check_interval and step < last + self._checkpoint_interval)):
            return None
        self.sync()  # of the save before: its failure is told as its own
        options = copy.copy(options) if options else tf.train.CheckpointOptions(enable_async=self._asynchronous)
        if self._keeps:
            options.experimental_write_callbacks = [self._commit]
            shards = options.experimental_sharding_callback
            options.experimental_sharding_callback = WrittenAfter(self._write_first, shards)
        prefix = f"{self._prefix}-{step if checkpoint_number is None else int(checkpoint_number)}"
        try:
            check_held(prefix)
            if self._keeps:
                make_room(prefix, self._run_id())
                mark([prefix], self._run_id())
            with contextlib.suppress(FileNotFoundError):
                os.remove(prefix + RECORD)  # of a checkpoint that is written over
            self._before_save(prefix)
            files.reach("checkpoint.save", prefix)
            self._saving = prefix
            super().save(step_of(prefix), check_interval=False, options=options)
        except (tf.errors.OpError, OSError, StorageError) as error:
            raise self._failed(prefix, error) from error
        self._in_flight = self.saved_path = prefix
        self.saved_step = step
        return prefix

    def sync(self) -> None:
        """Waits for the save in flight.

        Raises:
          StorageError: when it failed. TensorFlow itself would say so with the next save only, or never.
        """
        super().sync()
        asked, self._in_flight = self._in_flight, ""
        error = _failure_in_background(self.checkpoint)
        if error is not None or (asked and asked != self.latest_checkpoint):  # which moves when a save is complete
            raise self._failed(asked, error) from error

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Waits for the save in flight, whatever ended the run; after an error, that one is raised, not its own."""
        try:
            self.sync()
        except StorageError as second:
            if kind is None:
                raise
            _LOG.warning("%s", second)
        finally:
            end_saver(self.checkpoint)
            if self._own_folder:
                self._own_folder.cleanup()

    @property
    def begins_anew(self) -> bool:
        """Whether there was no checkpoint to go on from."""
        return self._start is None

    def restore_or_initialize(self) -> str | None:
        """Restores the newest sound checkpoint and returns its prefix, or calls init_fn; for evaluation does nothing.

        Called again before the run has moved, it only returns the same; then it goes to the newest one there is, as
        TensorFlow's manager does.

        Raises:
          UsageError: when it does not fit the model.
          StorageError: when none is whole.
          DivergedError: when none is sound.
        """
        if self._begun and (not self._for_training or int(self._step_counter.numpy()) == self._begun_at):
            return self._start
        path, self._start = self.newest() if self._begun else self._start, None
        self._begun = True
        try:
            return self._restore_sound(path)
        finally:
            self._begun_at = int(self._step_counter.numpy())

    def _restore_sound(self, path: str | None) -> str | None:
        """Restores the checkpoint at `path`, or the newest sound one before it, or calls init_fn."""
        while path is not None:
            self.restore(path)
            if self._sound():
                self._start = path
                return path
            _LOG.warning("%s holds weights that are not finite; it is moved to %s/ and passed over", path, DIVERGED)
            path = self.discard(path)
            if path is None:
                raise DivergedError(
                    f"every checkpoint in {self.source} holds weights that are not finite; they were moved to "
                    f"{DIVERGED}/: start again with --from_step=0, and a lower learning rate or gradient clipping"
                )
        if self._for_training and self._init_fn is not None:
            self._init_fn()
        return None

    def restore(self, path: str) -> None:
        """Restores one checkpoint; the next save is an interval after it."""
        restore(self.checkpoint, path, whole=self._for_training, partial=self._partial, loose=self._loose)
        self._last_checkpoint_step = self.saved_step = int(self._step_counter.numpy())
        self.saved_path = path
        self._after_restore(path)

    def discard(self, path: str) -> str | None:
        """Moves the checkpoint at `path` to `diverged/`; returns the newest one that is left, on every worker."""
        if self._keeps:
            set_aside(path, DIVERGED)
        newest = self._newest()
        self._follow_folder()
        return newest

    def archive_later(self) -> None:
        """Moves the checkpoints after the one that the run goes back to away, if it does.

        Raises:
          StorageError: when they cannot be moved.
        """
        if self.goes_back_to is None:
            return
        moved = archive_later(self.source, self.goes_back_to) if self._keeps else []
        if moved:
            _LOG.warning("moved, since the run goes back to step %d: %s", self.goes_back_to, ", ".join(moved))
        self._follow_folder()

    def done_going_back(self) -> None:
        """Notes that all which told of later steps is gone: from now on the run only goes on."""
        if self._keeps and self.goes_back_to is not None:
            done_going_back(self.source)
        self.goes_back_to = None

    def newest(self) -> str | None:
        """Returns the prefix of the newest checkpoint that is whole, when no save is in flight; on every worker."""
        self.sync()
        return self._newest()

    def _first(self, from_step: int | None) -> str | None:
        """Returns the prefix of the checkpoint that the run goes on from, on every worker."""
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
        """Makes the checkpoints that are there those that TensorFlow's manager knows of and puts in its pointer."""
        there = complete_checkpoints(self._directory).values()
        self._maybe_delete.clear()
        if self._keeps and self._for_training:  # else another process removes them
            self._maybe_delete.update({path: os.path.getmtime(f"{path}.index") for path in there})
        self._latest_checkpoint = next(reversed(there), None)

    def _write_first(self) -> None:
        """In the thread of the save, before the variables are written."""
        self._before_files()
        recorded = self._recorded(step_of(self._saving))
        self._noted = {"recorded": recorded} if recorded else {}
        remove_made_again(self._saving)  # the folder may be gone since `save` looked, and TensorFlow makes it again
        check_held(self._saving)

    def _commit(self, prefix: str) -> None:
        """In the thread of the save, when its files are in place and before the pointer moves."""
        files.reach("checkpoint.written", prefix)
        run_id = self._run_id()
        identity = {"run_id": run_id} if run_id else {}
        commit(prefix, **identity, **self._noted)
        unmark([prefix], run_id)
        files.reach("checkpoint.pointer", prefix)

    def _sweep(self) -> None:
        """Removes all but the newest checkpoints and those that are pinned or spared; in the thread of the save.

        Overrides TensorFlow's, which knows neither pins nor checkpoints of others. A checkpoint leaves the pointer file
        before it loses a file.
        """
        check_held(self._directory)
        there, run_id = complete_checkpoints(self._directory), self._run_id()
        own = [path for path in there.values() if not self._keeps or is_own(path, run_id)]
        old = [path for path in own[: -self._keep_newest] if not os.path.exists(f"{path}.pin")]
        spared = self._spared([step_of(path) for path in old])
        old = [path for path in old if step_of(path) not in spared]
        gone = [path for path in self._maybe_delete if step_of(path) not in there]
        for path in [*old, *gone]:
            self._maybe_delete.pop(path, None)
        if old:
            self._record_state()
        for path in old:
            remove_checkpoint(path, run_id)

    def _failed(self, prefix: str, error: Exception | None) -> StorageError:
        """Removes what the failed save has left, and returns what to tell."""
        self._last_checkpoint_step, self.saved_step = None, -1  # else the same step would not be tried again
        what = "was not written"
        if os.path.exists(prefix + RECORD):
            what = "was written, but not the file that points to it, or an older one was not removed"
        remove_made_again(prefix)
        remove_unfinished(prefix)
        unmark([prefix], self._run_id())
        return not_written(f"the checkpoint {prefix} {what}", os.path.dirname(prefix), error)


def _failure_in_background(checkpoint: tf.train.Checkpoint) -> Exception | None:
    """Takes the error of the last asynchronous save from TensorFlow, which would raise it once more at exit."""
    saver = getattr(checkpoint, "_async_checkpointer_impl", None)
    error = getattr(saver, "_async_error", None)
    if saver is not None:
        saver._async_error = None
    return error
