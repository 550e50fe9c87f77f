"""Metrics that are reset and read together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.errors import UsageError
from trainer_kit.testing import TinyConfig, TinyTask
from trainer_kit.training.metric_set import MetricSet, model_metrics, task_metrics, to_numpy


class _Parts(keras.metrics.Metric):
    """A metric whose result is a dict."""

    def update_state(self, *arguments: Any, **keywords: Any) -> None: ...

    def result(self) -> dict[str, Any]:
        return {"low": keras.ops.convert_to_tensor(1.0), "high": keras.ops.convert_to_tensor(2.0)}

    def reset_state(self) -> None: ...


@pytest.mark.parametrize(
    "wrap", [lambda inputs: inputs, lambda inputs: (inputs, inputs), lambda inputs: {"a": inputs}]
)
def test_loss_is_the_mean_over_examples_for_any_batches(wrap: Callable[[Any], Any]) -> None:
    losses = np.linspace(0, 5, 11, dtype=np.float32) ** 2
    metrics = MetricSet("validation_loss", [])
    task = TinyTask(TinyConfig())

    for start in (0, 4, 8, 11):  # 4, 4, 3 and no examples
        batch = losses[start : start + 4]
        # Of no examples: NaN.
        metrics.update(task, {task.loss: tf.reduce_mean(batch)}, wrap(tf.constant(batch)))

    assert metrics.results()["validation_loss"].numpy() == pytest.approx(losses.mean(), rel=1e-6)


def test_batches_of_scalars_count_as_one_example() -> None:
    metrics = MetricSet("loss", [])
    task = TinyTask(TinyConfig())

    metrics.update(task, {task.loss: tf.constant(2.0)}, tf.constant(5))
    metrics.update(task, {task.loss: tf.constant(4.0)}, tf.constant(5))

    assert metrics.results()["loss"].numpy() == 3.0


def test_the_loss_is_reported_only_when_a_step_gave_one() -> None:
    metrics = MetricSet("loss", [keras.metrics.Mean("mean")])

    assert list(metrics.results()) == ["mean"]
    assert metrics.names() == ["mean", "loss"]

    metrics.loss.update_state(1.0)

    assert list(metrics.results()) == ["mean", "loss"]
    assert metrics.names() == ["mean", "loss"]


def test_reset_starts_all_anew() -> None:
    metrics = MetricSet("loss", [keras.metrics.Mean("three"), tf_keras.metrics.Mean("two")])

    for value in (1.0, 5.0):
        metrics.reset()
        metrics.loss.update_state(value)
        for metric in metrics.metrics:
            metric.update_state(value)

    assert to_numpy(metrics.results()) == {"three": 5.0, "two": 5.0, "loss": 5.0}


def test_a_ragged_batch_weighs_as_much_as_it_has_examples() -> None:
    metrics = MetricSet("training_loss", [])
    task = TinyTask(TinyConfig())

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([])], autograph=False)
    def step(batch: tf.Tensor, loss: tf.Tensor) -> None:
        metrics.update_with_step(task, {task.loss: loss}, batch)

    for examples, loss in ((3, 1.0), (3, 2.0), (1, 5.0), (0, np.nan)):
        step(tf.zeros((examples, 2)), loss)

    assert to_numpy(metrics.results()) == {"training_loss": 2.0}


def test_a_metric_with_several_results_reports_each() -> None:
    assert to_numpy(MetricSet("loss", [_Parts(name="parts")]).results()) == {
        "low": 1.0,
        "high": 2.0,
    }


class _Signs(tf_keras.metrics.Metric):
    """A metric that counts signs, with conditions of tensors in its methods."""

    def __init__(self) -> None:
        super().__init__(name="signs")
        self.balance = self.add_weight("balance", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        if y_pred < y_true:
            self.balance.assign_sub(1.0)
        else:
            self.balance.assign_add(1.0)

    def result(self) -> Any:
        return -10.0 if self.balance < 0 else self.balance


def test_tensor_conditions_in_a_metric_of_tf_keras_are_converted() -> None:
    metric = _Signs()
    task = TinyTask(TinyConfig())
    metrics = MetricSet("loss", [metric])

    @tf.function(autograph=False)
    def update_metrics(prediction: Any) -> Any:
        task.process_metrics([metric], tf.constant(0.0), prediction)
        return metrics.results()["signs"]

    predictions = (1.0, 2.0, -1.0, -1.0, -1.0)

    assert [float(update_metrics(tf.constant(prediction))) for prediction in predictions] == [
        1.0,
        2.0,
        1.0,
        0.0,
        -10.0,
    ]


def test_metrics_of_a_compiled_model_leave_out_its_loss_tracker() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    assert model_metrics(model) == []

    model.compile(loss="mse", metrics=["mae"])
    model.compute_metrics(x=None, y=tf.zeros((1, 1)), y_pred=tf.ones((1, 1)), sample_weight=None)

    assert "loss" in [metric.name for metric in model.metrics]
    assert "loss" not in [metric.name for metric in model_metrics(model)]
    assert len(model_metrics(model)) == 1
    assert model_metrics(tf.Module()) == []


def test_two_metrics_of_one_name_are_refused() -> None:
    twice = [keras.metrics.Mean("accuracy"), keras.metrics.Sum("accuracy")]

    with pytest.raises(UsageError, match="several metrics are called accuracy"):
        MetricSet("loss", twice)

    with pytest.raises(UsageError, match="several metrics are called loss"):
        MetricSet("loss", [keras.metrics.Mean("loss")])


def test_compiled_metrics_have_names_after_the_first_batch() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])

    model.compile(loss="mse", metrics=["mae"])
    metrics = MetricSet("validation_loss", model_metrics(model))

    assert metrics.names() is None

    model.compute_metrics(x=None, y=tf.zeros([4, 3]), y_pred=tf.ones([4, 3]))

    assert metrics.names() == ["mae", "validation_loss"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "None"),
        ("accuracy", "a str"),
        (["accuracy"], "'accuracy', which is not a metric"),
        ([keras.metrics.Mean], "the class Mean, which is not a metric"),
    ],
)
def test_what_is_no_list_of_metrics_is_told_with_the_method(value: Any, told: str) -> None:
    class Wrong(TinyTask):
        def build_metrics(self, training: bool = True) -> Any:
            return value

    with pytest.raises(UsageError, match=rf"^Wrong\.build_metrics returned .*{told}"):
        task_metrics(Wrong(TinyConfig()), True)
