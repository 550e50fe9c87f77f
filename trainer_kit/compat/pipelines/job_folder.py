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
        """Returns the path of the newest complete checkpoint, without the endings of its files.

        None if no checkpoint exists.
        """
        # The record is written last: without it a checkpoint is not complete.
        folder = glob.escape(self.checkpoints_dir)
        pattern = os.path.join(folder, f"ckpt-*{RECORD_SUFFIX}")
        prefixes = []
        for record_path in glob.glob(pattern):
            name = os.path.basename(record_path)
            if parse_checkpoint_name(name):
                prefix = record_path.removesuffix(RECORD_SUFFIX)
                prefixes.append(prefix)
        return max(prefixes, key=parse_step, default=None)

    def last_epoch(self) -> int:
        """Returns the number of epochs whose training steps are all in the newest checkpoint."""
        checkpoint = self.last_checkpoint()
        directory = RunDirectory(self.checkpoints_dir, TrainerConfig())
        epoch_length = directory.read_steps_per_epoch()
        if not checkpoint or not epoch_length:
            return 0

        # A checkpoint may be one inside an epoch.
        step = parse_step(checkpoint)
        return step // epoch_length

    def read_meta(self) -> dict[str, Any]:
        """Returns the content of job_meta.json. An empty dict if there is no such file."""
        return files.read_json(self.meta_path) or {}

    def update_meta(self, **values: Any) -> None:
        """Changes values in job_meta.json. Leaves the file alone if it has them.

        Raises:
          StorageError: When the file cannot be written.
        """
        meta = self.read_meta()
        new_meta = {**meta, **values}
        if new_meta != meta:
            files.write_json(self.meta_path, new_meta)
