"""Looks up the OpDef of a TensorFlow operation by the name of the operation."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf


@functools.cache
def find_op_definition(op: str) -> Any:
    """Returns the OpDef of an operation, without its descriptions; None if TensorFlow has none of this name.

    The list of operations that an exported graph comes with is the public place of definitions.
    Runs on the host, and starts nothing.
    """
    graph = tf.compat.v1.GraphDef()
    graph.node.add(name="op", op=op)
    with tf.Graph().as_default():  # in eager mode TensorFlow exports none
        exported = tf.compat.v1.train.export_meta_graph(graph_def=graph)
    return next(iter(exported.meta_info_def.stripped_op_list.op), None)
