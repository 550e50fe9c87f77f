"""Gradients of micro-batches: what is added up, by which calls it is applied, and which steps are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import optimization
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.accumulation import GradientAccumulator, GradientSums
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.gradients import apply_gradients

SHARES = (0.5, 0.25, 0.25)
PARTS = ([4.0, 0.0], [0.0, 8.0], [0.0, 4.0])  # the gradients of three micro-batches; their weighted sum is [2, 3]


def _variable(values: Sequence[float] = (1.0, 1.0), dtype: str = "float32") -> keras.Variable:
    return keras.Variable(np.array(values), dtype=dtype)


def _accumulate(optimizer: Any, step: Callable[[Any, tf.Tensor], None], parts: Sequence[Any] = PARTS) -> None:
    """Runs a step of the stand-in optimizer and a gradient for each part, and the update."""
    sums = GradientSums()
    for number, (share, part) in enumerate(zip(SHARES, parts, strict=True)):
        step(GradientAccumulator(sums, optimizer, tf.constant(share), tf.constant(number == 0)), tf.constant(part))
    sums.update()


WAYS: dict[str, Callable[[Any, Any, Any], None]] = {
    "trainer_kit": lambda optimizer, gradient, weights: apply_gradients(optimizer, [(gradient, weights)]),
    "apply_gradients": lambda optimizer, gradient, weights: optimizer.apply_gradients([(gradient, weights)]),
    "apply": lambda optimizer, gradient, weights: optimizer.apply([gradient], [weights]),
    "apply to what was built": lambda optimizer, gradient, weights: optimizer.apply([gradient]),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_update_applies_the_weighted_sum(way: str) -> None:
    weights, optimizer = _variable(), keras.optimizers.SGD(0.5)
    optimizer.build([weights])
    sums = GradientSums()
    for _ in range(2):  # the sums of the first batch are replaced
        sums.calls = {}
        for number, (share, gradient) in enumerate(zip(SHARES, PARTS, strict=True)):
            part = GradientAccumulator(sums, optimizer, tf.constant(share), tf.constant(number == 0))
            WAYS[way](part, tf.constant(gradient), weights)
        sums.update()
    np.testing.assert_allclose(weights.numpy(), [-1.0, -2.0])
    assert int(optimizer.iterations.numpy()) == 2 and len(sums.variables) == 1


def test_the_sum_is_clipped_and_not_its_parts() -> None:
    weights, optimizer = _variable(), create_optimizer(optimization("sgd", learning_rate=1.0, clipvalue=2.5))
    _accumulate(optimizer, lambda one, gradient: apply_gradients(one, [(gradient, weights)]))
    np.testing.assert_allclose(weights.numpy(), [-1.0, -1.5])


def test_rows_of_an_embedding_are_added_up() -> None:
    table, optimizer = _variable(np.zeros((3, 2))), keras.optimizers.SGD(1.0)
    sums = GradientSums()
    for rows in ([1, 1], [0, 1]):
        gradient = tf.IndexedSlices(tf.ones([2, 2]), tf.constant(rows), tf.constant([3, 2]))
        part = GradientAccumulator(sums, optimizer, tf.constant(0.5), tf.constant(rows == [1, 1]))
        apply_gradients(part, [(gradient, table)])
    sums.update()
    np.testing.assert_allclose(table.numpy(), [[-0.5, -0.5], [-1.5, -1.5], [0, 0]])


def test_half_precision_gradients_are_added_in_float32() -> None:
    weights, optimizer = _variable([0.0], "float16"), keras.optimizers.SGD(1.0)
    sums = GradientSums()
    for number in range(4):  # in float16, 2048 + 0.5 is 2048
        gradient = tf.constant([8192.0 if number == 0 else 2.0], tf.float16)
        part = GradientAccumulator(sums, optimizer, tf.constant(0.25), tf.constant(number == 0))
        apply_gradients(part, [(gradient, weights)])
    (total,) = sums.variables.values()
    assert total.dtype == tf.float32 and float(total[0]) == 2049.5
    sums.update()
    assert weights.numpy().dtype == np.float16


def test_a_weight_of_zero_leaves_nothing_of_a_nan() -> None:
    weights, optimizer = _variable(), keras.optimizers.SGD(1.0)
    sums = GradientSums()
    for number, (share, value) in enumerate(((1.0, 1.0), (0.0, np.nan))):
        part = GradientAccumulator(sums, optimizer, tf.constant(share), tf.constant(number == 0))
        apply_gradients(part, [(tf.constant([value, value], tf.float32), weights)])
    sums.update()
    np.testing.assert_allclose(weights.numpy(), [0.0, 0.0])


def test_a_step_reads_the_state_of_the_optimizer() -> None:
    optimizer = keras.optimizers.Adam(0.25)
    optimizer.build([_variable()])
    part = GradientAccumulator(GradientSums(), optimizer, tf.constant(1.0), tf.constant(True))
    assert float(part.learning_rate) == 0.25 and part.iterations is optimizer.iterations
    assert part.variables == optimizer.variables
    assert float(part.scale_loss(tf.constant(3.0))) == 3.0


def test_other_attributes_of_an_optimizer_are_refused() -> None:
    part = GradientAccumulator(GradientSums(), keras.optimizers.Adam(), tf.constant(1.0), tf.constant(True))
    assert not hasattr(part, "beta_1")
    with pytest.raises(UsageError):
        part.minimize(None, None)


@pytest.mark.parametrize("outer", ["condition", "loop"])
def test_gradients_inside_a_condition_or_a_loop_are_refused(outer: str) -> None:
    weights = _variable()
    sums, optimizer = GradientSums(), keras.optimizers.SGD()

    def step(flag: tf.Tensor) -> None:
        part = GradientAccumulator(sums, optimizer, tf.constant(1.0), tf.constant(True))

        def apply(number: Any = 0) -> Any:
            apply_gradients(part, [(tf.constant([1.0, 1.0]), weights)])
            return number

        if outer == "loop":
            tf.while_loop(lambda number: number < 1, lambda number: (apply(number) + 1,), (0,))
        else:
            tf.cond(flag, apply, lambda: 0)

    with pytest.raises(UsageError):
        tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([], tf.bool))


def test_a_function_inside_the_step_may_be_traced_twice() -> None:
    weights, optimizer, made = _variable(), keras.optimizers.SGD(1.0), []
    sums = GradientSums()
    part = GradientAccumulator(sums, optimizer, tf.constant(1.0), tf.constant(True))

    @tf.function(autograph=False)
    def inner(gradient: tf.Tensor) -> None:
        if not made:
            made.append(tf.Variable(0.0))  # TensorFlow traces a function again that has made a variable
        apply_gradients(part, [(gradient, weights)])

    inner(tf.constant([1.0, 2.0]))
    sums.update()
    np.testing.assert_allclose(weights.numpy(), [0.0, -1.0])
    assert len(sums.variables) == 1
