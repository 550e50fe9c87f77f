"""Hyper-parameters by name: which there are, and which values cannot be changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.builders import seeded_trainer
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.errors import UsageError
from trainer_kit.training.trainer import Trainer

CONSTANT = {"type": "constant", "constant": {"learning_rate": 0.5}}
COSINE = {"type": "cosine", "cosine": {"initial_learning_rate": 0.5, "decay_steps": 100}}
ADAM = {"optimizer": {"type": "adam"}, "learning_rate": CONSTANT}


class Weighted(LinearTask):
    """A task with a hyper-parameter of its own."""

    def build_model(self) -> keras.Model:
        self.loss_weight = tf.Variable(1.0, trainable=False)
        return super().build_model()

    def hyper_parameters(self) -> dict[str, tf.Variable]:
        return {"loss_weight": self.loss_weight}


class Decaying(keras.optimizers.SGD):
    """An optimizer with a variable of its own."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.decay = keras.Variable(0.1)


class OwnOptimizer(LinearTask):
    @classmethod
    def create_optimizer(cls, optimizer_config: Any, runtime_config: Any = None) -> Any:
        return Decaying()


def _create_trainer(task: type[LinearTask] = LinearTask, **trainer: Any) -> Trainer:
    config = linear_experiment(**{"optimizer_config": ADAM, **trainer})
    return seeded_trainer(config, task)


SEVERAL: dict[str, Any] = {
    "optimizer_config": {},
    "optimizers": {
        "head": {"variables": ("kernel",), **ADAM},
        "rest": {"variables": (".",), **ADAM},
    },
}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["learning_rate", "learning_rate_factor"]),
        ({"task": Weighted}, ["loss_weight", "learning_rate", "learning_rate_factor"]),
        ({"optimizer_config": {**ADAM, "learning_rate": COSINE}}, ["learning_rate_factor"]),
        ({"task": OwnOptimizer}, ["learning_rate", "learning_rate_factor", "optimizer.decay"]),
        (
            SEVERAL,
            [
                f"{optimizer}.learning_rate{end}"
                for optimizer in ("head", "rest")
                for end in ("", "_factor")
            ],
        ),
    ],
)
def test_names_are_of_the_optimizers_and_the_task(
    options: Mapping[str, Any], names: list[str]
) -> None:
    trainer = _create_trainer(**options)

    assert trainer.hyper_parameters.names == names
    assert trainer.hyper_parameters.factors == []  # what no run uses is not in its training step

    for name in names:
        trainer.hyper_parameters.set(name, 0.25)
        assert trainer.hyper_parameters.value(name) == 0.25


@pytest.mark.parametrize(
    ("rate", "name", "message"),
    [
        (
            CONSTANT,
            "learnin_rate",
            r"no hyper-parameter 'learnin_rate'; did you mean learning_rate",
        ),
        (CONSTANT, "head.learning_rate", r"no hyper-parameter 'head.learning_rate'"),
        (
            CONSTANT,
            "optimizer.beta_1",
            r"optimizer.beta_1 is the Python number 0.9 in Adam, a constant of the training",
        ),
        (CONSTANT, "optimizer.iterations", r"no hyper-parameter 'optimizer.iterations'"),
        (
            COSINE,
            "learning_rate",
            r"learning_rate is a schedule, .*; change learning_rate_factor, which multiplies it",
        ),
    ],
)
def test_what_cannot_be_changed_is_refused(
    rate: Mapping[str, Any], name: str, message: str
) -> None:
    trainer = _create_trainer(optimizer_config={**ADAM, "learning_rate": rate})
    with pytest.raises(UsageError, match=message):
        trainer.hyper_parameters.change(name, 0.1, 0, "a test")


def test_a_task_has_to_offer_variables() -> None:
    class Plain(LinearTask):
        def hyper_parameters(self) -> Any:
            return {"loss_weight": 0.5}

    with pytest.raises(
        UsageError, match=r"Plain\.hyper_parameters: loss_weight is 0\.5; return scalar variables"
    ):
        _create_trainer(Plain).hyper_parameters.variable("loss_weight")
