"""RunHistory: keeps metrics.jsonl, TensorBoard, the ledger and the best checkpoint in step with the checkpoints.

A run that was killed resumes from its last checkpoint and reports the steps after that checkpoint
again. A run that rewinds (a rollback, --from_step) reports new steps in place of the old ones. In
both cases one history remains.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

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

_LOG = logging.getLogger(__name__)


class RunHistory:
    """Rewinds history, curves, ledger and best checkpoint to the step that training resumes from.

    Args:
      ledger: The ledger of the run's own evaluations.
      history_writer: The writer of metrics.jsonl; None on workers that are not the chief.
      summaries: The managers of TensorBoard's folders for training and validation; those without a
        method `resume` are left alone.
      best: The owner of the best checkpoints; None if the run keeps none.
      background_writer: The writer of all reports; None: there are none to wait for.
      checkpoint_folder: The folder of the run's checkpoints, whose records contain the
        `read_extent` of their steps; "": there is none to compare with.
    """

    def __init__(
        self,
        ledger: Ledger,
        history_writer: JsonLinesWriter | None,
        summaries: Sequence[Any],
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
        """Writes all reports to the disk, before a checkpoint; returns `extent`."""
        if self._background_writer is not None:
            self._background_writer.flush_threaded_writers()
        return self.read_extent(step)

    def read_extent(self, step: int) -> dict[str, list[int]]:
        """Returns how much history and ledger hold up to `step`, for the record of its checkpoint.

        Returns:
          "history": [the last step, bytes up to it]; "evaluations": [their number before `step`,
          the last step]. {} on workers that are not the chief.
        """
        if self._history_writer is None:
            return {}
        return {
            "history": list(read_extent(self._history_writer.path, step)),
            "evaluations": list(self.ledger.read_extent(step)),
        }

    def begin_or_rewind(self, step: int, manager: Any) -> None:
        """Rewinds all to the step that training resumes from; permanently if the run goes back by request.

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
        saved = [
            item["checkpoint"]
            for item in active_records(self.ledger.records())
            if item.get("checkpoint")
        ]
        if is_new and saved:
            raise StorageError(
                f"{self.ledger.path} names the checkpoint {saved[-1]}, but the folder holds none;"
                " restore one from a backup, or start again from step 0 with --from_step=0"
            )
        last = (
            max(
                (line["step"] for line in read_active_history(self._history_writer.path)), default=0
            )
            if self._history_writer
            else 0
        )
        if is_new and last and self._history_writer is not None:
            _LOG.warning(
                "%s has reports up to step %d, but there is no checkpoint: the run begins at"
                " step 0",
                self._history_writer.path,
                last,
            )
        if is_new and self._history_writer is not None and self._sidecars_know_lost_checkpoints():
            _LOG.warning(
                "%s names evaluations of checkpoints that are gone; sidecars forget them, and the"
                " run begins at step 0",
                self.ledger.path,
            )
            self.ledger.rewind(0)  # a sidecar that still runs reads this
        if not is_new:
            self._warn_of_loss(step)
        self.resume(step)

    def _warn_of_loss(self, step: int) -> None:
        """Warns when history or ledger hold less than when the checkpoint of `step` was saved."""
        if self._history_writer is None or not self._checkpoint_folder:
            return
        record = read_commit_record(os.path.join(self._checkpoint_folder, f"ckpt-{step}")) or {}
        before = record.get("recorded")
        if not isinstance(before, dict):
            return
        now = self.read_extent(step)
        (last, size), (last_now, size_now) = _parse_extent(before, "history"), now["history"]
        if size_now < size:
            left = (
                f"what is left ends at step {last_now}"
                if last_now < last
                else f"{size_now:,} bytes are left"
            )
            _LOG.warning(
                "%s has lost reports: it held %s bytes up to step %d when ckpt-%d was saved,"
                " and %s",
                *(
                    self._history_writer.path,
                    f"{size:,}",
                    last,
                    step,
                    left if size_now else "nothing is left",
                ),
            )
        (count, last), (count_now, last_now) = (
            _parse_extent(before, "evaluations"),
            now["evaluations"],
        )
        if count_now < count:
            left = f"{count_now} are left, up to step {last_now}" if count_now else "none is left"
            _LOG.warning(
                "%s has lost evaluations: it held %d before step %d, up to step %d, and %s",
                *(self.ledger.path, count, step, last, left),
            )

    def _sidecars_know_lost_checkpoints(self) -> bool:
        """Whether a sidecar has evaluated, or is evaluating, a checkpoint that the run has not taken back itself."""
        others = active_records(read_sidecar_records(self.ledger.path))
        lineages = [item["lineage"] for item in others if item["step"] > 0]
        lineages += read_lineages_in_evaluation(os.path.dirname(self.ledger.path))
        return max(lineages, default=-1) >= self.ledger.lineage

    def resume(self, step: int) -> None:
        """Sets all to `step`; reports of later steps are superseded and come again."""
        self._resume_reports(step)
        if self.best is not None:
            self.best.resume(step, self.ledger.get_active_evaluations())

    def _resume_reports(self, step: int) -> None:
        """Sets history and curves to `step`."""
        if self._history_writer is not None:
            if self._background_writer is not None:
                self._background_writer.flush()
            self._history_writer.resume(step)
            evaluated = (
                step if self.find_recorded_sets(step) else step - 1
            )  # a missing evaluation is repeated
            for manager, last in zip(self._summaries, (step, evaluated), strict=True):
                if hasattr(manager, "resume"):
                    manager.resume(last)

    def rewind(self, step: int) -> None:
        """Goes back to `step` permanently: later results, the best checkpoint included, no longer count."""
        if (
            self.best is not None
        ):  # before the ledger, so that no later weights remain without a record
            self.best.rewind(step, self.ledger.get_active_evaluations())
        if self._history_writer is not None:
            self.ledger.rewind(step)
        self._resume_reports(step)

    def get_recorded_logs(self, step: int) -> dict[str, Any]:
        """Returns the metrics of the recorded evaluations of `step` by validation set; a single set is called ""."""
        sets, metrics = self.find_recorded_sets(step), self.metrics_at(step)
        return {name: metrics.get(name, {}) if name else metrics for name in sets}

    def metrics_at(self, step: int) -> dict[str, Any]:
        """Returns the metrics of the recorded evaluation of `step`; {} if there is none."""
        found: dict[str, Any] = {}
        for record in active_records(self.ledger.records()):
            if record["step"] == step:
                found.update(record["metrics"])
        return found

    def find_recorded_sets(self, step: int) -> set[str]:
        """Returns the validation sets whose evaluation of `step` is in the ledger and the history.

        A single set is called "".
        """
        if self._history_writer is not None and not has_report(
            self._history_writer.path, "validation", step
        ):
            return set()
        return self.ledger.find_recorded_sets(step)


def _parse_extent(extents: dict[str, Any], name: str) -> list[int]:
    """Returns the two numbers of an extent; [0, 0], so that nothing seems lost, if the record is damaged."""
    value = extents.get(name)
    whole = (
        isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)
    )
    return list(value) if isinstance(value, list) and whole else [0, 0]
