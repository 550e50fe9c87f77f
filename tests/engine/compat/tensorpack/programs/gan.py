"""A GAN with two optimizers in a separate trainer, as a program of Tensorpack.

Usage: gan.py FOLDER [--signal=KILL@step:7]. The signal is sent to the process after a step.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
from trainer_kit.compat.tensorpack.tfutils.summary import add_moving_summary
from trainer_kit.compat.tensorpack.tfutils.tower import TowerContext, TowerFunc
from trainer_kit.compat.tensorpack.utils import logger

from trainer_kit.compat.tensorpack import *
from trainer_kit.compat.tensorpack import tfv1 as tf

SIZE = 6


class Ring(DataFlow):
    """Points of a ring, which are drawn from NumPy's generator."""

    def __iter__(self) -> Iterator[list[Any]]:
        for _ in range(7):
            points = np.random.normal(size=(8, SIZE))
            yield [(points / np.linalg.norm(points, axis=1, keepdims=True)).astype("float32")]

    def __len__(self) -> int:
        return 7


class Model(ModelDescBase):
    def __init__(self) -> None:
        self.penalty = 0.0

    def inputs(self) -> list[Any]:
        return [tf.TensorSpec((None, SIZE), tf.float32, "points")]

    def build_graph(self, points: Any) -> None:
        noise = tf.random_normal([8, 4])
        with tf.variable_scope("gen"):
            hidden = FullyConnected("fc0", noise, 16, activation=BNReLU)
            drawn = FullyConnected("fc1", hidden, SIZE)
        with tf.variable_scope("discrim"):
            real = self.judge(points)
        with tf.variable_scope("discrim", reuse=True):
            fake = self.judge(drawn)
        entropy = tf.nn.sigmoid_cross_entropy_with_logits
        loss_real = entropy(logits=real, labels=tf.ones_like(real))
        loss_fake = entropy(logits=fake, labels=tf.zeros_like(fake))
        self.d_loss = tf.reduce_mean(loss_real + loss_fake, name="d_loss")
        self.g_loss = tf.reduce_mean(entropy(logits=fake, labels=tf.ones_like(fake)), name="g_loss")
        add_moving_summary(self.d_loss, self.g_loss)

    def judge(self, points: Any) -> Any:
        hidden = FullyConnected("fc0", points, 16, activation=tf.nn.leaky_relu)
        return FullyConnected("fc1", Dropout("dropout", hidden, rate=0.3), 1)


class GANTrainer(TowerTrainer):
    """Trains the discriminator in each step, and the generator in every second one."""

    def __init__(self, source: Any, model: Model) -> None:
        super().__init__()
        self.register_callback(source.setup(model.get_input_signature()))
        self.tower_func = TowerFunc(model.build_graph, model.get_input_signature())
        with TowerContext("", is_training=True):
            self.tower_func(*source.get_input_tensors())
        gen = tf.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES, "gen")
        discrim = tf.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES, "discrim")
        with tf.name_scope("optimize"):
            momentum = tf.train.MomentumOptimizer(0.05, 0.9)
            self.d_min = momentum.minimize(model.d_loss, var_list=discrim, name="d_min")
            adam = tf.train.AdamOptimizer(0.01, beta1=0.5)
            self.g_min = adam.minimize(model.g_loss, var_list=gen, name="g_min")

    def run_step(self) -> None:
        self.hooked_sess.run(self.d_min)
        if self.local_step % 2 == 0:
            self.hooked_sess.run(self.g_min)


class Penalty(Callback):
    """Reports an attribute of the model, which another callback sets."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def _trigger_epoch(self) -> None:
        self.trainer.monitors.put_scalar("penalty", self._model.penalty)


class SignalInStep(Callback):
    def __init__(self, signal_name: str, step: int) -> None:
        self._signal = getattr(signal, f"SIG{signal_name}")
        self._step = step

    def _trigger_step(self) -> None:
        if self.global_step >= self._step:
            os.kill(os.getpid(), self._signal)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--signal", default="")
    arguments = parser.parse_args()
    logger.set_logger_dir(arguments.folder)

    model = Model()
    penalty = ObjAttrParam(model, "penalty")
    callbacks: list[Any] = [
        PeriodicTrigger(ModelSaver(max_to_keep=3), every_k_epochs=1),
        HyperParamSetterWithFunc(penalty, lambda epoch, value: value + epoch + 1.0),
        Penalty(model),
    ]
    if arguments.signal:
        signal_name, _, moment = arguments.signal.partition("@")
        callbacks.append(SignalInStep(signal_name, int(moment.partition(":")[2])))
    GANTrainer(QueueInput(Ring()), model).train_with_defaults(
        callbacks=callbacks, steps_per_epoch=5, max_epoch=4
    )


if __name__ == "__main__":
    main()
