"""The scalars that steps return in addition to the loss, in the reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import seeded_trainer
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.errors import UsageError
from trainer_kit.testing import tiny_arrays
from trainer_kit.training.metric_set import MetricSet
from trainer_kit.training.trainer import Trainer


class _Reports(LinearTask):
    """Reports the mean of the labels of each batch, and values that are no reports."""

    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        logs = super().train_step(inputs, model, optimizer, metrics)
        return {**logs, **_build_values(inputs[1]), "accuracy": tf.constant(7.0)}

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        return {**super().validation_step(inputs, model, metrics), **_build_values(inputs[1])}


def _build_values(labels: tf.Tensor) -> dict[str, Any]:
    mean = tf.reduce_mean(tf.cast(labels, tf.float32))
    return {"label": mean, "whole": 2, "labels": labels, "text": tf.constant("a"), "nothing": None}


def _create_trainer(count: int = 1, **settings: Any) -> Trainer:
    config = linear_experiment(**settings).replace(
        task={"train_data": {"drop_remainder": False, "is_training": False}}
    )
    return seeded_trainer(config, _Reports, count)


_STEPS = 13  # one pass over 103 examples in batches of 8: the last one has 7


@pytest.mark.parametrize("settings", [{}, {"fuse_steps": 4}, {"train_tf_while_loop": False}])
def test_training_reports_means_weighted_by_examples(settings: dict[str, Any]) -> None:
    trainer = _create_trainer(**settings)
    logs = trainer.train(tf.constant(_STEPS))

    _, labels = tiny_arrays(False)

    assert logs["label"] == pytest.approx(labels.mean(), rel=1e-6)
    assert logs["whole"] == 2.0
    assert logs["accuracy"] < 1.0
    assert not logs.keys() & {"labels", "text", "nothing", "loss"}


def test_each_loop_reports_the_mean_over_all_examples() -> None:
    trainer = _create_trainer(2)
    (_, labels) = tiny_arrays(False)

    first, second = (trainer.train(tf.constant(5))["label"] for _ in range(2))

    assert first == pytest.approx(labels[:40].mean(), rel=1e-6)
    assert second == pytest.approx(labels[40:80].mean(), rel=1e-6)


def test_an_evaluation_reports_means_over_its_examples() -> None:
    logs = _create_trainer().evaluate(tf.constant(-1))

    assert logs["label"] == pytest.approx(tiny_arrays(False)[1].mean(), rel=1e-6)
    assert logs["label"].dtype == np.float32


def test_too_many_scalars_are_an_error_that_names_one() -> None:
    metrics = MetricSet("loss", [])
    task = LinearTask(None)
    metrics.update(task, {f"value_{number}": 1.0 for number in range(64)}, tf.ones([1]))

    with pytest.raises(
        UsageError, match="more than 64 scalars in addition to the loss; 'one_more' is one too many"
    ):
        metrics.update(task, {"one_more": 1.0}, tf.ones([1]))
