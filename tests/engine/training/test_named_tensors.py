"""`expose`: which tensors have which names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer_kit as tk
from trainer_kit.errors import UsageError
from trainer_kit.training.step_tensors import LayerOutputs


class Squared(keras.layers.Layer):
    """Exposes the squares of its inputs, and returns their halves."""

    def call(self, inputs: Any) -> Any:
        return tk.expose("squares", inputs**2) / 2


def _collect_tensors(model: Any, *names: str, x: Any = None) -> dict[str, tf.Tensor]:
    with LayerOutputs(model).collect(names) as collection:
        model(tf.ones([2, 3]) if x is None else x)
    return collection.tensors


def test_outside_of_a_run_it_returns_the_same_object() -> None:
    tensor = tf.ones([2])

    assert tk.expose("ones", tensor) is tensor

    with pytest.raises(UsageError, match=r"the name 3 is not a text; call expose\(name, tensor\)"):
        tk.expose(3, tensor)


def test_exposed_tensors_and_layers_are_known_at_any_depth() -> None:
    inner = keras.Sequential(
        [keras.Input((3,)), Squared(name="halves"), keras.layers.Dense(2, name="last")],
        name="inner",
    )
    inputs = keras.Input((3,))
    model = keras.Model(inputs, inner(keras.layers.Dense(3, name="first")(inputs)))

    tensors = _collect_tensors(model, "squares", "first", "last", "inner", "halves")

    np.testing.assert_allclose(tensors["squares"], tensors["first"] ** 2)
    np.testing.assert_allclose(tensors["halves"], tensors["first"] ** 2 / 2)
    np.testing.assert_allclose(tensors["inner"], model(tf.ones([2, 3])))
    np.testing.assert_allclose(tensors["inner"], tensors["last"])
    assert not any("call" in vars(layer) for layer in model.layers)  # the layers are as before


def test_of_several_calls_the_last_one_counts() -> None:
    layer = Squared()

    with LayerOutputs(layer).collect(["squares"]) as collection:
        layer(tf.constant([1.0]))
        layer(tf.constant([3.0]))

    assert collection.tensors["squares"].numpy() == [9.0]


def test_a_gradient_passes_through_it() -> None:
    x = tf.Variable(3.0)

    with LayerOutputs(tf.Module()).collect(["square"]) as collection, tf.GradientTape() as tape:
        y = tk.expose("square", x * x) * 2

    assert tape.gradient(y, x).numpy() == 12.0
    assert collection.tensors["square"].numpy() == 9.0


def _expose_in_cond(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x[0] > 0, lambda: tk.expose("inside", x), lambda: -x)


def _expose_in_loop(x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda y: y[0] < 9, lambda y: [tk.expose("inside", y + 1)], [x])[0]


def _expose_in_function(x: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda x: tk.expose("inside", x), autograph=False)(x)


@pytest.mark.parametrize("step", [_expose_in_cond, _expose_in_loop, _expose_in_function])
def test_a_tensor_inside_another_graph_can_only_be_left_alone(
    step: Callable[[tf.Tensor], Any],
) -> None:
    def collect(x: tf.Tensor, *names: str) -> Any:
        with LayerOutputs(tf.Module()).collect(names):
            return step(x)

    assert tf.function(collect, autograph=False)(tf.ones([1])).shape == [1]

    with pytest.raises(
        UsageError,
        match=r"'inside'\) is called inside a tf\.cond, a loop or a tf\.function.*return",
    ):
        tf.function(lambda x: collect(x, "inside"), autograph=False)(tf.ones([1]))


def test_layers_that_share_a_name_or_return_a_dict_are_errors() -> None:
    model = tf.Module()
    model.one = Squared(name="twin")
    model.two = Squared(name="twin")

    with (
        pytest.raises(UsageError, match="2 layers are called 'twin'; give each layer a name"),
        LayerOutputs(model).collect(["twin"]),
    ):
        pass

    class Pair(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return {"a": inputs}

    with pytest.raises(
        UsageError, match=r"'pair' is a dict, no dense tensor; call trainer_kit\.expose on one"
    ):
        _collect_tensors(Pair(name="pair"), "pair")
