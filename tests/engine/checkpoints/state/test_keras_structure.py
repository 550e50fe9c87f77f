"""Best weights as a program reads them that knows only TensorFlow and Keras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.checkpoints.state.keras_structure import build_model_trackable
from trainer_kit.checkpoints.state.object_graph import CheckpointGraph
from trainer_kit.checkpoints.state.strict_restore import (
    create_training_checkpoint,
    create_weights_checkpoint,
    restore,
)


def _build_block(name: str) -> Any:
    inputs = keras.Input((4,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4)(inputs))
    return keras.Model(inputs, keras.layers.Dropout(0.5)(hidden), name=name)


def build_functional() -> Any:
    inputs = keras.Input((3,))
    body = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.5)])
    shared = keras.layers.Dense(4)
    hidden = shared(_build_block("one")(body(inputs)))
    return keras.Model(inputs, keras.layers.Dense(2)(shared(_build_block("two")(hidden))))


class _Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.body = _build_block("body")
        self.norm = keras.layers.LayerNormalization()
        self.first = keras.layers.Dense(4)
        self.head = keras.layers.Dense(2)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.untracked = tf.Variable(3.0)  # TensorFlow tracks it, Keras 3 does not
        self(tf.zeros([1, 3]))

    def call(self, inputs: Any, training: bool = False) -> Any:
        hidden = self.body(self.first(inputs), training=training) * self.scale
        return self.head(self.norm(hidden))


class _Module(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.random.normal([3, 2]))

    def __call__(self, inputs: Any) -> Any:
        return inputs @ self.weight


def build_sequential() -> Any:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5)]
    )


def _build_tf_keras() -> Any:
    return tf_keras.Sequential(
        [tf_keras.layers.Dense(2, input_shape=(3,)), tf_keras.layers.BatchNormalization()]
    )


MODELS: dict[str, Callable[[], Any]] = {
    "sequential": build_sequential,
    "functional": build_functional,
    "subclassed": _Subclassed,
    "tf_keras": _build_tf_keras,
    "module": _Module,
}
POINTS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


def scramble_weights(model: Any) -> None:
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(
            np.random.default_rng(number).normal(size=variable.shape).astype(np.float32)
        )


@pytest.mark.parametrize("kind", MODELS)
def test_plain_tensorflow_reads_the_weights_of_any_model(tmp_path: Path, kind: str) -> None:
    """Of two replicas, from each of two writes."""
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        step = tf.Variable(7, dtype=tf.int64)
        model = MODELS[kind]()
        scramble_weights(model)
        wanted = model(POINTS).numpy()
        checkpoint = create_weights_checkpoint(global_step=step, model=model)
        paths = [checkpoint.write(str(tmp_path / f"ckpt-{number}")) for number in (1, 2)]

    for path in paths:
        plain = MODELS[kind]()
        assert not np.allclose(plain(POINTS), wanted)
        tf.train.Checkpoint(model=plain).read(path).assert_existing_objects_matched()
        np.testing.assert_array_equal(plain(POINTS), wanted)
        assert int(tf.train.load_variable(path, "global_step/.ATTRIBUTES/VARIABLE_VALUE")) == 7


@pytest.mark.parametrize("kind", ["sequential", "functional", "subclassed"])
def test_each_value_is_in_the_file_once_and_under_our_name(tmp_path: Path, kind: str) -> None:
    step = tf.Variable(0, dtype=tf.int64)
    model = MODELS[kind]()
    named = create_training_checkpoint(global_step=step, model=model).write(str(tmp_path / "named"))
    both = create_weights_checkpoint(global_step=step, model=model).write(str(tmp_path / "both"))
    more = {"model/untracked": ()} if kind == "subclassed" else {}

    assert CheckpointGraph(both).shapes_by_name() == {
        **CheckpointGraph(named).shapes_by_name(),
        **more,
    }

    fresh = MODELS[kind]()

    restore(create_training_checkpoint(global_step=step, model=fresh), both, strict=False)

    np.testing.assert_array_equal(fresh(POINTS), model(POINTS))


def test_layers_that_tensorflow_does_not_see_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Listed(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="listed")
            self.blocks = [keras.layers.Dense(4), keras.layers.Dense(4)]
            self(tf.zeros([1, 3]))

        def call(self, inputs: Any) -> Any:
            return self.blocks[1](self.blocks[0](inputs))

    model = Listed()
    step = tf.Variable(0, dtype=tf.int64)

    path = create_weights_checkpoint(global_step=step, model=model).write(str(tmp_path / "best"))

    assert "the model listed" in caplog.text
    assert "dense/kernel and 3 more" in caplog.text

    fresh = Listed()

    restore(create_training_checkpoint(global_step=step, model=fresh), path, strict=False)

    np.testing.assert_array_equal(fresh(POINTS), model(POINTS))


def test_a_name_with_two_meanings_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Swapped(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.a = keras.Variable(1.0, name="b")
            self.b = keras.Variable(2.0, name="a")
            self.built = True

    model = Swapped()

    kept = build_model_trackable(model)

    assert "a is the name of a variable and of another attribute" in caplog.text
    assert "load_weights" in caplog.text
    assert isinstance(kept, dict)
    assert kept["a"] is model.b.value
