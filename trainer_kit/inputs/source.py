"""What a dataset is to the Trainer when it can start at any position."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import tensorflow as tf


@runtime_checkable
class Source(Protocol):
    """Data whose order is a pure function of (seed, epoch, index), so that a run can go on where it stopped.

    `Task.build_inputs` may return one instead of a tf.data.Dataset. The Trainer then asks for the dataset when it
    needs the iterator: after a checkpoint has been restored.
    """

    def at(self, position: int, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Returns the dataset from global batch `position` on, in batches for one replica.

        Args:
          position: how many global batches have been used already, from the start of the first epoch.
          input_context: the worker's place among the others; None for a single replica.
        """
        ...
