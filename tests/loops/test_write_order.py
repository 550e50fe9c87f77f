"""Steps in graph whose batch cannot be had."""

from __future__ import annotations

import pytest
import tensorflow as tf

from trainer_kit.loops.write_order import writes_after


def test_a_variable_is_written_only_once_the_batch_is_there_and_read_at_any_time() -> None:
    count, weight, total = tf.Variable(0), tf.Variable(2.0), tf.Variable(0.0)

    @tf.function(autograph=False)
    def step(iterator: object) -> None:
        batch = next(iterator)
        with writes_after([batch]):
            count.assign_add(1)
            total.assign_add(weight * batch)

    iterator = iter(tf.data.Dataset.from_tensor_slices([1.0, 2.0]))
    graph = step.get_concrete_function(iterator).graph
    batch = next(op for op in graph.get_operations() if op.type == "IteratorGetNext")
    waiting = {op.type for op in graph.get_operations() if batch in op.control_inputs}
    assert waiting == {"AssignAddVariableOp"}
    for _ in range(2):
        step(iterator)
    for _ in range(20):
        with pytest.raises(tf.errors.OutOfRangeError):
            step(iterator)
    assert (int(count), float(total)) == (2, 6.0)


def test_what_runs_eagerly_writes_as_it_comes() -> None:
    count = tf.Variable(0)
    with writes_after([tf.constant(1.0)]):
        count.assign_add(1)
    assert int(count) == 1
