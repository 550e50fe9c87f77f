"""KeepAccumulation: makes a resumed run keep the number that trainer.accumulate_steps=auto has chosen."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.process.run_directory import RunDirectory, kept_accumulate_steps

_LOG = logging.getLogger(__name__)


class KeepAccumulation(Callback):
    """Reads the number of micro-batches from the run's manifest, or records there the one that the trainer chose.

    Only runs with one worker have a choice.

    Args:
      directory: The run's directory.
    """

    name = "accumulation"

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._kept: int | None = None

    def run_begin(self, run: Run) -> None:
        """Sets the trainer's number of micro-batches to the one that the run started with."""
        self._kept = kept_accumulate_steps(self._directory.path)
        if self._kept is not None and run.trainer.accumulation.steps == "auto":
            run.trainer.accumulation.steps = self._kept
            _LOG.info("trainer.accumulate_steps=auto: %d, with which this run was begun", self._kept)

    def loop_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        """Records the number once it is chosen. A run that is killed before that chooses again."""
        del logs
        self._record(run)

    def checkpoint_begin(self, run: Run) -> None:
        """Records the number before the first checkpoint, also that of a loop that was interrupted."""
        self._record(run)

    def _record(self, run: Run) -> None:
        if run.trainer.accumulation.steps not in ("auto", self._kept):
            self._kept = int(run.trainer.accumulation.steps)
            self._directory.keep_accumulate_steps(self._kept)
