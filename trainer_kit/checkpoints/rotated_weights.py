"""RotatedWeights: a folder with the newest checkpoints of weights alone, in files that plain TensorFlow reads."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoint_names import POINTER, RECORD, complete_checkpoints, pointer_text
from trainer_kit.checkpoints.commit import commit
from trainer_kit.checkpoints.startup_scan import not_written, remove_checkpoint, remove_debris, remove_unfinished
from trainer_kit.checkpoints.unfinished import mark, unmark
from trainer_kit.errors import StorageError


class RotatedWeights:
    """Writes `ckpt-<step>` into a folder, and removes older ones once the new one is complete on disk.

    A process may die at any moment: a checkpoint without a commit record is unfinished, `remove_debris` removes it, and
    the older ones are still there. Checkpoints of later steps are those of a run that was killed or went back: they are
    removed too. Runs eagerly, on the host.

    Args:
      folder: The local folder; it is created with the first checkpoint.
      max_to_keep: The number of newest checkpoints to keep.
      keeps: Whether this worker writes the folder. Workers that are not the chief discard what they save.
    """

    def __init__(self, folder: str, max_to_keep: int, keeps: bool = True) -> None:
        self._folder, self._most, self._keeps = folder, max_to_keep, keeps

    def remove_debris(self) -> None:
        """Removes what a killed process has left unfinished; only the chief of the training run may call this."""
        if self._keeps:
            remove_debris(self._folder)

    def write(self, step: int, save: Callable[[str], None]) -> None:
        """Writes the checkpoint of a step, then removes all but the newest; on every worker.

        Args:
          step: The global step of the weights.
          save: Writes a checkpoint at the prefix that it receives.

        Raises:
          StorageError: when a file cannot be written.
        """
        if not self._keeps:
            with tempfile.TemporaryDirectory(prefix="trainer_kit_worker_") as folder:
                save(os.path.join(folder, f"ckpt-{step}"))
            return
        prefix = self._prefix(step)
        try:
            mark([prefix])
            os.makedirs(self._folder, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.remove(prefix + RECORD)  # of weights that are overwritten
            save(prefix)
            files.reach("checkpoint.written", prefix)
            commit(prefix)
            unmark([prefix])
            self._rotate(step)
        except (tf.errors.OpError, OSError, StorageError) as error:
            remove_unfinished(prefix)
            unmark([prefix])
            raise not_written(f"the checkpoint {prefix} was not written", self._folder, error) from error

    def _rotate(self, step: int) -> None:
        """Lets TensorFlow's pointer file name the checkpoints to keep, then removes the others that have a record."""
        there = complete_checkpoints(self._folder)
        kept = [one for one in there if one <= step][-self._most :]
        text = pointer_text([os.path.basename(there[one]) for one in kept])
        files.write_text(os.path.join(self._folder, POINTER), text, point="checkpoint.pointer_file")
        for one, prefix in there.items():
            if one not in kept and os.path.exists(prefix + RECORD):
                remove_checkpoint(prefix)

    def _prefix(self, step: int) -> str:
        return os.path.join(self._folder, f"ckpt-{step}")
