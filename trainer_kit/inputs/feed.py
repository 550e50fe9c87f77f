"""A dataset and its iterator, made when first needed: after a checkpoint has been restored.

The destructor of a tf.data iterator can wait for a minute: it tells tf.data's tuner to stop while the tuner sleeps,
and the tuner, woken too early to see it, sleeps on, each time twice as long as before. (An evaluation of 0.7 s took
50 s that way, the end of a process on two replicas two minutes.) So iterators are deleted in threads, those of one pass
as soon as it ends, while the pauses are short; and those that live to the end of the process are not deleted at all.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from trainer_kit.errors import DataError

_ALIVE: weakref.WeakSet[Feed] = weakref.WeakSet()


class Feed:
    """Hands out the iterator of one dataset.

    Args:
      name: of the config's section, for messages.
      make: returns the dataset; called when it is first needed, and again after `forget`.
      given: a ready-made dataset in its place, which `forget` keeps.
      begin: returns what to iterate over in place of a ready-made dataset: it from some batch on.
      replaced: called after another ready-made dataset was set.

    Attributes:
      given: the ready-made dataset; None if there is none.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Any],
        given: Any = None,
        *,
        begin: Callable[[Any], Any] = lambda given: given,
        replaced: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.given = name, given
        self._make, self._begin, self._replaced = make, begin, replaced
        self._made: Any = None
        self._iterator: Any = None
        self._one_pass = False
        _ALIVE.add(self)

    @property
    def dataset(self) -> Any:
        """The dataset; a ready-made one as it was given."""
        if self.given is not None:
            return self.given
        if self._made is None:
            self._made = self._make()
        return self._made

    @property
    def started(self) -> bool:
        """Whether there is an iterator."""
        return self._iterator is not None

    def check_not_empty(self) -> None:
        """Raises DataError when the dataset is known to hold no batch; many tell only when they are read."""
        if _cardinality(self.dataset) == 0:
            raise DataError(no_batch(self.name))

    def cardinality(self) -> int | None:
        """Returns how many elements the dataset has that was made of the task's data; from any thread.

        Under several replicas an element is the batch of one of them. None before it is made, where it does not tell,
        and for a ready-made one, which may be distributed in any way.
        """
        known = None if self.given is not None or self._made is None else _cardinality(self._made)
        return None if known is None or known < 0 else known

    def replace(self, dataset: Any) -> None:
        """Uses `dataset` from the next iterator on, which is made at the next call of `iterator`."""
        self.given = dataset
        self.forget()
        self._replaced()

    def forget(self) -> None:
        """Drops the iterator and the made dataset, because the position that they stand at no longer counts."""
        self._made = None
        self._let_go()

    def iterator(self, *, fresh: bool = False) -> Any:
        """Returns the iterator; a new one at the first example if `fresh`, which the end of a pass lets go."""
        self._one_pass = fresh
        if fresh:
            self._let_go()
        if self._iterator is None:
            self._iterator = iter(self.dataset if self.given is None else self._begin(self.given))
        return self._iterator

    def end_pass(self) -> None:
        """To be called after an evaluation: lets a fresh iterator go, which no one needs any more."""
        if self._one_pass:
            self._let_go()

    def leave(self) -> None:
        """Leaves the iterator to the operating system, at the end of the process: its destructor never runs."""
        if self._iterator is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._iterator))

    def _let_go(self) -> None:
        if self._iterator is not None:
            last_reference, self._iterator = [self._iterator], None
            threading.Thread(target=last_reference.clear).start()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._let_go()


def _cardinality(dataset: Any) -> int | None:
    known = getattr(dataset, "cardinality", None)  # a method; of a distributed dataset a property
    known = known() if callable(known) else known
    return None if known is None else int(known)


@atexit.register
def _leave_all() -> None:
    for feed in list(_ALIVE):
        feed.leave()


def no_batch(section: str) -> str:
    """Returns the message for a section of data without a batch."""
    return f"task.{section} has no batch: no files, no examples, or fewer than a batch of them"
