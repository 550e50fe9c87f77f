"""Makes the dataset of one worker of what a task's build_inputs returns.

A strategy calls a pipeline once for each worker, between the position and the iterator: TrainData
tells it the position, and TaskInputs distributes what it makes.
"""

from __future__ import annotations

import abc
import logging
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.autotune_off import without_idle_tuner
from trainer_kit.inputs.batch_position import Position
from trainer_kit.inputs.dataset_resume import Resumption, examine, resume_method, source_resumption
from trainer_kit.inputs.dataset_structure import never_ends
from trainer_kit.inputs.fused_batches import stacked_at
from trainer_kit.inputs.registered_datasets import inputs_of
from trainer_kit.inputs.sources.base import Source, made_inputs, positioned
from trainer_kit.inputs.sources.first_batches import FirstBatches
from trainer_kit.runtime.datasets import with_threads
from trainer_kit.runtime.global_batch import tell_uneven_batch

_LOG = logging.getLogger(__name__)
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
      task: The task; its build_inputs makes the data where the section names no dataset.
      runtime: The section `runtime` of the config.
      first_batches: The number of global batches that the data is cut to; None: it is not cut.
    """

    path: str
    params: Any
    task: Any
    runtime: Any
    first_batches: int | None = None


class ResumeReports:
    """Logs once for each reason that a resume is slow or not exact.

    Args:
      require_exact: Whether a resume that cannot be exact is refused.

    Attributes:
      reasons: The reasons so far.
    """

    def __init__(self, require_exact: bool) -> None:
        self._require_exact = require_exact
        self.reasons: set[str] = set()

    def report(self, resumption: Resumption, level: int = logging.WARNING) -> None:
        """Logs the reasons that are new.

        Raises:
          UsageError: when the resume cannot be exact, and require_exact is set.
        """
        if resumption.method == "inexact" and self._require_exact:
            raise UsageError("\n  ".join(("trainer.require_exact_resume:", *resumption.reasons)))
        for reason in resumption.reasons:
            if reason not in self.reasons:
                self.reasons.add(reason)
                _LOG.log(level, "%s", reason)


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
      built: What build_inputs has returned last; None before the first call.
    """

    repeats = False  # whether data that is cut to its first batches repeats them

    def __init__(self, section: DataSection) -> None:
        self.section = section
        self.built: Any = None

    def __call__(self, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Returns the dataset of one worker; runs on the host, eagerly or in graph.

        Args:
          input_context: The worker's place among the others; None for a single replica.

        Raises:
          UsageError: when each of several workers would read all of the data.
        """
        section = self.section
        context = input_context
        workers = input_context.num_input_pipelines if input_context is not None else 1
        if input_context is not None and workers > 1 and not _is_sharded(section.params):
            worker = input_context.input_pipeline_id
            context = _WatchedContext(workers, worker, input_context.num_replicas_in_sync)

        build_inputs = inputs_of(section.task, section.params)
        data = self.built = made_inputs(build_inputs, section.params, context)
        if section.first_batches:
            data = FirstBatches(data, section.first_batches, self.repeats)
        dataset = with_threads(self.begin(data, context), section.runtime)

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
    def begin(self, data: Any, input_context: tf.distribute.InputContext | None) -> tf.data.Dataset:
        """Returns the dataset of one worker.

        Args:
          data: The Source or tf.data.Dataset.
          input_context: The worker's place among the others.
        """


def _is_sharded(params: Any) -> bool:
    """Whether the section says that no worker reads all data; Model Garden's by `sharding: false`."""
    says_so = getattr(params, "data_is_sharded", not getattr(params, "sharding", True))
    return bool(says_so or getattr(params, "enable_tf_data_service", False))


class OnePassPipeline(WorkerPipeline):
    """One pass over the data of a section, for validation."""

    def __call__(self, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Returns the dataset of one worker; see WorkerPipeline.

        Raises:
          ConfigError: when the replicas cannot share a batch equally.
        """
        batch_size = getattr(self.section.params, "global_batch_size", 0)
        replicas = input_context.num_replicas_in_sync if input_context is not None else 1
        with tell_uneven_batch(batch_size, replicas, f"task.{self.section.path}.global_batch_size"):
            return super().__call__(input_context)

    def begin(self, data: Any, input_context: tf.distribute.InputContext | None) -> tf.data.Dataset:
        """Returns one pass over the data of one worker."""
        return one_pass(data, input_context)


def one_pass(data: Any, input_context: tf.distribute.InputContext | None) -> tf.data.Dataset:
    """Returns one pass over the data of one worker, from its beginning.

    Args:
      data: The Source or tf.data.Dataset.
      input_context: The worker's place among the others.
    """
    data = without_idle_tuner(data)
    if never_ends(data):  # a strategy's dataset of several tells only their cardinality
        data = data.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return positioned(data, Position(), input_context)


class PositionedPipeline(WorkerPipeline):
    """The training data of a section from the run's position on.

    Args:
      section: See WorkerPipeline.
      require_exact: Whether data that cannot be resumed exactly is refused.
      one_iterator: Whether the dataset is a plain one for one replica, whose iterator can be saved.
      deterministic_ops: Whether TensorFlow's op determinism is on.
      restarts: Whether a tf.data.Dataset that ends starts again, with new orders of its shuffles.

    Attributes:
      reports: Reports how the run resumes in the data.
      data: The data that the last dataset was made of; None before the first one.
      saves_iterator: Whether checkpoints need the state of the dataset's iterator.
    """

    repeats = True

    def __init__(
        self,
        section: DataSection,
        *,
        require_exact: bool = False,
        one_iterator: bool = False,
        deterministic_ops: bool = False,
        restarts: bool = False,
    ) -> None:
        super().__init__(section)
        self.reports = ResumeReports(require_exact)
        self._one_iterator = one_iterator
        self._deterministic_ops = deterministic_ops
        self._restarts = restarts
        self.data: Any = None
        self.saves_iterator = False
        self.move_to(Position())

    def move_to(self, position: Position, stack: int = 1, *, is_saved: bool = False, read: Any = None) -> None:
        """Sets where the next dataset begins.

        Args:
          position: The position of the run.
          stack: The number of batches in an element; see inputs.fused_batches.
          is_saved: Whether the state of an iterator at this position is saved.
          read: The data that this process has read before, which may be the same object.
        """
        self._position = position
        self._stack = stack
        self._is_saved = is_saved
        self._read = read
        self.saves_iterator = False

    def begin(self, data: Any, input_context: tf.distribute.InputContext | None) -> tf.data.Dataset:
        """Returns the dataset of one worker from the position on.

        Raises:
          UsageError: when the data cannot be resumed exactly, but has to be.
        """
        self.data = data
        position = self._position
        if not isinstance(data, Source):
            if self._restarts and not never_ends(data):
                data = data.repeat()
            if self._continues_from_iterator(data):
                position = Position()  # the saved state moves the iterator

        if self._stack > 1:
            dataset = stacked_at(without_idle_tuner(data), position, self._stack, input_context)
        else:
            dataset = positioned(data, position, input_context)

        if isinstance(data, Source):
            find_resumption = getattr(data, "resumption", None)
            if find_resumption is not None:
                resumption = find_resumption(deterministic_ops=self._deterministic_ops)
            else:
                resumption = source_resumption(dataset, deterministic_ops=self._deterministic_ops)
            if resumption is not None:
                self.reports.report(resumption, _level_of(resumption))
        return dataset

    def _continues_from_iterator(self, dataset: tf.data.Dataset) -> bool:
        """Decides how a plain dataset gets to the position, and sets `saves_iterator`.

        Returns:
          Whether it is by the saved state of its iterator.
        """
        no_iterator = ""
        if not self._one_iterator:
            no_iterator = "an iterator over several replicas cannot be saved"
        if self._position.left_out:
            no_iterator = "a batch is left out, which the state of an iterator does not record"
        examination = examine(dataset)
        resumption = resume_method(examination, no_iterator=no_iterator, deterministic_ops=self._deterministic_ops)
        self.reports.report(resumption, _level_of(resumption))
        if resumption.method == "iterator" and self._is_saved:
            self.saves_iterator = True
            return True

        if self.data is self._read and examination.new_orders:
            text = _BEGUN_AGAIN.format(", ".join(examination.new_orders))
            self.reports.report(Resumption("inexact", (text,)))
        # The state of an iterator that began elsewhere would not fit the dataset as it is made.
        self.saves_iterator = resumption.method == "iterator" and self._position.batch == 0
        return False


def _level_of(resumption: Resumption) -> int:
    """Returns the level of a report: reading from the start is exact, and mostly quick enough."""
    return logging.INFO if resumption.method == "skip" else logging.WARNING
