"""The validation sets of a trainer: the data of each, what evaluates it, and over how many batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_kit.config.schema.evaluation import ValidationSetConfig
from trainer_kit.inputs.dataset_iterator import DatasetIterator
from trainer_kit.training.metrics import MetricSet


@dataclass(frozen=True)
class ValidationSet:
    """One validation set and what evaluates it.

    Attributes:
      name: of the set; "" for a single one.
      feed: hands out the data.
      task: whose validation_step evaluates a batch.
      model: that the step is given; where several tasks share a model, the part that is the task's.
      metrics: that the step updates, with the loss.
      options: the steps and the interval that the config gives this set; None: those of all sets.
    """

    name: str
    feed: DatasetIterator
    task: Any
    model: Any
    metrics: MetricSet
    options: ValidationSetConfig | None = None

    @property
    def has_own_steps(self) -> bool:
        """Whether the config says how many batches of this set are evaluated."""
        return self.options is not None and self.options.steps is not None

    def steps(self, default: int) -> int:
        """Returns how many batches are evaluated, -1 for all; `default` where the set has no number of its own."""
        own = self.options.steps if self.options is not None else None
        return default if own is None else own

    def interval(self, default: int | None) -> int | None:
        """Returns the training steps between two evaluations; `default` where the set has no interval of its own."""
        own = self.options.interval if self.options is not None else None
        return default if own is None else own

    def check_ends(self, default: int) -> None:
        """Raises DataError when all batches are to be evaluated, and the data is known to be endless.

        Args:
          default: see `steps`.
        """
        if self.steps(default) < 0:
            field = f"validation_sets.{self.name}.steps" if self.has_own_steps else "validation_steps"
            self.feed.check_ends(f"trainer.{field}")

    def batches(self, default: int, replicas: int) -> int | None:
        """Returns how many batches this process has in an evaluation, if that is known; from any thread.

        Args:
          default: see `steps`.
          replicas: of this process; each takes an element of the data.
        """
        steps, elements = self.steps(default), self.feed.cardinality()
        if elements is None:
            return steps if steps > 0 else None
        batches = -(-elements // replicas)
        return min(steps, batches) if steps > 0 else batches


class ValidationSets:
    """All validation sets of a trainer, by name, in the order in which they are evaluated.

    Args:
      sets: a single one may be called ""; without any, an evaluation reports nothing.

    Attributes:
      current: the set that is evaluated now, or was evaluated last; None where there are no sets.
      evaluated: the names of the sets of the last evaluation, or of the one under way.
      results: of that evaluation's metrics, by the name of the set, as NumPy values.
    """

    def __init__(self, sets: Iterable[ValidationSet]) -> None:
        self._sets = {one.name: one for one in sets}
        self.current: Any = next(iter(self._sets.values()), None)
        self.evaluated = self.names
        self.results: dict[str, Any] = {}

    def __getitem__(self, name: str) -> ValidationSet:
        return self._sets[name]

    def __iter__(self) -> Iterator[ValidationSet]:
        return iter(self._sets.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all sets."""
        return tuple(self._sets)

    @property
    def have_names(self) -> bool:
        """Whether there are sets with names; logs are nested by them then."""
        return "" not in self._sets

    @property
    def dataset(self) -> Any:
        """The data, made when first needed; a dict of it by name where the sets have names."""
        datasets = {one.name: one.feed.dataset for one in self}
        return datasets if self.have_names else datasets[""]

    def replace(self, dataset: Any) -> None:
        """Uses other data from the next evaluation on; a dict of some sets by name where the sets have names."""
        for name, one in dataset.items() if self.have_names else [("", dataset)]:
            self._sets[name].feed.replace(one)

    def turn_to(self, name: str) -> ValidationSet:
        """Makes a set the current one, tells its task by the attribute `validation_set`, and returns the set."""
        self.current = self._sets[name]
        self.current.task.validation_set = name
        return self.current

    def check(self, default: int) -> None:
        """Raises DataError when a set is known to be empty, or to be endless where all of it is evaluated.

        Args:
          default: see ValidationSet.steps.
        """
        for one in self:
            one.feed.check_not_empty()
            one.check_ends(default)

    def batches(self, default: int, replicas: int) -> int | None:
        """Returns how many batches the evaluation has, if that is known; see ValidationSet.batches."""
        found = [self._sets[name].batches(default, replicas) for name in self.evaluated]
        return None if None in found else sum(batches for batches in found if batches is not None)

    def metric_variables(self) -> list[Any]:
        """Returns the variables of the metrics of all sets, each once."""
        found = [variable for one in self for variable in one.metrics.variables()]
        return list({id(variable): variable for variable in found}.values())


def shared_sets(
    feeds: Mapping[str, DatasetIterator], task: Any, model: Any, metrics: MetricSet, options: Any
) -> ValidationSets:
    """Returns validation sets that differ in their data only.

    Args:
      feeds: hand out the data of each set, by its name.
      task: that evaluates all sets.
      model: of the task.
      metrics: of the task, which each evaluation begins by resetting.
      options: of the config's trainer; its `validation_sets` may give a set steps and an interval of its own.
    """
    own = getattr(options, "validation_sets", {})
    return ValidationSets(
        ValidationSet(name, feed, task, model, metrics, own.get(name)) for name, feed in feeds.items()
    )
