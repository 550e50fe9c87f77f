"""Which trainers cannot split their batches, and which layers get a warning."""

from __future__ import annotations

import logging
import re
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.errors import UsageError
from trainer_kit.training.base_trainer import CustomParts
from trainer_kit.training.micro_batches import (
    check_micro_batch_support,
    less_memory_advice,
    warn_of_batch_normalization,
)
from trainer_kit.training.trainer import Trainer


class _OwnLoop(Trainer):
    def create_train_loop_fn(self) -> Any:
        return super().create_train_loop_fn()


class _OwnReplicaStep(Trainer):
    def _replica_train_step(self, inputs: Any, optimizer: Any = None, share: Any = None) -> None:
        super()._replica_train_step(inputs, optimizer, share)


def _create_trainer(cls: type[Trainer], steps: int = 2, **trainer: Any) -> Trainer:
    config = linear_experiment(accumulate_steps=steps, **trainer)
    task = LinearTask(config.task)
    return cls(
        config, task, task.build_model(), task.create_optimizer(config.trainer.optimizer_config)
    )


@pytest.mark.parametrize(
    ("cls", "told"),
    [
        (
            _OwnLoop,
            "=2: _OwnLoop builds its own training loop in create_train_loop_fn; set it to 1",
        ),
        (
            _OwnReplicaStep,
            "=2: _OwnReplicaStep has a training step of its own on each replica, .* set it to 1",
        ),
    ],
)
def test_own_loops_and_replica_steps_are_refused(cls: type[Trainer], told: str) -> None:
    with pytest.raises(UsageError, match=rf"trainer\.accumulate_steps{told}"):
        _create_trainer(cls)

    assert _create_trainer(cls, 1).accumulation.steps == 1


class _ParameterServers(tf.distribute.experimental.ParameterServerStrategy):
    def __init__(self) -> None:
        """Does nothing: the check looks at the class only."""


def test_asynchronous_training_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.distribute, "get_strategy", _ParameterServers)

    with pytest.raises(
        UsageError, match="workers of a ParameterServerStrategy update by themselves; set it to 1"
    ):
        check_micro_batch_support("Trainer", CustomParts(), None, 4)


class _ScalingOfKeras2:
    get_scaled_loss = None


def test_loss_scales_of_tf_keras_are_refused() -> None:
    optimizer = {"one": keras.optimizers.SGD(), "other": _ScalingOfKeras2()}

    with pytest.raises(
        UsageError, match="accumulate_steps=4: an optimizer of tf_keras scales the loss"
    ):
        check_micro_batch_support("Trainer", CustomParts(), optimizer, 4)


def test_memory_that_runs_out_names_the_number_to_try_next() -> None:
    assert "try trainer.accumulate_steps=2," in less_memory_advice(1, 0)
    assert "try trainer.accumulate_steps=8," in less_memory_advice(4, 32)
    assert (
        "accumulate_steps=32 trains on one example at a time; take a smaller"
        in less_memory_advice(32, 32)
    )


class _Block(keras.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.parts = {"norm": [keras.layers.BatchNormalization(name="inner")]}


class _Module(tf.Module):
    def __init__(self) -> None:
        self.parts = [tf_keras.layers.BatchNormalization(name="of_tf_keras")]


def _build_tf_keras() -> Any:
    inner = tf_keras.Sequential(
        [
            tf_keras.layers.BatchNormalization(name="a", input_shape=(4,)),
            tf_keras.layers.BatchNormalization(),
        ]
    )
    return tf_keras.Sequential([inner])


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (
            lambda: keras.Sequential(
                [keras.Input((4,)), keras.layers.BatchNormalization(name="one")]
            ),
            "one",
        ),
        (lambda: keras.Sequential([_Block()]), "inner"),
        (_Module, "of_tf_keras"),
        (_build_tf_keras, r"\w+ and 1 more"),
        (lambda: keras.Sequential([keras.Input((4,)), keras.layers.LayerNormalization()]), ""),
    ],
)
def test_batch_normalization_is_found_wherever_it_is(
    model: Any, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_batch_normalization(model(), 4)

    assert len(caplog.records) == bool(named)

    if named:
        assert caplog.records[0].levelno == logging.WARNING
        assert re.search(
            rf"batch normalization \({named}\) takes mean and variance", caplog.messages[0]
        )
