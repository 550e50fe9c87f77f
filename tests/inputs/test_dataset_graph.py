"""What the graph of a dataset tells, and how large its arrays are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.inputs.dataset_graph import graph_of, held_bytes, own_node

D = tf.data.Dataset


@pytest.mark.parametrize("again", [False, True])
def test_the_settings_of_the_last_of_several_shuffles_are_told(again: bool) -> None:
    dataset = D.range(9).shuffle(9, reshuffle_each_iteration=not again).shuffle(9, reshuffle_each_iteration=again)
    assert own_node(graph_of(dataset)).attr["reshuffle_each_iteration"].b is again


def test_a_python_function_below_is_no_obstacle() -> None:
    dataset = D.range(3).map(lambda x: tf.py_function(lambda y: y, [x], tf.int64)).shuffle(3)
    assert own_node(graph_of(dataset)).op.startswith("ShuffleDataset")


def test_arrays_count_once_in_the_dataset_and_in_its_functions() -> None:
    images, labels = np.zeros([6, 5], np.float32), np.zeros([6], np.int64)
    table = tf.zeros([100], tf.float32)
    dataset = D.from_tensor_slices((images, labels))
    assert held_bytes(dataset) == held_bytes(dataset.batch(2).repeat()) == images.nbytes + labels.nbytes
    assert held_bytes(D.zip(dataset, dataset)) == held_bytes(dataset)
    assert held_bytes(D.from_tensors(images)) == images.nbytes
    looked_up = D.range(9).map(lambda x: table[x]).map(lambda x: x * table[0])
    assert held_bytes(looked_up) == 4 * 100


def test_texts_in_a_dataset_and_unknown_sizes_are_endless() -> None:
    assert held_bytes(D.from_tensor_slices(["a", "b"])) == math.inf
    words = tf.constant(["one", "three"])
    assert held_bytes(D.range(2).map(lambda x: words[x])) == 8
    ragged = D.from_tensor_slices(tf.ragged.constant([[1], [2, 3]]))
    assert held_bytes(ragged) == math.inf
