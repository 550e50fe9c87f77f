"""KeepExecutor: makes a resumed run use the executor that runtime.executor=auto chose before its first step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.process.run_directory import RunDirectory, kept_executor

_LOG = logging.getLogger(__name__)


class KeepExecutor(Callback):
    """Reads the executor of training loops from the run's manifest, or records there the one that the trainer chose.

    Only runs on a single device have a choice, so several workers never have to agree.

    Args:
      directory: The run's directory.
    """

    name = "executor"

    def __init__(self, directory: RunDirectory) -> None:
        self._directory, self._noted = directory, ""

    def run_begin(self, run: Run) -> None:
        """Sets the trainer's executor to the one that the run started with."""
        self._noted = kept_executor(self._directory.path) or ""
        if self._noted and run.trainer.executor == "auto":
            run.trainer.executor = self._noted
            _LOG.info("runtime.executor=auto: %s, with which this run was begun", self._noted)

    def loop_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        """Records the executor once it is chosen. A run that is killed before that chooses the same one again."""
        del logs
        self._record(run)

    def checkpoint_begin(self, run: Run) -> None:
        """Records the executor before a checkpoint that holds its steps: an interrupted loop has no loop_end."""
        self._record(run)

    def _record(self, run: Run) -> None:
        if run.trainer.executor not in ("auto", self._noted):
            self._noted = run.trainer.executor
            self._directory.keep_executor(self._noted)
