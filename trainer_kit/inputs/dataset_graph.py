"""The graph that TensorFlow makes of a tf.data.Dataset.

It contains the settings of each transformation.
"""

from __future__ import annotations

import tensorflow as tf

# A value of tf.data's ExternalStatePolicy, with which a function with a state does not fail.
_IGNORE_STATE = 1


def build_graph_def(dataset: tf.data.Dataset) -> tf.compat.v1.GraphDef:
    """Returns the GraphDef of a dataset and of all its inputs, arrays in memory included.

    Runs eagerly, on the host.

    Raises:
      tf.errors.OpError: when TensorFlow cannot make the graph, such as one of 2 GiB or more.
    """
    variant = tf.data.experimental.to_variant(dataset)
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant, external_state_policy=_IGNORE_STATE
    )
    return tf.compat.v1.GraphDef.FromString(serialized.numpy())
