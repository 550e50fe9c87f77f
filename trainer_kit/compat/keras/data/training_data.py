"""The data of `fit`: everything that `Model.fit` takes, as data with a position and epochs of known length."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.compat.keras.data.array_epochs import ArrayEpochs, in_batches
from trainer_kit.compat.keras.data.dataset_passes import DatasetPasses, needs_new_iterators
from trainer_kit.compat.keras.data.own_memory import with_own_batches, with_own_memory
from trainer_kit.compat.keras.data.py_dataset_epochs import BatchOrders, PyDatasetEpochs, as_py_dataset
from trainer_kit.distribution.keras_internals import data_adapter, is_array_adapter
from trainer_kit.errors import UsageError
from trainer_kit.inputs.dataset_graph import graph_of
from trainer_kit.inputs.sources.arrays import array_identity
from trainer_kit.inputs.sources.base import identity_of

_LOG = logging.getLogger(__name__)
_SHORT = "steps_per_epoch=%d: x has only %d batches; as in Keras, an epoch ends with them"
_UNEVEN = (
    "steps_per_epoch=%d does not divide the %d batches of x: each epoch has %d steps and goes on where the one before "
    "has ended, across the end of x; Keras cuts an epoch short where x ends"
)


@dataclass(frozen=True)
class TrainingData:
    """The training data of a fit.

    Attributes:
      batches: A Source or a tf.data.Dataset of global batches. A DatasetPasses ends with its pass, and batches of a
        generator end with it; others have no end.
      steps_per_epoch: The number of steps in an epoch.
      batch_size: The number of examples in a full batch; 0 if it is not known.
    """

    batches: Any
    steps_per_epoch: int
    batch_size: int


class DatasetEpochs:
    """A Source of a tf.data.Dataset of which the length of a pass is known.

    Args:
      dataset: The dataset of global batches, one pass after the other.
      batches_per_epoch: The number of batches in a pass; None: not known.
      arrays: The nested arrays that the dataset was made of, for its identity; None: there are none.
    """

    def __init__(self, dataset: tf.data.Dataset, batches_per_epoch: int | None, arrays: Any = None) -> None:
        self._dataset, self.batches_per_epoch, self._arrays = dataset, batches_per_epoch, arrays

    def at(self, position: int, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Returns the dataset from batch `position` on; the batches before it are read. Runs on the host."""
        del input_context
        return self._dataset.skip(position)

    def identity(self) -> dict[str, Any]:
        """Returns what describes the arrays, or else the dataset; see Source."""
        return identity_of(self._dataset) if self._arrays is None else array_identity(self._arrays)


def training_data(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps_per_epoch: int | None = None,
    shuffle: bool | str = True,
    class_weight: Any = None,
    orders: BatchOrders | None = None,
    seed: int | None = None,
    keras_2: bool = False,
    by_pass: bool = True,
) -> TrainingData:
    """Returns training data in global batches; the arguments are those of `Model.fit`.

    Runs eagerly, in scope, on the host.

    Args:
      orders: The orders of the batches of a PyDataset that is shuffled.
      seed: See ArrayEpochs.
      keras_2: Whether the orders are those of tf_keras.
      by_pass: Whether training loops end where passes end, so that each pass may have an iterator of its own.

    Raises:
      UsageError: when the data does not tell the length of an epoch, or has no examples.
      ValueError: for data that Keras cannot read, with Keras's message.
    """
    x = as_py_dataset(x)
    if isinstance(x, keras.utils.PyDataset):
        return _of_py_dataset(x, (orders or BatchOrders()) if shuffle else None, class_weight, steps_per_epoch, by_pass)
    x = with_own_batches(x)
    options = {"batch_size": batch_size, "steps_per_epoch": steps_per_epoch, "class_weight": class_weight}
    adapter = data_adapter(x, y, sample_weight, shuffle=False, **options)
    if is_array_adapter(adapter):
        arrays = _arrays(x, y, sample_weight, class_weight)
        epochs = ArrayEpochs(arrays, int(adapter.batch_size), shuffle, seed, keras_2=keras_2)
        return TrainingData(epochs, _steps(steps_per_epoch, epochs.batches_per_epoch), adapter.batch_size)
    dataset = adapter.get_tf_dataset()
    size = int(tf.nest.flatten(dataset.element_spec)[0].shape[0] or 0)
    if isinstance(x, GeneratorType):
        return TrainingData(dataset, _steps(steps_per_epoch, None, "a generator"), size)
    given = x if isinstance(x, tf.data.Dataset) else dataset
    return _of_dataset(dataset, given, steps_per_epoch, size, by_pass, keras_2)


def validation_dataset(given: Any, batch_size: int | None = None, steps: int | None = None) -> Any:
    """Returns one pass over validation data in global batches: a dataset, or a Source of arrays or of a PyDataset.

    Runs eagerly, on the host. Batches of a generator are read here and kept, so that each evaluation has the same ones.

    Args:
      given: What `validation_data` of `Model.fit` may be: (x, y), (x, y, sample_weight), or data that holds both.
      batch_size: The number of examples in a batch, for arrays. None: 32, or what divides the arrays into `steps`.
      steps: The number of batches in an evaluation. None: all.

    Raises:
      UsageError: for arrays without examples.
      ValueError: for data that Keras cannot read, with Keras's message.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(as_py_dataset(given))
    if isinstance(x, keras.utils.PyDataset):
        source = PyDatasetEpochs(x, None)
        source.evaluation = 0
        return source
    x = with_own_batches(x)
    adapter = data_adapter(x, y, sample_weight, batch_size=batch_size, steps_per_epoch=steps)
    if is_array_adapter(adapter):
        size, examples = int(adapter.batch_size), _number_of_examples((x, y), "validation_data")
        batches, length = in_batches(_arrays(x, y, sample_weight), size), math.ceil(examples / size)
        if tf.distribute.get_strategy().num_replicas_in_sync == 1:  # others would drop the length, with a warning
            batches = batches.apply(tf.data.experimental.assert_cardinality(length))
        return DatasetEpochs(batches, length, arrays=(x, y, sample_weight))
    dataset = adapter.get_tf_dataset()
    if isinstance(x, GeneratorType):
        kept = list(dataset.take(steps or -1))
        return tf.data.Dataset.from_generator(lambda: map(with_own_memory, kept), output_signature=dataset.element_spec)
    return dataset


def known_length(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of elements in a dataset; None if it is not known or there is no end."""
    length = int(dataset.cardinality())
    return length if length >= 0 else None


def _number_of_examples(x: Any, name: str) -> int:
    """Returns the number of examples of nested arrays.

    Raises:
      UsageError: when there are none.
    """
    examples = next(int(one.shape[0]) for one in keras.tree.flatten(x) if one is not None)  # a sparse one has no len()
    if not examples:
        raise UsageError(
            f"{name} has no examples: its first dimension is 0; give at least one example, or leave it out"
        )
    return examples


def _arrays(x: Any, y: Any, sample_weight: Any, class_weight: Any = None) -> Any:
    """Returns all examples as nested tensors, which may be sparse or ragged, with the dtypes that Keras gives them."""
    examples = _number_of_examples((x, y), "x")  # an input that is None may be optional
    adapter = data_adapter(x, y, sample_weight, batch_size=examples, class_weight=class_weight)
    with tf.device("CPU:0"):
        if all(isinstance(one, np.ndarray) for one in keras.tree.flatten((x, y, sample_weight)) if one is not None):
            # The same without a tf.data.Dataset, whose functions take a tenth of a second to make.
            # tf.data would pack a list into one tensor.
            whole = keras.tree.lists_to_tuples(next(iter(adapter.get_numpy_iterator())))
            return tf.nest.map_structure(tf.constant, whole)
        return next(iter(adapter.get_tf_dataset()))


def _of_py_dataset(
    x: keras.utils.PyDataset, orders: BatchOrders | None, class_weight: Any, wanted: int | None, by_pass: bool
) -> TrainingData:
    source = PyDatasetEpochs(x, orders, class_weight)
    length = source.batches_per_epoch
    steps = _steps(wanted, length, "a PyDataset without a length")
    source.steps_per_epoch = steps
    source.by_pass = by_pass
    return TrainingData(source, steps, batch_size=0)


def _of_dataset(
    dataset: tf.data.Dataset,
    given: tf.data.Dataset,
    steps_per_epoch: int | None,
    size: int,
    by_pass: bool,
    keras_2: bool,
) -> TrainingData:
    """Returns the passes of `Model.fit` over a dataset that was made of `given`.

    Raises:
      UsageError: for a dataset without end or without batches.
    """
    length: int | None = int(dataset.cardinality())
    known = length != tf.data.UNKNOWN_CARDINALITY
    if length == tf.data.INFINITE_CARDINALITY or (not known and steps_per_epoch):
        return TrainingData(dataset.repeat(), _steps(steps_per_epoch, None, "a dataset without end"), size)
    if not known:
        length = _counted(dataset)
        _LOG.info(
            "x was read once to count the batches of an epoch: %d; give steps_per_epoch to save this time", length
        )
    if not length:
        raise UsageError("x is an empty dataset: it has no batch. Check its files, filters and batch size")
    steps = _steps(steps_per_epoch, length)
    if not by_pass or length % steps or not needs_new_iterators(dataset):
        return TrainingData(dataset.repeat(), steps, size)
    # Keras makes one more iterator at the end of each pass, and in the scope of a strategy one at the begin of a fit;
    # tf_keras always makes one there, and no other.
    unused = (1, 0) if keras_2 else (int(tf.distribute.has_strategy()), int(known and not steps_per_epoch))
    passes = DatasetPasses(dataset, length, given=given, unused=unused)
    return TrainingData(passes, steps, size)


def _counted(dataset: tf.data.Dataset) -> int:
    """Returns the number of batches, found by reading a copy without its shuffles, which would use up an order."""
    try:
        graph = graph_of(dataset)
        shuffled = {node.name: node.input[0] for node in graph.node if node.op.startswith("ShuffleDataset")}
        for node in graph.node:
            for place, name in enumerate(node.input):
                while name.partition(":")[0] in shuffled:
                    name = shuffled[name.partition(":")[0]]
                node.input[place] = name
        variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
        dataset = tf.data.experimental.from_variant(variant, dataset.element_spec)
    except tf.errors.OpError:
        _LOG.info("x is counted by reading it, so that its shuffles draw other orders than in Keras")
    return int(dataset.reduce(tf.constant(0, tf.int64), lambda count, _: count + 1))


def _steps(wanted: int | None, batches: int | None, what: str = "") -> int:
    """Returns the number of steps in an epoch.

    Args:
      wanted: The argument `steps_per_epoch` of fit.
      batches: The number of batches in a pass over x; None if it is not known.
      what: What x is, for the error.
    """
    if not wanted and not batches:
        raise UsageError(f"x is {what}, which does not tell the length of an epoch; give steps_per_epoch")
    if not wanted or not batches:
        return int(wanted or batches or 0)
    if wanted > batches:
        _LOG.warning(_SHORT, wanted, batches)
    elif batches % wanted:
        _LOG.warning(_UNEVEN, wanted, batches, wanted)
    return min(wanted, batches)
