"""Decides which evaluations are kept as the best, by a fold over them in their order.

It imports no TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer_kit.telemetry.scalars import flatten_scalars

_SIGNS = {"higher": 1.0, "lower": -1.0}
_LOWER = ("loss", "error", "mse", "mae", "mape", "msle")
_HIGHER = ("acc", "auc", "precision", "recall", "f1", "iou")


def guess_comparison(metric: str) -> str | None:
    """Returns "lower" or "higher" where the name of a metric indicates which values are better.

    Returns None for other names.
    """
    is_lower = any(part in metric for part in _LOWER)
    is_higher = any(part in metric for part in _HIGHER)
    if is_lower == is_higher:
        return None
    return "lower" if is_lower else "higher"


class ScoredEvaluation(NamedTuple):
    """An evaluation that may be kept: the step of its weights, its value, and its record."""

    step: int
    value: float
    record: Any


@dataclass(frozen=True)
class Criterion:
    """Keeps up to `keep` evaluations.

    A later one displaces the worst of them if it is better by enough. Of equal evaluations the
    first stays, and of each step the first kept evaluation stays.

    Attributes:
      metric: The metric that decides. `a|b` is the entry b of the nested metrics a.
      comparison: Which value is better, "higher" or "lower".
      keep: The number of evaluations to keep.
      min_delta: An evaluation must be better by more than this to displace another.
    """

    metric: str
    comparison: str = "higher"
    keep: int = 1
    min_delta: float = 0.0

    def score(
        self, step: int, metrics: Mapping[str, object], record: Any
    ) -> ScoredEvaluation | None:
        """Returns `record` as a candidate, or None when its metric is missing or not finite."""
        scalars = flatten_scalars(metrics, "|")
        value = scalars.get(self.metric, math.nan)
        if math.isfinite(value):
            return ScoredEvaluation(step, value, record)
        return None

    def fold(self, candidates: Iterable[ScoredEvaluation]) -> list[ScoredEvaluation]:
        """Returns the kept `candidates`, in their order."""
        selected: list[ScoredEvaluation] = []
        for candidate in candidates:
            selected = self.select_after(selected, candidate)
        return selected

    def select_after(
        self, selected: Sequence[ScoredEvaluation], new: ScoredEvaluation
    ) -> list[ScoredEvaluation]:
        """Returns the kept evaluations after `new` was considered."""
        selected_steps = {evaluation.step for evaluation in selected}
        if new.step in selected_steps:
            return list(selected)
        if len(selected) < self.keep:
            return [*selected, new]

        # Of equal evaluations the later one is the worst.
        ranked = self.sort_best_first(selected)
        worst = ranked[-1]
        sign = _SIGNS[self.comparison]
        gain = sign * (new.value - worst.value)
        if gain <= self.min_delta:
            return list(selected)
        others = [evaluation for evaluation in selected if evaluation is not worst]
        return [*others, new]

    def sort_best_first(self, evaluations: Iterable[ScoredEvaluation]) -> list[ScoredEvaluation]:
        """Sorts by metric, best first. Ties keep their order."""
        sign = -_SIGNS[self.comparison]
        return sorted(evaluations, key=lambda evaluation: sign * evaluation.value)

    def best(self, evaluations: Iterable[ScoredEvaluation]) -> ScoredEvaluation | None:
        """Returns the best kept evaluation, or None when nothing is kept."""
        ranked = self.sort_best_first(evaluations)
        return ranked[0] if ranked else None
