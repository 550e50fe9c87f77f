"""MicroBatchTrials: finds the smallest number of micro-batches whose training step fits into memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.traced_writes import variables_by_handle, written
from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import converted
from trainer_kit.process.error_report import described
from trainer_kit.training.checks.accumulating import global_batch_size
from trainer_kit.training.checks.batch_spec import one_replica
from trainer_kit.training.loops.iterators import OneElement
from trainer_kit.training.loops.micro_batches import batch_size, part_of

_LOG = logging.getLogger(__name__)
_PATH = "trainer.accumulate_steps=auto"


class MicroBatchTrials:
    """Tries 1, 2, 4, 8, ... micro-batches on zeros. Runs eagerly, on the host, before the first step.

    A trial runs the forward and backward pass of one micro-batch on all replicas. It takes no batch of the data, and
    the variables that it has changed get their values back.

    Args:
      trainer: The trainer.
      step: A function of the number of micro-batches that returns a function of a micro-batch, to be run on a replica.
      spec: The spec of the elements of the training data.
      fused: Whether steps are fused in a program of XLA, in stacks of batches.
    """

    def __init__(self, trainer: Any, step: Callable[[int], Callable[[Any], None]], spec: Any, fused: bool) -> None:
        self._trainer, self._step, self._fused = trainer, step, fused
        self._spec = tf.nest.map_structure(self._known_spec, _one_batch(one_replica(spec), fused))
        self._examples = next((one.shape[0] for one in tf.nest.flatten(self._spec) if one.shape.rank), 1)

    def smallest_that_fits(self) -> int:
        """Returns the smallest number of micro-batches that fits, and logs it.

        Raises:
          UsageError: when a micro-batch of one example does not fit, or the shape of a batch is not known.
        """
        error: tf.errors.ResourceExhaustedError | None = None
        for parts in candidates(self._examples):
            try:
                self._try(parts)
            except tf.errors.ResourceExhaustedError as exhausted:
                error = exhausted
            else:
                size, reason = -(-self._examples // parts), "more do not fit into memory" if error else "they fit"
                _LOG.info("%s: %d, so a replica trains on %d examples at a time; %s", _PATH, parts, size, reason)
                return parts
        raise UsageError(
            f"{_PATH}: even the forward and backward pass of a single example does not fit into memory; use a device "
            "with more memory, a smaller model or smaller examples, or runtime.mixed_precision_dtype=bfloat16"
        ) from error

    def _try(self, parts: int) -> None:
        step = self._step(parts)

        def trial(element: Any) -> None:
            inputs = converted(self._trainer.next_train_inputs)(OneElement(element))
            n = batch_size(tf.nest.flatten(inputs))
            part = part_of(inputs, 0, -(-n // parts))
            self._trainer.strategy.run(step, args=(part,))

        function = tf.function(trial, autograph=False, jit_compile=self._fused or None)
        graph = function.get_concrete_function(self._spec).graph
        with _unchanged(graph):
            function(tf.nest.map_structure(lambda one: tf.zeros(one.shape, one.dtype), self._spec))

    def _known_spec(self, spec: Any) -> tf.TensorSpec:
        """Returns the spec of a tensor with the batch size of the config where the data does not show it.

        Raises:
          UsageError: when another size is not known.
        """
        shape = spec.shape.as_list() if isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None else [None] * 2
        if shape and shape[0] is None:
            replicas = self._trainer.strategy.num_replicas_in_sync
            shape[0] = global_batch_size(self._trainer) // replicas or None
        if None in shape:
            raise UsageError(
                f"{_PATH}: the memory of a step depends on the shape of a batch, which is not known: "
                f"{described(spec)}; pad the examples to one shape, or set trainer.accumulate_steps to a number"
            )
        return tf.TensorSpec(shape, spec.dtype)


def candidates(examples: int) -> list[int]:
    """Returns the numbers of micro-batches to try for a batch: the powers of 2, and at last one for each example."""
    powers = [2**power for power in range(examples.bit_length()) if 2**power < examples]
    return [*powers, examples]


def _one_batch(spec: Any, fused: bool) -> Any:
    """Returns the spec of a batch; with fused steps, an element is (number of batches, stacked batches)."""
    if not fused:
        return spec
    return tf.nest.map_structure(lambda one: tf.TensorSpec(one.shape[1:], one.dtype), spec[1])


@contextlib.contextmanager
def _unchanged(graph: tf.Graph) -> Iterator[None]:
    """A context after which all variables that a graph writes have their earlier values; runs eagerly, on the host."""
    variables = variables_by_handle(graph)
    parts = [variables[id(handle)] for handle in written(graph) if id(handle) in variables]
    before = [(part, part.numpy()) for part in parts]
    try:
        yield
    finally:
        for part, value in before:
            part.assign(value)
