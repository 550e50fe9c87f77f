"""Early stopping: ends a run when its recorded evaluations have stopped improving.

No counters are kept while the run trains. The decision at a step is a function of the ledger up to
that step, so a run that was killed, even between an evaluation and the next checkpoint, ends at the
same step as one that was not killed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.config.schema.evaluation import EarlyStoppingConfig
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.evals.ledger import REWIND, Ledger, active_records
from trainer_kit.telemetry.scalars import flatten_scalars

_DEFAULT_EVAL_NAME = "validation"


@dataclass(frozen=True)
class MetricProgress:
    """The improvement of a metric over the evaluations up to a step.

    Attributes:
      best: The last value that was an improvement; NaN before the first one.
      best_step: The step of that value; -1 before the first one.
      last_step: The step of the last evaluation that counts; -1 before the first one.
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
    """Returns the Standing after a series of evaluations. Pure.

    Args:
      evaluations: Pairs (step, value) in the order of their steps. A value that is not finite is
        not an improvement.
      comparison: "higher" or "lower": which values are better.
      min_delta: A value is an improvement if it is better than the best one by more than this. The
        first finite value always is.
      start_step: Evaluations before this step do not count.
    """
    sign = {"higher": 1.0, "lower": -1.0}[comparison]
    now = MetricProgress()
    for step, value in evaluations:
        if step < start_step:
            continue
        gain = sign * (value - now.best)
        if math.isfinite(value) and (now.best_step < 0 or gain > min_delta):
            now = MetricProgress(value, step, step)
        else:
            now = MetricProgress(now.best, now.best_step, step, now.evaluations_since_best + 1)
    return now


def check_metric(metric: str, names: Iterable[str], where: str) -> None:
    """Raises UsageError when `metric` is not in `names`; the message says that `where` reports these names."""
    known = sorted(names)
    if metric not in known:
        raise UsageError(
            f"trainer.early_stopping.metric: {where} reports no single number called {metric!r}; "
            f"{suggest_names(metric, known)} (all: {', '.join(known)})"
        )


def check_early_stopping_metric(options: EarlyStoppingConfig, trainer: Any) -> None:
    """Raises UsageError when no evaluation will report the metric of early stopping, unless only a run can tell."""
    names = None if options.eval_name else trainer.validation_metric_names()
    if names is not None:
        check_metric(options.metric, names, "an evaluation")


class EarlyStopping(Callback):
    """Ends a run when its evaluations, or those of a sidecar, have brought no improvement for long enough.

    Args:
      options: The section trainer.early_stopping of the config.
      ledger: The run's ledger of evaluations.
      evals: The folder of the ledgers.
    """

    name = "early_stopping"

    def __init__(self, options: EarlyStoppingConfig, ledger: Ledger, evals: str) -> None:
        self._options, self._ledger = options, ledger
        self._sidecar_ledger = Ledger(
            os.path.join(evals, f"{options.eval_name or _DEFAULT_EVAL_NAME}.jsonl"),
            dataset="",
            config_hash="",
        )
        self._cached_evaluations: tuple[Any, list[tuple[int, float]]] = (None, [])

    def train_begin(self, run: Run) -> None:
        """Ends the run at once if its recorded evaluations already ask for a stop."""
        self._stop_if_not_improving(run)

    def loop_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        """Checks the new evaluations of a sidecar, if the config names one."""
        if self._options.eval_name:
            self._stop_if_not_improving(run)

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Checks the run's evaluations, unless the config names a sidecar.

        Raises:
          UsageError: when the evaluation did not report the metric.
        """
        if not self._options.eval_name:
            self._stop_if_not_improving(run)

    def find_stop_reason(self, step: int) -> str:
        """Returns why early stopping ends the run at `step`; "" if the run continues.

        Raises:
          UsageError: when the last evaluation did not report the metric.
        """
        options = self._options
        done = [one for one in self._read_evaluations(options) if one[0] <= step]
        now = compute_metric_progress(
            done, options.metric_comp, options.min_delta, options.start_step
        )
        if now.evaluations_since_best < options.patience:
            return ""

        where = f" of {options.eval_name}" if options.eval_name else ""
        much = f" by more than {options.min_delta:g}" if options.min_delta else ""
        before = f" on {now.best:.6g} of step {now.best_step}" if now.best_step >= 0 else ""
        count = (
            "evaluation"
            if now.evaluations_since_best == 1
            else f"{now.evaluations_since_best} evaluations"
        )
        return (
            f"{options.metric}{where} has not improved{before}{much} in the last {count}, up to"
            f" step {now.last_step} (trainer.early_stopping.patience={options.patience})"
        )

    def _stop_if_not_improving(self, run: Run) -> None:
        if reason := self.find_stop_reason(run.step):
            run.stop(reason)

    def _read_evaluations(self, options: EarlyStoppingConfig) -> list[tuple[int, float]]:
        """Returns (step, last value) of each evaluation that counts, in the order of steps; rereads changed ledgers.

        A sidecar may record a rewind of the run late, so rewinds are read from the run's ledger.
        """
        records = self._ledger.records()
        if options.eval_name:
            records = [
                *(item for item in records if item.get("kind") == REWIND),
                *self._sidecar_ledger.records(),
            ]
        if records != self._cached_evaluations[0]:
            found = (
                active_records(records)
                if options.eval_name
                else self._ledger.get_current_evaluations()
            )
            active = _select_set(found, options.metric)
            if found and not active:
                self._check_validation_set(options, found)
            if options.eval_name:  # a sidecar with other data or another config starts a new series
                series = [(record.get("dataset"), record.get("config_hash")) for record in active]
                active = [
                    record for record, own in zip(active, series, strict=True) if own == series[-1]
                ]
            self._cached_evaluations = records, _extract_values(active, options)
        return self._cached_evaluations[1]

    def _check_validation_set(
        self, options: EarlyStoppingConfig, records: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raises UsageError when the metric's validation set is never evaluated."""
        own = options.metric.partition("|")[0] in self._ledger.sets  # it may have a longer interval
        whole = {
            item["step"] for item in records
        }  # of a sidecar, which evaluates all of its sets at each step
        if len(whole) > 1 if options.eval_name else not own:
            names = {name for item in records for name in flatten_scalars(item["metrics"], "|")}
            check_metric(
                options.metric, names, f"evals/{options.eval_name or _DEFAULT_EVAL_NAME}.jsonl"
            )


def _select_set(records: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Returns the records of the metric's validation set, if there are several sets; else all records."""
    of_sets = [item for item in records if list(item["metrics"]) == [item.get("dataset")]]
    return (
        [item for item in of_sets if item["dataset"] == metric.partition("|")[0]]
        if of_sets
        else records
    )


def _extract_values(
    records: Sequence[Mapping[str, Any]], options: EarlyStoppingConfig
) -> list[tuple[int, float]]:
    flat = {int(item["step"]): flatten_scalars(item["metrics"], "|") for item in records}
    if records:
        where = f"evals/{options.eval_name or _DEFAULT_EVAL_NAME}.jsonl"
        check_metric(options.metric, flat[int(records[-1]["step"])], where)
    return [(step, flat[step].get(options.metric, math.nan)) for step in sorted(flat)]
