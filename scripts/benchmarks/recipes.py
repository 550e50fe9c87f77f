"""What a training recipe needs beyond one optimizer, by hand and in trainer_kit: the same work.

Each function is run by a process of its own, takes its turns from a Pacer and never returns.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import trainer_kit as tk
from scripts.benchmarks import nets
from scripts.benchmarks.by_hand import Learner, train_learner
from scripts.benchmarks.ours import constant_rate, make_config
from scripts.benchmarks.pacer import Pacer

PARTS = 4
DECAY = 0.99
FIRST_RATE = 0.001
LAST_RATE = 0.0003


def _adam(rate: float) -> dict[str, Any]:
    return {"optimizer": {"type": "adam"}, "learning_rate": constant_rate(rate)}


# The section `trainer` of each recipe that trains the dense net.
TRAINER: dict[str, dict[str, Any]] = {
    "groups": {
        "optimizers": {
            "first": {"variables": ("/dense/",), **_adam(FIRST_RATE)},
            "last": {"variables": (".",), **_adam(LAST_RATE)},
        },
        "optimizer_config": {},
    },
    "accumulation": {"accumulate_steps": PARTS},
    "average": {
        "optimizer_config": {
            "optimizer": {"type": "sgd"},
            "learning_rate": constant_rate(nets.LEARNING_RATE),
            "ema": {"average_decay": DECAY, "dynamic_decay": False},
        }
    },
}


class GroupsLearner(Learner):
    """Two optimizers, each for one of the layers."""

    def __init__(self, net: str) -> None:
        super().__init__(net)
        self._first, self._last = [layer.trainable_variables for layer in self.model.layers]
        self._first_optimizer = keras.optimizers.Adam(FIRST_RATE)
        self._first_optimizer.build(self._first)
        self._last_optimizer = keras.optimizers.Adam(LAST_RATE)
        self._last_optimizer.build(self._last)

    def update(self, gradients: list[Any]) -> None:
        """Applies the gradients of each layer."""
        count = len(self._first)
        self._first_optimizer.apply_gradients(zip(gradients[:count], self._first, strict=True))
        self._last_optimizer.apply_gradients(zip(gradients[count:], self._last, strict=True))


class AccumulationLearner(Learner):
    """One update with the gradients of the parts of a batch, which follow each other.

    So memory contains the activations of one part at a time.
    """

    def step(self, features: Any, labels: Any) -> None:
        """Takes a training step; in graph."""
        sums: list[Any] = []
        for part in zip(tf.split(features, PARTS), tf.split(labels, PARTS), strict=True):
            with tf.control_dependencies(sums):
                gradients = [
                    gradient / PARTS for gradient in self.gradients(*map(tf.identity, part))
                ]
            sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients
        self.update(sums)


class AverageLearner(Learner):
    """An exponential moving average of the weights."""

    def __init__(self, net: str) -> None:
        super().__init__(net)
        weights = self.model.trainable_variables
        self._averages = [tf.Variable(tf.convert_to_tensor(weight)) for weight in weights]

    def update(self, gradients: list[Any]) -> None:
        """Applies the gradients, and moves the averages."""
        super().update(gradients)
        for average, weight in zip(self._averages, self.model.trainable_variables, strict=True):
            average.assign(DECAY * average + (1.0 - DECAY) * tf.convert_to_tensor(weight))


LEARNERS: dict[str, type[Learner]] = {
    "groups": GroupsLearner,
    "accumulation": AccumulationLearner,
    "average": AverageLearner,
}


def by_hand(pacer: Pacer, folder: str, *, recipe: str, loop: int) -> None:
    """Trains the dense net by hand."""
    del folder
    train_learner(pacer, LEARNERS[recipe]("dense"), "dense", loop)


def ours(pacer: Pacer, folder: str, *, recipe: str, loop: int) -> None:
    """Trains the dense net in trainer_kit."""
    config = make_config("dense", loop, trainer=TRAINER[recipe])
    tk.launch(
        config, "train", f"{folder}/run", train_actions=[lambda logs: pacer.report_steps(loop)]
    )
