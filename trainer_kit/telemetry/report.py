"""What a run tells about itself: one Report per training loop and per evaluation, and who writes it down.

No TensorFlow here, so that whatever only reads or prints reports does not wait for its import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Report:
    """The figures of one training loop or of one evaluation, on the host.

    Writers read it in another thread: whoever makes it does not change `metrics` afterwards.

    Attributes:
      kind: "train" or "validation".
      step: the global step that was reached.
      total_steps: the step at which the run ends; None where that is not known.
      metrics: Python or NumPy scalars by name; a nested mapping is a group of its own (one data set of several).
      steps_per_second: of this loop; None for an evaluation or when it is not known.
      examples_per_second: the same in examples of the global batch.
      seconds: how long the loop or the evaluation took.
      best: name, value and step of the best metric so far; None when there is none yet.
      seconds_of_sets: of an evaluation of several validation sets, how long each took; its metrics are grouped by them.
    """

    kind: str
    step: int
    total_steps: int | None
    metrics: Mapping[str, Any]
    steps_per_second: float | None = None
    examples_per_second: float | None = None
    seconds: float = 0.0
    best: tuple[str, float, int] | None = None
    seconds_of_sets: Mapping[str, float] = field(default_factory=dict)


TRAINING, EVALUATING = "training", "evaluating"


@dataclass(frozen=True)
class Activity:
    """What a run is doing, and how far that is.

    Attributes:
      what: TRAINING: a training loop; EVALUATING; or words for anything else, such as "building the model".
      step: the global step now; of an evaluation, that of its weights.
      done: steps of this training loop, or batches of this evaluation; 0 for anything else.
      total: steps of the run, or batches of the evaluation; None where that is not known.
      seconds: since it began.
    """

    what: str
    step: int
    done: int
    total: int | None
    seconds: float


class Writer(Protocol):
    """Something that keeps or shows reports."""

    def write(self, report: Report) -> None:
        """Takes one report; reports come in the order of the run."""

    def flush(self) -> None:
        """Returns when what was written can be read by others."""

    def close(self) -> None:
        """Flushes and lets go of files, threads and the terminal; a second call does nothing."""
