"""What a dataset is to the Trainer when it can start at any position."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

_LOG = logging.getLogger(__name__)


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


def dataset_at(
    build_inputs: Callable[..., Any], params: Any, position: int, input_context: tf.distribute.InputContext | None
) -> tf.data.Dataset:
    """Returns what a task's `build_inputs` makes of `params`: from `position` on, if it is a Source. On the host.

    A tf.data.Dataset starts at its beginning. A `build_inputs` without an argument `input_context` is not given one.
    """
    takes_context = "input_context" in inspect.signature(build_inputs).parameters
    made = build_inputs(params, **({"input_context": input_context} if takes_context else {}))
    if isinstance(made, Source):
        return made.at(position, input_context)
    if position:
        _LOG.warning(
            "the training data is a tf.data.Dataset without a position: it starts again at its beginning, not at batch "
            "%d; build_inputs can return a Source, such as ArraySource, to go on there",
            position,
        )
    return made
