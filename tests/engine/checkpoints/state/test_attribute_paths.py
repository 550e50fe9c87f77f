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


class Counts:
    def __init__(self) -> None:
        self.steps = tf.Variable(0)

    @tf.function
    def count(self) -> None:
        self.steps.assign_add(1)


def test_the_owner_of_a_tf_function_method_is_searched() -> None:
    counts = Counts()
    found = reachable({"train_step": counts.count})
    assert list(found.values()) == [counts.steps]
