"""A tf.data.Dataset as the graph that TensorFlow makes of it, which holds the settings of each transformation."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_IGNORE_STATE = 1  # of tf.data's ExternalStatePolicy: a function with a state does not fail


def graph_of(part: Any) -> Any:
    """Returns the GraphDef of a dataset and all that it is made from, arrays in memory included. Eager, on the host.

    Raises:
      tf.errors.OpError: when TensorFlow cannot make one, as from 2 GiB on.
    """
    variant = tf.data.experimental.to_variant(part)
    text = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=_IGNORE_STATE)
    return tf.compat.v1.GraphDef.FromString(text.numpy())
