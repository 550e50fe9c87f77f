"""Sidecar: evaluates the checkpoints of a training run from another process.

It has its own ledger and best checkpoint, and never writes a file of the trainer. Its ledger
contains its evaluations, so a restarted sidecar continues where the previous one ended. It follows
rewinds of the run by reading the run's ledger.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.evaluation import get_validation_sets
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.multitask import MultiTaskConfig
from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
from trainer_kit.evals.ledger import Ledger
from trainer_kit.process.run_directory import RunDirectory, has_begun
from trainer_kit.process.run_lock import is_process_alive, read_heartbeat
from trainer_kit.process.sidecar_lease import Lease

_LOG = logging.getLogger(__name__)
# The time of four beats
_SILENT_SECONDS = 20.0


def select_validation_sets(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the config of a sidecar, reduced to the validation sets that it evaluates.

    These are the sets of trainer.continuous_eval.validation_sets. Best checkpoints by metrics of
    other sets are left out.
    """
    options = config.trainer
    data = get_validation_sets(config.task)
    names = options.continuous_eval.validation_sets
    if not names:
        return config

    left_out_names = data.keys() - set(names)

    def is_evaluated(metric: str) -> bool:
        set_name = metric.partition("|")[0]
        return set_name not in left_out_names

    primary = options.best_checkpoint_eval_metric
    metrics = [primary]
    for best in options.best_checkpoints.values():
        metrics.append(best.metric)
    unevaluated_metrics = [metric for metric in metrics if not is_evaluated(metric)]
    if unevaluated_metrics:
        _LOG.info(
            "no best checkpoint is kept by %s: this sidecar does not evaluate that data",
            ", ".join(dict.fromkeys(unevaluated_metrics)),
        )

    # An entry with the value None is removed.
    task: dict[str, Any] = {"validation_data": {name: None for name in data if name not in names}}
    if isinstance(config.task, MultiTaskConfig):
        task = {"evaluated_tasks": names}
    removed_sets = {name: None for name in options.validation_sets if name not in names}
    removed_best_checkpoints = {
        name: None
        for name, best in options.best_checkpoints.items()
        if not is_evaluated(best.metric)
    }
    return config.replace(
        task=task,
        trainer={
            "validation_sets": removed_sets,
            "best_checkpoint_eval_metric": primary if is_evaluated(primary) else "",
            "best_checkpoints": removed_best_checkpoints,
        },
    )


class Sidecar:
    """Answers CheckpointWatcher's questions about the run.

    Args:
      directory: The run's folder.
      ledger: The sidecar's ledger.
      best: The owner of the sidecar's best checkpoints, or None if it keeps none.
      summaries: The manager of the sidecar's TensorBoard folder. One without a method `resume` is
        left alone.
      lease: The sidecar's lease.
      train_steps: The value of trainer.train_steps that counts if the run's folder does not name
        it.
      global_step: The variable of the step that was restored last. None if a subclass has another
        `get_reached_step`.
    """

    def __init__(
        self,
        directory: RunDirectory,
        ledger: Ledger,
        best: BestCheckpoints | None,
        summaries: object,
        lease: Lease,
        train_steps: int | str,
        global_step: tf.Variable | None = None,
    ) -> None:
        self._directory = directory
        self._ledger = ledger
        self._best = best
        self._lease = lease
        self._summaries = summaries
        self._train_steps = train_steps
        self._global_step = global_step
        self._last_heartbeat: tuple[Any, float] = (None, 0.0)
        # Whether a checkpoint and a manifest were seen
        self._has_begun = False

    def begin(self) -> None:
        """Sets the best checkpoint and the curves to the last recorded step."""
        if self.poll_rewind() is None:
            self._resume_best_and_summaries(max(self.get_evaluated_steps(), default=-1))

    def is_finished(self) -> bool:
        """Whether the run has ended.

        It has if final.json says so, or if the checkpoint of its last step was restored. While a
        trainer is alive, the run continues whatever final.json says, since it may have started
        again from an earlier step, and the file may be from before that.

        Raises:
          StorageError: when the folder of a run that has saved a checkpoint was moved or removed.
        """
        if self._has_begun:
            self._directory.check_manifest()
        else:
            self._has_begun = has_begun(self._directory.path) and os.path.exists(
                self._directory.manifest_path
            )
        if self.is_alive():
            return False

        # The number is that of the run, which a restart may change.
        last_step = self._directory.read_last_step(self._train_steps)
        final = self._directory.read_final()
        if final is not None and (
            last_step is None or final["step"] >= last_step or final.get("stopped")
        ):
            return True

        # The restored step may be superseded.
        newest_step = max(complete_checkpoints(self._directory.path), default=-1)
        return last_step is not None and last_step <= min(self.get_reached_step(), newest_step)

    def get_reached_step(self) -> int:
        """Returns the step of the checkpoint that was restored last."""
        assert self._global_step is not None
        return int(self._global_step.numpy())

    def is_alive(self) -> bool:
        """Whether the trainer's heartbeat beats."""
        heartbeat = read_heartbeat(self._directory.path)
        if heartbeat is None or heartbeat["ended"]:
            return False

        now = time.monotonic()
        if heartbeat["beat"] != self._last_heartbeat[0]:
            self._last_heartbeat = (heartbeat["beat"], now)
        if now - self._last_heartbeat[1] >= _SILENT_SECONDS:
            return False
        is_on_this_host = heartbeat["host"] == socket.gethostname()
        return not is_on_this_host or is_process_alive(heartbeat["pid"])

    def describe_trainer(self) -> str:
        """Describes the trainer: its host and pid, its step, and whether it is alive."""
        heartbeat = read_heartbeat(self._directory.path)
        if heartbeat is None:
            return (
                "no run has begun there (heartbeat.json is missing); "
                "if one should have, check the folder"
            )
        trainer = f"the trainer ({heartbeat['host']} pid {heartbeat['pid']})"
        if heartbeat["ended"]:
            return f"{trainer} ended at step {heartbeat['step']}: {heartbeat['ended']}"
        state = "is alive" if self.is_alive() else "is gone"
        return (
            f"{trainer} {state}; "
            f"its last heartbeat was at step {heartbeat['step']} ({heartbeat['phase']})"
        )

    def poll_rewind(self) -> int | None:
        """Follows a rewind of the run, after which evaluations of later steps no longer count.

        Returns the step that the run went back to, or None if there is no new rewind.
        """
        # The best is rewound before the ledger, so that a sidecar that dies in between repeats both
        # at its next start.
        step = self._ledger.follow(
            self._directory.training_ledger_path, before_rewind=self._rewind_best
        )
        if step is not None:
            self._resume_best_and_summaries(step)
        return step

    def last_metrics(self) -> dict[str, Any]:
        """Returns the metrics of the last recorded step, or {} if there is none."""
        metrics_by_step = self._ledger.get_metrics_by_step()
        if not metrics_by_step:
            return {}
        return metrics_by_step[max(metrics_by_step)]

    def get_evaluated_steps(self) -> set[int]:
        """Returns the recorded steps for this data and config."""
        return set(self._ledger.get_metrics_by_step())

    def protect_checkpoints(self, after_step: int | None, reading_step: int | None) -> None:
        """Keeps the run from removing checkpoints.

        Args:
          after_step: Checkpoints after this step are kept. None keeps none of them.
          reading_step: The checkpoint of this step is kept. None keeps none.
        """
        self._lease.protect_checkpoints(after_step, reading_step, self._ledger.lineage)

    def _rewind_best(self, step: int) -> None:
        if self._best is not None:
            self._best.rewind(step, self._ledger.get_active_evaluations())

    def _resume_best_and_summaries(self, step: int) -> None:
        if hasattr(self._summaries, "resume"):
            self._summaries.resume(step)
        if self._best is not None:
            self._best.resume(None, self._ledger.get_active_evaluations())
