"""Sidecar: evaluates the checkpoints of a training run from another process, and keeps its own ledger and best.

It never writes a file that the trainer owns. What it has evaluated is in its own ledger, so a sidecar that is started
again goes on where the one before ended; a run that goes back for good is followed by way of the run's own ledger.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.evaluation import validation_sets
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.evals.best.exporter import BestCheckpoint
from trainer_kit.evals.best.named_bests import EXPORTERS, BestCheckpoints
from trainer_kit.evals.ledger import Ledger
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.process.run_lock import read_heartbeat, runs
from trainer_kit.process.sidecar_lease import Lease

_LOG = logging.getLogger(__name__)
_SILENT_SECONDS = 20.0  # four beats


def with_chosen_sets(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the config of a sidecar, which evaluates only those of several validation sets that it is told to.

    It keeps the bests of those sets only.
    """
    options, data = config.trainer, validation_sets(config.task)
    names = options.continuous_eval.validation_sets
    if not names:
        return config

    def is_told(metric: str) -> bool:
        return metric.partition("|")[0] not in data.keys() - set(names)

    primary = options.best_checkpoint_eval_metric
    left_out = [primary] if not is_told(primary) else []
    left_out += [best.metric for best in options.best_checkpoints.values() if not is_told(best.metric)]
    if left_out:
        _LOG.info("no best is kept here by %s: other sets are evaluated", ", ".join(dict.fromkeys(left_out)))
    return config.replace(
        task={"validation_data": {name: None for name in data if name not in names}},
        trainer={
            "validation_sets": {name: None for name in options.validation_sets if name not in names},
            "best_checkpoint_eval_metric": primary if is_told(primary) else "",
            "best_checkpoints": {
                name: None for name, best in options.best_checkpoints.items() if not is_told(best.metric)
            },
        },
    )


class Sidecar:
    """What CheckpointWatcher asks about the run, and what becomes of an evaluation.

    Args:
      directory: of the run.
      ledger: of the sidecar.
      best: of the sidecar, if it keeps one.
      summaries: the manager of the sidecar's TensorBoard folder.
      lease: of the sidecar.
      train_steps: at which the run ends, if it does not tell itself.
      step: returns the step that was restored last.
      put_back: exports the best weights that are missing again, from the run's checkpoints.
    """

    def __init__(
        self,
        directory: RunDirectory,
        ledger: Ledger,
        best: BestCheckpoint | BestCheckpoints | None,
        summaries: Any,
        lease: Lease,
        train_steps: int,
        step: Callable[[], int],
        put_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory, self._ledger, self._best, self._lease = directory, ledger, best, lease
        self._summaries, self._train_steps, self._step = summaries, train_steps, step
        self._put_back = put_back
        self._beat: tuple[Any, float] = (None, 0.0)

    def begin(self) -> None:
        """Takes the best and the curves to the last step that is on record."""
        if self.went_back_to() is None:
            self._follow_records(max(self.evaluated(), default=-1))

    def finished(self) -> bool:
        """Whether the run has ended: it says so, at its last step or before, or the last of its steps was restored.

        While a trainer is alive there the run goes on, whatever final.json says: it may have begun again from an
        earlier step, and what says so may be of its life before.
        """
        if self.alive():
            return False
        train_steps = self._directory.train_steps(self._train_steps)  # the run's own, which may be changed and go on
        final = self._directory.read_final()
        if final is not None and (final["step"] >= train_steps or final.get("stopped")):
            return True
        newest = max(complete_checkpoints(self._directory.path), default=-1)  # a step of before is no end of this run
        return 0 <= train_steps <= min(self._step(), newest)

    def alive(self) -> bool:
        """Whether the trainer's heartbeat beats."""
        heartbeat = read_heartbeat(self._directory.path)
        if heartbeat is None or heartbeat["ended"]:
            return False
        now = time.monotonic()
        if heartbeat["beat"] != self._beat[0]:
            self._beat = (heartbeat["beat"], now)
        here = heartbeat["host"] == socket.gethostname()
        return now - self._beat[1] < _SILENT_SECONDS and not (here and not runs(heartbeat["pid"]))

    def trainer(self) -> str:
        """Who trains, or has trained, how far it came and whether it is alive."""
        heartbeat = read_heartbeat(self._directory.path)
        if heartbeat is None:
            return "nobody has trained there (there is no heartbeat.json): is it the right folder?"
        who = f"the trainer ({heartbeat['host']} pid {heartbeat['pid']})"
        if heartbeat["ended"]:
            return f"{who} has ended at step {heartbeat['step']}: {heartbeat['ended']}"
        state = "is" if self.alive() else "is gone, last heard of"
        return f"{who} {state} at step {heartbeat['step']} ({heartbeat['phase']})"

    def went_back_to(self) -> int | None:
        """Follows the run when it has gone back for good: what was evaluated for later steps counts no more."""
        # The best goes back before the ledger notes it: one that dies in between does both when it is started again.
        step = self._ledger.follow(self._directory.training_ledger, before=self._rewind_best)
        if step is not None:
            self._follow_records(step)
        return step

    def last_metrics(self) -> dict[str, Any]:
        """Returns the metrics of the last step on record; {} if there is none."""
        evaluated = self._ledger.evaluated()
        return evaluated[max(evaluated)] if evaluated else {}

    def evaluated(self) -> set[int]:
        """Returns the steps on record, of this data and this config."""
        return set(self._ledger.evaluated())

    def record(self, step: int, logs: Mapping[str, Any], seconds: float | Mapping[str, float], checkpoint: str) -> None:
        """Notes an evaluation, when it was reported: a sidecar that dies in between reports it once more."""
        self._ledger.append(step, logs, seconds, os.path.relpath(checkpoint, self._directory.path))

    def need(self, after: int | None, reads: int | None) -> None:
        """Keeps the run from removing checkpoints that are still needed."""
        self._lease.need(after, reads, self._ledger.lineage)

    def _rewind_best(self, step: int) -> None:
        if isinstance(self._best, EXPORTERS):
            self._best.rewind(step)

    def _follow_records(self, step: int) -> None:
        if hasattr(self._summaries, "resume"):
            self._summaries.resume(step)
        if isinstance(self._best, EXPORTERS):
            self._best.resume(None, self._ledger.counting())
        self._put_back()
