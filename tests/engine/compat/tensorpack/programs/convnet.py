"""A convolutional net on made-up digits, as a program of Tensorpack.

Usage: convnet.py FOLDER [--signal=KILL@step:7]. The signal is sent to the process at a moment:
`step`, `inference` or `save`, each with the number of the global step.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import numpy as np
from trainer_kit.compat.tensorpack.dataflow import DataFromList
from trainer_kit.compat.tensorpack.utils import logger

from trainer_kit.compat.tensorpack import *
from trainer_kit.compat.tensorpack import tfv1 as tf
from trainer_kit.compat.tensorpack.tfutils import summary

SIZE = 8
CLASSES = 4


class Model(ModelDesc):
    def inputs(self) -> list[Any]:
        return [
            tf.TensorSpec((None, SIZE, SIZE, 1), tf.float32, "image"),
            tf.TensorSpec((None,), tf.int32, "label"),
        ]

    def build_graph(self, image: Any, label: Any) -> Any:
        with argscope(Conv2D, kernel_size=3, filters=4, activation=BNReLU):
            net = LinearWrap(image)
            logits = net.Conv2D("conv0").MaxPooling("pool0", 2)
            logits = logits.Dropout("dropout", rate=0.5)
            logits = logits.FullyConnected("fc0", CLASSES)()
        cost = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=label)
        cost = tf.reduce_mean(cost, name="cross_entropy")
        wrong = tf.cast(tf.logical_not(tf.nn.in_top_k(logits, label, 1)), tf.float32, "incorrect")
        noise = build_noise()
        decay = regularize_cost("fc.*/W", tf.nn.l2_loss) * 1e-4
        cost = tf.add_n([cost, decay, noise], name="cost")
        summary.add_moving_summary(cost, tf.reduce_mean(wrong, name="train_error"))
        return cost

    def optimizer(self) -> Any:
        rate = tf.get_variable("learning_rate", initializer=0.01, trainable=False)
        return tf.train.AdamOptimizer(rate)


def build_noise() -> Any:
    """Returns a random number that is drawn in the body of a loop."""

    def body(index: Any, total: Any) -> tuple[Any, Any]:
        return index + 1, total + tf.random_uniform([])

    return tf.while_loop(lambda index, _: index < 3, body, [0, 0.0])[1] * 0.01


class SignalInStep(Callback):
    def __init__(self, signal_name: str, step: int) -> None:
        self._signal = getattr(signal, f"SIG{signal_name}")
        self._step = step

    def _trigger_step(self) -> None:
        if self.global_step == self._step:
            os.kill(os.getpid(), self._signal)


class SignalInInference(Inferencer):
    def __init__(self, signal_name: str, step: int) -> None:
        self._signal = getattr(signal, f"SIG{signal_name}")
        self._step = step

    def _get_fetches(self) -> list[str]:
        return ["cross_entropy"]

    def _on_fetches(self, outputs: Any) -> None:
        if self.trainer.global_step == self._step:
            os.kill(os.getpid(), self._signal)


def make_data(count: int, seed: int) -> list[list[Any]]:
    random = np.random.RandomState(seed)
    patterns = np.random.RandomState(0).normal(size=(CLASSES, SIZE, SIZE, 1))
    labels = random.randint(CLASSES, size=count)
    images = patterns[labels] + random.normal(size=(count, SIZE, SIZE, 1))
    return [[image.astype("float32"), label] for image, label in zip(images, labels, strict=True)]


def train_convnet(signal_name: str = "", place: str = "", step: int = 0) -> None:
    """Trains, and sends a signal to this process in a step or in the inference after it."""
    train = BatchData(DataFromList(make_data(60, 1), shuffle=True), 8, remainder=True)
    test = BatchData(DataFromList(make_data(20, 2), shuffle=False), 8, remainder=True)
    inferencers: list[Any] = [ScalarStats("cross_entropy"), ClassificationError("incorrect")]
    if place == "inference":
        inferencers.append(SignalInInference(signal_name, step))
    callbacks: list[Any] = [
        PeriodicTrigger(ModelSaver(max_to_keep=4), every_k_steps=3),
        InferenceRunner(test, inferencers),
        MaxSaver("validation_cross_entropy"),
        MinSaver("validation_error"),
        ScheduledHyperParamSetter("learning_rate", [(1, 0.01), (2, 0.005), (4, 0.001)], "linear"),
        HyperParamSetterWithFunc("learning_rate", lambda epoch, rate: rate * 0.9),
        StatMonitorParamSetter("learning_rate", "validation_error", lambda r: r * 0.5, 0.3, 2),
    ]
    if place == "step":
        callbacks.append(SignalInStep(signal_name, step))
    config = AutoResumeTrainConfig(
        model=Model(),
        data=FeedInput(train),
        callbacks=callbacks,
        steps_per_epoch=5,
        max_epoch=4,
    )
    launch_train_with_config(config, SimpleTrainer())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--signal", default="")
    arguments = parser.parse_args()
    logger.set_logger_dir(arguments.folder)
    if not arguments.signal:
        train_convnet()
        return
    signal_name, _, moment = arguments.signal.partition("@")
    place, _, step = moment.partition(":")
    train_convnet(signal_name, place, int(step))


if __name__ == "__main__":
    main()
