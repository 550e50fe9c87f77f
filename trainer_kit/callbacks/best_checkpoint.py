"""KeepBest: exports the weights of the best evaluations, when these are on record."""

from __future__ import annotations

from typing import Any

from trainer_kit.callbacks.base import Callback, Run


class KeepBest(Callback):
    """Has the trainer keep its best weights, on every worker, and adds the best so far to the logs.

    A trainer of its own kind may keep its best in `evaluate`; this one then does nothing.
    """

    chief_only = False
    name = "best_checkpoint"

    def run_begin(self, run: Run) -> None:
        """From now on the run decides when the best is exported."""
        run.trainer.best_is_kept_by_run = True

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Exports the weights if they are among the best."""
        run.trainer.keep_best(logs)

    def run_end(self, run: Run) -> None:
        """The trainer is on its own again."""
        run.trainer.best_is_kept_by_run = False
