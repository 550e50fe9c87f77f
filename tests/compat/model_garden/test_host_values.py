"""Values on the host."""

from __future__ import annotations

import tensorflow as tf

from trainer_kit.compat.model_garden.host_values import host_value


def test_tensors_and_variables_give_what_they_hold_and_all_else_is_left_alone() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()).scope():
        mirrored = tf.Variable(3)
    assert [int(host_value(value)) for value in (tf.constant(1), tf.Variable(2), mirrored, 4)] == [1, 2, 3, 4]
    assert host_value("text") == "text"
