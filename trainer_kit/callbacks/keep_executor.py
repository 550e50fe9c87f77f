"""KeepExecutor: a run keeps to the executor that runtime.executor=auto has chosen before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.process.run_directory import RunDirectory, kept_executor


class KeepExecutor(Callback):
    """Takes the executor of training loops from the manifest of the run, or notes there what the trainer has chosen.

    Only single devices have a choice, so that several workers need not agree.

    Args:
      directory: of the run.
    """

    name = "executor"

    def __init__(self, directory: RunDirectory) -> None:
        self._directory, self._noted = directory, ""

    def run_begin(self, run: Run) -> None:
        """Gives the trainer the executor that the run was begun with."""
        self._noted = kept_executor(self._directory.path) or ""
        if self._noted and run.trainer.executor == "auto":
            run.trainer.executor = self._noted

    def loop_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        """Notes the executor once it is chosen. A run that is killed before this chooses the same one again."""
        del logs
        if run.trainer.executor not in ("auto", self._noted):
            self._noted = run.trainer.executor
            self._directory.keep_executor(self._noted)
