"""Puts the figures of training loops and evaluations together as reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_kit.telemetry.report import Report, Writer


class Reporter:
    """Makes reports and hands them to a writer.

    Args:
      writer: takes them.
      batch_size: examples in a training step, over all replicas; 0: not known, so no rate of examples is told.
      evaluator: whose `checkpoint_exporter`, if it has one, knows the best metric so far.
    """

    def __init__(self, writer: Writer, batch_size: int = 0, evaluator: Any = None) -> None:
        self._writer, self._batch_size, self._evaluator = writer, batch_size, evaluator

    def report(
        self,
        kind: str,
        step: int,
        total_steps: int | None,
        logs: Mapping[str, Any],
        seconds: float,
        *,
        steps: int = 0,
        of_sets: Mapping[str, float] | None = None,
    ) -> None:
        """Reports a loop of `steps` steps, or an evaluation; the rest as a Report has it.

        Args:
          kind: "train" or "validation".
          step: the global step that was reached.
          total_steps: the step at which the run ends; None where that is not known.
          logs: scalars on the host, which nobody changes afterwards.
          seconds: that it took.
          steps: that the loop has done; 0 for an evaluation, which has no rate.
          of_sets: of an evaluation of several validation sets, the seconds of each.
        """
        rate = steps / seconds if steps and seconds > 0 else None
        self._writer.write(
            Report(
                kind=kind,
                step=step,
                total_steps=total_steps,
                metrics=logs,
                steps_per_second=rate,
                examples_per_second=rate * self._batch_size if rate and self._batch_size else None,
                seconds=seconds,
                best=getattr(getattr(self._evaluator, "checkpoint_exporter", None), "best", None),
                seconds_of_sets=of_sets or {},
            )
        )
