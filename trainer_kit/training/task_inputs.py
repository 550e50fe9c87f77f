"""TaskInputs and ValidationSets: open the data of a trainer's task.

The data is distributed over the replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from trainer_kit.config.schema.durations import Duration, RoundedSteps
from trainer_kit.config.schema.evaluation import ValidationSetConfig, get_validation_sets
from trainer_kit.errors import UsageError
from trainer_kit.inputs.dataset_iterator import ValidationData
from trainer_kit.inputs.dataset_resume import ResumePolicy
from trainer_kit.inputs.sources.source_protocol import get_data_identity
from trainer_kit.inputs.train_data import TrainData
from trainer_kit.inputs.worker_pipeline import DataSection, OnePassPipeline, WorkerPipeline
from trainer_kit.runtime.collectives import worker_count
from trainer_kit.runtime.datasets import distribute_dataset, has_plain_iterator
from trainer_kit.runtime.determinism import is_op_determinism_enabled
from trainer_kit.training.metric_set import MetricSet
from trainer_kit.typing import Dataset, ExperimentLike, Model, TaskLike, Variable

if TYPE_CHECKING:
    from trainer_kit.config.schema.experiment import DataConfig, TrainerConfig


@dataclass(frozen=True)
class ValidationSet:
    """One validation set, with the task, model and metrics that evaluate it.

    Attributes:
      name: The name of the set. "" for a single set.
      data: The data of the set, with its iterator.
      options: The steps and the interval of this set from the config. None: those of all sets.
      task: The task whose validation_step evaluates a batch. None: the trainer's task.
      model: The model for the step, which is the task's part of a model that several tasks share.
        None: the trainer's model.
      metrics: The metrics that the step updates, with the loss. None: the trainer's metrics.
    """

    name: str
    data: ValidationData
    options: ValidationSetConfig | None = None
    task: TaskLike | None = None
    model: Model | None = None
    metrics: MetricSet | None = None

    @property
    def has_own_steps(self) -> bool:
        """Whether the config sets the number of batches for this set."""
        return self.options is not None and self.options.steps is not None

    def steps(self, default: int) -> int:
        """Returns the number of batches to evaluate. -1 means all.

        Args:
          default: The number of batches if the config sets none for this set.
        """
        if self.options is None or self.options.steps is None:
            return default
        return self.options.steps

    def interval(self, default: int | None) -> int | None:
        """Returns the training steps between two evaluations.

        Args:
          default: The interval if the config sets none for this set.
        """
        if self.options is None or self.options.interval is None:
            return default
        return self.options.interval

    def check_ends(self, default: int) -> None:
        """Checks that the data is not known to be endless if all batches are to be evaluated.

        Args:
          default: The number of batches if the config sets none for this set.

        Raises:
          DataError: when the data is known to be endless.
        """
        if self.steps(default) < 0:
            field = "validation_steps"
            if self.has_own_steps:
                field = f"validation_sets.{self.name}.steps"
            self.data.check_has_end(f"trainer.{field}")

    def batches(self, default: int, replicas: int) -> int | None:
        """Returns the number of batches that this process evaluates. None if it is not known.

        Safe from any thread.

        Args:
          default: The number of batches if the config sets none for this set.
          replicas: The number of replicas of this process. Each takes an element of the data.
        """
        steps = self.steps(default)
        elements = self.data.cardinality()
        if elements is None:
            return steps if steps > 0 else None

        # The last batch may have elements for some of the replicas only.
        batches = -(-elements // replicas)
        if steps > 0:
            return min(steps, batches)
        return batches


class ValidationSets:
    """All validation sets of a trainer, by name, in the order in which they are evaluated.

    Args:
      sets: The sets. A single set may have the name "". Without sets, an evaluation reports
        nothing.

    Attributes:
      current: The set that is evaluated now, or was evaluated last. None if there are no sets.
      evaluated_names: The names of the sets in the current or last evaluation.
    """

    def __init__(self, sets: Iterable[ValidationSet]) -> None:
        self._sets = {validation_set.name: validation_set for validation_set in sets}
        self.current: ValidationSet | None = next(iter(self._sets.values()), None)
        self.evaluated_names = self.names

    def __iter__(self) -> Iterator[ValidationSet]:
        return iter(self._sets.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all sets."""
        return tuple(self._sets)

    @property
    def has_names(self) -> bool:
        """Whether the sets have names. Logs are then nested under these names."""
        return "" not in self._sets

    @property
    def dataset(self) -> Dataset | dict[str, Dataset]:
        """The dataset, created when it is first needed.

        If the sets have names, it is a dict of datasets by name.
        """
        datasets = {validation_set.name: validation_set.data.dataset for validation_set in self}
        return datasets if self.has_names else datasets[""]

    def replace(self, dataset: Dataset | Mapping[str, Dataset]) -> None:
        """Replaces the data from the next evaluation on.

        Args:
          dataset: The dataset. If the sets have names, a dict of datasets by name.
        """
        # A single set without a name is passed without a dict.
        datasets = dataset if self.has_names else {"": dataset}
        for name, new_dataset in datasets.items():
            self._sets[name].data.replace(new_dataset)

    def select(self, name: str) -> ValidationSet:
        """Makes the set of this name the current one, and returns it."""
        self.current = self._sets[name]
        return self._sets[name]

    def check(self, default: int) -> None:
        """Checks that each set has data, and an end where all of it is to be evaluated.

        Args:
          default: The number of batches for sets without one in the config.

        Raises:
          DataError: when a set is known to be empty, or endless although all of it is to be
            evaluated.
        """
        for validation_set in self:
            validation_set.data.check_not_empty()
            validation_set.check_ends(default)

    def batches(self, default: int, replicas: int) -> int | None:
        """Returns the number of batches of the evaluation. None if it is not known.

        The arguments are those of ValidationSet.batches.
        """
        total = 0
        for name in self.evaluated_names:
            batches = self._sets[name].batches(default, replicas)
            # One set of unknown length makes the sum unknown.
            if batches is None:
                return None
            total += batches
        return total

    def metric_variables(self) -> list[Variable]:
        """Returns the variables of the metrics that belong to single sets."""
        variables: list[Variable] = []
        for validation_set in self:
            if validation_set.metrics is not None:
                variables += validation_set.metrics.variables()
        return variables


def create_validation_sets(
    data_by_name: Mapping[str, ValidationData], options: TrainerConfig
) -> ValidationSets:
    """Returns validation sets that differ only in their data.

    The trainer's task evaluates all of them.

    Args:
      data_by_name: The data of each set, by name.
      options: The section `trainer` of the config. Its `validation_sets` may set steps and interval
        for each set.
    """
    set_options = getattr(options, "validation_sets", {})
    sets = []
    for name, data in data_by_name.items():
        sets.append(ValidationSet(name, data, set_options.get(name)))
    return ValidationSets(sets)


class TaskInputs:
    """Opens training and validation data with a task's build_inputs. Created in strategy scope.

    Args:
      config: The experiment's config.
      task: The trainer's task.

    Attributes:
      pass_pipeline_class: The class that creates the validation data of a worker.
    """

    pass_pipeline_class: type[OnePassPipeline] = OnePassPipeline

    def __init__(self, config: ExperimentLike, task: TaskLike) -> None:
        self._config = config
        self._task = task
        self._strategy = tf.distribute.get_strategy()
        self._overfit_batches: int | None = getattr(config.trainer, "overfit_batches", None)
        self._validation_pipelines: list[OnePassPipeline] = []

    @property
    def opened_validation_data(self) -> dict[str, Any]:
        """What build_inputs has returned for each opened validation set, by its section."""
        sources = {}
        for pipeline in self._validation_pipelines:
            if pipeline.source is not None:
                sources[pipeline.section.path] = pipeline.source
        return sources

    def data_identities(self, train_source: object) -> dict[str, Any]:
        """Returns what describes the opened data, by the path of its section in the config.

        Args:
          train_source: What build_inputs has returned for the training data. None: it is not
            opened.
        """
        replicas = self._strategy.num_replicas_in_sync
        workers = worker_count(self._strategy)
        key_suffix = f" for one of {replicas} replicas on {workers} workers"

        sources = {"train_data": train_source, **self.opened_validation_data}
        return {
            f"task.{section}": get_data_identity(source, key_suffix)
            for section, source in sources.items()
        }

    def create_train_data(
        self, global_step: tf.Variable, ready_made_dataset: Dataset | None
    ) -> TrainData:
        """Returns the training data of the trainer's task. It is not opened yet.

        Args:
          global_step: The number of steps that have taken a batch, an int64 scalar.
          ready_made_dataset: A ready-made dataset that replaces the task's. None: there is none.

        Raises:
          UsageError: when the config asks to overfit batches of a ready-made dataset.
        """
        config = self._config
        # The program may have turned op determinism on itself.
        asks_for_determinism = getattr(config.runtime, "deterministic_ops", False)
        is_deterministic = asks_for_determinism or is_op_determinism_enabled()
        # Data begins again where the length of the run is a duration, such as "3 epochs".
        train_steps = config.trainer.train_steps
        policy = ResumePolicy(
            require_exact=getattr(config.trainer, "require_exact_resume", False),
            has_single_iterator=has_plain_iterator(self._strategy),
            deterministic_ops=is_deterministic,
            repeats_datasets=isinstance(train_steps, (Duration, RoundedSteps)),
        )

        params = getattr(config.task, "train_data", None)
        section = self._section("train_data", params, self._task, ready_made_dataset)
        batch_size = getattr(params, "global_batch_size", 0)
        return TrainData(
            self, section, policy, global_step, ready_made_dataset, batch_size=batch_size
        )

    def create_all_validation_data(
        self, ready_made_dataset: Dataset | Mapping[str, Dataset] | None
    ) -> dict[str, ValidationData]:
        """Returns the data of each validation set, by name. None of it is opened yet.

        Args:
          ready_made_dataset: A ready-made dataset that replaces the task's, or a dict of datasets
            by name. None: there is none.
        """
        sets = get_validation_sets(self._config.task)
        datasets = {"": ready_made_dataset}
        if isinstance(ready_made_dataset, Mapping):
            # The order is that of the dict. Sets of the config that it lacks come after it.
            named_sets = {name: data for name, data in sets.items() if name}
            sets = {**dict.fromkeys(ready_made_dataset), **named_sets}
            datasets = dict(ready_made_dataset)

        validation_data = {}
        for name, params in sets.items():
            dataset = datasets.get(name)
            validation_data[name] = self.create_validation_data(name, params, self._task, dataset)
        return validation_data

    def create_validation_data(
        self,
        name: str,
        params: DataConfig | None,
        task: TaskLike,
        ready_made_dataset: Dataset | None = None,
    ) -> ValidationData:
        """Returns the data of one validation set. See `create_all_validation_data`.

        Args:
          name: The name of the set. "" for a single set.
          params: The data's section of the config.
          task: The task whose build_inputs opens the data.
          ready_made_dataset: A ready-made dataset that replaces the task's. None: there is none.

        Raises:
          UsageError: when the config asks to overfit batches, but the dataset is ready-made.
        """
        path = self.validation_section(name)
        # With overfit_batches, the evaluation sees the batches that are trained on.
        if self._overfit_batches:
            params = self._config.task.train_data
        section = self._section(path, params, task, ready_made_dataset)
        pipeline = self.pass_pipeline_class(section)
        self._validation_pipelines.append(pipeline)
        return ValidationData(path, self, pipeline, ready_made_dataset)

    def validation_section(self, name: str) -> str:
        """Returns the dotted path of a validation set's data below the section `task`."""
        return f"validation_data.{name}".rstrip(".")

    def distribute(self, pipeline: WorkerPipeline) -> Dataset:
        """Returns the dataset of a pipeline over the replicas. Runs eagerly, on the host."""
        return distribute_dataset(self._strategy, pipeline)

    def _section(
        self,
        path: str,
        params: DataConfig | None,
        task: TaskLike,
        ready_made_dataset: Dataset | None,
    ) -> DataSection:
        """Returns the description of a dataset, which its pipeline opens."""
        if ready_made_dataset is not None and self._overfit_batches:
            raise UsageError(
                f"task.{path}: trainer.overfit_batches cuts the data that build_inputs makes, "
                "but this dataset is ready-made; "
                f"cut it with take({self._overfit_batches}), and remove trainer.overfit_batches"
            )
        return DataSection(path, params, task, self._config.runtime, self._overfit_batches)
