"""Arrays in memory as a Source.

Any position in the order costs the same to reach, on any number of replicas.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import DataError
from trainer_kit.inputs.dataset_structure import declare_endless
from trainer_kit.inputs.sources.batch_function import BatchFunction
from trainer_kit.inputs.sources.example_order import Order
from trainer_kit.inputs.sources.source_pipeline import (
    build_options,
    finish_pipeline,
    warn_of_unread_fields,
)

# Nested arrays or tensors. In those of examples, the first dimension counts the examples.
Arrays: TypeAlias = "np.ndarray | tf.Tensor | tuple[Arrays, ...] | Mapping[str, Arrays]"

# One gather makes so many batches at most, and so many bytes.
_MOST_ROWS = 16
_GATHERED_BYTES = 2**18
# Bytes of each array. A checksum of so many takes about 10 ms.
_CHECKED_BYTES = 2**24


class ArraySource:
    """Batches from NumPy arrays, in an order that is a pure function of (seed, epoch, index).

    For training (`params.is_training`) the data has no end. Each epoch is a separate permutation,
    drawn from (`params.seed` or 0, epoch), and batches may cross from one epoch into the next. So
    every batch is full, and global batch p begins at example p * global_batch_size of the stream.
    Otherwise it is one pass in the arrays' own order, and the last, smaller batch is kept unless
    `params.drop_remainder`.

    R replicas together get exactly the batches that one replica would get: each takes its part of
    every global batch, in order. Where a batch cannot be divided, in a pass, the parts differ by
    one example at most. With fewer examples than replicas the last replicas get empty batches.

    Of `params` it also uses prefetch_buffer_size (batches, None: tf.data decides), deterministic
    and autotune_algorithm. `cache` changes nothing, since the arrays are in memory anyway, and
    neither does `sharding`, since no two workers get the same example. Fields about files and
    services do not apply, and a warning names those that are set.

    A batch costs one gather per array: 23,000 batches of 32 x 64 floats a second on 2 CPU cores,
    where tf.data's slices, shuffle buffer and batch make 16,500. A permutation costs, once an epoch
    and in the background, 0.4 ms for 1,800 examples and 0.2 s for 10 million.

    Args:
      arrays: Nested tuples and dicts of arrays with one first dimension, the examples. They are
        copied once to host memory, not into the graphs of the datasets. Their dtypes do not change.
      params: The data's section of the config.
      transform: A function that changes a batch, in graph, on the host. It gets one argument, of
        the structure of `arrays` (so a tuple for arrays in a tuple), first dimension the batch. It
        has to be a pure function, or a resumed run differs. For random changes give it a second
        parameter named `seed`: int32 [batch, 2], one row for each example, a pure function of
        (`params.seed` or 0, epoch, index of the example), for ops such as
        tf.random.stateless_uniform. An evaluation has epoch 0.

    Raises:
      UsageError: when the batch size is 0, autotune_algorithm is unknown, or `transform` takes
        other arguments.
      DataError: when the arrays have no examples, the first dimensions differ, or they have fewer
        examples than a batch, except in a pass that keeps its last batch.
    """

    def __init__(
        self,
        arrays: Arrays,
        params: DataConfig,
        *,
        transform: Callable[..., object] | None = None,
    ) -> None:
        self._params = params
        self._transform = None if transform is None else BatchFunction(transform, "transform")
        self._uses_seeds = self._transform is not None and self._transform.takes_seed
        self.num_examples = _count_examples(arrays)
        self._order = Order(self.num_examples, params)
        with tf.device("CPU:0"):
            self._arrays = tf.nest.map_structure(tf.constant, arrays)
        self._options = build_options(params)
        warn_of_unread_fields("ArraySource", params, {"cache"})

    def at(
        self, position: int, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset:
        """Returns the dataset from global batch `position` on, in batches for one replica.

        A worker with several replicas hands successive batches to them. In training the batch
        dimension is static. Runs on the host.

        Args:
          position: How many global batches have been used already, from the start of the first
            epoch.
          input_context: The worker's place among the others. None for a single replica.

        Raises:
          UsageError: when the replicas cannot share a global batch to train on equally.
        """
        stages = self.stages(position, input_context)
        *_, batches = stages.values()
        return finish_pipeline(batches, self._params, self._options)

    def stages(
        self, position: int, input_context: tf.distribute.InputContext | None = None
    ) -> dict[str, tf.data.Dataset]:
        """Returns the datasets that make the batches of `at`, one after another. See Source.

        The stages are "gather" and the transform. The arguments are those of `at`.
        """
        batches_per_gather = self._count_batches_per_gather(input_context)
        has_several_workers = input_context and input_context.num_input_pipelines > 1
        if batches_per_gather > 1:
            # The examples of several batches are gathered at once, and then divided.
            indices = self._order.at(
                position, batches_per_element=batches_per_gather, with_seeds=self._uses_seeds
            )
            gathered = indices.map(self._gather)
            batches = gathered.rebatch(self._params.global_batch_size, drop_remainder=True)
            batches = declare_endless(batches)
        elif self._params.is_training or self._uses_seeds or has_several_workers:
            indices = self._order.at(position, input_context, with_seeds=self._uses_seeds)
            batches = indices.map(self._gather)
        else:
            # One pass in the arrays' own order needs no gather.
            replicas = input_context.num_replicas_in_sync if input_context else 1
            batches = self._slices(position, replicas)
        stages = {"gather": batches}

        if self._transform is not None:
            batches = self._transform.apply_to(batches, has_seeds=self._uses_seeds)
            stages[self._transform.label] = batches
        return stages

    def identity(self) -> dict[str, Any]:
        """Returns shape, dtype and checksum of each array. See Source."""
        return compute_array_identity(self._arrays)

    def _count_batches_per_gather(self, input_context: tf.distribute.InputContext | None) -> int:
        """Returns how many batches one gather makes.

        A call of a function costs as much as a few kilobytes do.
        """
        has_several_replicas = input_context is not None and input_context.num_replicas_in_sync > 1
        if has_several_replicas or not self._params.is_training:
            return 1

        example_bytes = 0
        for array in tf.nest.flatten(self._arrays):
            values = math.prod(array.shape[1:])
            example_bytes += array.dtype.size * values
        batch_bytes = example_bytes * self._params.global_batch_size
        # Examples without a value take no bytes.
        batches_in_limit = _GATHERED_BYTES // max(1, batch_bytes)
        batches = min(_MOST_ROWS, batches_in_limit)
        return max(1, batches)

    def stacked_at(self, position: int, size: int) -> tf.data.Dataset | None:
        """Returns the dataset of `at` for one replica, with `size` batches stacked in each element.

        One gather makes the successive batches of an element.

        Args:
          position: The number of global batches that have been used already.
          size: The number of batches in an element.

        Returns:
          None if batches differ in size, or are transformed one by one.
        """
        if not self._params.is_training or self._transform is not None:
            return None

        batch = self._params.global_batch_size
        rows = self._order.at(position, batches_per_element=size)
        index_stacks = rows.map(lambda row: tf.reshape(row, [size, batch]))
        stacks = index_stacks.map(self._gather)

        # The caller prefetches the stacks.
        params = self._params.replace(prefetch_buffer_size=0)
        return finish_pipeline(stacks, params, self._options)

    def _slices(self, position: int, replicas: int) -> tf.data.Dataset:
        """Returns the batches of one pass for all replicas, without a function in it.

        Every new iterator instantiates the functions of its dataset, each for some milliseconds. An
        evaluation of 50 batches, which begins with a new iterator, took twice as long with a gather
        for each.
        """
        begin, end, sizes, last_sizes = self._order.split_one_pass(position, replicas)
        full_part = self._part(begin, end)
        examples = tf.data.Dataset.from_tensors(full_part)

        # With one size and without a remainder, the batch dimension is static.
        different_sizes = set(sizes)
        has_equal_batches = len(different_sizes) == 1 and not last_sizes
        size = sizes[0] if has_equal_batches else sizes
        batches = examples.rebatch(size, drop_remainder=has_equal_batches)

        num_examples = end - begin
        full_batches = num_examples // self._params.global_batch_size
        count = full_batches * replicas + len(last_sizes)
        for last_size in last_sizes:
            part = self._part(end, end + last_size)
            last_batch = tf.data.Dataset.from_tensors(part)
            batches = batches.concatenate(last_batch)
            end += last_size

        assertion = tf.data.experimental.assert_cardinality(count)
        return batches.apply(assertion)

    def _part(self, begin: int, end: int) -> Any:
        return tf.nest.map_structure(lambda array: array[begin:end], self._arrays)

    @tf.autograph.experimental.do_not_convert
    def _gather(self, indices: tf.Tensor, seeds: tf.Tensor | None = None) -> Any:
        batch = tf.nest.map_structure(lambda array: tf.gather(array, indices), self._arrays)
        if seeds is None:
            return batch
        return batch, seeds


def compute_array_identity(arrays: Arrays) -> dict[str, Any]:
    """Returns dtype, shape and a checksum of each of some nested arrays or tensors.

    The checksum covers all of an array of up to 16 MiB. Of a larger one it covers evenly spaced
    examples. Runs on the host.
    """
    identity = {}
    parts = tf.nest.flatten(arrays, expand_composites=True)
    for number, part in enumerate(parts):
        array = np.asarray(part)
        array = np.atleast_1d(array)
        # An array without examples has no bytes.
        interval = -(-array.nbytes // _CHECKED_BYTES) or 1
        sample = array[::interval]

        # Strings are objects in NumPy, whose bytes are addresses.
        if array.dtype == object:
            text = repr(sample.tolist())
            content = text.encode()
        else:
            content = sample.tobytes()
        checksum = zlib.crc32(content)
        shape = list(array.shape)
        name = f"array {number}"
        identity[name] = f"{array.dtype} {shape}, checksum {checksum:08x}"
    return identity


def _count_examples(arrays: Arrays) -> int:
    """Returns the number of examples. Raises DataError for other than arrays of examples."""
    all_arrays = tf.nest.flatten(arrays)
    shapes = [np.shape(array) for array in all_arrays]
    first_shapes = shapes[:8]
    is_nested = isinstance(arrays, (tuple, Mapping, np.ndarray))
    if not shapes or () in shapes or not is_nested:
        kind = type(arrays).__name__
        raise DataError(
            f"ArraySource got a {kind} of shapes {first_shapes}; give it an array,"
            " or a tuple or dict of arrays, whose first dimension counts the examples"
        )

    counts = {shape[0] for shape in shapes}
    if len(counts) > 1:
        raise DataError(
            "the arrays differ in their number of examples, the first dimension: shapes"
            f" {first_shapes}"
        )
    if counts == {0}:
        raise DataError(f"the arrays hold no examples: shapes {first_shapes}")
    return int(counts.pop())
