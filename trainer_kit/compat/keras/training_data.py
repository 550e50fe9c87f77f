"""The data of `fit`: all that `Model.fit` takes, with a position and epochs of known length."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.compat.keras.array_epochs import ArrayEpochs
from trainer_kit.compat.keras.dataset_passes import DatasetPasses, needs_new_iterators
from trainer_kit.compat.keras.keras_types import ClassWeight
from trainer_kit.compat.keras.py_dataset_epochs import PyDatasetEpochs, copy_batch
from trainer_kit.errors import UsageError
from trainer_kit.inputs.dataset_graph import build_graph_def
from trainer_kit.inputs.sources.arrays import compute_array_identity
from trainer_kit.inputs.sources.source_protocol import get_data_identity
from trainer_kit.runtime.keras_internals import get_data_adapter, is_array_adapter

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """The training data of a fit.

    Attributes:
      batches: A Source or a tf.data.Dataset of global batches. None: there are none. A
        DatasetPasses ends with its pass, and batches of a generator end with it. Others have no
        end.
      steps_per_epoch: The number of steps in an epoch.
      batch_size: The number of examples in a full batch. 0 if it is not known.
    """

    batches: Any
    steps_per_epoch: int
    batch_size: int = 0


@dataclass(frozen=True)
class DatasetEpochs:
    """A Source of a tf.data.Dataset of which the length of a pass is known.

    Attributes:
      dataset: The dataset of global batches, one pass after the other.
      batches_per_epoch: The number of batches in a pass.
      arrays: The nested arrays that the dataset was made of, for its identity. None: there are
        none.
    """

    dataset: tf.data.Dataset
    batches_per_epoch: int
    arrays: Any = None

    @property
    def element_spec(self) -> Any:
        """The spec of a batch."""
        return self.dataset.element_spec

    def at(
        self, position: int, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset:
        """Returns the dataset from batch `position` on.

        Runs on the host. The batches before `position` are read.
        """
        del input_context
        return self.dataset.skip(position)

    def identity(self) -> dict[str, Any]:
        """Returns what describes the arrays, or else the dataset. See Source."""
        if self.arrays is None:
            return get_data_identity(self.dataset)
        return compute_array_identity(self.arrays)


def build_training_data(
    x: Any,
    y: object = None,
    sample_weight: object = None,
    *,
    batch_size: int | None = None,
    steps_per_epoch: int | None = None,
    shuffle: bool | str = True,
    class_weight: ClassWeight | None = None,
    seed: int | None = None,
    is_keras_2: bool = False,
) -> TrainingData:
    """Returns training data in global batches.

    Runs eagerly, in scope, on the host. The arguments before `seed` are those of `Model.fit`.

    Args:
      x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight: See `Model.fit`.
      seed: The seed of an experiment, each of whose epochs has a separate order. Passes over its
        datasets are then read with one iterator.
      is_keras_2: Whether the orders are those of tf_keras.

    Raises:
      UsageError: When the data does not tell the length of an epoch, or has no examples.
      ValueError: For data that Keras cannot read, with Keras's message.
    """
    # A PyDataset, or a Sequence of tf_keras.
    if hasattr(x, "on_epoch_end"):
        # Without a global seed that of TensorFlow is a constant.
        order_seed = seed
        if seed is None:
            order_seed = tf.compat.v1.get_seed(1)[0]
        source = PyDatasetEpochs(x, order_seed if shuffle else None, class_weight)
        steps = compute_steps_per_epoch(
            steps_per_epoch, source.batches_per_epoch, "a PyDataset without a length"
        )
        source.steps_per_pass = steps
        source.ends_with_pass = seed is None
        return TrainingData(source, steps)

    if isinstance(x, GeneratorType):
        x = (copy_batch(batch) for batch in x)
    options = {
        "batch_size": batch_size,
        "steps_per_epoch": steps_per_epoch,
        "class_weight": class_weight,
    }
    adapter = get_data_adapter(x, y, sample_weight, shuffle=False, **options)
    if is_array_adapter(adapter):
        arrays = convert_to_tensors(x, y, sample_weight, class_weight)
        if isinstance(shuffle, str):
            raise UsageError(
                f"shuffle={shuffle!r}: give True, with which the examples of all batches are"
                " shuffled"
            )
        epochs = ArrayEpochs(
            arrays, int(adapter.batch_size), bool(shuffle), seed, is_keras_2=is_keras_2
        )
        steps = compute_steps_per_epoch(steps_per_epoch, epochs.batches_per_epoch)
        return TrainingData(epochs, steps, adapter.batch_size)

    dataset = adapter.get_tf_dataset()
    first_spec = tf.nest.flatten(dataset.element_spec)[0]
    size = int(first_spec.shape[0] or 0)
    if isinstance(x, GeneratorType):
        steps = compute_steps_per_epoch(steps_per_epoch, None, "a generator")
        return TrainingData(dataset, steps, size)

    length = int(dataset.cardinality())
    is_known = length != tf.data.UNKNOWN_CARDINALITY
    if length == tf.data.INFINITE_CARDINALITY or (not is_known and steps_per_epoch):
        batches = dataset.repeat()
        steps = compute_steps_per_epoch(steps_per_epoch, None, "a dataset without end")
        return TrainingData(batches, steps, size)

    if not is_known:
        length = _count_batches(dataset)
    if not length:
        raise UsageError(
            "x is an empty dataset: it has no batch. Check its files, filters and batch size"
        )
    steps = compute_steps_per_epoch(steps_per_epoch, length)
    if seed is not None or length % steps or not needs_new_iterators(dataset):
        return TrainingData(dataset.repeat(), steps, size)

    # tf_keras always makes one iterator at the begin of a fit, and no other. Keras 3 makes one
    # there in the scope of a strategy, and one more at the end of each pass.
    if is_keras_2:
        unread_iterators = (1, 0)
    else:
        at_begin = int(tf.distribute.has_strategy())
        after_a_pass = int(is_known and not steps_per_epoch)
        unread_iterators = (at_begin, after_a_pass)
    original_dataset = dataset
    if isinstance(x, tf.data.Dataset):
        original_dataset = x
    passes = DatasetPasses(
        dataset, length, original_dataset=original_dataset, unread_iterators=unread_iterators
    )
    return TrainingData(passes, steps, size)


def build_validation_data(
    validation_data: object, batch_size: int | None = None, steps: int | None = None
) -> tf.data.Dataset | DatasetEpochs | PyDatasetEpochs:
    """Returns one pass over validation data in global batches.

    This is a dataset, or a Source of arrays or of a PyDataset. Runs eagerly, on the host. Batches
    of a generator are read here and kept, so that each evaluation has the same ones.

    Args:
      validation_data: See `Model.fit`: (x, y), (x, y, sample_weight), or data that contains both.
      batch_size: The number of examples in a batch, for arrays. None: 32, or what divides the
        arrays into `steps`.
      steps: The number of batches in an evaluation. None: all.

    Raises:
      UsageError: For arrays without examples.
      ValueError: For data that Keras cannot read, with Keras's message.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation_data)

    # A PyDataset, or a Sequence of tf_keras.
    if hasattr(x, "on_epoch_end"):
        source = PyDatasetEpochs(x)
        source.evaluation_number = 0
        return source

    if isinstance(x, GeneratorType):
        x = (copy_batch(batch) for batch in x)
    adapter = get_data_adapter(x, y, sample_weight, batch_size=batch_size, steps_per_epoch=steps)
    if is_array_adapter(adapter):
        size = int(adapter.batch_size)
        arrays = convert_to_tensors(x, y, sample_weight, name="validation_data")
        first_array = tf.nest.flatten(arrays)[0]
        num_examples = int(first_array.shape[0])
        length = math.ceil(num_examples / size)
        if tf.distribute.has_strategy():
            # A strategy of one device would leave out a rebatch, and one of several devices the
            # length after a rebatch.
            batches = tf.data.Dataset.from_tensor_slices(arrays).batch(size)
        else:
            # A rebatch has no function. Each evaluation would make one anew with its iterator.
            batches = tf.data.Dataset.from_tensors(arrays).rebatch(size)
            batches = batches.apply(tf.data.experimental.assert_cardinality(length))
        return DatasetEpochs(batches, length, arrays=(x, y, sample_weight))

    dataset = adapter.get_tf_dataset()
    if isinstance(x, GeneratorType):
        elements = list(dataset.take(steps or -1))
        return tf.data.Dataset.from_generator(
            lambda: map(copy_batch, elements), output_signature=dataset.element_spec
        )
    return dataset


def convert_to_tensors(
    x: object,
    y: object,
    sample_weight: object,
    class_weight: ClassWeight | None = None,
    name: str = "x",
) -> Any:
    """Returns all examples as nested tensors, with the dtypes that Keras gives them.

    Runs eagerly, on the host: the tensors are in its memory.

    Args:
      x, y, sample_weight, class_weight: See `Model.fit`.
      name: What the data is called in an error.

    Raises:
      UsageError: When there are no examples, or they are sparse or ragged.
    """
    # An input may be optional, and is None then.
    all_parts = keras.tree.flatten((x, y, sample_weight))
    parts = [part for part in all_parts if part is not None]
    # A sparse part has no len().
    num_examples = int(parts[0].shape[0])
    if not num_examples:
        raise UsageError(
            f"{name} has no examples: its first dimension is 0; give at least one example, or leave"
            " it out"
        )

    adapter = get_data_adapter(
        x, y, sample_weight, batch_size=num_examples, class_weight=class_weight
    )
    with tf.device("CPU:0"):
        if all(isinstance(part, np.ndarray) for part in parts):
            # The same without a tf.data.Dataset, whose functions take a tenth of a second to make.
            # tf.data would pack a list into one tensor.
            numpy_batch = next(iter(adapter.get_numpy_iterator()))
            batch = keras.tree.lists_to_tuples(numpy_batch)
            return tf.nest.map_structure(tf.constant, batch)
        batch = next(iter(adapter.get_tf_dataset()))

    if all(isinstance(part, tf.Tensor) for part in tf.nest.flatten(batch)):
        return batch
    raise UsageError(
        f"{name} is sparse or ragged; give batches: tf.data.Dataset.from_tensor_slices((x,"
        " y)).batch(32)"
    )


def _count_batches(dataset: tf.data.Dataset) -> int:
    """Returns the number of batches in a pass over a dataset, by reading it.

    A copy without the shuffles is read where this is possible: a shuffle would use up an order.
    """
    try:
        # The inputs of a shuffle replace it in the graph.
        graph = build_graph_def(dataset)
        shuffled = {}
        for node in graph.node:
            if node.op.startswith("ShuffleDataset"):
                shuffled[node.name] = node.input[0]
        for node in graph.node:
            for index, name in enumerate(node.input):
                while name.partition(":")[0] in shuffled:
                    name = shuffled[name.partition(":")[0]]
                node.input[index] = name
        variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
        dataset = tf.data.experimental.from_variant(variant, dataset.element_spec)
    except tf.errors.OpError:
        _LOG.info(
            "x is counted by reading it, so that its shuffles draw other orders than in Keras"
        )

    zero = tf.constant(0, tf.int64)
    count = int(dataset.reduce(zero, lambda count, _: count + 1))
    _LOG.info(
        "x was read once to count the batches of an epoch: %d; give steps_per_epoch to save this"
        " time",
        count,
    )
    return count


def compute_steps_per_epoch(
    steps_per_epoch: int | None, batches_per_pass: int | None, description: str = ""
) -> int:
    """Returns the number of steps in an epoch.

    Args:
      steps_per_epoch: The argument `steps_per_epoch` of fit.
      batches_per_pass: The number of batches in a pass over x. None if it is not known.
      description: What x is, for the error.

    Raises:
      UsageError: When neither of the two numbers is known.
    """
    if not steps_per_epoch and not batches_per_pass:
        raise UsageError(
            f"x is {description}, which does not tell the length of an epoch; give steps_per_epoch"
        )
    if not steps_per_epoch or not batches_per_pass:
        return int(steps_per_epoch or batches_per_pass or 0)

    if steps_per_epoch > batches_per_pass:
        _LOG.warning(
            "steps_per_epoch=%d: x has only %d batches; as in Keras, an epoch ends with them",
            steps_per_epoch,
            batches_per_pass,
        )
    elif batches_per_pass % steps_per_epoch:
        _LOG.warning(
            "steps_per_epoch=%d does not divide the %d batches of x: each epoch has so many steps"
            " and goes on where the one before has ended, across the end of x; Keras cuts an epoch"
            " short where x ends",
            steps_per_epoch,
            batches_per_pass,
        )
    return min(steps_per_epoch, batches_per_pass)
