"""Checkpoints of the averaged weights, beside Model Garden's; its own optimizer, one device and two."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from official.core import actions as theirs
from official.modeling import optimization

from trainer_kit.compat.model_garden.actions.averages import EMACheckpointing
from trainer_kit.compat.model_garden.training.moving_average import averages_in_place
from trainer_kit.errors import UsageError

STRATEGIES = pytest.mark.parametrize("devices", [1, 2])


def _strategy(devices: int) -> tf.distribute.Strategy:
    if devices == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(devices)], tf.distribute.ReductionToOneDevice()
    )


def _trained(trainable_only: bool = False) -> tuple[Any, Any]:
    """Returns a model, of which no two values have the same exponent, and its averaging optimizer. In scope."""
    model = tf_keras.Sequential([tf_keras.Input((3,)), tf_keras.layers.Dense(4), tf_keras.layers.BatchNormalization()])
    optimizer = optimization.ExponentialMovingAverage(tf_keras.optimizers.legacy.SGD(), trainable_only)
    optimizer.shadow_copy(model)
    generator = np.random.default_rng(0)
    for variable in [*model.variables, *optimizer._average_weights]:
        variable.assign(10.0 ** generator.uniform(-6, 6, variable.shape))
    optimizer.iterations.assign(70)
    return model, optimizer


def _bits(variables: Any) -> list[bytes]:
    return [local.numpy().tobytes() for one in variables for local in getattr(one, "values", [one])]


def _read(folder: Path, model: Any) -> list[Any]:
    """Returns the weights of the newest checkpoint in a folder."""
    path = tf.train.latest_checkpoint(os.path.join(folder, "ema_checkpoints"))
    other = tf_keras.models.clone_model(model)
    tf.train.Checkpoint(model=other).restore(path).expect_partial()
    return [variable.numpy() for variable in other.variables]


@STRATEGIES
@pytest.mark.parametrize("trainable_only", [False, True])
def test_averages_are_saved_and_weights_are_back_bit_by_bit(tmp_path: Path, devices: int, trainable_only: bool) -> None:
    strategy = _strategy(devices)
    with strategy.scope():
        model, optimizer = _trained(trainable_only)
        weights, averages = _bits(model.variables), _bits(optimizer._average_weights)
        averaged = [variable.numpy() for variable in optimizer._average_weights]
        EMACheckpointing(str(tmp_path), optimizer, tf.train.Checkpoint(model=model))({})
        assert (_bits(model.variables), _bits(optimizer._average_weights)) == (weights, averages)
    saved = _read(tmp_path, model)
    names = [variable.name for variable in model.variables]
    of_averaged = [names.index(variable.name) for variable in optimizer._model_weights]
    for place, average in zip(of_averaged, averaged, strict=True):
        np.testing.assert_array_equal(saved[place], average)


def test_theirs_changes_the_weights_last_bits(tmp_path: Path) -> None:
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():  # without one theirs refuses
        model, optimizer = _trained()
        weights = _bits(model.variables)
        theirs.EMACheckpointing(str(tmp_path), optimizer, tf.train.Checkpoint(model=model))({})
        assert _bits(model.variables) != weights


def test_the_files_are_called_as_theirs_and_the_newest_stay(tmp_path: Path) -> None:
    found = {}
    for name, action in (("ours", EMACheckpointing), ("theirs", theirs.EMACheckpointing)):
        with tf.distribute.OneDeviceStrategy("CPU:0").scope():
            model, optimizer = _trained()
            saves = action(str(tmp_path / name), optimizer, tf.train.Checkpoint(model=model), max_to_keep=2)
            for step in (70, 80, 90):
                optimizer.iterations.assign(step)
                saves({})
        found[name] = sorted(os.listdir(tmp_path / name / "ema_checkpoints"))
    assert found["ours"] == found["theirs"]
    assert found["ours"][:1] + found["ours"][-1:] == [
        "average_weights-80.data-00000-of-00001",
        "checkpoint",
    ]


def test_the_weights_are_back_when_the_save_fails(tmp_path: Path) -> None:
    model, optimizer = _trained()
    weights = _bits(model.variables)
    action = EMACheckpointing(str(tmp_path), optimizer, tf.train.Checkpoint(model=model))
    (tmp_path / "ema_checkpoints").rmdir()
    (tmp_path / "ema_checkpoints").touch()  # a file in the place of the folder
    with pytest.raises((tf.errors.OpError, OSError)):
        action({})
    assert _bits(model.variables) == weights


def test_an_optimizer_that_averages_nothing_is_a_value_error(tmp_path: Path) -> None:
    optimizer = tf_keras.optimizers.legacy.SGD()
    for action in (EMACheckpointing, theirs.EMACheckpointing):
        with pytest.raises(ValueError, match="ExponentialMovingAverage"):
            action(str(tmp_path), optimizer, tf.train.Checkpoint())


def test_averages_that_do_not_exist_yet_are_asked_for() -> None:
    optimizer = optimization.ExponentialMovingAverage(tf_keras.optimizers.legacy.SGD())
    with pytest.raises(UsageError, match=re.escape("call its shadow_copy(model) first")), averages_in_place(optimizer):
        pass
