"""LastBatch: keeps the batch of the training step under way, so that an error of a loop on one thread can be explained.

On one thread TensorFlow's errors do not name the operation that failed. The user's line is then not known, and an error
of the data looks like an error of the step. So the loop notes whether it waits for a batch, and keeps the batch. After
an error the step is repeated on it by TensorFlow's default executor, which names the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import tensorflow as tf

from trainer_kit.errors import add_note
from trainer_kit.training.loops.iterators import OneElement
from trainer_kit.training.loops.read_before_write import WAITING

UNNAMED = (
    "on one thread TensorFlow does not say which operation has failed; start the run again in a new model_dir with "
    "runtime.executor=default to see it"
)

_NOT_HELD = (tf.variant, tf.resource)  # no variable holds values of these dtypes


class LastBatch:
    """Keeps the batch that a training step has read last, on the host. Created eagerly.

    Args:
      spec: The spec of a batch. Batches of other dtypes are not kept.

    Attributes:
      variables: The variables that the loop writes for this; checkpoints do not need them.
    """

    def __init__(self, spec: Any) -> None:
        parts = tf.nest.flatten(spec, expand_composites=True)
        self._dtypes = [getattr(part, "dtype", None) for part in parts]  # an iterator of a user's may have no spec
        holds = not {None, *_NOT_HELD}.intersection(self._dtypes)
        self._kept = [_variable(dtype) for dtype in self._dtypes] if holds else []
        self._is_read, self._reads, self._spec = _variable(tf.bool), 0, None
        self.variables = [self._is_read, *self._kept]

    def begin_step(self) -> None:
        """Forgets the reads of an earlier trace; called when a step is traced."""
        self._reads = 0

    @property
    def is_kept(self) -> bool:
        """Whether the traced step reads exactly one batch, and its batch can be kept."""
        return self._reads == 1 and self._spec is not None

    @tf.autograph.experimental.do_not_convert
    def read(self, iterator: Any) -> Any:
        """Returns the next element of an iterator; the step's operations wait until it is kept. In graph, on the host.

        An element with a part that no variable can hold, such as a dataset, is not kept, nor one of another structure.
        """
        self._reads += 1
        with tf.control_dependencies([self._is_read.assign(False, name=WAITING)]):
            element = next(iterator)
        parts = tf.nest.flatten(element, expand_composites=True)
        if not self._kept or [getattr(part, "dtype", None) for part in parts] != self._dtypes:
            self._spec = None
            return element
        self._spec = tf.nest.map_structure(tf.type_spec_from_value, element)
        with tf.control_dependencies(parts):
            writes = [self._is_read.assign(True)]
        writes += [variable.assign(part) for variable, part in zip(self._kept, parts, strict=True)]
        with tf.control_dependencies(writes):
            return tf.nest.map_structure(tf.identity, element, expand_composites=True)

    def explained(self, error: tf.errors.OpError, step: Callable[[Any], Any]) -> tf.errors.OpError:
        """Returns the error that names the operation which failed, or `error` with a note. Eager, on the host.

        Args:
          error: An error of the loop.
          step: Runs the training step on an iterator. It may write the variables that it has written before its error
            once more.
        """
        if self.is_kept and not self._is_read.numpy():
            return type(error)(error.node_def, error.op, f"{error.message}\n\t [[{{{{node IteratorGetNext}}}}]]")
        if self.is_kept:
            values = [variable.read_value() for variable in self._kept]
            batch = tf.nest.pack_sequence_as(self._spec, values, expand_composites=True)

            def again(element: Any) -> None:  # TensorFlow finds no lines for the operations of a lambda
                step(OneElement(element))

            try:
                with tf.summary.record_if(False):
                    tf.function(again, [self._spec], autograph=False)(batch)
            except Exception as named:
                if type(named) is type(error):
                    return cast(tf.errors.OpError, named)
        add_note(error, UNNAMED)
        return error


def _variable(dtype: tf.DType) -> tf.Variable:
    """Returns a variable on the host for values of any shape, outside of every strategy."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.Variable(tf.zeros([], dtype), trainable=False, shape=tf.TensorShape(None), name="last_batch")
