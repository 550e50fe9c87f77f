"""An evaluation in parts calls its functions around each part, and ends where the data does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.training.loops.eval_loop import SplitEvalLoop


class Noting:
    """A loop over numbers, with parts of two batches, that notes what is called."""

    steps = 2

    def __init__(self, known: int | None = None, goes_on: bool = True) -> None:
        self.calls: list[Any] = []
        self._goes_on, self._sum = goes_on, 0
        self.loop = SplitEvalLoop(lambda: self.calls.append("reset"), self.part, self, lambda: known)

    def begin(self, batch: int) -> None:
        self.calls.append(batch)

    def end(self, batch: int, results: Any) -> bool:
        self.calls.append((batch, results["sum"]))
        return self._goes_on

    def part(self, iterator: Iterator[int], steps: tf.Tensor) -> tuple[int, dict[str, int]]:
        taken = [value for _, value in zip(range(int(steps)), iterator, strict=False)]
        self._sum += sum(taken)
        return len(taken), {"sum": self._sum}


@pytest.mark.parametrize(
    ("steps", "known", "calls"),
    [
        (-1, 5, ["reset", 0, (1, 3), 2, (3, 10), 4, (4, 15)]),
        (-1, None, ["reset", 0, (1, 3), 2, (3, 10), 4, (4, 15)]),
        (3, None, ["reset", 0, (1, 3), 2, (2, 6)]),
        (9, 5, ["reset", 0, (1, 3), 2, (3, 10), 4, (4, 15)]),
    ],
)
def test_parts_are_called_around_their_batches(steps: int, known: int | None, calls: list[Any]) -> None:
    noting = Noting(known)
    done, results = noting.loop(iter([1, 2, 3, 4, 5]), tf.constant(steps))
    assert noting.calls == calls
    assert (done, results) == (calls[-1][0] + 1, {"sum": calls[-1][1]})


def test_a_part_that_does_not_begin_has_no_end() -> None:
    noting = Noting()
    assert noting.loop(iter([1, 2]), -1) == (2, {"sum": 3})
    assert noting.calls == ["reset", 0, (1, 3), 2]


def test_an_end_may_end_the_evaluation() -> None:
    noting = Noting(goes_on=False)
    assert noting.loop(iter([1, 2, 3]), -1) == (2, {"sum": 3})
