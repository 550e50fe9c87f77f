"""WeightsFolder: a folder with checkpoints of weights alone, which plain TensorFlow can read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.commit import (
    begin_save,
    fail_save,
    finish_interrupted_saves,
    finish_save,
)
from trainer_kit.checkpoints.pointer_file import write_pointer
from trainer_kit.checkpoints.retention import remove_checkpoints_except
from trainer_kit.errors import StorageError


class WeightsFolder:
    """A folder with `ckpt-<step>.*` that one process writes.

    Runs eagerly, on the host, on every worker.

    Args:
      path: The local folder, which is created with the first checkpoint.
      is_writer: Whether this worker writes the folder. Others take part in each save, since reading
        a variable can involve all workers, but discard what they save.
    """

    def __init__(self, path: str, is_writer: bool = True) -> None:
        self.path = path
        self.is_writer = is_writer
        if is_writer:
            finish_interrupted_saves(path)

    def prefix(self, step: int) -> str:
        """Returns the path of the weights of `step`, without suffixes."""
        return os.path.join(self.path, f"ckpt-{step}")

    def steps(self) -> list[int]:
        """Returns the steps of the weights that have an index, in order."""
        return list(complete_checkpoints(self.path))

    def write(
        self,
        step: int,
        save: Callable[[str], None],
        keep: Sequence[int],
        point: str = "checkpoint",
        **entries: Any,
    ) -> None:
        """Writes the checkpoint of a step, then removes others.

        Args:
          step: The global step of the weights.
          save: Writes a checkpoint at the prefix that it receives.
          keep: The steps to keep, `step` included. See `rotate`.
          point: The name under which fault injection knows the record.
          **entries: Further entries of the record.

        Raises:
          StorageError: when a file cannot be written.
        """
        if not self.is_writer:
            with tempfile.TemporaryDirectory(prefix="trainer_kit_worker_") as folder:
                save(os.path.join(folder, f"ckpt-{step}"))
            return

        prefix = self.prefix(step)
        try:
            # The weights are in place before others are removed.
            save(begin_save(prefix))
            files.report_write_point("checkpoint.written", prefix)
            finish_save(prefix, point, **entries)
            self.rotate(keep)
        except (tf.errors.OpError, OSError, StorageError) as error:
            raise fail_save(prefix, error) from error

    def rotate(self, keep: Sequence[int]) -> None:
        """Lists the steps `keep` in the pointer file, then removes other weights with a record."""
        write_pointer(self.path, [self.prefix(step) for step in keep])
        remove_checkpoints_except(self.path, keep)
