"""The training data of several tasks as one stream.

Each element has batches of all tasks, or a batch of one task.

If the data of every task is a Source, so is the stream, and it begins at any position. Otherwise it
is a tf.data.Dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.dataset_structure import declare_endless
from trainer_kit.inputs.sources.example_order import count_local_replicas
from trainer_kit.inputs.sources.source_protocol import Source, get_data_identity
from trainer_kit.inputs.task_sampler import TaskSampler


def combine_task_data(
    parts: Mapping[str, tf.data.Dataset | Source],
    sampler: TaskSampler | None,
    input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset | Source:
    """Returns the data of several tasks as one stream. Runs eagerly, on the host.

    Args:
      parts: The data of each task, a Source or a tf.data.Dataset, in batches for one replica.
      sampler: Draws the task of each element. None: each element has a batch of every task.
      input_context: The worker's place among the others. None for a single replica.

    Raises:
      UsageError: when a task is drawn, and the batches of a task have no form without examples.
    """
    source = MultiTaskSource(parts, sampler)
    if all(isinstance(part, Source) for part in parts.values()):
        return source
    return source.at(0, input_context)


class MultiTaskSource:
    """A Source of the batches of several tasks.

    Its elements have a batch of each task, {task: batch}, or of one task that a sampler draws.

    An element with a batch of one task is (number of the task, {task: batch}). The number counts
    the tasks in the order of `parts`, int64. The batches of the other tasks have no examples.

    Args:
      parts: The data of each task: a Source, or a tf.data.Dataset, which can only be read from its
        beginning.
      sampler: Draws the task of each element. None: each element has a batch of every task.
    """

    def __init__(
        self, parts: Mapping[str, tf.data.Dataset | Source], sampler: TaskSampler | None
    ) -> None:
        self._parts = dict(parts)
        self._sampler = sampler

    def at(
        self, position: int, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset:
        """Returns the dataset from element `position` on. See Source.

        Each task continues at its own batch.
        """
        datasets = self._datasets_at(position, input_context)
        if self._sampler is None:
            return tf.data.Dataset.zip(datasets)
        tasks = self._sampler.draw_tasks(position)
        local_replicas = count_local_replicas(input_context)
        return _interleave_tasks(datasets, tasks, local_replicas)

    def identity(self) -> dict[str, Any]:
        """Returns the identity of the data of each task. See Source."""
        identity = {}
        for task, part in self._parts.items():
            part_identity = get_data_identity(part)
            for name, value in part_identity.items():
                identity[f"{task}, {name}"] = value
        return identity

    def stacked_at(self, position: int, size: int) -> tf.data.Dataset | None:
        """Returns the dataset of `at` for one replica, in stacks of `size` elements.

        See ArraySource. XLA compiles a program for each shape, so the batches of tasks that are not
        drawn are full ones of zeros here.

        Returns:
          None if a task cannot stack its batches at once, or the batches of an interleaved task
          differ in shape.
        """
        if self._sampler is None:
            stacks = {}
            for name, part in self._parts.items():
                stacked_at = getattr(part, "stacked_at", None)
                stacks[name] = stacked_at and stacked_at(position, size)
            if None in stacks.values():
                return None
            return tf.data.Dataset.zip(stacks)

        datasets = self._datasets_at(position, None)
        specs = [dataset.element_spec for dataset in datasets.values()]
        for spec in tf.nest.flatten(specs):
            if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
                return None

        tasks = self._sampler.draw_tasks(position)
        elements = _interleave_tasks(datasets, tasks, 1, full=True)
        return elements.batch(size, drop_remainder=True)

    def _datasets_at(
        self, position: int, input_context: tf.distribute.InputContext | None
    ) -> dict[str, tf.data.Dataset]:
        """Returns the dataset of each task from its own batch on."""
        counts = [position] * len(self._parts)
        if self._sampler:
            counts = self._sampler.count_steps_per_task(position)
        datasets = {}
        for (name, part), count in zip(self._parts.items(), counts, strict=True):
            dataset = part
            if isinstance(part, Source):
                dataset = part.at(count, input_context)
            datasets[name] = dataset
        return datasets


def _interleave_tasks(
    datasets: Mapping[str, tf.data.Dataset],
    tasks: tf.data.Dataset,
    repeats: int,
    *,
    full: bool = False,
) -> tf.data.Dataset:
    """Returns the elements (number of the task, {task: batch}) in the order of `tasks`.

    Args:
      datasets: The dataset of each task.
      tasks: The task of each global batch.
      repeats: The number of successive elements that make this worker's part of a global batch.
      full: Whether the batches of the other tasks are full ones of zeros, instead of ones without
        examples.
    """
    specs = {name: dataset.element_spec for name, dataset in datasets.items()}
    for spec in tf.nest.flatten(specs):
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
            raise UsageError(
                f"the batches of a task have {spec}, and interleaved tasks need dense tensors of"
                " known rank; make them dense in build_inputs, or set task.training=joint"
            )

    def zeros(spec: tf.TensorSpec) -> tf.Tensor:
        shape = [size or 0 for size in spec.shape]

        # The first dimension of a batch counts its examples. A scalar has none.
        if shape and not full:
            shape[0] = 0
        return tf.zeros(shape, spec.dtype)

    def pad_with_empty_batches(number: int, name: str) -> tf.data.Dataset:
        @tf.autograph.experimental.do_not_convert
        def element(*parts: Any) -> tuple[tf.Tensor, dict[str, Any]]:
            # tf.data passes a tuple in parts.
            tensors = tf.nest.flatten(parts)
            batch = tf.nest.pack_sequence_as(specs[name], tensors)
            batches = tf.nest.map_structure(zeros, specs)
            batches[name] = batch
            task = tf.constant(number, tf.int64)
            return task, batches

        return datasets[name].map(element)

    # All elements of a global batch are of one task.
    if repeats > 1:
        tasks = tasks.flat_map(lambda task: tf.data.Dataset.from_tensors(task).repeat(repeats))
    streams = [pad_with_empty_batches(number, name) for number, name in enumerate(datasets)]
    elements = tf.data.Dataset.choose_from_datasets(streams, tasks, stop_on_empty_dataset=True)

    # The stream ends with the first of its datasets.
    is_endless = all(
        int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY for dataset in datasets.values()
    )
    if is_endless:
        elements = declare_endless(elements)

    # A small step is 10 % faster with a prefetch.
    if not full:
        elements = elements.prefetch(tf.data.AUTOTUNE)
    return elements
