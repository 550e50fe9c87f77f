"""The engine's own work with an evaluation: it exports the best weights, then records it."""

from __future__ import annotations

import os
from typing import Any

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
from trainer_kit.evals.ledger import Ledger
from trainer_kit.evals.run_history import RunHistory
from trainer_kit.telemetry.report import Writer


class ExportBest(Callback):
    """Exports the weights of an evaluation if they are among the best.

    It also adds the best value so far to the logs. It is the first of the callbacks, so weights are
    exported before their evaluation is recorded. Runs eagerly, on the host, on every worker.

    Args:
      best: The owner of the best checkpoints.
    """

    chief_only = False
    name = "evaluation"

    def __init__(self, best: BestCheckpoints) -> None:
        self._best = best

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Exports the evaluation, unless an earlier process or the trainer has done so."""
        evaluation = run.evaluation
        assert evaluation is not None
        trainer = run.trainer
        if not evaluation.is_replayed:
            if trainer.checkpoint_exporter is not None:
                # The trainer has exported it, and its logs contain the best value.
                return
            self._best.export(trainer, evaluation.logs, evaluation.sets)
        self._best.add_best(trainer, logs)


class RecordEvaluation(Callback):
    """Records each evaluation in the run's ledger before other callbacks see it.

    It also rewinds history, ledger and best checkpoint. Runs eagerly, on the host, on every worker.

    Args:
      history: The run's history.
    """

    chief_only = False
    name = "ledger"

    def __init__(self, history: RunHistory) -> None:
        self._history = history

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Appends the evaluation to the ledger, on the chief only."""
        del logs
        evaluation = run.evaluation
        assert evaluation is not None
        if evaluation.is_replayed or not run.is_chief:
            return

        path = None
        if evaluation.checkpoint:
            path = os.path.relpath(evaluation.checkpoint, run.directory)
        seconds = evaluation.seconds_of_sets or evaluation.seconds
        ledger = self._history.ledger
        ledger.append(evaluation.step, evaluation.logs, seconds, path)

    def rewound(self, run: Run, step: int) -> None:
        """Rewinds history, ledger and best checkpoint to `step`."""
        del run
        self._history.rewind(step)


class RecordSidecarEvaluation(Callback):
    """Records each evaluation of a sidecar in the sidecar's ledger, after it was reported.

    A sidecar that dies before the record evaluates and reports the checkpoint again.

    Args:
      ledger: The ledger of the sidecar.
      writer: The writer of the reports.
    """

    name = "ledger"

    def __init__(self, ledger: Ledger, writer: Writer) -> None:
        self._ledger = ledger
        self._writer = writer

    def boundary_end(self, run: Run) -> None:
        """Appends the evaluation to the ledger."""
        evaluation = run.evaluation
        assert evaluation is not None and evaluation.checkpoint is not None
        # A record never precedes what it records.
        self._writer.flush()
        seconds = evaluation.seconds_of_sets or evaluation.seconds
        path = os.path.relpath(evaluation.checkpoint, run.directory)
        self._ledger.append(evaluation.step, evaluation.logs, seconds, path)
