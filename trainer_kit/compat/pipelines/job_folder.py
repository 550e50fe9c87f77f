"""JobFolder: the files of a job, and how far it has trained."""

from __future__ import annotations

import glob
import os
from typing import Any

from trainer_kit import files
from trainer_kit.checkpoint_names import RECORD_SUFFIX, parse_checkpoint_name, parse_step
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.process.run_directory import RunDirectory


class JobFolder:
    """The files in job_dir. Imports no TensorFlow.

    Args:
      job_dir: The folder of the job, a local one.

    Attributes:
      checkpoints_dir: The folder of the run, with its checkpoints.
      logs_dir: The folder of the TensorBoard callback.
      meta_path: The path of job_meta.json.
    """

    def __init__(self, job_dir: str) -> None:
        self.checkpoints_dir = os.path.join(job_dir, "checkpoints")
        self.logs_dir = os.path.join(job_dir, "logs")
        self.meta_path = os.path.join(job_dir, "job_meta.json")

    def last_checkpoint(self) -> str | None:
        """Returns the path of the newest complete checkpoint, without the endings of its files; None if none exists."""
        records = glob.glob(
            os.path.join(glob.escape(self.checkpoints_dir), f"ckpt-*{RECORD_SUFFIX}")
        )
        prefixes = (
            one.removesuffix(RECORD_SUFFIX)
            for one in records
            if parse_checkpoint_name(os.path.basename(one))
        )
        return max(prefixes, key=parse_step, default=None)

    def last_epoch(self) -> int:
        """Returns the number of epochs whose training steps are all in the newest checkpoint."""
        newest, steps = (
            self.last_checkpoint(),
            RunDirectory(self.checkpoints_dir, TrainerConfig()).read_steps_per_epoch(),
        )
        return parse_step(newest) // steps if newest and steps else 0

    def read_meta(self) -> dict[str, Any]:
        """Returns the content of job_meta.json; an empty dict if there is no such file."""
        return files.read_json(self.meta_path) or {}

    def update_meta(self, **values: Any) -> None:
        """Changes values in job_meta.json; leaves the file alone if it has them.

        Raises:
          StorageError: when the file cannot be written.
        """
        before = self.read_meta()
        if (after := {**before, **values}) != before:
            files.write_json(self.meta_path, after)
