"""Early stopping: ends a run when its recorded evaluations have stopped improving.

The callback stores no counters. The decision at a step is a function of the ledger up to that step,
so a run that was killed, even between an evaluation and the next checkpoint, ends at the same step
as one that was not killed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.config.schema.evaluation import EarlyStoppingConfig
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.evals.ledger import REWIND, Ledger, active_records
from trainer_kit.telemetry.scalars import flatten_scalars

if TYPE_CHECKING:
    from trainer_kit.training.base_trainer import BaseTrainer

_DEFAULT_EVAL_NAME = "validation"


@dataclass(frozen=True)
class MetricProgress:
    """The improvement of a metric over the evaluations up to a step.

    Attributes:
      best: The last value that was an improvement. NaN before the first one.
      best_step: The step of that value. -1 before the first one.
      last_step: The step of the last evaluation that counts. -1 before the first one.
      evaluations_since_best: The number of evaluations since the last improvement.
    """

    best: float = math.nan
    best_step: int = -1
    last_step: int = -1
    evaluations_since_best: int = 0


def compute_metric_progress(
    evaluations: Iterable[tuple[int, float]],
    comparison: str,
    min_delta: float = 0.0,
    start_step: int = 0,
) -> MetricProgress:
    """Returns the progress of a metric after a series of evaluations. Pure.

    Args:
      evaluations: Pairs (step, value) in the order of their steps. A value that is not finite is
        not an improvement.
      comparison: Which values are better: "higher" or "lower".
      min_delta: A value is an improvement if it is better than the best one by more than this. The
        first finite value is always an improvement.
      start_step: Evaluations before this step do not count.
    """
    sign = {"higher": 1.0, "lower": -1.0}[comparison]
    progress = MetricProgress()
    for step, value in evaluations:
        if step < start_step:
            continue
        gain = sign * (value - progress.best)
        is_first = progress.best_step < 0
        is_better = is_first or gain > min_delta
        if math.isfinite(value) and is_better:
            progress = MetricProgress(value, step, step)
        else:
            count = progress.evaluations_since_best + 1
            progress = MetricProgress(progress.best, progress.best_step, step, count)
    return progress


def check_metric(metric: str, names: Iterable[str], where: str) -> None:
    """Raises UsageError when `metric` is not in `names`.

    Args:
      metric: The metric of early stopping.
      names: The names of the metrics that are reported.
      where: What reports these names, for the message.
    """
    sorted_names = sorted(names)
    if metric not in sorted_names:
        suggestion = suggest_names(metric, sorted_names)
        listed_names = ", ".join(sorted_names)
        raise UsageError(
            f"trainer.early_stopping.metric: {where} reports no single number called {metric!r}; "
            f"{suggestion} (all: {listed_names})"
        )


def check_early_stopping_metric(options: EarlyStoppingConfig, trainer: BaseTrainer) -> None:
    """Raises UsageError when no evaluation will report the metric of early stopping.

    Checks nothing where only a run can tell the names of the metrics.
    """
    names = None if options.eval_name else trainer.validation_metric_names()
    if names is not None:
        check_metric(options.metric, names, "an evaluation")


class EarlyStopping(Callback):
    """Ends a run when its evaluations have brought no improvement for long enough.

    The evaluations are those of the run, or of a sidecar if the config names one. Runs eagerly, on
    the host, on the chief.

    Args:
      options: The section trainer.early_stopping of the config.
      ledger: The run's ledger of evaluations.
      evals: The folder of the ledgers.
    """

    name = "early_stopping"

    def __init__(self, options: EarlyStoppingConfig, ledger: Ledger, evals: str) -> None:
        self._options = options
        self._ledger = ledger
        sidecar = options.eval_name or _DEFAULT_EVAL_NAME
        sidecar_path = os.path.join(evals, f"{sidecar}.jsonl")
        self._sidecar_ledger = Ledger(sidecar_path, dataset="", config_hash="")
        # The records of the last reading, and the evaluations that count among them.
        self._cached_evaluations: tuple[list[dict[str, Any]] | None, list[tuple[int, float]]]
        self._cached_evaluations = (None, [])

    def train_begin(self, run: Run) -> None:
        """Ends the run at once if its recorded evaluations already ask for a stop."""
        self._stop_if_not_improving(run)

    def loop_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Checks the new evaluations of a sidecar, if the config names one."""
        if self._options.eval_name:
            self._stop_if_not_improving(run)

    def evaluation_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Checks the run's evaluations, unless the config names a sidecar.

        Raises:
          UsageError: when the evaluation did not report the metric.
        """
        if not self._options.eval_name:
            self._stop_if_not_improving(run)

    def find_stop_reason(self, step: int) -> str:
        """Returns why early stopping ends the run at `step`, or "" if the run continues.

        Raises:
          UsageError: when the last evaluation did not report the metric.
        """
        options = self._options
        evaluations = []
        for evaluated_step, value in self._read_evaluations(options):
            if evaluated_step <= step:
                evaluations.append((evaluated_step, value))
        progress = compute_metric_progress(
            evaluations, options.metric_comp, options.min_delta, options.start_step
        )
        count = progress.evaluations_since_best
        if count < options.patience:
            return ""

        where = ""
        if options.eval_name:
            where = f" of {options.eval_name}"
        margin = ""
        if options.min_delta:
            margin = f" by more than {options.min_delta:g}"
        best = ""
        if progress.best_step >= 0:
            best = f" on {progress.best:.6g} of step {progress.best_step}"
        period = "evaluation" if count == 1 else f"{count} evaluations"
        return (
            f"{options.metric}{where} has not improved{best}{margin} in the last {period}, up to"
            f" step {progress.last_step} (trainer.early_stopping.patience={options.patience})"
        )

    def _stop_if_not_improving(self, run: Run) -> None:
        if reason := self.find_stop_reason(run.step):
            run.stop(reason)

    def _read_evaluations(self, options: EarlyStoppingConfig) -> list[tuple[int, float]]:
        """Returns (step, last value) of each evaluation that counts, in the order of steps.

        The value is NaN where the metric is missing. Evaluates the records again only if a ledger
        has changed. A sidecar may record a rewind of the run late, so rewinds are read from the
        run's ledger.

        Raises:
          UsageError: when the last record does not contain the metric.
        """
        records = self._ledger.records()
        if options.eval_name:
            rewinds = [record for record in records if record.get("kind") == REWIND]
            records = [*rewinds, *self._sidecar_ledger.records()]
        cached_records, cached_evaluations = self._cached_evaluations
        if records == cached_records:
            return cached_evaluations

        current_records = (
            active_records(records) if options.eval_name else self._ledger.get_current_evaluations()
        )
        active = _select_set(current_records, options.metric)
        if current_records and not active:
            self._check_validation_set(options, current_records)

        # A sidecar with other data or another config starts a new series.
        if options.eval_name:
            series = [(record.get("dataset"), record.get("config_hash")) for record in active]

            active = [
                record
                for record, own_series in zip(active, series, strict=True)
                if own_series == series[-1]
            ]

        # Of several records of a step, the last one counts.
        scalars_by_step: dict[int, dict[str, float]] = {}
        for record in active:
            scalars_by_step[int(record["step"])] = flatten_scalars(record["metrics"], "|")
        if active:
            ledger_name = options.eval_name or _DEFAULT_EVAL_NAME
            last_scalars = scalars_by_step[int(active[-1]["step"])]
            check_metric(options.metric, last_scalars, f"evals/{ledger_name}.jsonl")

        evaluations = [
            (step, scalars.get(options.metric, math.nan))
            for step, scalars in sorted(scalars_by_step.items())
        ]
        self._cached_evaluations = (records, evaluations)
        return evaluations

    def _check_validation_set(
        self, options: EarlyStoppingConfig, records: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raises UsageError when the metric's validation set is never evaluated."""
        if options.eval_name:
            # A sidecar evaluates all of its sets at each step.
            steps = {record["step"] for record in records}
            is_never_evaluated = len(steps) > 1
        else:
            # A set of the run may have a longer interval than the others.
            name = options.metric.partition("|")[0]
            is_never_evaluated = name not in self._ledger.sets

        if is_never_evaluated:
            names: set[str] = set()
            for record in records:
                scalars = flatten_scalars(record["metrics"], "|")
                names.update(scalars)
            ledger_name = options.eval_name or _DEFAULT_EVAL_NAME
            check_metric(options.metric, names, f"evals/{ledger_name}.jsonl")


def _select_set(records: Sequence[Mapping[str, Any]], metric: str) -> Sequence[Mapping[str, Any]]:
    """Returns the records of the metric's validation set if there are several sets, else all."""
    set_records = [
        record for record in records if list(record["metrics"]) == [record.get("dataset")]
    ]
    if not set_records:
        return records
    name, _, _ = metric.partition("|")
    return [record for record in set_records if record["dataset"] == name]
