"""Conditions inside of conditions, which TensorFlow's executor on one thread never ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.training.loops.loop_function import has_nested_conditions


def _take_absolute(x: Any) -> Any:
    return tf.cond(x > 1.0, lambda: x, lambda: -x)


def _switch(x: Any) -> Any:
    return tf.switch_case(tf.cast(x, tf.int32), [lambda: _take_absolute(x), lambda: x])


def _nest_through_loop(x: Any) -> Any:
    return tf.cond(x > 0.0, lambda: _loop_over_condition(x), lambda: x)


def _call_between(x: Any) -> Any:
    return tf.cond(x > 0.0, lambda: tf.function(_take_absolute)(x), lambda: x)


def _chain_conditions(x: Any) -> Any:
    return _take_absolute(_take_absolute(x)) + tf.function(_take_absolute)(x)


def _loop_over_condition(x: Any) -> Any:
    return tf.while_loop(lambda y: y < 5.0, lambda y: (_take_absolute(y) + 1.0,), (x,))[0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_switch, True),
        (_nest_through_loop, True),
        (_call_between, True),
        (_chain_conditions, False),
        (_loop_over_condition, False),
    ],
)
def test_conditions_are_followed_through_loops_and_calls(
    function: Callable[..., Any], expected: bool
) -> None:
    graph = tf.function(function).get_concrete_function(tf.TensorSpec([], tf.float32)).graph
    assert has_nested_conditions(graph) is expected
