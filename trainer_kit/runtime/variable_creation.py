"""Traces functions that create variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def trace_concrete_function(function: Callable[..., object], *specs: Any) -> Any:
    """Traces a function on specs, so that the variables that it creates exist; runs nothing.

    A tf.function creates the variables that replicas share with a value for the first replica only,
    so with several replicas they are created outside of the function that is traced. Runs eagerly,
    on the host, in strategy scope.

    Args:
      function: The function.
      *specs: The nested specs of its arguments.

    Returns:
      The concrete function.
    """

    @tf.autograph.experimental.do_not_convert
    def creating(*arguments: Any) -> Any:
        def create_variable(next_creator: Callable[..., tf.Variable], **named: Any) -> tf.Variable:
            # The variable is created outside of the graph.
            with tf.init_scope():
                return next_creator(**named)

        with tf.variable_creator_scope(create_variable):
            return function(*arguments)

    has_several_replicas = tf.distribute.get_strategy().num_replicas_in_sync > 1
    traced = tf.function(creating if has_several_replicas else function, autograph=False)
    return traced.get_concrete_function(*specs)
