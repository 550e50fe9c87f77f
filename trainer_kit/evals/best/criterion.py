"""Which evaluations are kept as the best: a fold over them in their order. No TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer_kit.telemetry.scalars import flat_scalars

_SIGNS = {"higher": 1.0, "lower": -1.0}


class Scored(NamedTuple):
    """An evaluation that may be kept: the step of its weights, its value, and the record that tells of it."""

    step: int
    value: float
    record: Any


@dataclass(frozen=True)
class Criterion:
    """What is kept: up to `keep` evaluations; a later one displaces the worst of them if it is better by enough.

    The first of equals stays, and of a step the first evaluation that is kept.

    Attributes:
      metric: that decides; `a|b` is the entry b of the nested metrics a.
      comparison: "higher" or "lower", what is better.
      keep: how many are kept.
      min_delta: what displaces another has to be better by more than this.
    """

    metric: str
    comparison: str = "higher"
    keep: int = 1
    min_delta: float = 0.0

    def score(self, step: int, metrics: Mapping[str, Any], record: Any) -> Scored | None:
        """Returns `record` as a candidate; None when its metric is missing or not finite."""
        value = flat_scalars(metrics, "|").get(self.metric, math.nan)
        return Scored(step, value, record) if math.isfinite(value) else None

    def fold(self, candidates: Iterable[Scored]) -> list[Scored]:
        """Returns what is kept of `candidates`, in the order in which they came."""
        kept: list[Scored] = []
        for one in candidates:
            kept = self.add(kept, one)
        return kept

    def add(self, kept: Sequence[Scored], new: Scored) -> list[Scored]:
        """Returns what is kept when `new` comes to what was kept before."""
        if any(one.step == new.step for one in kept):
            return list(kept)
        if len(kept) < self.keep:
            return [*kept, new]
        worst = self.ranked(kept)[-1]
        if _SIGNS[self.comparison] * (new.value - worst.value) <= self.min_delta:
            return list(kept)
        return [*(one for one in kept if one is not worst), new]

    def ranked(self, kept: Iterable[Scored]) -> list[Scored]:
        """Returns the same, the best first, the first of equals before the others."""
        return sorted(kept, key=lambda one: -_SIGNS[self.comparison] * one.value)

    def best(self, kept: Iterable[Scored]) -> Scored | None:
        """Returns the best of what is kept; None when nothing is."""
        return next(iter(self.ranked(kept)), None)
