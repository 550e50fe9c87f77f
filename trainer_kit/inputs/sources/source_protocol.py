"""Source, the protocol of data that can start at any position.

Other datasets are skipped to the position.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import UsageError
from trainer_kit.inputs.batch_position import Position
from trainer_kit.inputs.dataset_resume import skip_batches
from trainer_kit.inputs.sources.example_order import count_local_replicas
from trainer_kit.runtime.tensorflow_internals import restart_operation_seeds


@runtime_checkable
class Source(Protocol):
    """Data whose order is a pure function of (seed, epoch, index).

    A run with such data can resume where it stopped. `Task.build_inputs` may return one instead of
    a tf.data.Dataset. The Trainer then asks for the dataset when it needs the iterator: after a
    checkpoint has been restored.

    A Source may have a method `resumption(*, deterministic_ops) -> Resumption | None` that returns
    how exactly it resumes. Without one, the functions of its dataset are examined.

    A Source may have a cheap method `identity() -> dict[str, Any]` that describes its data by JSON
    values, the same in every process. A run refuses to resume with other values. Without one,
    changes of the data are not noticed.

    A Source may have a method `stages(position, input_context=None) -> dict[str, Dataset]` that
    returns the datasets that make its batches one after another, by the name of the stage. Then
    `trainer-kit doctor data` measures each stage.
    """

    def at(
        self, position: int, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset:
        """Returns the dataset from global batch `position` on, in batches for one replica.

        Args:
          position: How many global batches have been used already, from the start of the first
            epoch.
          input_context: The worker's place among the others. None for a single replica.
        """
        ...


def get_data_identity(data: tf.data.Dataset | Source, key_suffix: str = "") -> dict[str, Any]:
    """Returns the JSON values that describe data, or none if nothing is known. Runs eagerly.

    Args:
      data: The data that build_inputs has returned.
      key_suffix: A suffix of the keys for a plain dataset, which names the replicas and workers
        that it has batches for. Others have another number of batches.
    """
    if isinstance(data, tf.data.Dataset):
        return {
            f"batches{key_suffix}": int(data.cardinality()),
            f"element_spec{key_suffix}": str(data.element_spec),
        }
    identity = getattr(data, "identity", None)
    if callable(identity):
        return dict(identity())
    return {}


def call_build_inputs(
    build_inputs: Callable[..., tf.data.Dataset | Source],
    params: DataConfig,
    input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset | Source:
    """Returns the data that a task's `build_inputs` makes: a Source, or a tf.data.Dataset.

    Runs eagerly, on the host.

    A method without an argument `input_context` is called without it. Shuffles and random ops
    without a seed get the same one in every process and at every call, derived from TensorFlow's
    global seed. Otherwise they would depend on how many random ops the process made before.

    Raises:
      UsageError: when `build_inputs` returns something else.
    """
    parameters = inspect.signature(build_inputs).parameters
    takes_context = "input_context" in parameters
    context = {"input_context": input_context} if takes_context else {}
    with restart_operation_seeds():
        data = build_inputs(params, **context)

    if not isinstance(data, Source) and not hasattr(data, "element_spec"):
        name = getattr(build_inputs, "__qualname__", "build_inputs")
        kind = "None" if data is None else f"a {type(data).__name__}"
        raise UsageError(
            f"{name} returned {kind}; return a tf.data.Dataset or a Source, such as ArraySource"
        )
    return data


def build_dataset_at(
    data: tf.data.Dataset | Source,
    position: Position,
    input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
    """Returns a task's data, in batches for one replica, from `position` on.

    The batches that the position leaves out are missing. A Source is asked to begin at the
    position. A plain dataset is read from its start, and the batches before the position are
    dropped.

    Args:
      data: The Source or tf.data.Dataset that a task's `build_inputs` returned.
      position: The position of the first batch.
      input_context: The worker's place among the others. None for a single replica.
    """
    local_replicas = count_local_replicas(input_context)
    if not isinstance(data, Source):
        dataset = skip_batches(data, position.batch, local_replicas)
        return _drop_skipped_batches(dataset, position, local_replicas)

    # The ranges between the batches that are left out follow one another.
    ranges = []
    for begin, length in position.iterate_ranges():
        dataset = data.at(begin, input_context)
        if length is not None:
            dataset = dataset.take(length * local_replicas)
        ranges.append(dataset)
    return functools.reduce(lambda joined, part: joined.concatenate(part), ranges)


def _drop_skipped_batches(
    dataset: tf.data.Dataset, position: Position, local_replicas: int
) -> tf.data.Dataset:
    """Returns `dataset`, which begins at the position, without the batches that it leaves out.

    It does not use take, skip and concatenate: a dataset that is begun twice shuffles differently
    the second time.
    """
    skipped_batches = [batch for batch in position.skipped_batches if batch >= position.batch]
    if not skipped_batches:
        return dataset

    @tf.autograph.experimental.do_not_convert
    def is_used(index: tf.Tensor, element: object) -> tf.Tensor:
        del element
        batch = index // local_replicas + position.batch
        is_other = batch != tf.constant(skipped_batches, tf.int64)
        return tf.reduce_all(is_other)

    numbered = dataset.enumerate()
    used = numbered.filter(is_used)
    remaining = used.map(lambda index, element: element)

    # The length of a filtered dataset is unknown to TensorFlow, so it is computed here.
    count = int(dataset.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY:
        return remaining
    if count != tf.data.INFINITE_CARDINALITY:
        # The last global batch of a dataset may have fewer elements than this worker has replicas.
        num_skipped = 0
        for batch in skipped_batches:
            begin = (batch - position.batch) * local_replicas
            available = max(0, count - begin)
            num_skipped += min(local_replicas, available)
        count -= num_skipped
    assertion = tf.data.experimental.assert_cardinality(count)
    return remaining.apply(assertion)
