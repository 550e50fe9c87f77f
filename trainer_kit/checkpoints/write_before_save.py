"""Writes what has to be on the disk before a checkpoint is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class WrittenAfter(tf.train.experimental.ShardingCallback):
    """Calls `first`, then shards as it would have been done without.

    That is the one thing that TensorFlow asks for in the thread of a save just before it writes. Its write callbacks
    come when the index is in place, and a process that dies there leaves a checkpoint that is whole.

    Args:
      first: may be called more than once for a save, if its tensors are on several machines.
      shards: what decides on the shards; None: one for each machine, TensorFlow's own choice.
    """

    def __init__(self, first: Callable[[], None], shards: Any = None) -> None:
        self._first = first
        self._shards = shards or tf.train.experimental.ShardByTaskPolicy()

    @property
    def description(self) -> str:
        """That of the shards."""
        return str(self._shards.description)

    def __call__(self, shardable_tensors: Sequence[Any]) -> Any:
        """Returns the shards, when all that comes first is done."""
        self._first()
        return self._shards(shardable_tensors)
