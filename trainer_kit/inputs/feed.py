"""A dataset and its iterator, made when first needed: after a checkpoint has been restored."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from trainer_kit.errors import DataError


class Feed:
    """Hands out the iterator of one dataset.

    Args:
      name: of the config's section, for messages.
      make: returns the dataset; called when it is first needed, and again after `forget`.
      given: a ready-made dataset in its place, which `forget` keeps.
    """

    def __init__(self, name: str, make: Callable[[], Any], given: Any = None) -> None:
        self.name = name
        self._make, self._given = make, given
        self._made: Any = None
        self._iterator: Any = None

    @property
    def dataset(self) -> Any:
        """The dataset."""
        if self._given is not None:
            return self._given
        if self._made is None:
            self._made = self._make()
        return self._made

    def check_not_empty(self) -> None:
        """Raises DataError when the dataset is known to hold no batch; many tell only when they are read."""
        known = getattr(self.dataset, "cardinality", None)  # a method; of a distributed dataset a property
        known = known() if callable(known) else known
        if known is not None and int(known) == 0:
            raise DataError(no_batch(self.name))

    def replace(self, dataset: Any) -> None:
        """Uses `dataset` from the next iterator on, which is made at the next call of `iterator`."""
        self._given = dataset
        self._let_go()

    def forget(self) -> None:
        """Drops the iterator and the made dataset, because the position that they stand at no longer counts."""
        self._made = None
        self._let_go()

    def iterator(self, *, fresh: bool = False) -> Any:
        """Returns the iterator; a new one at the first example if `fresh`."""
        if fresh:
            self._let_go()
        if self._iterator is None:
            self._iterator = iter(self.dataset)
        return self._iterator

    def _let_go(self) -> None:
        """Deletes the iterator in a thread.

        The destructor waits until tf.data's tuner wakes up, whose pauses double up to a minute: evaluations of 0.7 s,
        each with a fresh iterator, took up to 50 s.
        """
        if self._iterator is not None:
            last_reference, self._iterator = [self._iterator], None
            threading.Thread(target=last_reference.clear, daemon=True).start()


def no_batch(section: str) -> str:
    """Returns the message for a section of data without a batch."""
    return f"task.{section} has no batch: no files, no examples, or fewer than a batch of them"
