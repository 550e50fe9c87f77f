"""The position of a run in the stream of all its batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """The index of the next global batch, and the indices of the batches that are left out.

    Batches are counted from 0 at the start of the first epoch. The count includes the batches that
    are left out.

    Attributes:
      batch: The index of the next batch. If that batch is left out, the one after it is used.
      skipped_batches: The indices of batches that are left out because they made training diverge,
        sorted and without duplicates.
    """

    batch: int = 0
    skipped_batches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # The class is frozen, so the field is set as the constructor sets it.
        skipped_batches = tuple(sorted(set(self.skipped_batches)))
        object.__setattr__(self, "skipped_batches", skipped_batches)

    def get_batch_after(self, count: int) -> int:
        """Returns the index of the batch that is used after `count` more batches."""
        batch = self.batch + count
        # The indices are sorted, so each one moves the batch past those before it.
        for skipped_batch in self.skipped_batches:
            if self.batch <= skipped_batch <= batch:
                batch += 1
        return batch

    def advance(self, steps: int) -> Position:
        """Returns the position after `steps` batches were used."""
        return Position(self.get_batch_after(steps), self.skipped_batches)

    def with_skipped_batch(self, batch: int) -> Position:
        """Returns the same position with one more batch left out."""
        return Position(self.batch, (*self.skipped_batches, batch))

    def iterate_ranges(self) -> Iterator[tuple[int, int | None]]:
        """Yields (first batch, number of batches) of each range without gaps from here on.

        The number of batches of the last range is None, since it has no end.
        """
        begin = self.batch
        for skipped_batch in self.skipped_batches:
            if skipped_batch > begin:
                yield begin, skipped_batch - begin
            begin = max(begin, skipped_batch + 1)
        yield begin, None
