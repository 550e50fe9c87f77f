"""Checks that evaluations are exact: compares metrics of all 1,797 digits with NumPy's, in every form of the loop.

    python -m scripts.exact_metrics [--without-peer]

prints, for each form, number of replicas and batch size, the largest difference between a metric of an evaluation and
the same in float64 from the same weights, and Model Garden's on the same images with its own defaults, which leave out
the last batch if it is not full. Ends with 1 if one of ours is 1e-6 or more.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import trainer_kit as tk
from trainer_kit.training.trainer import Trainer

EXAMPLES, TOLERANCE = 1797, 1e-6
BATCHES, REPLICAS = (7, 64, EXAMPLES), (1, 2, 4)
FORMS: dict[str, dict[str, bool]] = {
    "eager": {"eval_tf_function": False},
    "graph, step by step": {},
    "graph, while loop": {"eval_tf_while_loop": True},
    "graph, metrics only": {},
}


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns images float32 [1797, 64] in 0..1 and labels int32 [1797]."""
    data = load_digits()
    return (data.data / 16).astype(np.float32), data.target.astype(np.int32)


def is_three(labels: Any) -> Any:
    """Returns the labels of the AUC: 1.0 where the digit is a three, else 0.0, as float32."""
    return tf.cast(tf.equal(labels, 3), tf.float32)


@tk.register_task(tk.TaskConfig)
class EveryMetric(tk.Task):
    """Task with metrics of each kind; the images' names go to `aggregate_logs` as strings."""

    def build_model(self) -> keras.Model:
        """Returns a small net."""
        keras.utils.set_random_seed(5)
        layers = [keras.Input((64,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        model.layers[-1].kernel.assign(4.0 * model.layers[-1].kernel)  # for logits that differ
        return model

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        """Returns all digits."""
        return tk.ArraySource(digits(), params)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        """Returns the mean cross entropy."""
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model_outputs))

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns a count, a mean over examples and a threshold metric."""
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
        return [
            keras.metrics.SparseCategoricalAccuracy("accuracy"),
            keras.metrics.MeanMetricWrapper(entropy, name="entropy"),
            keras.metrics.AUC(name="auc"),
        ]

    def process_metrics(self, metrics: Sequence[Any], labels: Any, model_outputs: Any, **kwargs: Any) -> None:
        """Updates the metrics."""
        accuracy, entropy, auc = metrics
        accuracy.update_state(labels, model_outputs)
        entropy.update_state(labels, model_outputs)
        auc.update_state(is_three(labels), tf.nn.softmax(model_outputs)[:, 3])

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        """Adds the outputs to the logs."""
        return {
            **super().validation_step(inputs, model, metrics),
            "outputs": model(inputs[0], training=False),
            "labels": inputs[1],
        }


class AggregatingEveryMetric(EveryMetric):
    """Task that also computes metrics from the outputs for all images."""

    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        """Returns the outputs, labels and names of all images so far."""
        new = {key: tf.concat(step_logs[key], axis=0) for key in ("outputs", "labels", "names")}
        return new if state is None else {key: tf.concat([state[key], new[key]], axis=0) for key in new}

    def reduce_aggregated_logs(self, aggregated_logs: Any, global_step: Any = None) -> dict[str, Any]:
        """Returns the number of images, of their names, and the mean margin of the right digit over the next."""
        outputs, labels = aggregated_logs["outputs"].numpy(), aggregated_logs["labels"].numpy()
        names = set(aggregated_logs["names"].numpy().tolist())
        return {"examples": len(labels), "names": len(names), "margin": _margin(outputs, labels)}


class NamingTrainer(Trainer):
    """Trainer that names each image by a string, which no replica sees."""

    def next_eval_inputs(self, iterator: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the batch, and each image's pixels as its name."""
        inputs = next(iterator)
        images = self.strategy.experimental_local_results(inputs[0])
        return inputs, {"names": [tf.strings.reduce_join(tf.strings.as_string(some), axis=-1) for some in images]}


def evaluated(form: str, replicas: int, batch: int) -> dict[str, float]:
    """Returns the metrics of one evaluation of all digits; needs one logical CPU per replica."""
    task_class = EveryMetric if form == "graph, metrics only" else AggregatingEveryMetric
    data = {"global_batch_size": batch, "is_training": False, "drop_remainder": False}
    config = tk.ExperimentConfig(task=tk.TaskConfig()).replace(task={"validation_data": data}, trainer=FORMS[form])
    with _strategy(replicas).scope():
        task = task_class(config.task)
        trainer = NamingTrainer(config, task, task.build_model(), None, train=False)
    return {name: float(value) for name, value in trainer.evaluate(tf.constant(-1)).items()}


def exact(images: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns the same metrics for some of the digits, computed by NumPy in float64 from the weights on."""
    weights = [weight.astype(np.float64) for weight in EveryMetric(tk.TaskConfig()).build_model().get_weights()]
    logits = np.tanh(images @ weights[0] + weights[1]) @ weights[2] + weights[3]
    shifted = logits - logits.max(axis=1, keepdims=True)
    chances = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    entropy = float(-np.log(chances[np.arange(len(labels)), labels]).mean())
    return {
        "validation_loss": entropy,
        "accuracy": float(np.mean(logits.argmax(axis=1) == labels)),
        "entropy": entropy,
        "auc": _area(labels == 3, chances[:, 3]),
        "examples": len(labels),
        "names": len({image.tobytes() for image in images}),
        "margin": _margin(logits, labels),
    }


def differences(found: Mapping[str, float], expected: Mapping[str, float]) -> dict[str, float]:
    """Returns the absolute difference of each found metric from its expected value."""
    return {name: abs(value - expected[name]) for name, value in found.items()}


def _margin(logits: np.ndarray, labels: np.ndarray) -> float:
    logits, rows = logits.astype(np.float64), np.arange(len(labels))
    others = logits.copy()
    others[rows, labels] = -np.inf
    return float(np.mean(logits[rows, labels] - others.max(axis=1)))


def _area(positive: np.ndarray, chances: np.ndarray, thresholds: int = 200) -> float:
    """Returns the area under the ROC curve, by trapezoids between Keras' thresholds."""
    inner = np.arange(1, thresholds - 1) / (thresholds - 1)
    above = chances[:, None] > np.concatenate([[-1e-7], inner, [1 + 1e-7]])
    hits, alarms = above[positive].mean(axis=0), above[~positive].mean(axis=0)
    return float(np.sum((alarms[:-1] - alarms[1:]) * (hits[:-1] + hits[1:]) / 2))


def _strategy(replicas: int) -> tf.distribute.Strategy:
    if replicas == 1:
        return tf.distribute.get_strategy()
    devices = [f"CPU:{number}" for number in range(replicas)]
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())


def peer(batch: int) -> dict[str, float]:
    """Returns loss and accuracy from Model Garden's trainer, with the defaults of its DataConfig, on one device."""
    import tf_keras
    from official.core import base_task, base_trainer, config_definitions

    class PeerTask(base_task.Task):
        def build_model(self) -> Any:
            layers = tf_keras.layers
            model = tf_keras.Sequential([layers.Dense(32, "tanh", input_shape=(64,)), layers.Dense(10)])
            model.set_weights(EveryMetric(tk.TaskConfig()).build_model().get_weights())
            return model

        def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices(digits()).batch(params.global_batch_size, params.drop_remainder)

        def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model_outputs))

        def build_metrics(self, training: bool = True) -> list[Any]:
            return [tf_keras.metrics.SparseCategoricalAccuracy("accuracy")]

    config = config_definitions.ExperimentConfig()
    config.task.validation_data = config_definitions.DataConfig(global_batch_size=batch, is_training=False)
    task = PeerTask(config.task)
    trainer = base_trainer.Trainer(config, task, task.build_model(), tf_keras.optimizers.SGD(), train=False)
    return {name: float(value) for name, value in trainer.evaluate(tf.constant(-1)).items()}


def main() -> None:
    """Prints the table; exits with 1 if a metric of trainer_kit is not exact."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--without-peer", action="store_true", help="leave Model Garden out")
    arguments = parser.parse_args()
    tf.get_logger().setLevel("ERROR")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * max(REPLICAS))
    expected, worst = exact(*digits()), 0.0
    print(f"{'form':<22}{'replicas':>9}{'batch':>7}  {'largest difference':<12}")
    for form, replicas, batch in itertools.product(FORMS, REPLICAS, BATCHES):
        worst = max(worst, _print_row(form, replicas, batch, differences(evaluated(form, replicas, batch), expected)))
    for batch in () if arguments.without_peer else BATCHES:
        _print_row("Model Garden", 1, batch, differences(peer(batch), expected))
    print(f"largest difference of trainer_kit: {worst:.1e}; {TOLERANCE:.0e} is allowed")
    sys.exit(worst >= TOLERANCE)


def _print_row(form: str, replicas: int, batch: int, off: Mapping[str, float]) -> float:
    name = max(off, key=lambda key: off[key])
    print(f"{form:<22}{replicas:>9}{batch:>7}  {off[name]:.1e} {name}", flush=True)
    return off[name]


if __name__ == "__main__":
    main()
