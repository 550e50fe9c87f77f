"""The training data of several tasks, each at its own position, with the interface of one task's TrainData."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from trainer_kit.inputs.sources.tfrecords import reporting_damage
from trainer_kit.inputs.train_data import TrainData
from trainer_kit.training.loops.iterators import Iterators


class Batches(int):
    """The indices of the batches that a step uses; as an int it is the first task's index.

    Attributes:
      of_tasks: Task -> index of its batch.
    """

    of_tasks: dict[str, int]

    def __new__(cls, of_tasks: Mapping[str, int]) -> Batches:
        """Returns an int that also has the indices of all tasks."""
        made = super().__new__(cls, next(iter(of_tasks.values())))
        made.of_tasks = dict(of_tasks)
        return made

    def __str__(self) -> str:
        return ", ".join(f"{index} of {name}" for name, index in self.of_tasks.items())

    __format__ = object.__format__


class TaskData:
    """Provides iterators by task, and keeps the position of each.

    Args:
      parts: Task name -> TrainData, which counts its own task's steps.
      steps_of: Returns, for a step of the run, the tasks that it trains -> their own step numbers; counted from 1.

    Attributes:
      made: None, because there is no single source for all tasks.
    """

    stack = 1
    made = None

    def __init__(self, parts: Mapping[str, TrainData], steps_of: Callable[[int], Mapping[str, int]]) -> None:
        self.parts, self._steps_of = dict(parts), steps_of
        self.feed = TaskFeeds(self.parts)

    @property
    def saves_position(self) -> bool:
        """Whether checkpoints hold the state of any iterator."""
        return any(part.saves_position for part in self.parts.values())

    def iterator(self) -> Iterators:
        """Returns the iterators, each at its position; see TrainData."""
        return Iterators({name: part.iterator() for name, part in self.parts.items()})

    def batch_of(self, step: int) -> Batches:
        """Returns the indices of the batches that step number `step` uses or has used; steps are counted from 1."""
        return Batches({name: self.parts[name].batch_of(own) for name, own in self._steps_of(step).items()})

    def reporting_damage(self) -> AbstractContextManager[None]:
        """A context that explains errors of unreadable data, and then drops all iterators; see TrainData."""
        read = lambda: [data for part in self.parts.values() for data in (part.made, part.feed.dataset)]  # noqa: E731
        return reporting_damage(read, self.feed.forget)

    def leave_out(self, batch: Batches) -> None:
        """Skips these batches from now on; see TrainData."""
        for name, index in batch.of_tasks.items():
            self.parts[name].leave_out(index)

    def put_in_stacks(self, size: int) -> None:
        """Accepts only size 1: batches of several datasets cannot be stacked."""
        assert size == 1, "problem_of_fusing refuses it"
        for part in self.parts.values():
            part.put_in_stacks(size)

    def state(self) -> dict[str, Any]:
        """Returns the positions, for the checkpoint."""
        return {name: part.state() for name, part in self.parts.items()}

    def put_state(self, state: Mapping[str, Any] | None) -> None:
        """Moves to the positions in a checkpoint; see TrainData."""
        for name, part in self.parts.items():
            part.put_state((state or {}).get(name))

    def restored(self, path: str | None) -> None:
        """Notes the path prefix of saved iterator states next to the restored checkpoint; None: there are none."""
        for number, part in self._numbered():
            part.restored(f"{path}-{number}" if path else None)

    def save_iterator(self, prefix: str, **options: Any) -> None:
        """Saves the iterators' states to files named `prefix` plus a number; see TrainData."""
        for number, part in self._numbered():
            part.save_iterator(f"{prefix}-{number}", **options)

    def _numbered(self) -> list[tuple[int, TrainData]]:
        """Returns numbered parts: files are named by number, because task names may not be valid file names."""
        return list(enumerate(self.parts[name] for name in sorted(self.parts)))


class TaskFeeds:
    """The feeds of several tasks' data, used like one feed.

    Args:
      parts: Task name -> TrainData.
    """

    def __init__(self, parts: Mapping[str, TrainData]) -> None:
        self._feeds = {name: part.feed for name, part in parts.items()}

    @property
    def given(self) -> dict[str, Any] | None:
        """The ready-made datasets by task; None if there are none."""
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
        """Replaces datasets, by task, beginning with the next iterator."""
        for name, one in dataset.items():
            self._feeds[name].replace(one)

    def forget(self) -> None:
        """Drops iterators and datasets, because their positions are no longer valid."""
        for feed in self._feeds.values():
            feed.forget()
