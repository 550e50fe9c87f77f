"""The validation sets of a trainer: the data of each, the task that evaluates it, and the number of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_kit.config.schema.evaluation import ValidationSetConfig
from trainer_kit.inputs.dataset_iterator import DatasetIterator
from trainer_kit.training.metrics import MetricSet


@dataclass(frozen=True)
class ValidationSet:
    """One validation set, with the task, model and metrics that evaluate it.

    Attributes:
      name: The name of the set; "" for a single set.
      feed: The DatasetIterator over the data.
      options: The steps and the interval of this set from the config; None: those of all sets.
      task: The task whose validation_step evaluates a batch; None: the trainer's task.
      model: The model for the step: the task's part of a model that several tasks share; None: the trainer's model.
      metrics: The metrics that the step updates, with the loss; None: the trainer's metrics.
    """

    name: str
    feed: DatasetIterator
    options: ValidationSetConfig | None = None
    task: Any = None
    model: Any = None
    metrics: MetricSet | None = None

    @property
    def has_own_steps(self) -> bool:
        """Whether the config sets the number of batches for this set."""
        return self.options is not None and self.options.steps is not None

    def steps(self, default: int) -> int:
        """Returns the number of batches to evaluate, -1 for all; `default` if the config sets none for this set."""
        own = self.options.steps if self.options is not None else None
        return default if own is None else own

    def interval(self, default: int | None) -> int | None:
        """Returns the training steps between two evaluations; `default` if the config sets none for this set."""
        own = self.options.interval if self.options is not None else None
        return default if own is None else own

    def check_ends(self, default: int) -> None:
        """Raises DataError when all batches are to be evaluated, but the data is known to be endless.

        Args:
          default: The number of batches if the config sets none for this set.
        """
        if self.steps(default) < 0:
            field = f"validation_sets.{self.name}.steps" if self.has_own_steps else "validation_steps"
            self.feed.check_ends(f"trainer.{field}")

    def batches(self, default: int, replicas: int) -> int | None:
        """Returns the number of batches that this process evaluates; None if not known. Safe from any thread.

        Args:
          default: The number of batches if the config sets none for this set.
          replicas: The number of replicas of this process; each takes an element of the data.
        """
        steps, elements = self.steps(default), self.feed.cardinality()
        if elements is None:
            return steps if steps > 0 else None
        batches = -(-elements // replicas)
        return min(steps, batches) if steps > 0 else batches


class ValidationSets:
    """All validation sets of a trainer, by name, in the order in which they are evaluated.

    Args:
      sets: The sets; a single set may have the name "". Without sets, an evaluation reports nothing.

    Attributes:
      current: The set that is evaluated now, or was evaluated last; None if there are no sets.
      evaluated: The names of the sets in the current or last evaluation.
      results: The results of that evaluation's metrics, by name of the set, as NumPy values.
    """

    def __init__(self, sets: Iterable[ValidationSet]) -> None:
        self._sets = {one.name: one for one in sets}
        self.current: ValidationSet | None = next(iter(self._sets.values()), None)
        self.evaluated = self.names
        self.results: dict[str, Any] = {}

    def __iter__(self) -> Iterator[ValidationSet]:
        return iter(self._sets.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all sets."""
        return tuple(self._sets)

    @property
    def have_names(self) -> bool:
        """Whether the sets have names; logs are then nested under these names."""
        return "" not in self._sets

    @property
    def dataset(self) -> Any:
        """The dataset, created when first needed; if the sets have names, a dict of datasets by name."""
        datasets = {one.name: one.feed.dataset for one in self}
        return datasets if self.have_names else datasets[""]

    def replace(self, dataset: Any) -> None:
        """Replaces the data from the next evaluation on; if the sets have names, `dataset` is a dict by name."""
        for name, one in dataset.items() if self.have_names else [("", dataset)]:
            self._sets[name].feed.replace(one)

    def turn_to(self, name: str) -> ValidationSet:
        """Makes the set of this name the current one, and returns it."""
        self.current = self._sets[name]
        return self._sets[name]

    def check(self, default: int) -> None:
        """Raises DataError when a set is known to be empty, or endless although all of it is to be evaluated.

        Args:
          default: The number of batches for sets without one in the config.
        """
        for one in self:
            one.feed.check_not_empty()
            one.check_ends(default)

    def batches(self, default: int, replicas: int) -> int | None:
        """Returns the number of batches of the evaluation; None if not known. See ValidationSet.batches."""
        found = [self._sets[name].batches(default, replicas) for name in self.evaluated]
        return None if None in found else sum(batches for batches in found if batches is not None)

    def metric_variables(self) -> list[Any]:
        """Returns the variables of the metrics that belong to single sets."""
        return [variable for one in self if one.metrics is not None for variable in one.metrics.variables()]


def shared_sets(feeds: Mapping[str, DatasetIterator], options: Any) -> ValidationSets:
    """Returns validation sets that differ only in their data; the trainer's task evaluates all of them.

    Args:
      feeds: The DatasetIterator of each set, by name.
      options: The section `trainer` of the config; its `validation_sets` may set steps and interval for each set.
    """
    own = getattr(options, "validation_sets", {})
    return ValidationSets(ValidationSet(name, feed, own.get(name)) for name, feed in feeds.items())
