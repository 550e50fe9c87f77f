"""TaskInputs and ValidationSets: open the data of a trainer's task, distributed over the replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.durations import Duration, RoundedSteps
from trainer_kit.config.schema.evaluation import ValidationSetConfig, validation_sets
from trainer_kit.errors import UsageError
from trainer_kit.inputs.dataset_iterator import DatasetIterator
from trainer_kit.inputs.registered_datasets import inputs_of
from trainer_kit.inputs.sources.first_batches import only_first_batches
from trainer_kit.inputs.train_data import TrainData, open_whole
from trainer_kit.runtime.datasets import has_plain_iterator, with_threads
from trainer_kit.runtime.determinism import is_op_determinism_enabled
from trainer_kit.runtime.global_batch import tell_uneven_batch
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


class _WatchedContext(tf.distribute.InputContext):
    """An InputContext that knows whether its `input_pipeline_id` was read."""

    was_read = False

    @property
    def input_pipeline_id(self) -> int:
        self.was_read = True
        return int(super().input_pipeline_id)


class TaskInputs:
    """Opens training and validation data with a task's build_inputs. Created in the scope of the strategy.

    Args:
      config: The experiment's config.
      task: The trainer's task.
      distribute: The function distribute_dataset of the trainer.

    Attributes:
      validation_data: What build_inputs has returned for each validation set that was opened, by its section.
    """

    def __init__(self, config: Any, task: Any, distribute: Callable[[Any], Any]) -> None:
        self._config, self._task, self._distribute = config, task, distribute
        self._strategy = tf.distribute.get_strategy()
        self.validation_data: dict[str, Any] = {}
        self._overfit: int | None = getattr(config.trainer, "overfit_batches", None)

    def train_data(self, steps: tf.Variable, given: Any) -> TrainData:
        """Returns the training data of the trainer's task; see `train_data_of`."""
        return self.train_data_of(self._task, lambda: self._config.task.train_data, steps, given)

    def train_data_of(self, task: Any, params: Callable[[], Any], steps: tf.Variable, given: Any) -> TrainData:
        """Returns the training data of `task`; it is not opened yet.

        Args:
          task: The task whose build_inputs opens the data.
          params: A function that returns the data's section of the config.
          steps: The number of steps that have taken a batch, an int64 scalar.
          given: A ready-made dataset that replaces the task's; None: there is none.

        Raises:
          UsageError: when the config asks to overfit batches of a ready-made dataset.
        """
        _refuse_cut(given, self._overfit, "task.train_data")
        return TrainData(
            lambda open_at: self.opened(data := params(), open_at, _cut(inputs_of(task, data), self._overfit, True)),
            lambda: int(steps.numpy()),
            given,
            one_iterator=has_plain_iterator(self._strategy),
            deterministic_ops=getattr(self._config.runtime, "deterministic_ops", False) or is_op_determinism_enabled(),
            require_exact=getattr(self._config.trainer, "require_exact_resume", False),
            batch_size=getattr(getattr(self._config.task, "train_data", None), "global_batch_size", 0),
            restarts=isinstance(self._config.trainer.train_steps, (Duration, RoundedSteps)),
        )

    def validation_feeds(self, given: Any) -> dict[str, DatasetIterator]:
        """Returns the DatasetIterator of each validation set, by name; no data is opened yet.

        Args:
          given: A ready-made dataset that replaces the task's, or a dict of datasets by name; None: there is none.
        """
        sets = validation_sets(self._config.task)
        if isinstance(given, Mapping):
            sets = {**dict.fromkeys(given), **{name: data for name, data in sets.items() if name}}
        given = given if isinstance(given, Mapping) else {"": given}
        return {name: self.validation_feed(name, data, self._task, given.get(name)) for name, data in sets.items()}

    def validation_feed(self, name: str, params: Any, task: Any, given: Any = None) -> DatasetIterator:
        """Returns the DatasetIterator of one validation set; see `validation_feeds`.

        Args:
          name: The name of the set; "" for a single set.
          params: The data's section of the config.
          task: The task whose build_inputs opens the data.
          given: A ready-made dataset that replaces the task's; None: there is none.

        Raises:
          UsageError: when the config asks to overfit batches, but the dataset is ready-made.
        """
        section, replicas = self.validation_section(name), self._strategy.num_replicas_in_sync
        _refuse_cut(given, self._overfit, f"task.{section}")
        params = self._config.task.train_data if self._overfit else params
        build_inputs = inputs_of(task, params)

        @functools.wraps(build_inputs)
        def build(*args: Any, **kwargs: Any) -> Any:
            self.validation_data[section] = build_inputs(*args, **kwargs)
            return self.validation_data[section]

        def make() -> Any:
            path = f"task.{section}.global_batch_size"
            with tell_uneven_batch(getattr(params, "global_batch_size", 0), replicas, path):
                return self.opened(params, self.open_validation, _cut(build, self._overfit, False))

        return DatasetIterator(section, make, given)

    def validation_section(self, name: str) -> str:
        """Returns the dotted path of a validation set's data below the section `task`."""
        return f"validation_data.{name}".rstrip(".")

    def open_validation(self, build_inputs: Any, params: Any, input_context: Any) -> tf.data.Dataset:
        """Returns one pass over the validation data of one worker; some strategies call it in graph."""
        return open_whole(build_inputs, params, input_context)

    def opened(self, params: Any, open_data: Callable[..., tf.data.Dataset], build_inputs: Any) -> Any:
        """Returns data distributed over the replicas; runs eagerly.

        Args:
          params: The data's section of the config.
          open_data: A function of (build_inputs, params, input_context) that returns the dataset of one worker.
          build_inputs: The task's build_inputs.

        Raises:
          UsageError: when each of several workers would read all of the data.
        """

        def dataset_fn(input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
            workers = input_context.num_input_pipelines if input_context is not None else 1
            if input_context is None or workers == 1 or _is_sharded(params):
                return with_threads(open_data(build_inputs, params, input_context), self._config.runtime)
            context = _WatchedContext(workers, input_context.input_pipeline_id, input_context.num_replicas_in_sync)
            dataset = with_threads(open_data(build_inputs, params, context), self._config.runtime)
            if not context.was_read:
                name = getattr(build_inputs, "__qualname__", "build_inputs")
                option = "data_is_sharded: true" if hasattr(params, "data_is_sharded") else "sharding: false"
                raise UsageError(
                    f"{name} gives each of {workers} workers all of the data; before shuffle and batch, add dataset = "
                    "dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id), or set "
                    f"{option} in the section of the data if each worker has other data"
                )
            return dataset

        return self.distributed(dataset_fn)

    def distributed(self, dataset_or_fn: Any) -> Any:
        """Returns a dataset over the replicas; see Trainer.distribute_dataset. Runs eagerly.

        Args:
          dataset_or_fn: A dataset in global batches, or a function with the argument `input_context`.
        """
        return self._distribute(dataset_or_fn)


def _is_sharded(params: Any) -> bool:
    """Whether the section says that no worker reads all data; Model Garden's sections say so by `sharding: false`."""
    says_so = getattr(params, "data_is_sharded", not getattr(params, "sharding", True))
    return bool(says_so or getattr(params, "enable_tf_data_service", False))


def _cut(build_inputs: Callable[..., Any], batches: int | None, repeats: bool) -> Callable[..., Any]:
    """Returns `build_inputs`, or a function that cuts its data to the first `batches`; see only_first_batches."""
    return only_first_batches(build_inputs, batches, repeats) if batches else build_inputs


def _refuse_cut(given: Any, batches: int | None, section: str) -> None:
    if given is not None and batches:
        raise UsageError(
            f"{section}: trainer.overfit_batches cuts the data that build_inputs makes, but this dataset is "
            f"ready-made; cut it with take({batches}), and remove trainer.overfit_batches"
        )
