"""Evaluations of all 1,797 digits against NumPy in float64, from the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import trainer_kit as tk
from trainer_kit.training.trainer import Trainer

EXAMPLES = 1797
TOLERANCE = 1e-6


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns images float32 [1797, 64] in 0..1 and labels int32 [1797]."""
    digits = load_digits()
    return (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)


@tk.register_task(tk.TaskConfig)
class EveryMetric(tk.Task):
    """Task with metrics of each kind: a count, a mean over examples and a threshold metric."""

    def build_model(self) -> keras.Model:
        keras.utils.set_random_seed(5)
        layers = [keras.Input((64,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        # So that the logits differ.
        model.layers[-1].kernel.assign(4.0 * model.layers[-1].kernel)
        return model

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        return tk.ArraySource(read_digits(), params)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model_outputs))

    def build_metrics(self, training: bool = True) -> list[Any]:
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
        return [
            keras.metrics.SparseCategoricalAccuracy("accuracy"),
            keras.metrics.MeanMetricWrapper(entropy, name="entropy"),
            keras.metrics.AUC(name="auc"),
        ]

    def process_metrics(
        self, metrics: Sequence[Any], labels: Any, model_outputs: Any, **kwargs: Any
    ) -> None:
        accuracy, entropy, auc = metrics
        accuracy.update_state(labels, model_outputs)
        entropy.update_state(labels, model_outputs)
        is_three = tf.cast(tf.equal(labels, 3), tf.float32)
        auc.update_state(is_three, tf.nn.softmax(model_outputs)[:, 3])

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        logs = super().validation_step(inputs, model, metrics)
        return {**logs, "outputs": model(inputs[0], training=False), "labels": inputs[1]}


class AggregatingEveryMetric(EveryMetric):
    """Task that also computes metrics from the outputs for all images."""

    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        new = {key: tf.concat(step_logs[key], axis=0) for key in ("outputs", "labels", "names")}
        if state is None:
            return new

        return {key: tf.concat([state[key], new[key]], axis=0) for key in new}

    def reduce_aggregated_logs(
        self, aggregated_logs: Any, global_step: Any = None
    ) -> dict[str, Any]:
        outputs = aggregated_logs["outputs"].numpy()
        labels = aggregated_logs["labels"].numpy()
        names = set(aggregated_logs["names"].numpy().tolist())
        return {
            "examples": len(labels),
            "names": len(names),
            "margin": compute_mean_margin(outputs, labels),
        }


class NamingTrainer(Trainer):
    """Trainer that names each image by a string, its pixels, which no replica sees."""

    def next_eval_inputs(self, iterator: Any) -> tuple[Any, dict[str, Any]]:
        inputs = next(iterator)
        images = self.strategy.experimental_local_results(inputs[0])
        names = [tf.strings.reduce_join(tf.strings.as_string(part), axis=-1) for part in images]
        return inputs, {"names": names}


def compute_with_numpy(images: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns the metrics of some of the digits, computed in float64."""
    model = EveryMetric(tk.TaskConfig()).build_model()
    kernel, bias, last_kernel, last_bias = (
        weight.astype(np.float64) for weight in model.get_weights()
    )
    logits = np.tanh(images @ kernel + bias) @ last_kernel + last_bias
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    entropy = float(-np.log(probabilities[np.arange(len(labels)), labels]).mean())
    return {
        "validation_loss": entropy,
        "accuracy": float(np.mean(logits.argmax(axis=1) == labels)),
        "entropy": entropy,
        "auc": compute_area_under_curve(labels == 3, probabilities[:, 3]),
        "examples": len(labels),
        "names": len({image.tobytes() for image in images}),
        "margin": compute_mean_margin(logits, labels),
    }


def compute_mean_margin(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean margin of the right digit over the next."""
    logits = logits.astype(np.float64)
    rows = np.arange(len(labels))
    others = logits.copy()
    others[rows, labels] = -np.inf
    return float(np.mean(logits[rows, labels] - others.max(axis=1)))


def compute_area_under_curve(
    positive: np.ndarray, probabilities: np.ndarray, thresholds: int = 200
) -> float:
    """Returns the area under the ROC curve, by trapezoids between Keras' thresholds."""
    inner = np.arange(1, thresholds - 1) / (thresholds - 1)
    above = probabilities[:, None] > np.concatenate([[-1e-7], inner, [1 + 1e-7]])
    hits = above[positive].mean(axis=0)
    alarms = above[~positive].mean(axis=0)
    return float(np.sum((alarms[:-1] - alarms[1:]) * (hits[:-1] + hits[1:]) / 2))


@pytest.mark.parametrize(
    ("task_class", "trainer_config", "replicas", "batch"),
    [
        pytest.param(AggregatingEveryMetric, {"eval_tf_function": False}, 2, EXAMPLES, id="eager"),
        pytest.param(AggregatingEveryMetric, {}, 1, 64, id="step_by_step"),
        # The last batch has one example, and so one replica has none.
        pytest.param(AggregatingEveryMetric, {"eval_tf_while_loop": True}, 2, 449, id="while_loop"),
        pytest.param(EveryMetric, {}, 2, 64, id="metrics_only"),
    ],
)
def test_every_metric_agrees_with_numpys_to_1e_6(
    task_class: type[EveryMetric],
    trainer_config: dict[str, bool],
    replicas: int,
    batch: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = {"global_batch_size": batch, "is_training": False, "drop_remainder": False}
    config = tk.ExperimentConfig(task=tk.TaskConfig()).replace(
        task={"validation_data": data}, trainer=trainer_config
    )
    strategy = tf.distribute.get_strategy()
    if replicas > 1:
        devices = [f"CPU:{number}" for number in range(replicas)]
        strategy = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        task = task_class(config.task)
        trainer = NamingTrainer(config, task, task.build_model(), None, train=False)

    metrics = {name: float(value) for name, value in trainer.evaluate(tf.constant(-1)).items()}

    expected = compute_with_numpy(*read_digits())
    aggregated = {"examples", "names", "margin"} if task_class is EveryMetric else set()

    assert set(metrics) == set(expected) - aggregated
    assert metrics == pytest.approx(
        {name: expected[name] for name in metrics}, abs=TOLERANCE, rel=0
    )
    assert "step by step" not in caplog.text


def test_an_example_that_is_left_out_shows() -> None:
    images, labels = read_digits()

    expected = compute_with_numpy(images, labels)
    metrics = compute_with_numpy(images[:-1], labels[:-1])

    assert all(abs(metrics[name] - expected[name]) > TOLERANCE for name in expected)
