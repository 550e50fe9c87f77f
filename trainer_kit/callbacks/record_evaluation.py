"""What the engine does with an evaluation: it exports the best weights, then records the evaluation in the ledger."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.run_history import RunHistory
from trainer_kit.telemetry.report import Writer
from trainer_kit.training.metric_set import to_numpy


class ExportBest(Callback):
    """Exports the weights of an evaluation if they are among the best, and adds the best value so far to its logs.

    It is the first of the callbacks: weights are exported before their evaluation is recorded.

    Args:
      best: The owner of the best checkpoints.
    """

    chief_only = False
    name = "evaluation"

    def __init__(self, best: BestCheckpoints) -> None:
        self._best = best

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Exports the evaluation, unless an earlier process or the trainer has done so; on every worker."""
        done = run.evaluation
        assert done is not None
        if not done.is_replayed:
            if run.trainer.checkpoint_exporter is not None:
                return  # the trainer has exported it, and its logs have the best value
            before = set(run.trainer.validation_set_names) - set(
                done.sets
            )  # which may be in the logs of this step
            own = {name: value for name, value in logs.items() if name not in before}
            self._best.export(run.trainer, own, done.sets)
        self._best.add_best(run.trainer, logs)


class RecordEvaluation(Callback):
    """Records each evaluation in the run's ledger before other callbacks see it; rewinds history, ledger and best.

    Args:
      history: The run's history.
    """

    chief_only = False
    name = "ledger"

    def __init__(self, history: RunHistory) -> None:
        self._history = history

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Appends the evaluation to the ledger, on the chief only."""
        done = run.evaluation
        assert done is not None
        if done.is_replayed or not run.is_chief:
            return
        found = (
            logs if "" in done.sets else {name: logs[name] for name in done.sets if name in logs}
        )
        metrics = tf.nest.map_structure(to_numpy, found)
        path = os.path.relpath(done.checkpoint, run.directory) if done.checkpoint else None
        self._history.ledger.append(done.step, metrics, done.seconds_of_sets or done.seconds, path)

    def rewound(self, run: Run, step: int) -> None:
        """Rewinds history, ledger and best checkpoint to `step`; on every worker."""
        del run
        self._history.rewind(step)


class RecordSidecarEvaluation(Callback):
    """Records each evaluation of a sidecar in the sidecar's ledger, after the evaluation has been reported.

    A sidecar that dies before that evaluates and reports the checkpoint again.

    Args:
      sidecar: The sidecar that evaluates.
      writer: The writer of the reports.
    """

    name = "ledger"

    def __init__(self, sidecar: Sidecar, writer: Writer) -> None:
        self._sidecar, self._writer = sidecar, writer
        self._logs: dict[str, Any] = {}

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Remembers the logs until `boundary_end`."""
        del run
        self._logs = tf.nest.map_structure(to_numpy, dict(logs))

    def boundary_end(self, run: Run) -> None:
        """Appends the evaluation to the ledger."""
        done = run.evaluation
        assert done is not None and done.checkpoint is not None
        self._writer.flush()  # a record never precedes what it records
        self._sidecar.record(
            done.step, self._logs, done.seconds_of_sets or done.seconds, done.checkpoint
        )
