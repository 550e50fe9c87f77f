"""Muon: which variables it leaves to Adam, its slots, and what is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import optimization
from trainer_kit.checkpoints.state.variable_names import optimizer_variables
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.factory import create_optimizer

STARTS = {
    "kernel": np.arange(6.0).reshape(3, 2),
    "embedding": np.ones((2, 3)),
    "bias": np.ones(3),
    "head": np.eye(2),
}


def _create_variables() -> list[keras.Variable]:
    return [keras.Variable(value, dtype="float32", name=name) for name, value in STARTS.items()]


def test_only_matrices_that_are_not_excluded_are_for_muon() -> None:
    optimizer = create_optimizer(optimization("muon", exclude_layers=("^head",)))

    optimizer.build(_create_variables())

    assert [velocity is None for velocity in optimizer.adam_velocities] == [
        True,
        False,
        False,
        False,
    ]


def test_embeddings_are_for_muon_if_they_are_asked_for() -> None:
    optimizer = create_optimizer(optimization("muon", exclude_embeddings=False))

    optimizer.build(_create_variables())

    assert [velocity is None for velocity in optimizer.adam_velocities] == [True, True, False, True]


def test_slots_have_the_names_and_shapes_of_old_checkpoints() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)], name="net")
    optimizer = create_optimizer(optimization("muon"))
    optimizer.build(model.trainable_variables)

    variables = optimizer_variables(optimizer, model)

    assert {name: tuple(variable.shape) for name, variable in variables.items()} == {
        "Muon/iteration": (),
        "Muon/learning_rate": (),
        "Muon/net/dense/kernel/momentum": (4, 3),
        "Muon/net/dense/bias/momentum": (3,),
        "Muon/net/dense/bias/velocity": (3,),
    }


def test_a_variable_of_another_library_is_refused() -> None:
    optimizer = create_optimizer(optimization("muon"))

    with pytest.raises(
        UsageError,
        match=r"is for models of Keras 3, and net/kernel is a tf\.Variable; choose another",
    ):
        optimizer.build([tf.Variable(np.eye(2), name="net/kernel")])


def test_muon_of_an_older_keras_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = optimization("muon")
    # It has no argument rms_rate, like SGD.
    monkeypatch.setattr(keras.optimizers, "Muon", keras.optimizers.SGD)

    with pytest.raises(
        UsageError, match=r"^optimizer\.type=muon needs Keras 3\.13 or newer, and Keras"
    ):
        create_optimizer(config)
