"""Variables that are found by the attributes that lead to them."""

from __future__ import annotations

from types import SimpleNamespace

import tensorflow as tf

from trainer_kit.checkpoints.state.attribute_paths import reachable


def test_a_function_that_autograph_leaves_alone_is_searched() -> None:
    counter = tf.Variable(0)

    @tf.autograph.experimental.do_not_convert
    def count() -> None:
        counter.assign_add(1)

    found = reachable({"task": SimpleNamespace(count=count)})
    assert list(found.values()) == [counter]
