"""KeepChoices: makes a resumed run use what trainer.accumulate_steps=auto chose before its first step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.process.run_directory import RunDirectory, kept_accumulate_steps

_LOG = logging.getLogger(__name__)


class KeepChoices(Callback):
    """Reads the number of micro-batches from the run's manifest, or records there the one that the trainer has chosen.

    Only runs with one worker have a choice, so several workers never have to agree.

    Args:
      directory: The run's directory.
    """

    name = "choices"

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._kept: int | None = None

    def run_begin(self, run: Run) -> None:
        """Gives the trainer the choice that the run started with."""
        self._kept = kept_accumulate_steps(self._directory.path)
        if self._kept is not None and run.trainer.accumulation.steps == "auto":
            run.trainer.accumulation.steps = self._kept
            _LOG.info("trainer.accumulate_steps=auto: %s, with which this run was begun", self._kept)

    def loop_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        """Records the choice once it is made. A run that is killed before that chooses again."""
        del logs
        self._record(run)

    def checkpoint_begin(self, run: Run) -> None:
        """Records the choice before a checkpoint that holds its steps: an interrupted loop has no loop_end."""
        self._record(run)

    def _record(self, run: Run) -> None:
        steps = run.trainer.accumulation.steps
        if steps not in ("auto", self._kept):
            self._kept = steps
            self._directory.keep("accumulate_steps", steps)
