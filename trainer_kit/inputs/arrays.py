"""Arrays in memory as a Source: any position in the order costs the same to reach, on any number of replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.config.schema import DataConfig
from trainer_kit.errors import DataError, UsageError, suggestion

_LOG = logging.getLogger(__name__)
# The fields of DataConfig that are read here, and the two that change nothing by design.
_USED = {
    "global_batch_size", "is_training", "drop_remainder", "seed", "prefetch_buffer_size", "deterministic",
    "autotune_algorithm", "cache", "sharding",
}  # fmt: skip
_FOREVER = 2**62  # epochs, or batches: more than any run will see


class ArraySource:
    """Batches from NumPy arrays, in an order that is a pure function of (seed, epoch, index).

    For training (`params.is_training`) the data has no end: each epoch is a permutation of its own, drawn from
    (`params.seed` or 0, epoch), and batches may cross from one epoch into the next, so that every batch is full and
    global batch p begins at example p * global_batch_size of the stream. Otherwise it is one pass in the arrays' own
    order, and the last batch is kept, smaller, unless `params.drop_remainder`.

    R replicas together get exactly the batches that one replica would get: each takes its part of every global batch,
    in order. At the ragged end of a pass the parts differ by one example at most; with fewer examples than replicas
    the last replicas get empty batches.

    Of `params` it also uses prefetch_buffer_size (batches; None: tf.data decides), deterministic and
    autotune_algorithm. `cache` changes nothing, since the arrays are in memory anyway, and neither does `sharding`,
    since no two workers get the same example. What has to do with files and services does not apply: a warning names
    what is set all the same.

    A batch costs one gather per array: 23,000 batches of 32 x 64 floats a second on 2 CPU cores, where tf.data's
    slices, shuffle buffer and batch make 16,500. A permutation costs, once an epoch and in the background, 0.4 ms for
    1,800 examples and 0.2 s for 10 million.

    Args:
      arrays: nested tuples and dicts of arrays with one first dimension, the examples. They are copied once to host
        memory, not into the graphs of the datasets; dtypes stay as they are.
      params: the data's section of the config.
      transform: changes a batch, in graph, on the host; structure as `arrays`, first dimension the batch. It has to be
        a pure function, or the order is no longer all that there is to restore.

    Raises:
      UsageError: when the batch size is 0, or autotune_algorithm is unknown.
      DataError: when there are no examples, the first dimensions differ, or there are fewer examples than a batch,
        except in a pass that keeps its last batch.
    """

    def __init__(self, arrays: Any, params: DataConfig, *, transform: Callable[[Any], Any] | None = None) -> None:
        self._params, self._transform = params, transform
        self.num_examples = _count(arrays)
        _check_batch(self.num_examples, params)
        with tf.device("CPU:0"):
            self._arrays = tf.nest.map_structure(tf.constant, arrays)
        self._options = _options(params)
        _warn_of_unread(params)

    def at(self, position: int, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Returns the dataset from global batch `position` on, in batches for one replica. On the host.

        A worker with several replicas hands successive batches to them. In training the batch dimension is static.

        Args:
          position: how many global batches have been used already, from the start of the first epoch.
          input_context: the worker's place among the others; None for a single replica.

        Raises:
          UsageError: when the replicas cannot share a global batch equally.
        """
        share = _Share(self._params.global_batch_size, input_context)
        indices = self._shuffled(position, share) if self._params.is_training else self._in_order(position, share)
        batches = indices.map(self._gather)
        if self._transform is not None:
            batches = batches.map(self._transform, num_parallel_calls=tf.data.AUTOTUNE)
        buffer = self._params.prefetch_buffer_size
        batches = batches.prefetch(tf.data.AUTOTUNE if buffer is None else buffer) if buffer != 0 else batches
        return batches.with_options(self._options)

    @tf.autograph.experimental.do_not_convert
    def _gather(self, indices: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda array: tf.gather(array, indices), self._arrays)

    def _shuffled(self, position: int, share: _Share) -> tf.data.Dataset:
        """Returns the indices of each batch for training.

        The permutation is TensorFlow's stateless shuffle, not `index_shuffle`: that one uses 8 bits of each word of its
        seed for less than 65,536 examples (epochs repeat after 256), is far from uniform near powers of 4, and took
        half of the time of a batch.
        """
        count, seed = self.num_examples, self._params.seed or 0
        first_epoch, used = divmod(position * share.batch, count)

        @tf.autograph.experimental.do_not_convert
        def permutation(epoch: tf.Tensor) -> tf.Tensor:
            key = tf.stack([tf.constant(seed, tf.int64), epoch])
            order = tf.random.experimental.stateless_shuffle(tf.range(count, dtype=tf.int64), key, alg="philox")
            return order[tf.where(epoch == first_epoch, tf.constant(used, tf.int64), 0) :]

        epochs = tf.data.Dataset.range(first_epoch, _FOREVER).map(permutation).prefetch(1)
        batches = epochs.rebatch(share.batch, drop_remainder=True)
        if share.replicas > 1:
            own = slice(share.first * share.size, (share.first + share.here) * share.size)
            batches = batches.map(lambda batch: batch[own]).rebatch(share.size, drop_remainder=True)
        return batches.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))

    def _in_order(self, position: int, share: _Share) -> tf.data.Dataset:
        """Returns the indices of each batch of one pass."""
        count = self.num_examples
        full, rest = divmod(count, share.batch)
        all_full = self._params.drop_remainder or not rest
        last = full if all_full else full + 1

        @tf.autograph.experimental.do_not_convert
        def part(element: tf.Tensor) -> tf.Tensor:
            batch, replica = element // share.here, share.first + element % share.here
            examples = tf.minimum(tf.constant(share.batch, tf.int64), count - batch * share.batch)
            size, larger = examples // share.replicas, examples % share.replicas
            begin = batch * share.batch + replica * size + tf.minimum(replica, larger)
            indices = tf.range(begin, begin + size + tf.cast(replica < larger, tf.int64))
            return tf.ensure_shape(indices, [share.size if all_full else None])

        return tf.data.Dataset.range(min(position, last) * share.here, last * share.here).map(part)


class _Share:
    """The part of a global batch that one input pipeline hands out.

    Attributes:
      batch, size: examples in a global batch, and in a replica's.
      replicas, here: replicas in all, and those that this pipeline serves.
      first: number of the first of these.
    """

    def __init__(self, batch: int, context: tf.distribute.InputContext | None) -> None:
        self.batch = batch
        self.replicas = context.num_replicas_in_sync if context else 1
        self.size, rest = divmod(batch, self.replicas)
        if rest:
            nearest = [str(count * self.replicas) for count in (self.size, self.size + 1) if count]
            raise UsageError(
                f"global_batch_size: batch {batch} on {self.replicas} replicas leaves {rest} over; "
                f"the nearest that can be shared equally: {' or '.join(nearest)}"
            )
        self.here = self.replicas // context.num_input_pipelines if context else 1
        self.first = context.input_pipeline_id * self.here if context else 0


def _count(arrays: Any) -> int:
    """Returns the number of examples."""
    shapes = [np.shape(array) for array in tf.nest.flatten(arrays)]
    if not shapes or () in shapes or not isinstance(arrays, (tuple, Mapping, np.ndarray)):
        raise DataError(
            f"ArraySource takes arrays whose first dimension is the examples, in tuples or dicts; it got a "
            f"{type(arrays).__name__} of shapes {shapes[:8]}"
        )
    counts = {shape[0] for shape in shapes}
    if len(counts) > 1:
        raise DataError(f"the arrays differ in their number of examples, the first dimension: shapes {shapes[:8]}")
    if counts == {0}:
        raise DataError(f"the arrays hold no examples: shapes {shapes[:8]}")
    return int(counts.pop())


def _check_batch(examples: int, params: DataConfig) -> None:
    batch = params.global_batch_size
    if batch < 1:
        raise UsageError("global_batch_size is 0; set it in the data's section, such as train_data, to 1 or more")
    if batch > examples and (params.is_training or params.drop_remainder):
        advice = "" if params.is_training else ", or drop_remainder to false to use them in one smaller batch"
        raise DataError(
            f"global_batch_size is {batch}, but there are {examples} examples, so that no batch is full; "
            f"set it to {examples} or less{advice}"
        )


def _warn_of_unread(params: DataConfig) -> None:
    """A field that differs from its default was set for a purpose, which arrays do not serve."""
    defaults = DataConfig()
    others = [name for name in defaults.as_dict() if name not in _USED]
    unread = [name for name in others if getattr(params, name) != getattr(defaults, name)]
    if unread:
        _LOG.warning(
            "ArraySource does not read %s; unless the task does, what is set there has no effect", ", ".join(unread)
        )


def _options(params: DataConfig) -> tf.data.Options:
    options = tf.data.Options()
    # A gather has nothing to tune, and the tuner's pauses, up to a minute, would hold up the end of the process.
    options.autotune.enabled = params.autotune_algorithm is not None
    if params.deterministic is not None:
        options.deterministic = params.deterministic
    if params.autotune_algorithm is not None:
        known = {algorithm.name.lower(): algorithm for algorithm in tf.data.experimental.AutotuneAlgorithm}
        chosen = known.get(params.autotune_algorithm.lower())
        if chosen is None:
            raise UsageError(
                f"autotune_algorithm: {params.autotune_algorithm!r} is none that tf.data has; "
                f"{suggestion(params.autotune_algorithm, list(known))}"
            )
        options.autotune.autotune_algorithm = chosen
    return options
