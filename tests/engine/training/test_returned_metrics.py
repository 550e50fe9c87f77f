"""Metric objects that steps return and build_metrics does not contain, in all reports."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.builders import seeded_trainer
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.errors import UsageError
from trainer_kit.testing import tiny_arrays
from trainer_kit.training.metric_set import MetricSet
from trainer_kit.training.task import Task
from trainer_kit.training.trainer import Trainer

STEPS = 4  # of 8 examples each


class _Sums(LinearTask):
    """Returns the sum of labels in training and evaluation, which no mean of batches is."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.total = keras.metrics.Sum("total")

    def train_step(self, inputs: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        self.total.update_state(inputs[1])
        return {**super().train_step(inputs, *arguments, **named), "sum": self.total}

    def validation_step(self, inputs: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        self.total.update_state(inputs[1])
        return {**super().validation_step(inputs, *arguments, **named), "sum": self.total}


class _Aggregating(_Sums):
    """Counts the batches of an evaluation as well."""

    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        return (0 if state is None else state) + tf.ones_like(step_logs[self.loss][0])

    def reduce_aggregated_logs(
        self, aggregated_logs: Any, global_step: Any = None
    ) -> dict[str, Any]:
        return {"batches": float(aggregated_logs)}


def _create_trainer(task_type: type[Task] = _Sums, count: int = 1, **settings: Any) -> Trainer:
    runtime = {"enable_xla": settings.pop("enable_xla", False)}
    config = linear_experiment(**settings).replace(
        task={"train_data": {"is_training": False}}, runtime=runtime
    )
    return seeded_trainer(config, task_type, count)


FORMS: list[dict[str, Any]] = [
    {"fuse_steps": 2},
    {"train_tf_while_loop": False},
    {"accumulate_steps": 2},
    {"enable_xla": True},
]


@pytest.mark.parametrize("settings", FORMS)
def test_each_training_loop_reports_the_result_of_its_steps(settings: dict[str, Any]) -> None:
    trainer = _create_trainer(**settings)
    labels = tiny_arrays(False)[1]

    for start in (0, 8 * STEPS):
        assert trainer.train(tf.constant(STEPS))["sum"] == labels[start : start + 8 * STEPS].sum()


def test_replicas_report_the_result_over_all_examples() -> None:
    trainer = _create_trainer(count=2)

    assert trainer.train(tf.constant(STEPS))["sum"] == tiny_arrays(False)[1][: 8 * STEPS].sum()
    assert trainer.evaluate(tf.constant(-1))["sum"] == tiny_arrays(False)[1].sum()


@pytest.mark.parametrize(
    ("task_type", "settings"),
    [(_Sums, {}), (_Sums, {"eval_tf_function": False}), (_Aggregating, {})],
)
def test_each_evaluation_reports_the_result_of_its_examples(
    task_type: type[Task], settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = _create_trainer(task_type, **settings)

    trained = trainer.train(tf.constant(STEPS))["sum"]
    sums = [trainer.evaluate(tf.constant(-1))["sum"] for _ in range(2)]

    assert trained == tiny_arrays(False)[1][: 8 * STEPS].sum()
    assert sums == [tiny_arrays(False)[1].sum()] * 2

    warnings = [record for record in caplog.records if record.name.startswith("trainer_kit")]
    assert not warnings  # such as of a variable that an evaluation changes and training uses


def _extract_metrics(metrics: MetricSet, logs: dict[str, Any], task: Task | None = None) -> Any:
    """Returns what is left of the logs of a step without its metrics."""
    return metrics.extract_metrics(task or LinearTask(None), logs)


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_metrics_of_either_keras_are_noted_under_their_keys(library: Any) -> None:
    held, other = (library.metrics.Mean(name) for name in ("held", "other"))
    metrics = MetricSet("loss", [held])
    for metric in (held, other):
        metric.update_state(3.0)
    left = _extract_metrics(metrics, {"held": held, "key": other, "number": 1})

    results = metrics.results()

    assert left == {"number": 1}
    assert {name: float(results[name]) for name in results} == {
        "held": 3.0,
        "key": 3.0,
    }

    metrics.reset_returned_metrics()

    assert float(metrics.results()["key"]) == 0.0
    assert np.isfinite(float(held.result()))


def test_a_new_metric_in_each_step_is_refused() -> None:
    metrics = MetricSet("loss", [])
    _extract_metrics(metrics, {"mean": keras.metrics.Mean()})

    with pytest.raises(
        UsageError, match="a new metric object named 'mean'; create it once, in the task's __init__"
    ):
        _extract_metrics(metrics, {"mean": keras.metrics.Mean()})


def test_a_scalar_with_the_name_of_a_metric_gets_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = MetricSet("loss", [])
    task = _Sums(None)

    for _ in range(2):
        left = _extract_metrics(
            metrics, {"total": task.total.result(), "length": tf.constant(1.0)}, task
        )

    assert left.keys() == {"total", "length"}

    (told,) = caplog.messages
    assert told.startswith(
        "the step returns the scalar 'total', and the task or the model holds a metric of this name"
    )
