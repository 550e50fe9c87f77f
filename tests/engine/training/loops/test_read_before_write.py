"""Steps in graph whose batch cannot be had."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.builders import replicas
from trainer_kit.training.loops.loop_function import control_dependencies_for_writes


def test_writes_wait_for_the_batch_and_reads_do_not() -> None:
    count = tf.Variable(0)
    weight = tf.Variable(2.0)
    total = tf.Variable(0.0)

    @tf.function(autograph=False)
    def step(iterator: object) -> None:
        batch = next(iterator)
        with control_dependencies_for_writes([batch]):
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

    assert int(count) == 2
    assert float(total) == 6.0


@pytest.mark.parametrize("ragged", [False, True])
def test_replicas_write_nothing_after_the_end_of_the_data(ragged: bool) -> None:
    strategy = replicas(2)
    with strategy.scope():
        count = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    @tf.function(autograph=False)
    def loop(iterator: object) -> None:
        def step(number: tf.Tensor) -> tuple[tf.Tensor]:
            batch = next(iterator)
            parts = [
                t
                for b in strategy.experimental_local_results(batch)
                for t in tf.nest.flatten(b, True)
            ]
            with control_dependencies_for_writes(parts):
                strategy.run(lambda: count.assign_add(1.0))

            return (number + 1,)

        tf.while_loop(lambda number: number < 5, step, (0,))

    data = tf.data.Dataset.from_tensors(
        tf.ragged.constant([[1], [2, 3]]) if ragged else [1.0, 2.0]
    ).repeat(4)
    iterator = iter(strategy.experimental_distribute_dataset(data))

    with pytest.raises(tf.errors.OutOfRangeError):
        loop(iterator)

    assert float(count.numpy()) == 4 * 2.0
