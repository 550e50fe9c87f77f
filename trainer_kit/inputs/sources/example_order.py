"""The order of examples and the share of each replica, for every Source.

Both are pure functions of (seed, epoch, index).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.dataset_structure import declare_endless
from trainer_kit.inputs.sources.example_seeds import epoch_key, example_seeds

# A number of epochs or batches that no run will reach.
_FOREVER = 2**62


class Order:
    """Which examples are in which batch, as indices 0 to `examples` - 1.

    For training (`params.is_training`) the order has no end. Each epoch is a separate permutation,
    drawn from (`params.seed` or 0, epoch), and batches may cross from one epoch into the next.
    Otherwise it is one pass in order, whose last, smaller batch is kept unless
    `params.drop_remainder`. R replicas together get exactly the batches that one would get: each
    takes its part of every global batch, in order.

    Args:
      examples: The number of examples.
      params: The data's section of the config.
      block: The number of successive examples that stay together in a permutation.

    Raises:
      UsageError: when the batch size is 0.
      DataError: when the data has fewer examples than a batch, except in a pass that keeps its last
        batch.
    """

    def __init__(self, examples: int, params: DataConfig, *, block: int = 1) -> None:
        batch = params.global_batch_size
        if batch < 1:
            raise UsageError(
                "global_batch_size is 0; set it in the data's section, such as train_data, to 1 or"
                " more"
            )
        if batch > examples and (params.is_training or params.drop_remainder):
            advice = ""
            if not params.is_training:
                advice = ", or drop_remainder to false to use them in one smaller batch"
            raise DataError(
                f"global_batch_size is {batch}, but there are {examples} examples, so that no batch"
                f" is full; set it to {examples} or less{advice}"
            )

        self._count = examples
        self._params = params
        self._block = block

    def at(
        self,
        position: int,
        input_context: tf.distribute.InputContext | None = None,
        batches_per_element: int = 1,
        *,
        with_seeds: bool = False,
    ) -> tf.data.Dataset:
        """Returns the indices of each batch for one replica from global batch `position` on.

        The indices are int64 of shape [batch]. A worker with several replicas gets successive
        batches for them. In training the batch dimension is static. Runs on the host.

        Args:
          position: The position of the first batch.
          input_context: The worker's place among the others. None for a single replica.
          batches_per_element: The number of batches that come as one larger batch, for training on
            one replica.
          with_seeds: Whether elements are pairs of indices and the seeds of the examples, int32
            [batch, 2].

        Raises:
          UsageError: when the replicas cannot share a global batch to train on equally.
        """
        share = _Share(self._params, input_context)
        if self._params.is_training:
            return self._build_shuffled(position, share, batches_per_element, with_seeds)
        return self._in_order(position, share, with_seeds)

    def split_one_pass(self, position: int, replicas: int) -> tuple[int, int, list[int], list[int]]:
        """Returns how `at` shares one pass among the replicas from global batch `position` on.

        Returns:
          The index of the first example, the index after the last full batch, the number of
          examples that each replica gets of a full batch, and the same for the last, smaller batch.
          The latter is empty if the pass has no smaller batch.
        """
        batch = self._params.global_batch_size
        count = self._count
        rest = count % batch
        end = count - rest
        begin = min(position * batch, count)
        sizes = _split_evenly(batch, replicas)

        last_sizes: list[int] = []
        has_last_batch = begin < count and not self._params.drop_remainder
        if has_last_batch and rest:
            last_sizes = _split_evenly(rest, replicas)
        return min(begin, end), end, sizes, last_sizes

    def _build_shuffled(
        self, position: int, share: _Share, batches_per_element: int, with_seeds: bool
    ) -> tf.data.Dataset:
        """Returns the indices of each batch for training.

        Seeds are made for a whole epoch at once, in the background.

        The permutation is TensorFlow's stateless shuffle, not `index_shuffle`. That one uses 8 bits
        of each word of its seed for less than 65,536 examples (epochs repeat after 256), is far
        from uniform near powers of 4, and took half of the time of a batch.
        """
        count = self._count
        block = self._block
        seed = self._params.seed or 0
        first_example = position * share.global_batch_size
        first_epoch, used_examples = divmod(first_example, count)

        @tf.autograph.experimental.do_not_convert
        def permutation(epoch: tf.Tensor) -> Any:
            data_seed = tf.constant(seed, tf.int64)
            key = tf.stack([data_seed, epoch])
            # The last block may be smaller than the others.
            num_blocks = -(-count // block)
            blocks = tf.range(num_blocks, dtype=tf.int64)
            order = tf.random.experimental.stateless_shuffle(blocks, key, alg="philox")
            if block > 1:
                first_examples = order[:, tf.newaxis] * block
                examples = first_examples + tf.range(block, dtype=tf.int64)
                order = tf.reshape(examples, [-1])
                exists = order < count
                order = order[exists]

            # Only the first epoch has examples before the position.
            is_first = epoch == first_epoch
            begin_of_first = tf.constant(used_examples, tf.int64)
            begin = tf.where(is_first, begin_of_first, 0)
            order = order[begin:]
            if not with_seeds:
                return order

            hash_key = epoch_key(seed, epoch)
            seeds = example_seeds(hash_key, order)
            return order, seeds

        # The permutation of the next epoch is made in the background.
        epochs = tf.data.Dataset.range(first_epoch, _FOREVER)
        orders = epochs.map(permutation)
        orders = orders.prefetch(1)
        element_size = share.global_batch_size * batches_per_element
        batches = orders.rebatch(element_size, drop_remainder=True)
        if share.replicas > 1:
            # Each worker makes the rows of its own replicas.
            replica_batch_size = share.replica_batch_size
            begin = share.first * replica_batch_size
            size = share.local_replicas * replica_batch_size
            local_rows = slice(begin, begin + size)

            def select_rows(*parts: tf.Tensor) -> Any:
                rows_of_parts = tuple(part[local_rows] for part in parts)
                return rows_of_parts if with_seeds else rows_of_parts[0]

            local_batches = batches.map(select_rows)
            batches = local_batches.rebatch(replica_batch_size, drop_remainder=True)
        return declare_endless(batches)

    def _in_order(self, position: int, share: _Share, with_seeds: bool) -> tf.data.Dataset:
        """Returns the indices of each batch of one pass, which is epoch 0."""
        count = self._count
        key = None
        if with_seeds:
            with tf.device("CPU:0"):
                epoch = tf.constant(0, tf.int64)
                key = epoch_key(self._params.seed, epoch)

        global_batch_size = share.global_batch_size
        local_replicas = share.local_replicas
        batches, rest = divmod(count, global_batch_size)
        has_last_batch = rest > 0 and not self._params.drop_remainder
        if has_last_batch:
            batches += 1
        has_equal_parts = share.replica_batch_size * share.replicas == global_batch_size
        all_alike = has_equal_parts and not has_last_batch

        @tf.autograph.experimental.do_not_convert
        def part(element: tf.Tensor) -> Any:
            batch = element // local_replicas
            local_replica = element % local_replicas
            replica = share.first + local_replica
            batch_begin = batch * global_batch_size
            batch_size = tf.constant(global_batch_size, tf.int64)
            examples = tf.minimum(batch_size, count - batch_begin)

            # The first replicas get one example more where the batch cannot be divided.
            size = examples // share.replicas
            larger = examples % share.replicas
            equal_parts_begin = batch_begin + replica * size
            begin = equal_parts_begin + tf.minimum(replica, larger)
            added_example = tf.cast(replica < larger, tf.int64)
            end = begin + size + added_example
            indices = tf.range(begin, end)

            static_size = share.replica_batch_size if all_alike else None
            indices = tf.ensure_shape(indices, [static_size])
            if key is None:
                return indices
            return indices, example_seeds(key, indices)

        first_batch = min(position, batches)
        first_element = first_batch * local_replicas
        end_element = batches * local_replicas
        elements = tf.data.Dataset.range(first_element, end_element)
        return elements.map(part)


class _Share:
    """The part of a global batch that one input pipeline makes.

    Attributes:
      global_batch_size: The number of examples in a global batch.
      replicas: The number of all replicas.
      replica_batch_size: The number of examples in a replica's batch. In an evaluation some
        replicas get one more.
      local_replicas: The number of replicas that this pipeline serves.
      first: The number of the first of them.
    """

    def __init__(self, params: DataConfig, context: tf.distribute.InputContext | None) -> None:
        batch = params.global_batch_size
        self.global_batch_size = batch
        self.replicas = context.num_replicas_in_sync if context else 1
        self.replica_batch_size, rest = divmod(batch, self.replicas)
        if rest and params.is_training:
            counts = (self.replica_batch_size, self.replica_batch_size + 1)
            nearest_sizes = [str(count * self.replicas) for count in counts if count]
            nearest = " or ".join(nearest_sizes)
            raise UsageError(
                f"global_batch_size: batch {batch} on {self.replicas} replicas leaves {rest} over; "
                f"the nearest that can be shared equally: {nearest}"
            )
        self.local_replicas = count_local_replicas(context)
        self.first = context.input_pipeline_id * self.local_replicas if context else 0


def _split_evenly(examples: int, replicas: int) -> list[int]:
    size, larger = divmod(examples, replicas)
    return [size + (number < larger) for number in range(replicas)]


def count_local_replicas(input_context: tf.distribute.InputContext | None) -> int:
    """Returns how many replicas one input pipeline serves.

    As many of its batches make its part of a global batch.
    """
    if not input_context:
        return 1
    return input_context.num_replicas_in_sync // input_context.num_input_pipelines
