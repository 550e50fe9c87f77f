"""A step that counts, for the tests of loops."""

from __future__ import annotations

import tensorflow as tf

from trainer_kit.training.loops.iterators import stop_variable


class Counter:
    """A step that adds up what it is given."""

    def __init__(self) -> None:
        self.total = tf.Variable(0.0)
        self.stop = stop_variable()

    def reset(self) -> None:
        self.total.assign(0.0)

    def step(self, iterator: object) -> dict[str, tf.Tensor]:
        value = next(iterator)  # type: ignore[call-overload]
        self.total.assign_add(tf.reduce_sum(tf.cast(value, tf.float32)))
        return {"value": value}

    def after_step(self) -> None:
        """Nothing follows a step."""

    def results(self) -> dict[str, tf.Tensor]:
        return {"total": self.total.read_value()}


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.range(10).batch(3)
