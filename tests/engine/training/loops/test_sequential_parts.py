"""Parts of a graph that run one after the other; test_accumulation.py counts the activations in memory."""

from __future__ import annotations

import tensorflow as tf

from trainer_kit.training.loops.sequential_parts import SequentialParts


def test_constants_and_weights_do_not_wait_for_earlier_parts() -> None:
    weight, total = tf.Variable(2.0), tf.Variable(0.0)

    @tf.function(autograph=False)
    def step(value: tf.Tensor) -> None:
        order = SequentialParts()
        for _ in range(2):
            with order.part():
                total.assign_add(value * weight * 3.0)

    operations = step.get_concrete_function(tf.constant(1.0)).graph.get_operations()
    assert {op.type for op in operations if any(one.type == "NoOp" for one in op.control_inputs)} == {"Mul"}


def test_a_part_waits_for_earlier_results_and_not_for_metrics() -> None:
    weight, metric = tf.Variable(2.0), tf.Variable(0.0)

    @tf.function(autograph=False)
    def step(value: tf.Tensor) -> tf.Tensor:
        order = SequentialParts()
        for _ in range(2):
            with order.part() as results:
                results.append(tf.square(value * weight))
                metric.assign_add(results[0])
        return results[0]

    graph = step.get_concrete_function(tf.constant(1.0)).graph
    first, last = (op for op in graph.get_operations() if op.type == "Square")
    before, left = set[str](), [last]
    while left:
        op = left.pop()
        before.add(op.name)
        left += [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
    writes = {op.name for op in graph.get_operations() if op.type == "AssignAddVariableOp"}
    assert first.name in before and len(writes) == 2 and not writes & before


def test_eager_parts_run_in_their_order_anyway() -> None:
    order, total = SequentialParts(), tf.Variable(0.0)
    for _ in range(2):
        with order.part():
            total.assign_add(1.0)
    assert float(total) == 2.0
