"""RotatedWeights: a folder with the newest checkpoints of weights alone, in files that plain TensorFlow reads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoint_names import RECORD, complete_checkpoints
from trainer_kit.checkpoints.commit import begin_save, cancel_save, finish_save, remove_checkpoint
from trainer_kit.checkpoints.pointer_file import write_pointer
from trainer_kit.checkpoints.startup_scan import not_written, remove_debris
from trainer_kit.errors import StorageError


class RotatedWeights:
    """Writes `ckpt-<step>` into a folder, and removes older ones once the new one is complete on disk.

    Checkpoints of later steps are those of a run that was killed or went back: they are removed too. Runs eagerly, on
    the host.

    Args:
      folder: The local folder; it is created with the first checkpoint.
      max_to_keep: The number of newest checkpoints to keep.
      keeps: Whether this worker writes the folder. Workers that are not the chief discard what they save.
    """

    def __init__(self, folder: str, max_to_keep: int, keeps: bool = True) -> None:
        self._folder = folder
        self._max_to_keep = max_to_keep
        self._keeps = keeps

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
        prefix = os.path.join(self._folder, f"ckpt-{step}")
        try:
            save(begin_save(prefix))
            files.reach("checkpoint.written", prefix)
            finish_save(prefix)
            self._rotate(step)
        except (tf.errors.OpError, OSError, StorageError) as error:
            cancel_save(prefix)
            raise not_written(f"the checkpoint {prefix} was not written", self._folder, error) from error

    def _rotate(self, step: int) -> None:
        """Lets TensorFlow's pointer file name the checkpoints to keep, then removes the others that have a record."""
        checkpoints = complete_checkpoints(self._folder)
        newest = [number for number in checkpoints if number <= step][-self._max_to_keep :]
        others = [prefix for number, prefix in checkpoints.items() if number not in newest]
        write_pointer(self._folder, without=others)
        for prefix in others:
            if os.path.exists(prefix + RECORD):
                remove_checkpoint(prefix)
