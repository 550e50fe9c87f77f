"""Gradients of micro-batches: what is summed, which calls apply it, which steps are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import optimization
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.gradient_accumulator import GradientAccumulator, GradientSums
from trainer_kit.optimizers.gradients import apply_gradients

# The share and the gradient of three micro-batches, whose weighted sum is [2, 3].
PARTS = [(0.5, [4.0, 0.0]), (0.25, [0.0, 8.0]), (0.25, [0.0, 4.0])]
WAYS: dict[str, Callable[[Any, Any, Any], None]] = {
    "trainer_kit": lambda optimizer, gradient, weights: apply_gradients(
        optimizer, [(gradient, weights)]
    ),
    "apply_gradients": lambda optimizer, gradient, weights: optimizer.apply_gradients(
        [(gradient, weights)]
    ),
    "apply": lambda optimizer, gradient, weights: optimizer.apply([gradient], [weights]),
    "apply to what was built": lambda optimizer, gradient, weights: optimizer.apply([gradient]),
}


def _create_variable(values: Any = (1.0, 1.0), dtype: str = "float32") -> keras.Variable:
    return keras.Variable(np.array(values), dtype=dtype)


def _accumulate(
    optimizer: Any, weights: Any, parts: Sequence[tuple[float, Any]], way: str = "trainer_kit"
) -> Any:
    """Returns the sums after an update with the gradient of each part."""
    sums = GradientSums()
    for number, (share, gradient) in enumerate(parts):
        if isinstance(gradient, list):
            gradient = tf.constant(gradient)
        part = GradientAccumulator(sums, optimizer, tf.constant(share), tf.constant(number == 0))
        WAYS[way](part, gradient, weights)
    sums.update()
    return sums


@pytest.mark.parametrize("way", WAYS)
def test_one_update_applies_the_weighted_sum(way: str) -> None:
    weights = _create_variable()
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([weights])

    sums = _accumulate(optimizer, weights, PARTS, way)

    np.testing.assert_allclose(weights.numpy(), [0.0, -0.5])
    assert int(optimizer.iterations.numpy()) == 1
    assert len(sums.variables) == 1


def test_sums_of_the_batch_before_are_replaced() -> None:
    weights = _create_variable()
    optimizer = keras.optimizers.SGD(1.0)
    sums = GradientSums()

    for _ in range(2):
        sums.calls = {}
        part = GradientAccumulator(sums, optimizer, tf.constant(1.0), tf.constant(True))
        apply_gradients(part, [(tf.constant([1.0, 2.0]), weights)])
        sums.update()

    np.testing.assert_allclose(weights.numpy(), [-1.0, -3.0])


def test_the_sum_is_clipped_and_not_its_parts() -> None:
    weights = _create_variable()
    optimizer = create_optimizer(optimization("sgd", learning_rate=1.0, clipvalue=2.5))

    _accumulate(optimizer, weights, PARTS)

    np.testing.assert_allclose(weights.numpy(), [-1.0, -1.5])


def test_rows_of_an_embedding_are_added_up() -> None:
    table = _create_variable(np.zeros((3, 2)))
    ones = tf.ones([2, 2])
    size = tf.constant([3, 2])
    parts = [(0.5, tf.IndexedSlices(ones, tf.constant(rows), size)) for rows in ([1, 1], [0, 1])]

    _accumulate(keras.optimizers.SGD(1.0), table, parts)

    np.testing.assert_allclose(table.numpy(), [[-0.5, -0.5], [-1.5, -1.5], [0, 0]])


def test_half_precision_gradients_are_added_in_float32() -> None:
    weights = _create_variable([0.0], "float16")
    # 2048 + 0.5 is 2048 there.
    parts = [(0.25, tf.constant([value], tf.float16)) for value in (8192.0, 2.0, 2.0, 2.0)]

    (total,) = _accumulate(keras.optimizers.SGD(1.0), weights, parts).variables.values()

    assert total.dtype == tf.float32
    assert float(total[0]) == 2049.5
    assert weights.numpy().dtype == np.float16


def test_a_weight_of_zero_leaves_nothing_of_a_nan() -> None:
    weights = _create_variable()

    _accumulate(keras.optimizers.SGD(1.0), weights, [(1.0, [1.0, 1.0]), (0.0, [np.nan, np.nan])])

    np.testing.assert_allclose(weights.numpy(), [0.0, 0.0])


def test_a_step_reads_the_state_of_the_optimizer() -> None:
    optimizer = keras.optimizers.Adam(0.25)
    optimizer.build([_create_variable()])

    part = GradientAccumulator(GradientSums(), optimizer, tf.constant(1.0), tf.constant(True))

    assert float(part.learning_rate) == 0.25
    assert part.iterations is optimizer.iterations
    assert part.variables == optimizer.variables
    assert float(part.scale_loss(tf.constant(3.0))) == 3.0


def test_other_attributes_of_an_optimizer_are_refused() -> None:
    part = GradientAccumulator(
        GradientSums(), keras.optimizers.Adam(), tf.constant(1.0), tf.constant(True)
    )

    assert not hasattr(part, "beta_1")

    with pytest.raises(UsageError):
        part.minimize(None, None)


@pytest.mark.parametrize("outer", ["condition", "loop"])
def test_gradients_inside_a_condition_or_a_loop_are_refused(outer: str) -> None:
    weights = _create_variable()
    sums = GradientSums()
    optimizer = keras.optimizers.SGD()

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
    weights = _create_variable()
    optimizer = keras.optimizers.SGD(1.0)
    slots = []
    sums = GradientSums()
    part = GradientAccumulator(sums, optimizer, tf.constant(1.0), tf.constant(True))

    @tf.function(autograph=False)
    def inner(gradient: tf.Tensor) -> None:
        if not slots:
            # TensorFlow traces a function again that has made a variable.
            slots.append(tf.Variable(0.0))
        apply_gradients(part, [(gradient, weights)])

    inner(tf.constant([1.0, 2.0]))
    sums.update()

    np.testing.assert_allclose(weights.numpy(), [0.0, -1.0])
    assert len(sums.variables) == 1
