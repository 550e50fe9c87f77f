"""Early stopping: whether a run has trained enough, by the evaluations on record, or because an action says so.

Nothing is counted while the run trains. What is decided at a step is a function of the ledger up to that step, so that
a run that was killed, even between an evaluation and the next checkpoint, ends where one that was not killed does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_kit.config.schema.evaluation import EarlyStoppingConfig
from trainer_kit.errors import StopTraining, UsageError, suggestion
from trainer_kit.evals.ledger import REWIND, Ledger, active_records
from trainer_kit.telemetry.scalars import flat_scalars

_LOG = logging.getLogger(__name__)
_OWN = "validation"


@dataclass(frozen=True)
class Standing:
    """What evaluations up to a step tell.

    Attributes:
      best: the last value that was an improvement; NaN before the first, as no value is one.
      best_step: its step; -1 before the first.
      last_step: of the last evaluation that counts; -1 before the first.
      without: how many evaluations there were since the last improvement.
    """

    best: float = math.nan
    best_step: int = -1
    last_step: int = -1
    without: int = 0


def standing(
    evaluations: Iterable[tuple[int, float]], comparison: str, min_delta: float = 0.0, start_step: int = 0
) -> Standing:
    """Returns what (step, value) pairs, in the order of their steps, tell. Pure.

    Args:
      evaluations: one for each step. A value that is not finite is no improvement.
      comparison: "higher" or "lower", what is better.
      min_delta: by how much more than this a value has to be better than the best before; the first finite one is.
      start_step: evaluations before it do not count.
    """
    sign = {"higher": 1.0, "lower": -1.0}[comparison]
    now = Standing()
    for step, value in evaluations:
        if step < start_step:
            continue
        gain = sign * (value - now.best)
        if math.isfinite(value) and (now.best_step < 0 or gain > min_delta):
            now = Standing(value, step, step)
        else:
            now = Standing(now.best, now.best_step, step, now.without + 1)
    return now


def check_metric(metric: str, names: Iterable[str], where: str) -> None:
    """Raises UsageError when `metric` is not among the `names` that `where`, for the message, reports."""
    known = sorted(names)
    if metric not in known:
        raise UsageError(
            f"trainer.early_stopping.metric: {metric!r} is nothing that {where} reports as a single number; "
            f"{suggestion(metric, known)} (all: {', '.join(known)})"
        )


class EarlyStopping:
    """Ends a run when its evaluations, or those of a sidecar, have brought no improvement for long enough.

    Eager, on the host, on every worker: the chief decides, and all come to the same.

    Args:
      options: of the config; None: the run is never ended.
      ledger: of the run; None on workers that are not the chief.
      evals: the folder of the ledgers.
      agree: returns, on every worker, the number that the chief has called it with.
      step: returns the global step.

    Attributes:
      agree: as given.
    """

    def __init__(
        self,
        options: EarlyStoppingConfig | None,
        ledger: Ledger | None,
        evals: str,
        agree: Callable[[int], int],
        step: Callable[[], int],
    ) -> None:
        self._options, self._ledger, self.agree, self._step = options, ledger, agree, step
        name = options.eval_name if options else ""
        self._beside = Ledger(os.path.join(evals, f"{name or _OWN}.jsonl"), dataset="", config_hash="")
        self._read: tuple[Any, list[tuple[int, float]]] = (None, [])

    @property
    def actions(self) -> list[Callable[[Any], None]]:
        """What is to be called after each training loop: something where a sidecar's evaluations decide."""
        return [lambda _: self._check(self._step())] if self._options and self._options.eval_name else []

    def after_evaluation(self, step: int) -> None:
        """To be called when the run's own evaluation of `step` is on record.

        Raises:
          StopTraining: when the run ends there.
          UsageError: when the evaluation has not reported the metric.
        """
        if self._options and not self._options.eval_name:
            self._check(step)

    def reason(self, step: int) -> str:
        """Returns why the run ends at `step`, if it has come so far; "" if it goes on.

        Raises:
          UsageError: when the last evaluation has not reported the metric.
        """
        options = self._options
        if options is None:
            return ""
        done = [one for one in self._evaluations(options) if one[0] <= step]
        now = standing(done, options.metric_comp, options.min_delta, options.start_step)
        if not self.agree(int(now.without >= options.patience)):
            return ""
        return _told(options, now) if self._ledger is not None else "the first worker tells"

    def _check(self, step: int) -> None:
        if reason := self.reason(step):
            raise StopTraining(reason)

    def _evaluations(self, options: EarlyStoppingConfig) -> list[tuple[int, float]]:
        """Returns the last value of each step that counts, in the order of steps; read again when there are new ones.

        A sidecar may be late to note that the run has gone back: the run's own ledger tells.
        """
        if self._ledger is None:
            return []
        records = self._ledger.records()
        if options.eval_name:
            records = [*(item for item in records if item.get("kind") == REWIND), *self._beside.records()]
        if records != self._read[0]:
            found = active_records(records) if options.eval_name else self._ledger.active()
            active = _of_set(found, options.metric)
            if found and not active:
                self._check_set(options, found)
            self._read = records, _values(_of_last_kind(active) if options.eval_name else active, options)
        return self._read[1]

    def _check_set(self, options: EarlyStoppingConfig, found: Sequence[Mapping[str, Any]]) -> None:
        """Raises UsageError when no evaluation of the metric's validation set will come."""
        assert self._ledger is not None
        own = options.metric.partition("|")[0] in self._ledger.sets  # it may have a longer interval
        whole = {item["step"] for item in found}  # of a sidecar, which evaluates all of its sets at each step
        if len(whole) > 1 if options.eval_name else not own:
            names = {name for item in found for name in flat_scalars(item["metrics"], "|")}
            check_metric(options.metric, names, f"evals/{options.eval_name or _OWN}.jsonl")


class StopRequest:
    """Whether an action has asked to end the run.

    Args:
      step: returns the global step.

    Attributes:
      reason: why; "" while none has asked.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self.reason, self._step = "", step

    def ask(self, reason: str) -> None:
        """Asks to end the run at the step that it has reached; the first reason counts."""
        if not self.reason:
            self.reason = reason
            _LOG.info("the run ends at step %d: %s", self._step(), reason)

    def call(self, actions: Iterable[Callable[[Any], Any]], logs: Any) -> None:
        """Calls all `actions` with `logs`, whichever of them asks."""
        for action in actions:
            with self.heard():
                action(logs)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Takes a StopTraining that is raised inside for a request."""
        try:
            yield
        except StopTraining as stop:
            self.ask(str(stop))


def _of_set(records: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Those on the validation set that the metric is of, where several group their metrics by their names."""
    of_sets = [item for item in records if list(item["metrics"]) == [item.get("dataset")]]
    return [item for item in of_sets if item["dataset"] == metric.partition("|")[0]] if of_sets else records


def _of_last_kind(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those on the data and of the config of the last one: a sidecar that was changed begins anew."""
    kind = [(item.get("dataset"), item.get("config_hash")) for item in records]
    return [item for item, own in zip(records, kind, strict=True) if own == kind[-1]]


def _values(records: Sequence[Mapping[str, Any]], options: EarlyStoppingConfig) -> list[tuple[int, float]]:
    flat = {int(item["step"]): flat_scalars(item["metrics"], "|") for item in records}
    if records:
        where = f"evals/{options.eval_name or _OWN}.jsonl"
        check_metric(options.metric, flat[int(records[-1]["step"])], where)
    return [(step, flat[step].get(options.metric, math.nan)) for step in sorted(flat)]


def _told(options: EarlyStoppingConfig, now: Standing) -> str:
    where = f" of {options.eval_name}" if options.eval_name else ""
    much = f" by more than {options.min_delta:g}" if options.min_delta else ""
    before = f" on {now.best:.6g} of step {now.best_step}" if now.best_step >= 0 else ""
    count = "evaluation" if now.without == 1 else f"{now.without} evaluations"
    return (
        f"{options.metric}{where} has not improved{before}{much} in the last {count}, up to step {now.last_step} "
        f"(trainer.early_stopping.patience={options.patience})"
    )
