"""Which ops keep a state that no checkpoint holds."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.inputs.op_definitions import op_definition
from trainer_kit.inputs.stateful_ops import nodes, unsaved_state


@pytest.mark.parametrize(
    ("op", "state"),
    [
        ("PyFunc", "python"),
        ("EagerPyFunc", "python"),
        ("PyFuncStateless", None),
        ("RandomUniformInt", "random"),
        ("RandomShuffle", "random"),
        ("StatelessRandomUniformV2", None),
        ("RngReadAndSkip", None),  # the state is in a variable
        ("AssignAddVariableOp", None),
        ("ShuffleDatasetV3", None),  # its seeds are inputs, and its state that of an iterator
        ("SnapshotDataset", None),  # has a seed, and is not stateful
        ("NoSuchOp", None),
    ],
)
def test_python_and_random_ops_have_unsaved_state(op: str, state: str | None) -> None:
    definition = op_definition(op)
    assert (definition is None) == (op == "NoSuchOp")
    assert unsaved_state(op, definition) == state


def test_the_functions_of_a_graph_are_searched_too() -> None:
    @tf.function
    def loop() -> Any:
        for _ in tf.range(2):
            tf.print(tf.random.normal([]))
        return tf.random.uniform([])

    graph = loop.get_concrete_function().graph.as_graph_def()
    found = {node.op for node in nodes(graph)}
    assert {"RandomStandardNormal", "RandomUniform"} <= found
    assert "RandomStandardNormal" not in {node.op for node in graph.node}
