"""What a run tells about itself: one Report per training loop and per evaluation, and who writes it down.

No TensorFlow here, so that whatever only reads or prints reports does not wait for its import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

# NumPy's kinds of bool, signed and unsigned integer, and float; bfloat16 and the 8-bit floats call themselves "V".
_NUMBER_KINDS = frozenset("biufV")


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
    """

    kind: str
    step: int
    total_steps: int | None
    metrics: Mapping[str, Any]
    steps_per_second: float | None = None
    examples_per_second: float | None = None
    seconds: float = 0.0
    best: tuple[str, float, int] | None = None


class Writer(Protocol):
    """Something that keeps or shows reports."""

    def write(self, report: Report) -> None:
        """Takes one report; reports come in the order of the run."""

    def flush(self) -> None:
        """Returns when what was written can be read by others."""

    def close(self) -> None:
        """Flushes and lets go of files, threads and the terminal; a second call does nothing."""


def as_scalar(value: Any) -> float | None:
    """Returns `value` as a float, or None when it is no single number.

    A number is a Python or NumPy bool, int or float, or an array (an eager tensor) of numbers with the shape (). Text
    is none, even where it reads as a number, and neither is an array of shape (1,).
    """
    if isinstance(value, (bool, int, float)):
        return _to_float(value)
    if isinstance(value, (str, bytes)) or tuple(getattr(value, "shape", (0,))) != ():
        return None
    array = np.asarray(value)
    return _to_float(array) if array.dtype.kind in _NUMBER_KINDS else None


def flat_scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the scalars of nested `metrics` in their order, names of groups and metrics joined by "/".

    What is no scalar (arrays, text, None) is left out.
    """
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}/{inner}": number for inner, number in flat_scalars(value).items()})
        elif (number := as_scalar(value)) is not None:
            flat[str(name)] = number
    return flat


def _to_float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
