"""Finds conditions inside of conditions: TensorFlow's executor on one thread waits for them for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError

_CONDITIONS = ("If", "StatelessIf", "Case", "StatelessCase")


def has_nested_conditions(graph: tf.Graph) -> bool:
    """Returns whether a graph has a tf.cond, tf.case or tf.switch_case inside of one. The graph is only read.

    Loops and calls of functions between the two are followed.

    Args:
      graph: The graph of a traced function.
    """
    definition = graph.as_graph_def()
    functions = {one.signature.name: one.node_def for one in definition.library.function}
    waiting, seen = [(definition.node, False)], set[tuple[str, bool]]()
    while waiting:
        operations, inside = waiting.pop()
        for op in operations:
            is_condition = op.op in _CONDITIONS
            if is_condition and inside:
                return True
            called = {(name, inside or is_condition) for name in _functions_of(op)} - seen
            seen |= called
            waiting += [(functions[name], in_condition) for name, in_condition in called if name in functions]
    return False


def check_one_thread(graph: tf.Graph) -> None:
    """Raises UsageError when the executor on one thread would wait for ever in a graph. The graph is only read."""
    if has_nested_conditions(graph):
        raise UsageError(
            "runtime.executor=single_threaded: a step or a metric has a tf.cond, tf.case or tf.switch_case inside of "
            "another one, and TensorFlow's executor on one thread waits for ever in these; set executor=default"
        )


def check_of(runtime: Any) -> Callable[[tf.Graph], None]:
    """Returns `check_one_thread` if a runtime section asks for one thread, else a function that accepts each graph."""
    return check_one_thread if getattr(runtime, "executor", "default") == "single_threaded" else lambda graph: None


def _functions_of(operation: Any) -> Iterator[str]:
    """Yields the names of the functions in the attributes of a NodeDef."""
    for value in operation.attr.values():
        if value.HasField("func"):
            yield value.func.name
        yield from (function.name for function in value.list.func)
