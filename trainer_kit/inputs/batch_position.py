"""Where a run stands in the stream of all its batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """The index of the next global batch, and those that are left out.

    Batches count from 0, from the start of the first epoch on, those left out included.

    Attributes:
      batch: index of the next one; if it is left out itself, the next one is what comes after.
      left_out: indices of batches that are passed over, because they made training diverge; kept sorted, each once.
    """

    batch: int = 0
    left_out: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "left_out", tuple(sorted(set(self.left_out))))

    def nth(self, count: int) -> int:
        """Returns the index of the batch that is used after `count` others from here on."""
        batch = self.batch + count
        for out in self.left_out:
            if self.batch <= out <= batch:
                batch += 1
        return batch

    def after(self, steps: int) -> Position:
        """Returns the position after `steps` batches were used."""
        return Position(self.nth(steps), self.left_out)

    def without(self, batch: int) -> Position:
        """Returns the same position with one more batch left out."""
        return Position(self.batch, (*self.left_out, batch))

    def stretches(self) -> Iterator[tuple[int, int | None]]:
        """Yields (first batch, how many) of each unbroken part that is used from here on; the last has no end: None."""
        begin = self.batch
        for out in self.left_out:
            if out > begin:
                yield begin, out - begin
            begin = max(begin, out + 1)
        yield begin, None
