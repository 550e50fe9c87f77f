"""The training data of several tasks, each at its own position, with the methods of the data of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from trainer_kit.inputs.sources.tfrecords import reporting_damage
from trainer_kit.inputs.train_data import TrainData
from trainer_kit.training.loops.iterators import Iterators


class Batches(int):
    """The index of the batch that a step has used; of several tasks the first one's.

    Attributes:
      of_tasks: index by task.
    """

    of_tasks: dict[str, int]

    def __new__(cls, of_tasks: Mapping[str, int]) -> Batches:
        """Returns an int, which knows more."""
        made = super().__new__(cls, next(iter(of_tasks.values())))
        made.of_tasks = dict(of_tasks)
        return made

    def __str__(self) -> str:
        return ", ".join(f"{index} of {name}" for name, index in self.of_tasks.items())

    __format__ = object.__format__


class TaskData:
    """Hands out iterators by task, and knows where each of them is.

    Args:
      parts: the data of each task, by name; a part counts the steps of its own task.
      steps_of: returns, for a step of the run counted from 1, the tasks that it trains, each with the number that the
        step has among those of the task.

    Attributes:
      made: None: there is no one source for all tasks.
    """

    stack = 1
    made = None

    def __init__(self, parts: Mapping[str, TrainData], steps_of: Callable[[int], Mapping[str, int]]) -> None:
        self.parts, self._steps_of = dict(parts), steps_of
        self.feed = TaskFeeds(self.parts)

    @property
    def saves_position(self) -> bool:
        """Whether checkpoints hold the state of an iterator."""
        return any(part.saves_position for part in self.parts.values())

    def iterator(self) -> Iterators:
        """Returns the iterators, each at its position; see TrainData."""
        return Iterators({name: part.iterator() for name, part in self.parts.items()})

    def batch_of(self, step: int) -> Batches:
        """Returns the index of the batch, or batches, that step number `step`, counted from 1, uses or has used."""
        return Batches({name: self.parts[name].batch_of(own) for name, own in self._steps_of(step).items()})

    def reporting_damage(self) -> AbstractContextManager[None]:
        """Has an error of data that cannot be read say so, and drops all iterators; see TrainData."""
        read = lambda: [data for part in self.parts.values() for data in (part.made, part.feed.dataset)]  # noqa: E731
        return reporting_damage(read, self.feed.forget)

    def leave_out(self, batch: Batches) -> None:
        """Leaves out the batch, or batches, from now on; see TrainData."""
        for name, index in batch.of_tasks.items():
            self.parts[name].leave_out(index)

    def put_in_stacks(self, size: int) -> None:
        """Has batches come each by itself: several datasets cannot be stacked."""
        assert size == 1, "problem_of_fusing refuses it"
        for part in self.parts.values():
            part.put_in_stacks(size)

    def state(self) -> dict[str, Any]:
        """Returns the positions, for the checkpoint."""
        return {name: part.state() for name, part in self.parts.items()}

    def put_state(self, state: Mapping[str, Any] | None) -> None:
        """Goes to the positions of a checkpoint; see TrainData."""
        for name, part in self.parts.items():
            part.put_state((state or {}).get(name))

    def restored(self, path: str | None) -> None:
        """Notes where, beside the checkpoint that was restored, the states of iterators may be; None: nowhere."""
        for number, part in self._numbered():
            part.restored(f"{path}-{number}" if path else None)

    def save_iterator(self, prefix: str, **options: Any) -> None:
        """Saves the states of iterators to files that begin with `prefix` and a number; see TrainData."""
        for number, part in self._numbered():
            part.save_iterator(f"{prefix}-{number}", **options)

    def _numbered(self) -> list[tuple[int, TrainData]]:
        """Tasks may have names that files cannot have."""
        return list(enumerate(self.parts[name] for name in sorted(self.parts)))


class TaskFeeds:
    """The feeds of the data of several tasks, used as one.

    Args:
      parts: the data of each task, by name.
    """

    def __init__(self, parts: Mapping[str, TrainData]) -> None:
        self._feeds = {name: part.feed for name, part in parts.items()}

    @property
    def given(self) -> dict[str, Any] | None:
        """The ready-made datasets by task; None if there is none."""
        given = {name: feed.given for name, feed in self._feeds.items() if feed.given is not None}
        return given or None

    @property
    def dataset(self) -> dict[str, Any]:
        """The datasets by task."""
        return {name: feed.dataset for name, feed in self._feeds.items()}

    def check_not_empty(self) -> None:
        """Raises DataError when a dataset is known to hold no batch."""
        for feed in self._feeds.values():
            feed.check_not_empty()

    def replace(self, dataset: Mapping[str, Any]) -> None:
        """Uses other datasets, by task, from the next iterator on."""
        for name, one in dataset.items():
            self._feeds[name].replace(one)

    def forget(self) -> None:
        """Drops iterators and datasets, because their positions no longer count."""
        for feed in self._feeds.values():
            feed.forget()
