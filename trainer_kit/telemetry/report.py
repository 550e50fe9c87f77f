"""The reports of a run, and the interface of their writers.

A run makes one Report per training loop and per evaluation. This module does not import TensorFlow,
so that programs that only read or print reports do not wait for its import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

CHANGE = "change"
# The fields of a report that say how well a loop used the devices, as far as that is known.
DEVICE_USAGE_FIELDS = ("tokens_per_second", "flops_utilization", "peak_memory_bytes")


@dataclass(frozen=True)
class EpochProgress:
    """The place of a step in the epochs of its run. All numbers count from 1.

    Attributes:
      epoch: The epoch that the step belongs to.
      epochs: The number of epochs of the run. None if the run has no known end.
      step: The number of the step in its epoch.
      steps: The number of steps in this epoch.
    """

    epoch: int
    epochs: int | None
    step: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """The figures of one training loop or of one evaluation, on the host.

    Writers read a report in another thread, so `metrics` must not change after its creation.

    Attributes:
      kind: "train", "validation", or "change" for a hyper-parameter that was changed. In a change,
        `metrics` contains its new value.
      step: The global step that was reached.
      total_steps: The step at which the run ends. None if it is not known.
      epoch_progress: The place of the step in its epoch. None without epochs.
      metrics: Python or NumPy scalars by name. A nested mapping is a group (one data set of
        several).
      steps_per_second: The speed of this loop. None for an evaluation or if it is not known.
      examples_per_second: The same in examples of the global batch.
      tokens_per_second: The same in tokens. None unless the task says how many an example has.
      flops_utilization: The share of the devices' peak that the model's FLOPs use, from 0 to 1.
        None if the peak or the model's FLOPs are not known.
      peak_memory_bytes: The most memory that one device of this process has used since the run
        began. None where devices do not report it.
      seconds: The duration of the loop or the evaluation.
      seconds_left: The time to the last step, by the speed of the run so far with its callbacks,
        saves and evaluations. None if that is not known yet.
      best: (name, value, step) of the best metric so far. None when no metric is the best yet.
      reason: The reason for a change of a hyper-parameter. "" for the other kinds.
      seconds_of_sets: The durations of an evaluation by validation set, if it has several. The
        metrics are then grouped by set.
    """

    kind: str
    step: int
    total_steps: int | None
    metrics: Mapping[str, Any]
    steps_per_second: float | None = None
    examples_per_second: float | None = None
    tokens_per_second: float | None = None
    flops_utilization: float | None = None
    peak_memory_bytes: int | None = None
    seconds: float = 0.0
    seconds_left: float | None = None
    best: tuple[str, float, int] | None = None
    epoch_progress: EpochProgress | None = None
    reason: str = ""
    seconds_of_sets: Mapping[str, float] = field(default_factory=dict)


TRAINING = "training"
EVALUATING = "evaluating"


@dataclass(frozen=True)
class Activity:
    """The current activity of a run and its progress.

    Attributes:
      name: TRAINING for a training loop, EVALUATING, or a description such as "building the model".
      step: The current global step. For an evaluation, the step of its weights.
      completed: The finished steps of this training loop, or batches of this evaluation. 0 for
        other activities.
      total: The steps of the run, or the batches of the evaluation. None if it is not known.
      seconds: The seconds since the activity began.
    """

    name: str
    step: int
    completed: int
    total: int | None
    seconds: float


class Writer(Protocol):
    """An object that stores or shows reports."""

    def write(self, report: Report) -> None:
        """Takes one report. Reports come in the order of the run."""

    def flush(self) -> None:
        """Returns when others can read the written reports."""

    def close(self) -> None:
        """Flushes and releases files, threads and the terminal. A second call does nothing."""


class SilentWriter:
    """A Writer that drops each report, for a run that shows nothing."""

    def write(self, report: Report) -> None:
        """Does nothing."""

    def flush(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
