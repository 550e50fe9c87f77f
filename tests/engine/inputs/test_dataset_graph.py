"""The graph of a dataset."""

from __future__ import annotations

import pytest
import tensorflow as tf

from trainer_kit.inputs.dataset_graph import graph_of

D = tf.data.Dataset


@pytest.mark.parametrize("again", [False, True])
def test_the_graph_has_the_settings_of_a_transformation(again: bool) -> None:
    graph = graph_of(D.random(seed=1, rerandomize_each_iteration=again))
    (node,) = (node for node in graph.node if node.op.startswith("RandomDataset"))
    assert node.attr["rerandomize_each_iteration"].b is again


def test_a_python_function_below_is_no_obstacle() -> None:
    dataset = D.range(3).map(lambda x: tf.py_function(lambda y: y, [x], tf.int64)).shuffle(3)
    assert any(node.op.startswith("ShuffleDataset") for node in graph_of(dataset).node)
