"""The producer of indices of TensorFlow 1, without its queue, which no checkpoint would contain."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.compat.tensorpack.program_errors import ProgramError
from trainer_kit.compat.tensorpack.program_graph import enter_default_graph

# Names of tf.train that begin a queue, and of tf.
REFUSED_TRAIN_NAMES = (
    "batch",
    "batch_join",
    "maybe_batch",
    "shuffle_batch",
    "shuffle_batch_join",
    "input_producer",
    "slice_input_producer",
    "string_input_producer",
)
REFUSED_NAMES = ("FIFOQueue", "PaddingFIFOQueue", "PriorityQueue", "RandomShuffleQueue")


class RangeInputProducer:
    """Produces the indices below a limit, again and again. A variable counts them.

    Args:
      limit: The limit.
      num_epochs: Not supported, since an epoch of Tensorpack has its own length.
      shuffle: Whether each pass has another order.
      seed: The seed of the orders.
      capacity, shared_name: Not used.
      name: The name of the variable.

    Raises:
      UsageError: With num_epochs.
    """

    def __init__(
        self,
        limit: int,
        num_epochs: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        capacity: int = 32,
        shared_name: str | None = None,
        name: str | None = None,
    ) -> None:
        enter_default_graph()
        if num_epochs is not None:
            raise ProgramError(
                f"range_input_producer(num_epochs={num_epochs}) ends a training by the end of its"
                " data; leave num_epochs out, and give steps_per_epoch and max_epoch"
            )
        self._limit = tf.cast(limit, tf.int64)
        self._shuffle = shuffle
        self._seed = seed or 0
        self._counter: Any = tf.compat.v1.Variable(
            0, trainable=False, dtype=tf.int64, name=name or "input_producer"
        )

    def dequeue(self, name: str | None = None) -> tf.Tensor:
        """Returns the tensor of the next index, an int32 scalar. Called in graph."""
        count = tf.identity(self._counter.assign_add(1)) - 1
        index = count % self._limit
        if self._shuffle:
            # The order is a function of the seed and the number of the pass.
            pass_number = tf.cast(count // self._limit, tf.int32)
            seed = tf.stack([self._seed, pass_number])
            index = tf.random.experimental.index_shuffle(index, seed, self._limit - 1)
        return tf.cast(index, tf.int32, name=name)


def refuse_queues(module: str, name: str) -> None:
    """Raises UsageError for a name of a module that begins a queue."""
    raise ProgramError(
        f"{module}.{name} begins a queue of TensorFlow 1, whose place no checkpoint contains; use a"
        " DataFlow, or a tf.data.Dataset in TFDatasetInput"
    )
