"""Conditions inside of conditions, which TensorFlow's executor on one thread never ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.training.loops.loop_function import has_nested_conditions


def _inner(x: Any) -> Any:
    return tf.cond(x > 1.0, lambda: x, lambda: -x)


def _switch(x: Any) -> Any:
    return tf.switch_case(tf.cast(x, tf.int32), [lambda: _inner(x), lambda: x])


def _loop_between(x: Any) -> Any:
    loop = lambda: tf.while_loop(lambda y: y < 5.0, lambda y: (_inner(y) + 1.0,), (x,))[0]  # noqa: E731
    return tf.cond(x > 0.0, loop, lambda: x)


def _call_between(x: Any) -> Any:
    return tf.cond(x > 0.0, lambda: tf.function(_inner)(x), lambda: x)


def _one_after_the_other(x: Any) -> Any:
    return _inner(_inner(x)) + tf.function(_inner)(x)


def _in_a_loop(x: Any) -> Any:
    return tf.while_loop(lambda y: y < 5.0, lambda y: (_inner(y) + 1.0,), (x,))[0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_switch, True),
        (_loop_between, True),
        (_call_between, True),
        (_one_after_the_other, False),
        (_in_a_loop, False),
    ],
)
def test_conditions_are_followed_through_loops_and_calls(
    function: Callable[..., Any], expected: bool
) -> None:
    graph = tf.function(function).get_concrete_function(tf.TensorSpec([], tf.float32)).graph
    assert has_nested_conditions(graph) is expected
