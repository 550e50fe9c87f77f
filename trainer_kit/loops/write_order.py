"""Steps that change nothing before their batch is there: no count moves when the data has ended, or cannot be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf


@contextlib.contextmanager
def writes_after(tensors: Sequence[tf.Tensor]) -> Iterator[None]:
    """What is made within writes to no variable before all `tensors` are there; in graph, eager it does nothing.

    tf.control_dependencies would hold back each operation without inputs too, every read of a weight: an edge of the
    graph for each, and no work while a batch is waited for. That cost a small step 5 % of its time.

    Args:
      tensors: of a batch; constants and variables among them are there at any time.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    made_here = (tensor for tensor in tensors if tf.is_symbolic_tensor(tensor) and tensor.graph is graph)
    batch = list(dict.fromkeys(tensor.op for tensor in made_here))  # all else is there already
    after = set(batch)
    for op in graph.get_operations()[before:]:  # in the order they were made: inputs first
        if any(tensor.op in after for tensor in op.inputs) or any(one in after for one in op.control_inputs):
            after.add(op)
        elif _writes(op):
            op._add_control_inputs(batch)  # as automatic control dependencies do; nothing public can
            after.add(op)


def _writes(op: tf.Operation) -> bool:
    """Whether it may change a variable. Inside a TPU's program nothing may wait for what is outside it."""
    return op.op_def.is_stateful and op.type != "ReadVariableOp" and "_tpu_replicate" not in op.node_def.attr
