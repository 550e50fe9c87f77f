"""The model of a job is built, wrapped and compiled as the arguments of Training say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.compat.pipelines.model_building import (
    build_model,
    get_input_size,
    use_custom_objects,
)
from trainer_kit.errors import UsageError


class Wrapped(keras.Model):
    """A class of models with steps of its own."""


class Wrapped2(tf_keras.Model):
    """The same for tf_keras."""


class Unbuilt(keras.Model):
    """A model that is built when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


def functional_model(library: ModuleType = keras, **compiled: Any) -> Any:
    inputs = library.Input((4,))
    model = library.Model(inputs, library.layers.Dense(2)(inputs))
    if compiled:
        model.compile(**compiled)
    return model


def build_in_scope(
    build_model_func: Any, custom: type | None = None, objects: Any = None, **compiled: Any
) -> Any:
    with use_custom_objects(objects):
        return build_model(build_model_func, custom, **compiled)


def test_a_checkpoint_is_never_passed() -> None:
    passed = []

    def optional(checkpoint: Any = "its default") -> Any:
        passed.append(checkpoint)
        return functional_model()

    def any_keyword(**options: Any) -> Any:
        passed.append(options)
        return functional_model()

    def required(checkpoint: Any) -> Any:  # it is None
        passed.append(checkpoint)
        return functional_model()

    build_in_scope(optional)
    build_in_scope(any_keyword)
    build_in_scope(required)
    assert passed == ["its default", {}, None]


@pytest.mark.parametrize(
    ("library", "kind"), [(keras, Wrapped), (tf_keras, Wrapped2)], ids=["keras", "tf_keras"]
)
def test_a_custom_class_takes_inputs_and_outputs(library: ModuleType, kind: type) -> None:
    plain = library.Sequential([library.layers.Input((4,)), library.layers.Dense(2)])
    model = build_in_scope(lambda: plain, kind)

    assert isinstance(model, kind)

    x = np.ones((3, 4), "float32")
    np.testing.assert_array_equal(model(x), plain(x))


def test_a_model_of_the_custom_class_stays() -> None:
    inputs = keras.Input((4,))
    model = Wrapped(inputs, keras.layers.Dense(2)(inputs))
    assert build_in_scope(lambda: model, Wrapped) is model


@pytest.mark.parametrize("build", [Unbuilt, lambda: keras.Sequential([keras.layers.Dense(2)])])
def test_a_custom_class_needs_inputs_and_outputs(build: Any) -> None:
    message = r"made as Wrapped\(inputs, outputs\), and the model .* has no inputs"
    with pytest.raises(UsageError, match=message):
        build_in_scope(build, Wrapped)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (None, r"build_model_func: None is not a callable object; give a function"),
        (lambda n: n, r"missing a required argument: 'n'; .*bind"),
        (lambda: (1, 224), "build_model_func returned a tuple; it has to return a model of Keras"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(function: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_model(function)


@pytest.mark.parametrize(
    ("before", "arguments", "after"),
    [
        ({}, {"optimizer": "sgd", "loss": "mse"}, ("SGD", "mse")),
        ({"optimizer": "adam", "loss": "mse"}, {}, ("Adam", "mse")),
        ({"optimizer": "adam", "loss": "mse"}, {"loss": "mae"}, ("Adam", "mae")),
    ],
    ids=["not compiled", "compiled", "other arguments"],
)
@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize(
    ("library", "kind"), [(keras, Wrapped), (tf_keras, Wrapped2)], ids=["keras", "tf_keras"]
)
def test_arguments_count_before_what_the_model_has(
    before: Any, arguments: Any, after: Any, custom: bool, library: ModuleType, kind: type
) -> None:
    model = build_in_scope(
        lambda: functional_model(library, **before), kind if custom else None, **arguments
    )
    assert (type(model.optimizer).__name__, model.loss) == after


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_the_optimizer_of_a_compiled_model_stays(library: ModuleType) -> None:
    model = functional_model(library, optimizer=library.optimizers.Adam(0.5), loss="mse")
    optimizer = model.optimizer
    assert build_in_scope(lambda: model).optimizer is optimizer


@pytest.mark.parametrize(
    ("library", "kind"), [(keras, Wrapped), (tf_keras, Wrapped2)], ids=["keras", "tf_keras"]
)
def test_a_wrapped_model_keeps_what_is_not_registered(library: ModuleType, kind: type) -> None:
    def loss(y: Any, predicted: Any) -> Any:
        return abs(y - predicted)

    compiled = {"optimizer": "sgd", "loss": loss, "run_eagerly": True}
    for arguments in ({}, {"optimizer": "adam"}):
        model = build_in_scope(lambda: functional_model(library, **compiled), kind, **arguments)
        assert model.loss is loss
        assert model.run_eagerly


def test_custom_objects_are_found_by_name(tmp_path: Path) -> None:
    class Twice(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return 2 * inputs

    path = str(tmp_path / "model.keras")
    inputs = keras.Input((4,))
    keras.Model(inputs, Twice()(inputs)).save(path)

    def load_model() -> Any:
        return keras.models.load_model(path, compile=False)

    with pytest.raises(TypeError, match="Could not locate class 'Twice'"):
        build_in_scope(load_model)
    model = build_in_scope(load_model, objects={"Twice": Twice})
    assert model(np.ones((1, 4)))[0, 0] == 2


def build_weights(seed: int | None) -> Any:
    if seed is not None:
        tf.random.set_seed(seed)
    return build_in_scope(functional_model).get_weights()[0]


def test_the_seed_of_tensorflow_decides_initial_weights() -> None:
    first = build_weights(3)
    other = build_weights(4)
    again = build_weights(3)

    np.testing.assert_array_equal(again, first)
    assert not np.array_equal(other, first)


def test_numbers_of_numpy_go_on_as_the_program_seeded_them() -> None:
    np.random.seed(1)
    expected = np.random.rand()
    np.random.seed(1)
    build_weights(3)

    assert np.random.rand() == expected


def test_a_program_without_a_seed_has_other_weights_each_time() -> None:
    tf.random.set_seed(None)  # the value that TensorFlow starts with
    assert not np.array_equal(build_weights(None), build_weights(None))


@pytest.mark.parametrize(("shape", "size"), [((32, 32, 3), 32), ((24, 32, 3), (24, 32))])
@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_the_size_of_images_is_an_input_size(
    library: ModuleType, shape: tuple[int, ...], size: Any
) -> None:
    layers = library.layers
    model = library.Sequential([layers.Input(shape), layers.GlobalAveragePooling2D()])
    assert get_input_size(model) == size

    inputs = {"image": layers.Input(shape, name="image"), "more": layers.Input((2,), name="more")}
    outputs = layers.GlobalAveragePooling2D()(inputs["image"])
    assert get_input_size(library.Model(inputs, outputs)) == size

    assert get_input_size(functional_model(library)) == 4  # the number of features


@pytest.mark.parametrize(
    "build", [Unbuilt, lambda: keras.Sequential([keras.layers.Input((None, None, 3))])]
)
def test_a_model_for_any_size_has_no_input_size(build: Any) -> None:
    with pytest.raises(UsageError, match="does not tell the size of its inputs"):
        get_input_size(build())
