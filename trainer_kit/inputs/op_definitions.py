"""Looks up the OpDef of a TensorFlow operation by the name of the operation."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf


@functools.cache
def find_op_definition(op: str) -> Any:
    """Returns the OpDef of an operation, without its descriptions.

    Returns None if TensorFlow has no operation of this name. The list of operations in an exported
    graph is the public way to definitions. Runs on the host, and starts nothing.
    """
    graph = tf.compat.v1.GraphDef()
    graph.node.add(name="op", op=op)
    # In eager mode TensorFlow exports no graph.
    with tf.Graph().as_default():
        exported = tf.compat.v1.train.export_meta_graph(graph_def=graph)
    return next(iter(exported.meta_info_def.stripped_op_list.op), None)
