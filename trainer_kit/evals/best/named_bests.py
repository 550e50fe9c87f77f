"""Keeps all best checkpoints of a run: the primary one and the named ones of the config."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.evals.best.exporter import BestCheckpoint


class BestCheckpoints:
    """Combines several checkpoint exporters; it reports the best of the primary one.

    Args:
      primary: The exporter of best_checkpoint_eval_metric; None if there is none.
      named: The exporters of best_checkpoints, by name.
    """

    def __init__(self, primary: BestCheckpoint | None, named: Mapping[str, BestCheckpoint]) -> None:
        self.primary, self.named = primary, dict(named)

    def __iter__(self) -> Iterator[BestCheckpoint]:
        """Yields the primary one, if any, then the named ones."""
        yield from [self.primary] if self.primary else []
        yield from self.named.values()

    @property
    def best_ckpt_logs(self) -> dict[str, Any] | None:
        """The metrics of the primary best so far; None before the first, and if there is no primary one."""
        return self.primary.best_ckpt_logs if self.primary else None

    @property
    def best(self) -> tuple[str, float, int] | None:
        """(metric, value, step) of the primary best so far."""
        return self.primary.best if self.primary else None

    @property
    def metric_names(self) -> list[str]:
        """The metrics that decide, each once."""
        return list(dict.fromkeys(name for one in self for name in one.metric_names))

    def resume(self, step: int | None, evaluations: Iterable[Mapping[str, Any]]) -> None:
        """Resumes each; see BestCheckpoint."""
        recorded = list(evaluations)
        for one in self:
            one.resume(step, recorded)

    def rewind(self, step: int) -> None:
        """Rewinds each; see BestCheckpoint."""
        for one in self:
            one.rewind(step)

    def check_metric(self, names: Iterable[str]) -> None:
        """Raises UsageError when no evaluation will report the metric of one of them."""
        known = list(names)
        for one in self:
            one.check_metric(known)

    def maybe_export_checkpoint(
        self,
        checkpoint: tf.train.Checkpoint,
        eval_logs: Mapping[str, Any],
        step: int,
        not_evaluated: Collection[str] = (),
    ) -> bool:
        """Offers `checkpoint` to each exporter; returns whether any exported it. See BestCheckpoint."""
        exported = [
            one.maybe_export_checkpoint(checkpoint, eval_logs, step, not_evaluated=not_evaluated) for one in self
        ]
        return any(exported)


EXPORTERS = (BestCheckpoint, BestCheckpoints)
