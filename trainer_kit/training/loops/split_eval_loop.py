"""An evaluation in parts: functions of the host are called around each few batches, with the results so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

Part = Callable[[Any, tf.Tensor], tuple[int, Any]]


@dataclass(frozen=True)
class EvaluationHooks:
    """The functions that an evaluation calls before and after each part. They run eagerly, on the host.

    Attributes:
      steps: The number of batches in a part.
      begin: Called before a part with the number of its first batch, counted from 0. Where the length of the data is
        not known, it is also called before the end of the data is found.
      end: Called after a part with the number of its last batch and the results so far, as NumPy values; returns
        whether the evaluation goes on.
    """

    steps: int
    begin: Callable[[int], None]
    end: Callable[[int, Any], bool]


class SplitEvalLoop:
    """Runs an evaluation a few batches at a time, so that callbacks run between them. Runs eagerly, on the host.

    Args:
      reset: A function that resets the metrics.
      part: A function of an iterator and the number of batches, int32, which evaluates that many without resetting the
        metrics. It returns the number of batches that it has evaluated and the results so far.
      parts: The functions to call before and after each part.
      batches: A function that returns an upper bound of the number of batches in the data, or None if it is not known.
    """

    def __init__(
        self, reset: Callable[[], None], part: Part, parts: EvaluationHooks, batches: Callable[[], int | None]
    ) -> None:
        self._reset, self._part, self._parts, self._batches = reset, part, parts, batches

    def __call__(self, iterator: Any, num_steps: Any) -> tuple[int, Any]:
        """Returns the number of batches evaluated and the results; `num_steps` -1 means all of the data."""
        self._reset()
        done, results, given = 0, None, int(num_steps)
        limit = self._batches() if given < 0 else given
        while limit is None or done < limit:
            wanted = self._parts.steps if limit is None else min(self._parts.steps, limit - done)
            self._parts.begin(done)
            count, results = self._part(iterator, tf.constant(wanted, tf.int32))
            done += count
            goes_on = count > 0 and self._parts.end(done - 1, results)
            if count < wanted or not goes_on:
                break
        return done, results

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph of the loop of a part; None if there is none."""
        return getattr(self._part, "newest_graph", None)
