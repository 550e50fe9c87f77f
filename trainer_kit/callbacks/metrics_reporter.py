"""MetricsReporter: combines metrics into reports and passes them to the writers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.callbacks.callback import Callback, Evaluation, Loop, Run
from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
from trainer_kit.telemetry.device_usage import DeviceUsage
from trainer_kit.telemetry.report import CHANGE, EpochProgress, Report, Writer
from trainer_kit.training.loops.intervals import Epochs
from trainer_kit.training.metric_set import to_numpy


class MetricsReporter(Callback):
    """Writes one report for each training loop, and for the evaluations of a step.

    It also reports changes of hyper-parameters. It is the last of the callbacks, and runs eagerly,
    on the host, on every worker.

    Args:
      writer: The writer of the reports.
      batch_size: The examples in a training step, over all replicas. 0 if it is not known, and no
        example rate is reported.
      best: The owner of the best checkpoints, whose best value is reported. None if the run has
        none.
      peak_flops: The peak rate of one device. See DeviceUsage.
    """

    chief_only = False
    name = "report"

    def __init__(
        self,
        writer: Writer,
        batch_size: int = 0,
        best: BestCheckpoints | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self._writer = writer
        self._batch_size = batch_size
        self._best = best
        self._device_usage = DeviceUsage(peak_flops)
        self._reported_loop: Loop | None = None
        self._logs: Mapping[str, object] = {}
        self._evaluations: list[Evaluation] = []
        # The step and time at the end of the first loop, which was slow.
        self._first_loop_end: tuple[int, float] | None = None

    def loop_begin(self, run: Run, steps: int) -> None:
        """Reports the hyper-parameters that were changed since the last loop began."""
        del steps
        if run.trainer.custom_parts.replaces_steps:
            return
        changes = run.trainer.hyper_parameters.take_changes()
        for name, (value, reason) in changes.items():
            self._write(run, kind=CHANGE, step=run.step, metrics={name: value}, reason=reason)

    def loop_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Reports the loop, with the numbers that callbacks have added to it."""
        loop = run.loop
        assert loop is not None
        self._reported_loop = loop
        steps_per_second = None
        examples_per_second = None
        if loop.seconds > 0:
            steps_per_second = loop.steps / loop.seconds
        if steps_per_second and self._batch_size:
            examples_per_second = steps_per_second * self._batch_size

        seconds_left = None
        now = time.monotonic()
        if self._first_loop_end is None or loop.end <= self._first_loop_end[0]:
            # The run begins, or has gone back.
            self._first_loop_end = (loop.end, now)
        elif run.total_steps is not None:
            first_step, first_time = self._first_loop_end
            remaining_steps = max(0, run.total_steps - loop.end)
            seconds_left = remaining_steps * (now - first_time) / (loop.end - first_step)

        usage_fields = self._device_usage.measure(run.trainer, examples_per_second)
        self._write(
            run,
            kind="train",
            step=loop.end,
            metrics={**logs, **_pop_reported_metrics(run)},
            steps_per_second=steps_per_second,
            examples_per_second=examples_per_second,
            seconds=loop.seconds,
            seconds_left=seconds_left,
            **usage_fields,
        )

    def evaluation_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Remembers an evaluation. Another evaluation of this step may follow."""
        assert run.evaluation is not None
        metrics = _pop_reported_metrics(run)
        # A replayed evaluation was reported by an earlier process.
        if not run.evaluation.is_replayed:
            self._logs = {**logs, **metrics}
            self._evaluations.append(run.evaluation)

    def boundary_end(self, run: Run) -> None:
        """Reports the evaluations of this step."""
        evaluations = self._evaluations
        self._evaluations = []
        reported_metrics = _pop_reported_metrics(run)
        if not evaluations:
            return

        # Validation sets of one step may be evaluated one after another.
        seconds_of_sets: dict[str, float] = {}
        for evaluation in evaluations:
            seconds_of_sets.update(evaluation.seconds_of_sets)
        self._write(
            run,
            kind="validation",
            step=evaluations[-1].step,
            metrics={**self._logs, **reported_metrics},
            seconds=sum(evaluation.seconds for evaluation in evaluations),
            seconds_of_sets=seconds_of_sets,
        )

    def exception(self, run: Run, error: Exception) -> None:
        """Reports the last loop if it was not reported because another callback failed."""
        del error
        if run.loop is not None and run.loop is not self._reported_loop:
            self.loop_end(run, run.loop.logs)

    def rewound(self, run: Run, step: int) -> None:
        """Drops the evaluations that are not reported yet, since the run has gone back."""
        del step
        self._evaluations = []
        run.reported_metrics = {}

    def _write(self, run: Run, **figures: Any) -> None:
        best = self._best.best if self._best is not None else None
        figures["metrics"] = tf.nest.map_structure(to_numpy, figures["metrics"])
        epoch_progress = None
        if run.epochs:
            epoch_progress = get_epoch_progress(run.epochs, figures["step"], run.total_steps)
        self._writer.write(
            Report(total_steps=run.total_steps, best=best, epoch_progress=epoch_progress, **figures)
        )


def get_epoch_progress(epochs: Epochs, step: int, total: int | None) -> EpochProgress:
    """Returns the place of a step in its epoch.

    Args:
      epochs: The epochs of the run.
      step: The global step.
      total: The step at which the run ends. None if it is not known.
    """
    epoch, step_in_epoch = epochs.locate_step(step)
    steps = epochs.get_end_step(epoch) - epochs.get_end_step(epoch - 1)
    last_epoch = None if total is None else epochs.locate_step(total)[0]
    return EpochProgress(epoch, last_epoch, step_in_epoch, steps)


def _pop_reported_metrics(run: Run) -> dict[str, Any]:
    """Returns and clears the numbers that callbacks have reported since the last report."""
    metrics = run.reported_metrics
    run.reported_metrics = {}
    return metrics
