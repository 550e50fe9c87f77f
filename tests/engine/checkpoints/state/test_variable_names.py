"""Names of variables in a checkpoint."""

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.checkpoints.state.variable_names import (
    canonical_paths,
    item_variables,
    model_variables,
    optimizer_variables,
)


def _build_model() -> keras.Model:
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    )


def _create_adam(model: keras.Model, other: keras.Model) -> keras.Optimizer:
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    return optimizer


def _create_adam_of_both(model: keras.Model, other: keras.Model) -> keras.Optimizer:
    optimizer = keras.optimizers.Adam()
    optimizer.build([*model.trainable_variables, *other.trainable_variables])
    return optimizer


def _create_scaled_adam(model: keras.Model, other: keras.Model) -> keras.Optimizer:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    optimizer.apply(
        [tf.zeros(variable.shape) for variable in model.trainable_variables],
        model.trainable_variables,
    )
    return optimizer


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (_create_adam, "adam/sequential/dense_1/kernel/velocity"),
        (_create_adam_of_both, "adam/others/sequential/dense_1/kernel/velocity"),
        (_create_scaled_adam, "loss_scale_optimizer/adam/sequential/dense_1/kernel/velocity"),
    ],
)
def test_names_do_not_depend_on_what_the_process_built_before(
    make: Callable[..., Any], name: str
) -> None:
    first = _build_model()
    second = _build_model()

    assert first.layers[0].path != second.layers[0].path
    assert list(model_variables(first)) == list(model_variables(second))

    names = [
        list(optimizer_variables(make(model, _build_model()), model)) for model in (first, second)
    ]
    assert names[0] == names[1]
    assert name in names[0]


def test_numbers_count_below_the_same_parent() -> None:
    paths = ["net_4/dense_8/kernel", "net_4/dense_9/kernel", "net_4/block_2/dense_11/kernel"]

    assert canonical_paths(paths) == [
        "net/dense/kernel",
        "net/dense_1/kernel",
        "net/block/dense/kernel",
    ]


def test_order_of_numbers_is_kept_not_order_of_appearance() -> None:
    assert canonical_paths(["block_2/w", "block_1/w"]) == ["block_1/w", "block/w"]


def test_seed_generators_are_among_the_variables() -> None:
    tracked = model_variables(_build_model())

    assert any("seed_generator" in name for name in tracked)
    assert all(isinstance(variable, tf.Variable) for variable in tracked.values())


def test_variables_of_one_name_stay_apart() -> None:
    variables = [tf.Variable([1.0], name="w"), tf.Variable([2.0], name="w")]
    module = tf.Module()
    module.variables_of_one_name = variables
    adam = keras.optimizers.Adam()
    adam.build(module.trainable_variables)

    tracked = optimizer_variables(adam, module)

    assert len(tracked) == len(adam.variables)


def test_modules_and_keras_two_models_are_tracked_as_they_are() -> None:
    module = tf.Module()
    keras_two = tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=(3,))])

    assert model_variables(module) is module
    assert model_variables(keras_two) is keras_two


def test_what_a_checkpoint_can_hold_as_it_is_stays_so() -> None:
    variable = tf.Variable(1.0)
    keras_variable = keras.Variable(2.0)

    held = item_variables([variable, {"inner": keras_variable}])

    assert held[0] is variable
    assert held[1]["inner"] is keras_variable.value


def test_a_nested_checkpoint_holds_the_values_of_its_variables() -> None:
    keras_variable = keras.Variable(2.0)
    held = item_variables(tf.train.Checkpoint(weight=keras_variable))

    assert held.weight is keras_variable.value
