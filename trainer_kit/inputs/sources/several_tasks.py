"""The training data of several tasks as one stream: batches of all tasks in each element, or of one task.

If the data of every task is a Source, so is the stream: it begins at any position. Else it is a tf.data.Dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.sources.base import Source, identity_of
from trainer_kit.inputs.sources.example_order import replicas_here
from trainer_kit.inputs.task_sampler import TaskSampler


def joint_data(parts: Mapping[str, Any], input_context: tf.distribute.InputContext | None = None) -> Any:
    """Returns data whose elements hold a batch of each task: {task: batch}. Runs eagerly, on the host.

    Args:
      parts: The data of each task, a Source or a tf.data.Dataset, in batches for one replica.
      input_context: The worker's place among the others; None for a single replica.
    """
    if all(isinstance(one, Source) for one in parts.values()):
        return JointSource(parts)
    return tf.data.Dataset.zip(_from_the_start(parts, input_context))


def interleaved_data(
    parts: Mapping[str, Any], sampler: TaskSampler, input_context: tf.distribute.InputContext | None = None
) -> Any:
    """Returns data whose elements hold a batch of one task: (number of the task, {task: batch}).

    Runs eagerly, on the host.

    The number counts the tasks in the order of `parts`, int64. The batches of the other tasks have no examples.

    Args:
      parts: The data of each task, a Source or a tf.data.Dataset, in batches for one replica.
      sampler: Draws the task of each element.
      input_context: The worker's place among the others; None for a single replica.

    Raises:
      UsageError: when the batches of a task have no form without examples.
    """
    if all(isinstance(one, Source) for one in parts.values()):
        return InterleavedSource(parts, sampler)
    return _interleaved(_from_the_start(parts, input_context), sampler.tasks(0), replicas_here(input_context))


class JointSource:
    """A Source whose elements hold a batch of each task: {task: batch}.

    Args:
      parts: The Source of each task.
    """

    def __init__(self, parts: Mapping[str, Source]) -> None:
        self._parts = dict(parts)

    def at(self, position: int, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Returns the dataset from global batch `position` of every task on; see Source."""
        return tf.data.Dataset.zip({name: one.at(position, input_context) for name, one in self._parts.items()})

    def identity(self) -> dict[str, Any]:
        """Returns what describes the data of each task; see Source."""
        parts = {task: identity_of(one) for task, one in self._parts.items()}
        return {f"{task}, {name}": value for task, part in parts.items() for name, value in part.items()}

    def stacked_at(self, position: int, size: int) -> tf.data.Dataset | None:
        """Returns the dataset of `at` with `size` successive batches of each task in an element; see ArraySource.

        Returns:
          None if a task cannot stack its batches at once.
        """
        stacks = {}
        for name, one in self._parts.items():
            stacked_at = getattr(one, "stacked_at", None)
            stacks[name] = None if stacked_at is None else stacked_at(position, size)
        return None if None in stacks.values() else tf.data.Dataset.zip(stacks)


class InterleavedSource(JointSource):
    """A Source whose elements hold a batch of one task: (number of the task, {task: batch}).

    Args:
      parts: The Source of each task.
      sampler: Draws the task of each element.
    """

    def __init__(self, parts: Mapping[str, Source], sampler: TaskSampler) -> None:
        super().__init__(parts)
        self._sampler = sampler

    def at(self, position: int, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Returns the dataset from element `position` on, each task from its own batch on; see Source."""
        begun = self._begun(position, input_context)
        return _interleaved(begun, self._sampler.tasks(position), replicas_here(input_context))

    def stacked_at(self, position: int, size: int) -> tf.data.Dataset | None:
        """Returns the dataset of `at` for one replica, with `size` successive elements in each.

        XLA compiles a program for each shape, so here the batches of the other tasks are full ones of zeros.

        Returns:
          None if the batches of a task differ in shape.
        """
        begun = self._begun(position, None)
        parts = tf.nest.flatten([one.element_spec for one in begun.values()])
        if not all(isinstance(part, tf.TensorSpec) and part.shape.is_fully_defined() for part in parts):
            return None
        return _interleaved(begun, self._sampler.tasks(position), 1, full=True).batch(size, drop_remainder=True)

    def _begun(self, position: int, input_context: tf.distribute.InputContext | None) -> dict[str, tf.data.Dataset]:
        counts = zip(self._parts.items(), self._sampler.counts(position), strict=True)
        return {name: one.at(count, input_context) for (name, one), count in counts}


def _from_the_start(
    parts: Mapping[str, Any], input_context: tf.distribute.InputContext | None
) -> dict[str, tf.data.Dataset]:
    return {name: one.at(0, input_context) if isinstance(one, Source) else one for name, one in parts.items()}


def _interleaved(
    parts: Mapping[str, tf.data.Dataset], tasks: tf.data.Dataset, here: int, *, full: bool = False
) -> tf.data.Dataset:
    """Returns the elements (number of the task, {task: batch}) in the order of `tasks`.

    Args:
      parts: The dataset of each task.
      tasks: The task of each global batch.
      here: The number of successive elements that make this worker's part of a global batch.
      full: Whether the batches of the other tasks are full ones of zeros, instead of ones without examples.
    """
    specs = {name: one.element_spec for name, one in parts.items()}
    _check_specs(specs)
    turns = [_with_others(number, name, one, specs, full) for number, (name, one) in enumerate(parts.items())]
    if here > 1:
        tasks = tasks.flat_map(lambda task: tf.data.Dataset.from_tensors(task).repeat(here))
    chosen = tf.data.Dataset.choose_from_datasets(turns, tasks, stop_on_empty_dataset=True)
    endless = all(int(one.cardinality()) == tf.data.INFINITE_CARDINALITY for one in parts.values())
    if endless:
        chosen = chosen.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return chosen if full else chosen.prefetch(tf.data.AUTOTUNE)  # a small step is 10 % faster with it


def _with_others(
    number: int, name: str, dataset: tf.data.Dataset, specs: Mapping[str, Any], full: bool
) -> tf.data.Dataset:
    """Returns the batches of one task as elements that have a place for each task."""

    @tf.autograph.experimental.do_not_convert
    def element(*parts: Any) -> tuple[tf.Tensor, dict[str, Any]]:
        batch = tf.nest.pack_sequence_as(specs[name], tf.nest.flatten(parts))  # a tuple comes in parts
        others = {other: tf.nest.map_structure(lambda part: _zeros(part, full), spec) for other, spec in specs.items()}
        return tf.constant(number, tf.int64), {**others, name: batch}

    return dataset.map(element)


def _zeros(spec: tf.TensorSpec, full: bool) -> tf.Tensor:
    shape = [size or 0 for size in spec.shape]
    return tf.zeros(shape if full else [0, *shape[1:]] if shape else [], spec.dtype)


def _check_specs(specs: Mapping[str, Any]) -> None:
    """Raises UsageError when the batches of a task have no form without examples."""
    for name, spec in specs.items():
        for part in tf.nest.flatten(spec):
            if not isinstance(part, tf.TensorSpec) or part.shape.rank is None:
                kind = "tensors of unknown rank" if isinstance(part, tf.TensorSpec) else f"a {type(part).__name__}"
                raise UsageError(
                    f"the batches of the task {name!r} hold {kind.removesuffix('Spec')}, and interleaved tasks need "
                    "dense tensors of known rank; make them dense in build_inputs, or set task.training=joint"
                )
