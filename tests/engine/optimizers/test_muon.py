"""Muon: which variables it leaves to Adam, tall matrices, and Keras' class. Its values are in test_factory.py."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.optimizers.muon import Muon

STARTS = {"kernel": np.arange(6.0).reshape(3, 2), "embedding": np.ones((2, 3)), "bias": np.ones(3), "head": np.eye(2)}


def variables() -> list[keras.Variable]:
    return [keras.Variable(value, dtype="float32", name=name) for name, value in STARTS.items()]


def test_only_matrices_that_are_not_excluded_are_for_muon() -> None:
    optimizer = Muon(0.1, exclude_layers=("^head",))
    optimizer.build(variables())
    assert [velocity is None for velocity in optimizer.adam_velocities] == [True, False, False, False]
    everything = Muon(0.1, exclude_embeddings=False)
    everything.build(variables())
    assert [velocity is None for velocity in everything.adam_velocities] == [True, True, False, True]


def test_variables_of_tensorflow_are_told_apart_by_their_names() -> None:
    optimizer = Muon(0.1, exclude_layers=("net/head",))
    optimizer.build([tf.Variable(np.eye(2), name=f"net/{name}/kernel") for name in ("dense", "head")])
    assert [velocity is None for velocity in optimizer.adam_velocities] == [True, False]


@pytest.mark.skipif("rms_rate" not in inspect.signature(keras.optimizers.Muon).parameters, reason="Keras before 3.13")
def test_values_equal_those_of_keras() -> None:
    fields = {"weight_decay": 0.1, "adam_weight_decay": 0.2, "adam_lr_ratio": 0.5, "exclude_layers": ["head"]}
    ours, theirs = variables(), variables()
    for optimizer, trained in ((Muon(0.1, **fields), ours), (keras.optimizers.Muon(0.1, **fields), theirs)):
        for step in range(5):
            optimizer.apply([tf.cos(0.3 * step + tf.convert_to_tensor(one)) for one in trained], trained)
    for one, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.numpy(), wanted.numpy(), rtol=1e-4, atol=1e-5)


def test_keras_can_save_and_load_it() -> None:
    optimizer = Muon(0.1, ns_steps=3, exclude_layers=("head",), adam_weight_decay=0.1)
    loaded = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert (loaded.ns_steps, list(loaded.exclude_layers), loaded.adam_weight_decay) == (3, ["head"], 0.1)
