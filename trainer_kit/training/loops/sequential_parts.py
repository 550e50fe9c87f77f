"""SequentialParts: makes parts of a graph run one after the other, so that memory holds the tensors of only one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from trainer_kit.distribution.tensorflow_internals import run_after
from trainer_kit.training.loops.read_before_write import writes

# Operations that may run at any time: they need no memory of their own, or are no operations of this graph.
_FREE = ("Const", "Placeholder", "ReadVariableOp")


class SequentialParts:
    """The parts of one graph. Each waits for the results of the part before, or for its writes if it has no results.

    A part also writes metrics. No part waits for those, because they need little memory and the wait would cost a small
    step 6 % of its time.
    """

    def __init__(self) -> None:
        self._awaited: list[tf.Operation] = []  # of the part before: what computes the results or writes variables

    @contextlib.contextmanager
    def part(self) -> Iterator[list[tf.Tensor]]:
        """A context in which the operations of a part are created; has no effect when it runs eagerly.

        Yields:
          An empty list, which takes the results of the part.

        tf.control_dependencies would also delay each constant and each read of a weight: one graph edge for each, and
        constants that are computed in each part again.
        """
        if tf.executing_eagerly():
            yield []
            return
        graph = tf.compat.v1.get_default_graph()
        with tf.control_dependencies(self._awaited):
            ready = tf.no_op()
        before = len(graph.get_operations())
        results: list[tf.Tensor] = []
        yield results
        made = graph.get_operations()[before:]
        if self._awaited:
            _delay(made, ready)
        self._awaited = [tensor.op for tensor in results] or [op for op in made if writes(op)]


def _delay(operations: Sequence[tf.Operation], ready: tf.Operation) -> None:
    """Makes operations run after another one, by as few edges as possible.

    Args:
      operations: The operations, in the order in which they were created: inputs first.
      ready: The operation to wait for, which was created before them.
    """
    after = {ready}
    for op in operations:
        if any(tensor.op in after for tensor in op.inputs) or any(one in after for one in op.control_inputs):
            after.add(op)
        elif op.type not in _FREE:
            run_after(op, [ready])
            after.add(op)
