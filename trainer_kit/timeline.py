"""Timeline: what a run has told, its history, curves, evaluations and best, kept in step with its checkpoints.

A run that was killed goes on from its last checkpoint and tells the steps after it again; a run that goes back for
good (a rollback, --from_step) tells others in their place. Either way there is one history.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from trainer_kit.checkpoints.best import BestCheckpoint
from trainer_kit.checkpoints.bests import EXPORTERS, BestCheckpoints
from trainer_kit.checkpoints.ledger import Ledger, active_records
from trainer_kit.errors import StorageError
from trainer_kit.telemetry.history import JsonLinesWriter, active_history, reported

_LOG = logging.getLogger(__name__)


class Timeline:
    """Takes all that a run tells to the step that it goes on from.

    Args:
      ledger: of the run's own evaluations.
      history: metrics.jsonl; None on workers that are not the chief, which only follow.
      summaries: managers of TensorBoard's folders, of training and of validation; those without a method `resume` are
        left alone.
      best: keeps the best checkpoint, if any.
      flush: has all that was told so far written.
      put_back: given the step of the checkpoint that the run goes on from, exports best weights that are missing again.
    """

    def __init__(
        self,
        ledger: Ledger,
        history: JsonLinesWriter | None,
        summaries: Sequence[Any],
        best: BestCheckpoint | BestCheckpoints | None,
        flush: Callable[[], None] = lambda: None,
        put_back: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.ledger = ledger
        self._history, self._best, self._summaries, self._flush = history, best, summaries, flush
        self._put_back = put_back

    def begin(self, step: int, anew: bool) -> None:
        """Takes all to the step that a run begins at, or goes on from.

        Args:
          step: of the checkpoint that was restored.
          anew: whether there was none.

        Raises:
          StorageError: when there is none although the ledger tells of one that was saved.
        """
        saved = [item["checkpoint"] for item in active_records(self.ledger.records()) if item.get("checkpoint")]
        if anew and saved:
            raise StorageError(
                f"{self.ledger.path} tells of a checkpoint, {saved[-1]}, but there is none in the folder; restore one "
                "from a backup, or start again from step 0 with --from_step=0"
            )
        told = max((line["step"] for line in active_history(self._history.path)), default=0) if self._history else 0
        if anew and told and self._history is not None:
            _LOG.warning(
                "%s tells of step %d, but there is no checkpoint: the run begins at step 0", self._history.path, told
            )
        self.resume(step)
        if not anew:
            self._put_back(step)

    def resume(self, step: int) -> None:
        """Takes all to `step`; what was told for later steps is superseded, and comes again."""
        if self._history is not None:
            self._flush()
            self._history.resume(step)
            evaluated = step if self.recorded_sets(step) else step - 1  # what is missing comes once more
            for manager, last in zip(self._summaries, (step, evaluated), strict=True):
                if hasattr(manager, "resume"):
                    manager.resume(last)
        if isinstance(self._best, EXPORTERS):
            self._best.resume(step, self.ledger.counting())

    def rewind(self, step: int) -> None:
        """Goes back to `step` for good: what was found later counts no more, the best included."""
        if isinstance(self._best, EXPORTERS):
            self._best.rewind(step)  # before the ledger, by which later weights would be some that no record tells of
        if self._history is not None:
            self.ledger.rewind(step)
        self.resume(step)
        self._put_back(step)

    def metrics_at(self, step: int) -> dict[str, Any]:
        """Returns the metrics of the evaluation of `step` that is on record; {} if there is none."""
        found: dict[str, Any] = {}
        for record in active_records(self.ledger.records()):
            if record["step"] == step:
                found.update(record["metrics"])
        return found

    def recorded_sets(self, step: int) -> set[str]:
        """Returns the validation sets whose evaluation of `step` is in the ledger, if the history has it too.

        A single set is called "".
        """
        if self._history is not None and not reported(self._history.path, "validation", step):
            return set()
        return self.ledger.recorded_sets(step)
