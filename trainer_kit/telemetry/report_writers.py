"""ReportWriters: the outputs that a run reports its numbers to."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.telemetry.background_writer import BackgroundWriter
from trainer_kit.telemetry.metrics_jsonl import JsonLinesWriter
from trainer_kit.telemetry.report import Writer
from trainer_kit.telemetry.summary_manager import (
    SummaryManager,
    SummaryManagerLike,
    TensorBoardOptions,
    TensorBoardWriter,
)


@dataclass(frozen=True)
class ReportWriters:
    """The outputs that a run reports its numbers to.

    Attributes:
      writer: The writer that takes a Report after each loop and evaluation. It writes in a thread.
      train_summaries, eval_summaries: The managers for TensorBoard, also for the task's own
        tf.summary calls.
      history: The writer of metrics.jsonl. None for runs that do not train, and on workers that are
        not the chief.
    """

    writer: BackgroundWriter
    train_summaries: SummaryManagerLike
    eval_summaries: SummaryManagerLike
    history: JsonLinesWriter | None

    @classmethod
    def open(
        cls,
        directory: RunDirectory,
        *,
        is_chief: bool = True,
        trains: bool = True,
        save_summary: bool = True,
        console: Writer | None = None,
        log: Writer | None = None,
        tensorboard: TensorBoardOptions | None = None,
        summary_managers: tuple[SummaryManagerLike | None, SummaryManagerLike | None] = (
            None,
            None,
        ),
    ) -> ReportWriters:
        """Opens all outputs of a run. Workers that are not the chief write almost none.

        Args:
          directory: The run's folder.
          is_chief: Whether this process writes the run's files.
          trains: Whether the run trains and so has a history.
          save_summary: Whether TensorBoard summaries are written.
          console: The writer that shows progress. None shows none.
          log: The writer of log.txt. None writes none.
          tensorboard: What trainer_kit's own managers write for TensorBoard beside the metrics.
          summary_managers: The managers for training and validation summaries. None for
            trainer_kit's own.
        """
        has_summaries = save_summary and is_chief
        train_summaries, eval_summaries = summary_managers
        if not train_summaries:
            folder = directory.train_summary_dir
            train_summaries = SummaryManager(folder if has_summaries else None)
        if not eval_summaries:
            folder = directory.eval_summary_dir
            eval_summaries = SummaryManager(folder if has_summaries else None)

        writers: list[Writer] = [TensorBoardWriter(train_summaries, eval_summaries, tensorboard)]
        history = None
        if is_chief and trains:
            history = JsonLinesWriter(directory.metrics_path)
            writers.append(history)
        writers += [writer for writer in (console, log) if writer is not None]
        return cls(BackgroundWriter(writers), train_summaries, eval_summaries, history)
