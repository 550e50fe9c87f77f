"""Runs a function in the save's thread just before a checkpoint is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class WrittenAfter(tf.train.experimental.ShardingCallback):
    """Calls `first`, then returns the same shards as without it.

    The sharding callback is the only call that TensorFlow makes in the save's thread just before it writes. Its write
    callbacks come after the index is in place, and a process that dies there leaves a whole checkpoint.

    Args:
      first: The function to call; it may be called several times per save if tensors are on several machines.
      shards: The sharding callback to use; None selects TensorFlow's default, one shard per machine.
    """

    def __init__(self, first: Callable[[], None], shards: Any = None) -> None:
        self._first = first
        self._shards = shards or tf.train.experimental.ShardByTaskPolicy()

    @property
    def description(self) -> str:
        """The description of the sharding callback."""
        return str(self._shards.description)

    def __call__(self, shardable_tensors: Sequence[Any]) -> Any:
        """Calls `first` and returns the shards."""
        self._first()
        return self._shards(shardable_tensors)
