"""A tf.data.Dataset as the graph that TensorFlow makes of it, which holds the settings of each transformation."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from trainer_kit.distribution.tensorflow_internals import functions_of
from trainer_kit.inputs.dataset_structure import kind_of, transformations

_IGNORE_STATE = 1  # of tf.data's ExternalStatePolicy: a function with a state does not fail
_IN_MEMORY = {"Tensor", "TensorSlice", "SparseTensorSlice"}


def graph_of(part: Any) -> Any:
    """Returns the GraphDef of a dataset and all that it is made from, arrays in memory included. Eager, on the host.

    Raises:
      tf.errors.OpError: when TensorFlow cannot make one, as from 2 GiB on.
    """
    variant = tf.data.experimental.to_variant(part)
    text = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=_IGNORE_STATE)
    return tf.compat.v1.GraphDef.FromString(text.numpy())


def own_node(graph: Any) -> Any:
    """Returns the NodeDef of the dataset that a graph was made of; the other nodes are what it is made from."""
    nodes = {node.name: node for node in graph.node}
    (result,) = (node for node in graph.node if node.op == "_Retval")
    return nodes[result.input[0].partition(":")[0]]


def held_bytes(dataset: Any) -> float:
    """Returns the size of the arrays in a dataset and its functions; infinity if it is not known, as for texts.

    Eager, on the host.
    """
    parts = list(transformations(dataset))
    arrays = sum(_array_bytes(part) for part in parts if kind_of(part) in _IN_MEMORY)
    captured = {id(one): one for part in parts for graph in functions_of(part) for one, _ in graph.captures}
    return arrays + sum(_captured_bytes(one) for one in captured.values())


def _captured_bytes(tensor: Any) -> float:
    """The size of a tensor that a function of a dataset uses."""
    if tensor.dtype == tf.string and hasattr(tensor, "numpy"):
        return float(tf.reduce_sum(tf.strings.length(tensor)))
    return _size(tensor.shape, tensor.dtype)


def _array_bytes(part: Any) -> float:
    """The size of what a dataset of arrays holds, from its elements."""
    specs = tf.nest.flatten(part.element_spec, expand_composites=True)
    length = int(part.cardinality())
    return sum(_size(spec.shape, spec.dtype) for spec in specs) * length if length >= 0 else math.inf


def _size(shape: tf.TensorShape, dtype: tf.DType) -> float:
    count = shape.num_elements()
    if count is None or dtype == tf.string:  # TensorFlow ends the process where texts of 2 GiB come into a graph
        return math.inf
    return count * (0 if dtype in (tf.resource, tf.variant) else dtype.size)
