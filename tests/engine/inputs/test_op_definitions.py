"""Definitions of operations, from a public place."""

from __future__ import annotations

import pytest
import tensorflow as tf

from trainer_kit.inputs.op_definitions import op_definition


@pytest.mark.parametrize(
    ("op", "stateful"), [("RandomUniform", True), ("AssignAddVariableOp", True), ("While", True), ("MatMul", False)]
)
def test_a_definition_tells_whether_the_operation_keeps_a_state(op: str, stateful: bool) -> None:
    assert op_definition(op).name == op
    assert op_definition(op).is_stateful == stateful


def test_it_equals_that_of_a_real_operation() -> None:
    with tf.Graph().as_default() as graph:
        tf.random.uniform([2])
        (operation,) = [one for one in graph.get_operations() if one.type == "RandomUniform"]
    found = op_definition("RandomUniform")
    assert found.is_stateful and found.attr == operation.op_def.attr


def test_an_unknown_operation_has_none() -> None:
    assert op_definition("NoSuchOperation") is None
