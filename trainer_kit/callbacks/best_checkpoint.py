"""KeepBest: exports the weights of the best evaluations, once the ledger has recorded them."""

from __future__ import annotations

from typing import Any

from trainer_kit.callbacks.base import Callback, Run


class KeepBest(Callback):
    """Lets the trainer export its best weights, on every worker, and adds the best metric so far to the logs.

    A trainer whose `keep_best` does nothing may export its best weights in `evaluate`.
    """

    chief_only = False
    name = "best_checkpoint"

    def run_begin(self, run: Run) -> None:
        """Tells the trainer that the run exports the best weights from now on."""
        run.trainer.best_is_kept_by_run = True

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Exports the weights if they are among the best."""
        run.trainer.keep_best(logs)

    def run_end(self, run: Run) -> None:
        """Tells the trainer that it exports its best weights itself again."""
        run.trainer.best_is_kept_by_run = False
