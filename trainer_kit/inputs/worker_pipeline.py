"""Makes one worker's dataset of the data that a task's build_inputs returns.

TrainData makes a pipeline with the position of the run, and TaskInputs has a strategy call it, once
for each worker.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.autotune_off import disable_idle_autotune
from trainer_kit.inputs.batch_position import Position
from trainer_kit.inputs.dataset_resume import ResumePolicy, Resumption, examine_dataset
from trainer_kit.inputs.dataset_structure import declare_endless, is_infinite
from trainer_kit.inputs.fused_batches import build_stacked_dataset_at
from trainer_kit.inputs.registered_datasets import get_build_inputs
from trainer_kit.inputs.sources.first_batches import FirstBatches
from trainer_kit.inputs.sources.source_protocol import Source, build_dataset_at, call_build_inputs
from trainer_kit.runtime.datasets import with_private_threadpool
from trainer_kit.runtime.global_batch import explain_uneven_batch

_BEGUN_AGAIN = (
    "task.train_data: resume is not exact: the same dataset is read a second time, and {} then "
    "draws another order; let build_inputs make a new dataset at each call"
)


@dataclass(frozen=True)
class DataSection:
    """One section of data in the config, and the task that opens it.

    Attributes:
      path: The dotted path of the section below `task`, such as train_data.
      params: The section.
      task: The task. Its build_inputs makes the data where the section names no dataset.
      runtime: The section `runtime` of the config.
      batch_limit: The number of global batches that the data is cut to. None if it is not cut.
    """

    path: str
    params: Any
    task: Any
    runtime: Any
    batch_limit: int | None = None


class _WatchedContext(tf.distribute.InputContext):
    """An InputContext that knows whether its `input_pipeline_id` was read."""

    was_read = False

    @property
    def input_pipeline_id(self) -> int:
        self.was_read = True
        return int(super().input_pipeline_id)


class WorkerPipeline(abc.ABC):
    """Makes the dataset of a section for one worker.

    Args:
      section: The section.

    Attributes:
      section: The argument of this name.
      source: The data that build_inputs has returned last. None before the first call.
    """

    # Whether data that is cut to its first batches repeats them.
    repeats = False

    def __init__(self, section: DataSection) -> None:
        self.section = section
        self.source: Any = None

    def __call__(self, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Returns the dataset of one worker. Runs on the host, eagerly or in graph.

        Args:
          input_context: The worker's place among the others. None for a single replica.

        Raises:
          UsageError: when each of several workers would read all of the data.
        """
        section = self.section
        context = input_context
        workers = input_context.num_input_pipelines if input_context is not None else 1

        # No worker reads all data if the section says so. Sections of Model Garden say it by
        # `sharding: false`.
        params = section.params
        is_sharded = getattr(params, "data_is_sharded", not getattr(params, "sharding", True))
        is_served = getattr(params, "enable_tf_data_service", False)

        # build_inputs has to read the worker's number to shard the data, which is checked below.
        if input_context is not None and workers > 1 and not (is_sharded or is_served):
            worker = input_context.input_pipeline_id
            context = _WatchedContext(workers, worker, input_context.num_replicas_in_sync)

        build_inputs = get_build_inputs(section.task, section.params)
        data = call_build_inputs(build_inputs, section.params, context)
        self.source = data
        if section.batch_limit:
            data = FirstBatches(data, section.batch_limit, self.repeats)
        dataset = with_private_threadpool(self.build_dataset(data, context), section.runtime)

        if isinstance(context, _WatchedContext) and not context.was_read:
            name = getattr(build_inputs, "__qualname__", "build_inputs")
            has_field = hasattr(section.params, "data_is_sharded")
            option = "data_is_sharded: true" if has_field else "sharding: false"
            raise UsageError(
                f"{name} gives each of {workers} workers all of the data; before shuffle and "
                "batch, add dataset = dataset.shard(input_context.num_input_pipelines, "
                f"input_context.input_pipeline_id), or set {option} in the section of the data if "
                "each worker has other data"
            )
        return dataset

    @abc.abstractmethod
    def build_dataset(
        self, data: tf.data.Dataset | Source, input_context: tf.distribute.InputContext | None
    ) -> tf.data.Dataset:
        """Returns the dataset of one worker.

        Args:
          data: The Source or tf.data.Dataset.
          input_context: The worker's place among the others.
        """


class OnePassPipeline(WorkerPipeline):
    """One pass over the data of a section, for validation."""

    def __call__(self, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Returns the dataset of one worker. See WorkerPipeline.

        Raises:
          ConfigError: when the replicas cannot share a batch equally.
        """
        batch_size = getattr(self.section.params, "global_batch_size", 0)
        replicas = input_context.num_replicas_in_sync if input_context is not None else 1
        field = f"task.{self.section.path}.global_batch_size"
        with explain_uneven_batch(batch_size, replicas, field):
            return super().__call__(input_context)

    def build_dataset(
        self, data: tf.data.Dataset | Source, input_context: tf.distribute.InputContext | None
    ) -> tf.data.Dataset:
        """Returns one pass over the data of one worker."""
        return build_one_pass(data, input_context)


def build_one_pass(
    data: tf.data.Dataset | Source, input_context: tf.distribute.InputContext | None
) -> tf.data.Dataset:
    """Returns one pass over the data of one worker, from its beginning.

    Args:
      data: The Source or tf.data.Dataset.
      input_context: The worker's place among the others.
    """
    data = disable_idle_autotune(data)
    # A strategy's dataset of several datasets exposes only their cardinality.
    if isinstance(data, tf.data.Dataset) and is_infinite(data):
        data = declare_endless(data)
    return build_dataset_at(data, Position(), input_context)


@dataclass(frozen=True)
class TrainingStart:
    """Where and how a run begins to read its training data.

    Attributes:
      position: The position of the first batch.
      stack_size: The number of batches in an element. See inputs.fused_batches.
      has_saved_iterator: Whether the state of an iterator at this position is saved.
      previous_source: The data that this process has read before. It may be the same object.
    """

    position: Position
    stack_size: int = 1
    has_saved_iterator: bool = False
    previous_source: Any = None


@dataclass(frozen=True)
class OpenedData:
    """Training data that begins at the run's position.

    Attributes:
      dataset: The dataset of one worker.
      source: The data that build_inputs returned, or a ready-made dataset.
      needs_iterator_state: Whether checkpoints need the state of the dataset's iterator.
    """

    dataset: Any
    source: Any
    needs_iterator_state: bool = False


def open_at(
    data: tf.data.Dataset | Source,
    start: TrainingStart,
    policy: ResumePolicy,
    input_context: tf.distribute.InputContext | None = None,
) -> OpenedData:
    """Opens the data of one worker.

    A Source begins at the position. A plain dataset gets there as the policy decides.

    Args:
      data: The Source or tf.data.Dataset.
      start: The position where the data begins, and how to get there.
      policy: Decides how a plain dataset gets to the position, and reports it.
      input_context: The worker's place among the others. None for a single replica.

    Raises:
      UsageError: when the data cannot be resumed exactly, but has to be.
    """
    source = data
    position = start.position
    saves_iterator = False
    if not isinstance(data, Source):
        if policy.repeats_datasets and not is_infinite(data):
            data = data.repeat()
        examination = examine_dataset(data)
        can_be_saved = policy.can_save_iterator(examination, position)
        if can_be_saved and start.has_saved_iterator:
            # The saved state moves the iterator to the position.
            position = Position()
        elif source is start.previous_source and examination.reshuffled_each_iteration:
            text = _BEGUN_AGAIN.format(", ".join(examination.reshuffled_each_iteration))
            policy.report(Resumption("inexact", (text,)))
        # The state of an iterator that began elsewhere would not fit the dataset as it is made.
        saves_iterator = can_be_saved and position.batch == 0

    if start.stack_size > 1:
        dataset = build_stacked_dataset_at(
            disable_idle_autotune(data), position, start.stack_size, input_context
        )
    else:
        dataset = build_dataset_at(data, position, input_context)
    if isinstance(data, Source):
        policy.report_source(data, dataset)
    return OpenedData(dataset, source, saves_iterator)


class PositionedPipeline(WorkerPipeline):
    """The training data of a section from a position on, for one call of a strategy.

    Args:
      section: See WorkerPipeline.
      start: Where the data begins.
      policy: Decides how it gets there, and reports it.

    Attributes:
      opened_data: The data that the strategy has distributed. None before that.
    """

    repeats = True

    def __init__(self, section: DataSection, start: TrainingStart, policy: ResumePolicy) -> None:
        super().__init__(section)
        self._start = start
        self._policy = policy
        self.opened_data: OpenedData | None = None

    def build_dataset(
        self, data: tf.data.Dataset | Source, input_context: tf.distribute.InputContext | None
    ) -> tf.data.Dataset:
        """Returns the dataset of one worker from the position on. See `open_at`."""
        self.opened_data = open_at(data, self._start, self._policy, input_context)
        return self.opened_data.dataset
