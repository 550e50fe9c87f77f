"""RunHistory: keeps the reports of a run in step with its checkpoints.

These are metrics.jsonl, TensorBoard, the ledger and the best checkpoint. A run that was killed
resumes from its last checkpoint and reports the steps after that checkpoint again. A run that
rewinds (a rollback, --from_step) reports new steps in place of the old ones. In both cases one
history remains.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer_kit.checkpoints.commit import read_commit_record
from trainer_kit.errors import StorageError
from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
from trainer_kit.evals.ledger import Ledger, active_records, read_sidecar_records
from trainer_kit.process.sidecar_lease import read_lineages_in_evaluation
from trainer_kit.telemetry.background_writer import BackgroundWriter
from trainer_kit.telemetry.metrics_jsonl import (
    JsonLinesWriter,
    has_report,
    read_active_history,
    read_extent,
)

if TYPE_CHECKING:
    from trainer_kit.checkpoints.manager import CheckpointManager

_LOG = logging.getLogger(__name__)


class RunHistory:
    """Rewinds history, curves, ledger and best checkpoint to the step that training resumes from.

    Args:
      ledger: The ledger of the run's own evaluations.
      history_writer: The writer of metrics.jsonl, or None on workers that are not the chief.
      summaries: The managers of TensorBoard's folders for training and validation. Those without a
        method `resume` are left alone.
      best: The owner of the best checkpoints, or None if the run keeps none.
      background_writer: The writer of all reports, or None if there are none to wait for.
      checkpoint_folder: The folder of the run's checkpoints, whose records contain the
        `read_extent` of their steps. "" if there is none to compare with.
    """

    def __init__(
        self,
        ledger: Ledger,
        history_writer: JsonLinesWriter | None,
        summaries: Sequence[object],
        best: BestCheckpoints | None,
        background_writer: BackgroundWriter | None = None,
        checkpoint_folder: str = "",
    ) -> None:
        self.ledger = ledger
        self.best = best
        self._checkpoint_folder = checkpoint_folder
        self._history_writer = history_writer
        self._summaries = summaries
        self._background_writer = background_writer

    def flush_to_disk(self, step: int) -> dict[str, Any]:
        """Writes all reports to the disk, before a checkpoint, and returns `read_extent`."""
        if self._background_writer is not None:
            self._background_writer.flush_threaded_writers()
        return self.read_extent(step)

    def read_extent(self, step: int) -> dict[str, list[int]]:
        """Returns how much history and ledger contain up to `step`.

        The record of the checkpoint of `step` contains it.

        Returns:
          A dict of "history", which is [the last step, bytes up to it], and "evaluations", which is
          [their number before `step`, the last step]. {} on workers that are not the chief.
        """
        if self._history_writer is None:
            return {}
        return {
            "history": list(read_extent(self._history_writer.path, step)),
            "evaluations": list(self.ledger.read_extent(step)),
        }

    def begin_or_rewind(self, step: int, manager: CheckpointManager) -> None:
        """Rewinds all to the step that training resumes from.

        It does so permanently if the run goes back by request.

        Args:
          step: The step of the restored checkpoint.
          manager: The CheckpointManager that restored it.
        """
        if manager.rewind_step is None:
            self.begin(step, is_new=manager.is_new_run)
        else:
            self.rewind(step)
            manager.finish_rewind()

    def begin(self, step: int, is_new: bool) -> None:
        """Rewinds all to the step that a run starts at or resumes from.

        Args:
          step: The step of the restored checkpoint.
          is_new: Whether there was no checkpoint to restore.

        Raises:
          StorageError: when there is no checkpoint although the ledger names a saved one.
        """
        saved_checkpoints = [
            record["checkpoint"]
            for record in active_records(self.ledger.records())
            if record.get("checkpoint")
        ]
        if is_new and saved_checkpoints:
            raise StorageError(
                f"{self.ledger.path} names the checkpoint {saved_checkpoints[-1]}, "
                "but the folder holds none; "
                "restore one from a backup, or start again from step 0 with --from_step=0"
            )

        last_step = 0
        if self._history_writer:
            lines = read_active_history(self._history_writer.path)
            last_step = max((line["step"] for line in lines), default=0)
        if is_new and last_step and self._history_writer is not None:
            _LOG.warning(
                "%s has reports up to step %d, but there is no checkpoint: "
                "the run begins at step 0",
                self._history_writer.path,
                last_step,
            )

        if is_new and self._history_writer is not None:
            # A sidecar may have evaluated a checkpoint that the run has not taken back itself, or
            # may be evaluating one.
            records = active_records(read_sidecar_records(self.ledger.path))
            lineages = [record["lineage"] for record in records if record["step"] > 0]
            lineages += read_lineages_in_evaluation(os.path.dirname(self.ledger.path))
            if max(lineages, default=-1) >= self.ledger.lineage:
                _LOG.warning(
                    "%s names evaluations of checkpoints that are gone; "
                    "sidecars forget them, and the run begins at step 0",
                    self.ledger.path,
                )
                # A sidecar that still runs reads this.
                self.ledger.rewind(0)

        if not is_new:
            self._warn_of_loss(step)
        self.resume(step)

    def _warn_of_loss(self, step: int) -> None:
        """Warns when history or ledger contain less than when `step` was saved."""
        if self._history_writer is None or not self._checkpoint_folder:
            return
        prefix = os.path.join(self._checkpoint_folder, f"ckpt-{step}")
        record = read_commit_record(prefix) or {}
        saved_extent = record.get("recorded")
        if not isinstance(saved_extent, dict):
            return

        extent = self.read_extent(step)
        saved_last, saved_size = _parse_extent(saved_extent, "history")
        _, size = extent["history"]
        if size < saved_size:
            _LOG.warning(
                "%s has lost reports: it held %d bytes up to step %d when ckpt-%d was saved, and"
                " now %d bytes",
                self._history_writer.path,
                saved_size,
                saved_last,
                step,
                size,
            )

        saved_count, saved_last = _parse_extent(saved_extent, "evaluations")
        count, _ = extent["evaluations"]
        if count < saved_count:
            _LOG.warning(
                "%s has lost evaluations: it held %d before step %d, up to step %d, and now %d",
                self.ledger.path,
                saved_count,
                step,
                saved_last,
                count,
            )

    def resume(self, step: int) -> None:
        """Sets all to `step`. Reports of later steps are superseded and come again."""
        self._resume_reports(step)
        if self.best is not None:
            self.best.resume(step, self.ledger.get_active_evaluations())

    def _resume_reports(self, step: int) -> None:
        """Sets history and curves to `step`."""
        if self._history_writer is not None:
            if self._background_writer is not None:
                self._background_writer.flush()
            self._history_writer.resume(step)

            # A missing evaluation is repeated.
            evaluated_step = step if self.find_recorded_sets(step) else step - 1
            last_steps = (step, evaluated_step)
            for manager, last_step in zip(self._summaries, last_steps, strict=True):
                if hasattr(manager, "resume"):
                    manager.resume(last_step)

    def rewind(self, step: int) -> None:
        """Goes back to `step` permanently.

        Later results, the best checkpoint included, no longer count.
        """
        # The best comes before the ledger, so that no later weights remain without a record.
        if self.best is not None:
            self.best.rewind(step, self.ledger.get_active_evaluations())
        if self._history_writer is not None:
            self.ledger.rewind(step)
        self._resume_reports(step)

    def get_recorded_logs(self, step: int) -> dict[str, Any]:
        """Returns the metrics of the recorded evaluations of `step` by validation set.

        A single set is called "".
        """
        sets = self.find_recorded_sets(step)
        metrics = self.metrics_at(step)
        return {name: metrics.get(name, {}) if name else metrics for name in sets}

    def metrics_at(self, step: int) -> dict[str, Any]:
        """Returns the metrics of the recorded evaluation of `step`, or {} if there is none."""
        metrics: dict[str, Any] = {}
        for record in active_records(self.ledger.records()):
            if record["step"] == step:
                metrics.update(record["metrics"])
        return metrics

    def find_recorded_sets(self, step: int) -> set[str]:
        """Returns the validation sets whose evaluation of `step` is in the ledger and the history.

        A single set is called "".
        """
        if self._history_writer is not None and not has_report(
            self._history_writer.path, "validation", step
        ):
            return set()
        return self.ledger.find_recorded_sets(step)


def _parse_extent(extents: Mapping[str, object], name: str) -> list[int]:
    """Returns the two numbers of an extent.

    If the record is damaged, they are [0, 0], so that nothing seems lost.
    """
    value = extents.get(name)
    if not isinstance(value, list) or len(value) != 2:
        return [0, 0]
    if not all(type(number) is int for number in value):
        return [0, 0]
    return list(value)
