"""LastBatch: keeps the batch of the training step under way, so that an error of a loop on one thread can be explained.

On one thread TensorFlow's errors do not name the operation that failed. The user's line is then not known, and an error
of the data looks like an error of the step. So the loop notes whether it waits for a batch, and keeps the batch. After
an error the step is repeated on it by TensorFlow's default executor, which names the operation. An error that depends
on what the failed step has already written may not come again; it gets a note.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import tensorflow as tf

from trainer_kit.distribution.tensorflow_internals import run_after
from trainer_kit.errors import add_note
from trainer_kit.inputs.autograph import converted
from trainer_kit.training.loops.iterators import OneElement
from trainer_kit.training.loops.read_before_write import WAITING

UNNAMED = (
    "on one thread TensorFlow does not say which operation has failed; start the run again in a new model_dir with "
    "runtime.executor=default to see it"
)

_NOT_HELD = (tf.variant, tf.resource)  # no variable holds values of these dtypes
_NO_BATCH, _WAITS, _HAS_BATCH = range(3)  # how far a step is; no batch: none has been read so far
_CANNOT_FAIL = re.compile(  # they hand on values, or compute with each element
    r"AddV2|Cast|Const|Exp|Identity|Maximum|Minimum|Mul|Neg|NoOp|Placeholder|ReadVariableOp|RealDiv|Rsqrt|Sqrt|Square|Sub"
)


class LastBatch:
    """Keeps the batch that a training step has read last, on the host. Created eagerly.

    Args:
      spec: The spec of a batch. Batches of other dtypes are not kept.

    Attributes:
      variables: The variables that the loop writes for this; checkpoints do not need them.
    """

    def __init__(self, spec: Any) -> None:
        parts = tf.nest.flatten(spec, expand_composites=True)
        self._dtypes = [getattr(part, "dtype", None) for part in parts]  # a user's iterator may have no element_spec
        holds = not {None, *_NOT_HELD}.intersection(self._dtypes)
        self._kept = [_variable(dtype) for dtype in self._dtypes] if holds else []
        self._progress, self._reads, self._spec = _variable(tf.int32), 0, None
        self._graph: Any = None
        self._read_between: Any = None  # the operations before and after the read
        self.variables = [self._progress, *self._kept]

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context in which a step is traced. None of its operations can fail while the step waits for its batch."""
        self._reads, self._spec, self._graph = 0, None, tf.compat.v1.get_default_graph()
        yield
        if self.is_kept and not tf.executing_eagerly():
            _run_after_read(self._graph.get_operations(), *self._read_between)

    @property
    def is_kept(self) -> bool:
        """Whether the traced step reads exactly one batch, in its own graph, and its batch can be kept."""
        return self._reads == 1 and self._spec is not None

    @tf.autograph.experimental.do_not_convert
    def read(self, iterator: Any) -> Any:
        """Returns the next element of an iterator; the step's operations wait until it is kept.

        Runs in graph, on the host.

        An element is not kept if no variable can hold one of its parts, or if its structure differs from the spec. Nor
        is one that is read inside another graph, of a tf.function, a tf.cond or a loop in the step.
        """
        self._reads += 1
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._graph:
            self._spec = None
            return next(iterator)
        with tf.control_dependencies([] if tf.executing_eagerly() else _that_can_fail(graph.get_operations())):
            waiting = _after(self._progress.assign(_WAITS, name=WAITING))
        with tf.control_dependencies([waiting]):
            element = next(iterator)
        parts = tf.nest.flatten(element, expand_composites=True)
        if not self._kept or [getattr(part, "dtype", None) for part in parts] != self._dtypes:
            self._spec = None
            return element
        self._spec = tf.nest.map_structure(tf.type_spec_from_value, element)
        with tf.control_dependencies(parts):
            writes = [self._progress.assign(_HAS_BATCH)]
        writes += [variable.assign(part) for variable, part in zip(self._kept, parts, strict=True)]
        arrived = _after(*writes)
        self._read_between = waiting, arrived
        with tf.control_dependencies([arrived]):
            return tf.nest.map_structure(tf.identity, element, expand_composites=True)

    def explained(self, error: tf.errors.OpError, step: Callable[[Any], Any]) -> tf.errors.OpError:
        """Returns the error that names the operation which failed, or `error` with a note. Runs eagerly, on the host.

        Args:
          error: An error of the loop.
          step: Runs the training step on an iterator. It may write the variables that it has written before its error
            once more.
        """
        progress = int(self._progress.numpy())
        if self.is_kept and progress == _WAITS:
            return type(error)(error.node_def, error.op, f"{error.message}\n\t [[{{{{node IteratorGetNext}}}}]]")
        if self.is_kept and progress == _HAS_BATCH:
            values = [variable.read_value() for variable in self._kept]
            batch = tf.nest.pack_sequence_as(self._spec, values, expand_composites=True)

            def again(element: Any) -> None:  # TensorFlow finds no lines for the operations of a lambda
                converted(step)(OneElement(element))

            try:
                with tf.summary.record_if(False):
                    tf.function(again, [self._spec], autograph=False)(batch)
            except Exception as named:
                if type(named) is type(error):
                    return cast(tf.errors.OpError, named)
        add_note(error, UNNAMED)
        return error


def _that_can_fail(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    return [op for op in operations if not _CANNOT_FAIL.fullmatch(op.type)]


def _after(*writes: Any) -> Any:
    """Returns an operation that runs after writes: what `assign` of a variable returns need not be an operation."""
    with tf.control_dependencies(writes):
        return tf.no_op()


def _run_after_read(operations: Sequence[tf.Operation], waiting: tf.Operation, arrived: tf.Operation) -> None:
    """Makes operations that can fail, and were made after a batch was read, run after it has arrived.

    An edge costs no time on one thread, where operations run in a fixed order. All edges go from an operation to one
    that was made later, as those of TensorFlow's automatic control dependencies do, so there is no cycle.

    Args:
      operations: The operations of a step, in the order in which they were made.
      waiting: The operation that runs once it is noted that the step waits for a batch.
      arrived: The operation that runs once the batch is kept.
    """
    after, is_read = {waiting}, False
    for op in operations[operations.index(waiting) + 1 :]:
        is_read = is_read or op is arrived
        if any(tensor.op in after for tensor in op.inputs) or any(one in after for one in op.control_inputs):
            after.add(op)
        elif is_read and not _CANNOT_FAIL.fullmatch(op.type):
            run_after(op, [arrived])
            after.add(op)


def _variable(dtype: tf.DType) -> tf.Variable:
    """Returns a variable on the host for values of any shape; an open strategy scope applies to it."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.Variable(tf.zeros([], dtype), trainable=False, shape=tf.TensorShape(None), name="last_batch")
