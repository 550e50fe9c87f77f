"""ReportWriters: where the numbers of a run go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.telemetry.background_writer import BackgroundWriter
from trainer_kit.telemetry.metrics_jsonl import JsonLinesWriter
from trainer_kit.telemetry.report import Writer
from trainer_kit.telemetry.tensorboard import SummaryManager, TensorBoardWriter
from trainer_kit.telemetry.time_ledger import TimeLedger


@dataclass(frozen=True)
class ReportWriters:
    """Where a run's numbers go.

    Attributes:
      writer: takes a Report after each loop and evaluation; writes in a thread.
      train_summaries, eval_summaries: for TensorBoard, also for the task's own tf.summary calls.
      history: metrics.jsonl; None for runs that do not train, and on workers that are not the chief.
      times: what the run spends its time on.
    """

    writer: BackgroundWriter
    train_summaries: Any
    eval_summaries: Any
    history: JsonLinesWriter | None
    times: TimeLedger = field(default_factory=TimeLedger)

    @classmethod
    def open(
        cls,
        directory: RunDirectory,
        *,
        chief: bool = True,
        trains: bool = True,
        save_summary: bool = True,
        console: Writer | None = None,
        summary_managers: tuple[Any, Any] = (None, None),
        times: TimeLedger | None = None,
    ) -> ReportWriters:
        """Opens all that a run reports to; on a worker that is not the chief, next to nothing.

        Args:
          directory: of the run.
          chief: whether this process writes the run's files.
          trains: whether there will be a history.
          save_summary: whether TensorBoard summaries are written.
          console: where progress is shown; None: nowhere.
          summary_managers: of the summaries of training and of validation, in place of our own.
          times: counts what the run spends its time on; None: begins with this call.
        """
        folders = (directory.train_summaries, directory.eval_summaries)
        own = (SummaryManager(folder if save_summary and chief else None) for folder in folders)
        train, evaluation = (given or made for given, made in zip(summary_managers, own, strict=True))
        writers: list[Writer] = [TensorBoardWriter(train, evaluation)]
        history = JsonLinesWriter(directory.metrics) if chief and trains else None
        writers += [one for one in (history, console) if one is not None]
        return cls(BackgroundWriter(writers), train, evaluation, history, times or TimeLedger())
