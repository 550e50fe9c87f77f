"""ArrayEpochs: arrays in memory, in the batches and the order in which `Model.fit` reads them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.inputs.sources.arrays import compute_array_identity
from trainer_kit.inputs.sources.source_pipeline import build_options, finish_pipeline
from trainer_kit.runtime.keras_internals import get_data_adapter
from trainer_kit.runtime.tensorflow_internals import has_global_seed

_MAX_BATCHES_PER_GATHER = 16
_MAX_GATHER_BYTES = 2**18


class ArrayEpochs:
    """A Source of the batches of one pass after the other.

    Batches are global: a strategy splits them among the replicas. The last batch of a pass may be
    smaller, as in Keras.

    If TensorFlow's global seed is set and `seed` is None, passes have the orders that Keras draws
    from the global seed: in Keras 3 the same one in all passes, in tf_keras another one in each.
    Otherwise each pass has its own order, a pure function of `seed` and the number of the pass.

    Args:
      arrays: Nested tensors with one first dimension, the examples.
      batch_size: The number of examples in a batch.
      shuffle: Whether passes are shuffled.
      seed: The seed of the orders. None: the global seed, or 0 if there is none.
      is_keras_2: Whether the orders are those of tf_keras.

    Attributes:
      num_examples: The number of examples.
      batches_per_epoch: The number of batches in a pass.
      element_spec: The spec of a batch. As in Keras it leaves the number of examples open.
    """

    def __init__(
        self,
        arrays: Any,
        batch_size: int,
        shuffle: bool,
        seed: int | None = None,
        *,
        is_keras_2: bool = False,
    ) -> None:
        self._arrays = arrays
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        first_array = tf.nest.flatten(arrays)[0]
        self.num_examples = int(first_array.shape[0])
        self.batches_per_epoch = math.ceil(self.num_examples / batch_size)

        # The order of Keras 3, int64 [num_examples], is that of its adapter for one large batch.
        has_keras_order = shuffle and seed is None and has_global_seed()
        self._redraws_each_pass = has_keras_order and is_keras_2
        self._keras_3_order: tf.Tensor | None = None
        if has_keras_order and not is_keras_2:
            indices = np.arange(self.num_examples)
            adapter = get_data_adapter(indices, batch_size=self.num_examples, shuffle=True)
            large_batches = adapter.get_tf_dataset()
            batch = next(iter(large_batches))
            order = tf.nest.flatten(batch)[0]
            self._keras_3_order = tf.cast(order, tf.int64)

        def spec_of_batch(array: tf.Tensor) -> tf.TensorSpec:
            example_shape = array.shape[1:]
            return tf.TensorSpec([None, *example_shape], array.dtype)

        self.element_spec = tf.nest.map_structure(spec_of_batch, arrays)

        # A call of a function costs as much as a gather of some kilobytes: small batches are
        # gathered together.
        row_bytes = 0
        for array in tf.nest.flatten(arrays):
            row_size = math.prod(array.shape[1:])
            row_bytes += array.dtype.size * row_size
        batch_bytes = batch_size * row_bytes
        batches_in_limit = _MAX_GATHER_BYTES // max(1, batch_bytes)
        batches_per_gather = min(_MAX_BATCHES_PER_GATHER, batches_in_limit)
        self._batches_per_gather = max(1, batches_per_gather)

    def at(
        self, position: int, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset:
        """Returns the dataset without end from batch `position` on. Runs on the host.

        The position is counted over all passes.
        """
        del input_context
        first_pass, used_batches = divmod(position, self.batches_per_epoch)

        @tf.autograph.experimental.do_not_convert
        def read_pass(epoch: tf.Tensor, order: tf.Tensor) -> tf.data.Dataset:
            # Only the first pass has examples before the position.
            used_examples = used_batches * self._batch_size
            is_first = tf.equal(epoch, first_pass)
            begin = tf.where(is_first, used_examples, 0)
            rest_of_order = order[begin:]
            return self._batches(rest_of_order)

        # The indices of the examples in each pass, int64 [num_examples].
        numbers = tf.data.Dataset.range(first_pass, 2**62)
        if not self._shuffle:
            arrays_order = tf.range(self.num_examples, dtype=tf.int64)
            single_order = tf.data.Dataset.from_tensors(arrays_order)
            orders = single_order.repeat()
        elif self._keras_3_order is not None:
            single_order = tf.data.Dataset.from_tensors(self._keras_3_order)
            orders = single_order.repeat()
        elif self._redraws_each_pass:
            # The orders of the passes before are drawn, too.
            all_passes = tf.data.Dataset.range(1).repeat()
            all_orders = all_passes.map(self._draw_keras_2_order)
            orders = all_orders.skip(first_pass)
        else:
            orders = numbers.map(self._compute_seeded_order)

        passes = tf.data.Dataset.zip((numbers, orders))
        batches = passes.flat_map(read_pass)
        assertion = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        batches = batches.apply(assertion)
        params = DataConfig()
        return finish_pipeline(batches, params, build_options(params))

    def resumption(self, *, deterministic_ops: bool) -> None:
        """Returns None: a resumed run reads the same batches.

        Orders that are drawn from a generator are drawn again from the first.
        """

    def identity(self) -> dict[str, Any]:
        """Returns what describes the arrays. See Source."""
        return compute_array_identity(self._arrays)

    def _batches(self, order: tf.Tensor) -> tf.data.Dataset:
        """Returns the batches of the examples with these indices, int64 [n], in this order."""
        # A gather by shuffled indices is 0.8 to 1.6 times as fast as slices with a shuffle buffer.
        rest = self.num_examples % self._batch_size
        has_full_batches = rest == 0
        gather_size = self._batch_size * self._batches_per_gather
        orders = tf.data.Dataset.from_tensors(order)
        indices = orders.rebatch(gather_size)
        examples = indices.map(self._gather)
        return examples.rebatch(self._batch_size, drop_remainder=has_full_batches)

    @tf.autograph.experimental.do_not_convert
    def _gather(self, indices: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda array: tf.gather(array, indices), self._arrays)

    @tf.autograph.experimental.do_not_convert
    def _draw_keras_2_order(self, _: tf.Tensor) -> tf.Tensor:
        """Draws the next order as tf_keras does. Runs in graph.

        The seed of an op without one is its place in its function.
        """
        indices = tf.range(self.num_examples, dtype=tf.int64)
        return tf.random.shuffle(indices)

    @tf.autograph.experimental.do_not_convert
    def _compute_seeded_order(self, epoch: tf.Tensor) -> tf.Tensor:
        """Returns the order of a pass that is not Keras's. Runs in graph."""
        run_seed = tf.constant(self._seed or 0, tf.int64)
        seed = tf.stack([run_seed, epoch])
        indices = tf.range(self.num_examples, dtype=tf.int64)
        return tf.random.experimental.stateless_shuffle(indices, seed)
