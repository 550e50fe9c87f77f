"""KeepChoices: makes a resumed run use what values `auto` of its config chose before its first step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.process.run_directory import RunDirectory, kept_accumulate_steps, kept_executor

_LOG = logging.getLogger(__name__)
EXECUTOR, ACCUMULATE_STEPS = "runtime.executor", "trainer.accumulate_steps"
_READ = {EXECUTOR: kept_executor, ACCUMULATE_STEPS: kept_accumulate_steps}


class KeepChoices(Callback):
    """Reads choices from the run's manifest, or records there those that the trainer has made.

    Only runs with one worker have a choice, so several workers never have to agree.

    Args:
      directory: The run's directory.
      fields: Which of EXECUTOR and ACCUMULATE_STEPS are `auto` in the config.
    """

    name = "choices"

    def __init__(self, directory: RunDirectory, fields: Sequence[str]) -> None:
        self._directory, self._fields = directory, fields
        self._kept: dict[str, Any] = {}

    def run_begin(self, run: Run) -> None:
        """Gives the trainer the choices that the run started with."""
        for field in self._fields:
            kept = self._kept[field] = _READ[field](self._directory.path)
            if kept is not None and _chosen(run, field) == "auto":
                setattr(*_place(run, field), kept)
                _LOG.info("%s=auto: %s, with which this run was begun", field, kept)

    def loop_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        """Records choices once they are made. A run that is killed before that chooses again."""
        del logs
        self._record(run)

    def checkpoint_begin(self, run: Run) -> None:
        """Records choices before a checkpoint that holds their steps: an interrupted loop has no loop_end."""
        self._record(run)

    def _record(self, run: Run) -> None:
        for field in self._fields:
            chosen = _chosen(run, field)
            if chosen not in ("auto", self._kept.get(field)):
                self._kept[field] = chosen
                self._directory.keep(field.rpartition(".")[2], chosen)


def _place(run: Run, field: str) -> tuple[Any, str]:
    """Returns the object that has a choice, and its attribute."""
    return (run.trainer, "executor") if field == EXECUTOR else (run.trainer.accumulation, "steps")


def _chosen(run: Run, field: str) -> Any:
    return getattr(*_place(run, field))
