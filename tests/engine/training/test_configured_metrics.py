"""Metrics that a config names, in the reports of training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf

import trainer_kit as tk
from tests.builders import restore_registries, seeded_trainer
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.config.schema.metric_configs import MetricConfig
from trainer_kit.errors import UsageError
from trainer_kit.training.trainer import Trainer


@tk.configclass
class TopConfig(tk.Config):
    """A metric of these tests.

    Attributes:
      k: The number of classes that may hold the right one.
    """

    k: int = 1


@pytest.fixture(autouse=True)
def register_top() -> Iterator[None]:
    """Registers a metric for the time of a test."""
    with restore_registries(MetricConfig.registry):
        tk.register_metric("top", TopConfig)(lambda config: _TOP[config.k]())
        yield


_TOP: dict[int, Any] = {
    1: lambda: keras.metrics.SparseTopKCategoricalAccuracy(k=1, name="top_1"),
    3: lambda: keras.metrics.SparseTopKCategoricalAccuracy(k=3, name="top_3"),
    4: lambda: "four",
}
_KERAS = {
    "type": "keras",
    "keras": {"metric": "SparseTopKCategoricalAccuracy", "args": {"k": 2, "name": "top_2"}},
}


def _create_trainer(*metrics: Any) -> Trainer:
    config = linear_experiment(metrics=metrics)
    return seeded_trainer(config, LinearTask)


def test_training_and_evaluation_report_them() -> None:
    trainer = _create_trainer({"type": "top"}, {"type": "top", "top": {"k": 3}}, _KERAS)

    for logs in (trainer.train(tf.constant(10)), trainer.evaluate(tf.constant(-1))):
        assert logs["top_1"] == logs["accuracy"] <= logs["top_2"] <= logs["top_3"] == 1.0

    assert {"accuracy", "top_1", "top_2", "top_3"} <= set(trainer.validation_metric_names() or ())


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            {"type": "top", "top": {"k": 4}},
            r"trainer\.metrics\[0\]: top built 'four', which is not a metric",
        ),
        (
            {"type": "keras", "keras": {"metric": "Acuracy"}},
            r"keras\.metrics has no 'Acuracy'; did you mean Accuracy",
        ),
        (
            {"type": "keras", "keras": {"metric": "Mean", "args": {"k": 1}}},
            r"keras\.metrics\.Mean refuses its args",
        ),
    ],
)
def test_a_metric_that_cannot_be_made_is_an_error(metric: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _create_trainer(metric)
