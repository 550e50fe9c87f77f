"""Checkpoints of the averaged weights, named like Model Garden's; its own optimizer, one device and
two.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from official.core import actions as theirs
from official.modeling import optimization

from tests.builders import replicas
from tests.engine.compat.model_garden.garden_task import bits
from trainer_kit.compat.model_garden.actions import AveragesSaver
from trainer_kit.compat.model_garden.optimizers import OptimizerAverages


def _build_averaging() -> tuple[Any, Any]:
    """Returns a model, of which no two values have the same exponent, and its averaging optimizer.
    In scope.
    """
    model = tf_keras.Sequential(
        [tf_keras.Input((3,)), tf_keras.layers.Dense(4), tf_keras.layers.BatchNormalization()]
    )
    optimizer = optimization.ExponentialMovingAverage(tf_keras.optimizers.legacy.SGD(), False)
    optimizer.shadow_copy(model)
    generator = np.random.default_rng(0)
    for variable in [*model.variables, *optimizer._average_weights]:
        variable.assign(10.0 ** generator.uniform(-6, 6, variable.shape))
    optimizer.iterations.assign(70)
    return model, optimizer


def _read_newest(folder: Path, model: Any) -> list[Any]:
    """Returns the weights of the newest checkpoint in a folder."""
    path = tf.train.latest_checkpoint(os.path.join(folder, "ema_checkpoints"))
    other = tf_keras.models.clone_model(model)
    tf.train.Checkpoint(model=other).restore(path).expect_partial()
    return [variable.numpy() for variable in other.variables]


def _saver(folder: Path, model: Any, optimizer: Any, max_to_keep: int = 1) -> AveragesSaver:
    """Returns the action, with averages that are exchanged as a trainer does it. In scope."""
    average = OptimizerAverages(optimizer, model)

    @contextlib.contextmanager
    def use_average(name: str) -> Iterator[None]:
        average.swap()
        yield
        average.swap()

    checkpoint = tf.train.Checkpoint(model=model, global_step=optimizer.iterations)
    trainer = SimpleNamespace(
        strategy=tf.distribute.get_strategy(),
        checkpoint=checkpoint,
        global_step=optimizer.iterations,
        use_weights=use_average,
    )
    return AveragesSaver(trainer, str(folder), max_to_keep)


@pytest.mark.parametrize("devices", [1, 2])
def test_averages_are_saved_and_weights_are_back_bit_by_bit(tmp_path: Path, devices: int) -> None:
    with replicas(devices).scope():
        model, optimizer = _build_averaging()
        weights = bits(model.variables)
        averages = bits(optimizer._average_weights)
        average_values = [variable.numpy() for variable in optimizer._average_weights]

        _saver(tmp_path, model, optimizer)({})

        assert bits(model.variables) == weights
        assert bits(optimizer._average_weights) == averages
    for saved, average in zip(_read_newest(tmp_path, model), average_values, strict=True):
        np.testing.assert_array_equal(saved, average)


def test_the_files_are_called_as_theirs_and_the_newest_stay(tmp_path: Path) -> None:
    names = {}
    for name in ("ours", "theirs"):
        with tf.distribute.OneDeviceStrategy("CPU:0").scope():
            model, optimizer = _build_averaging()
            if name == "ours":
                saves = _saver(tmp_path / name, model, optimizer, max_to_keep=2)
            else:
                checkpoint = tf.train.Checkpoint(model=model)
                saves = theirs.EMACheckpointing(
                    str(tmp_path / name), optimizer, checkpoint, max_to_keep=2
                )
            for step in (70, 80, 90):
                optimizer.iterations.assign(step)
                saves({})
        names[name] = sorted(os.listdir(tmp_path / name / "ema_checkpoints"))

    assert names["ours"] == names["theirs"]
    assert names["ours"][0] == "average_weights-80.data-00000-of-00001"
    assert names["ours"][-1] == "checkpoint"
