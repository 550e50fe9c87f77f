"""What a training recipe needs beyond one optimizer, by hand and in trainer_kit: the same work in both.

Each function is run by a process of its own, takes its turns from a Pacer and never returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import trainer_kit as tk
from scripts.benchmarks import nets, samples
from scripts.benchmarks.by_hand import Learner, run_loops
from scripts.benchmarks.ours import FOR_EVER, config_of
from scripts.benchmarks.pacer import Pacer

PARTS, DECAY, LATENTS = 4, 0.99, 16
ADAM = {"type": "adam"}
RATES = {"first": 0.001, "last": 0.0003}


def _rate(value: float) -> dict[str, Any]:
    return {"type": "constant", "constant": {"learning_rate": value}}


# The section `trainer` of each recipe that trains the dense net.
TRAINER: dict[str, dict[str, Any]] = {
    "groups": {
        "optimizers": {
            "first": {"variables": ("/dense/",), "optimizer": ADAM, "learning_rate": _rate(RATES["first"])},
            "last": {"variables": (".",), "optimizer": ADAM, "learning_rate": _rate(RATES["last"])},
        },
        "optimizer_config": {},
    },
    "accumulation": {"accumulate_steps": PARTS},
    "average": {
        "optimizer_config": {
            "optimizer": {"type": "sgd"},
            "learning_rate": _rate(samples.RATE),
            "ema": {"average_decay": DECAY, "dynamic_decay": False},
        }
    },
}


class _Groups(Learner):
    """Two optimizers, each for one of the layers."""

    def __init__(self, net: str) -> None:
        super().__init__(net)
        self._optimizers = [keras.optimizers.Adam(rate) for rate in RATES.values()]
        self._parts = [layer.trainable_variables for layer in self.model.layers]
        for optimizer, variables in zip(self._optimizers, self._parts, strict=True):
            optimizer.build(variables)

    def update(self, gradients: list[Any]) -> None:
        """Applies the gradients of each layer."""
        first = len(self._parts[0])
        for optimizer, variables, part in zip(
            self._optimizers, self._parts, (gradients[:first], gradients[first:]), strict=True
        ):
            optimizer.apply_gradients(zip(part, variables, strict=True))


class _Accumulation(Learner):
    """One update with the gradients of the parts of a batch, which may run at the same time."""

    def step(self, features: Any, labels: Any) -> None:
        """Takes a training step; in graph."""
        sums: list[Any] = []
        for part in zip(tf.split(features, PARTS), tf.split(labels, PARTS), strict=True):
            gradients = [gradient / PARTS for gradient in self.gradients(*part)]
            sums = [one + other for one, other in zip(sums, gradients, strict=True)] if sums else gradients
        self.update(sums)


class _AccumulationInTurn(Learner):
    """One update with the gradients of the parts of a batch, one after the other: memory holds one part."""

    def step(self, features: Any, labels: Any) -> None:
        """Takes a training step; in graph."""
        sums: list[Any] = []
        for part in zip(tf.split(features, PARTS), tf.split(labels, PARTS), strict=True):
            with tf.control_dependencies(sums):
                gradients = [gradient / PARTS for gradient in self.gradients(*map(tf.identity, part))]
            sums = [one + other for one, other in zip(sums, gradients, strict=True)] if sums else gradients
        self.update(sums)


class _Average(Learner):
    """An exponential moving average of the weights."""

    def __init__(self, net: str) -> None:
        super().__init__(net)
        self._averages = [tf.Variable(tf.convert_to_tensor(one)) for one in self.model.trainable_variables]

    def update(self, gradients: list[Any]) -> None:
        """Applies the gradients, and moves the averages."""
        super().update(gradients)
        for average, weight in zip(self._averages, self.model.trainable_variables, strict=True):
            average.assign(DECAY * average + (1.0 - DECAY) * tf.convert_to_tensor(weight))


_BY_HAND: dict[str, type[Learner]] = {
    "groups": _Groups,
    "accumulation": _AccumulationInTurn,
    "accumulation_at_once": _Accumulation,
    "average": _Average,
}


def by_hand(pacer: Pacer, folder: str, *, recipe: str, loop: int) -> None:
    """Trains the dense net by hand."""
    del folder
    run, iterator, steps = _BY_HAND[recipe]("dense").loop(), iter(nets.pipeline("dense")), tf.constant(loop)
    run_loops(pacer, loop, lambda: run(iterator, steps))


def ours(pacer: Pacer, folder: str, *, recipe: str, loop: int) -> None:
    """Trains the dense net in trainer_kit."""
    config = config_of("dense", loop, {}, TRAINER[recipe], {})
    tk.launch(config, "train", f"{folder}/run", train_actions=[lambda logs: pacer.done(loop)])


def _minimize(losses: Callable[[], Any], net: Any, optimizer: Any) -> Any:
    """Updates a net by the gradient of the last of the losses, and returns all of them; in graph."""
    with tf.GradientTape() as tape:
        found = losses()
    weights = net.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(found[-1], weights), weights, strict=True))
    return found


def gan_by_hand(pacer: Pacer, folder: str, *, loop: int) -> None:
    """Trains a GAN by hand: the discriminator, then the generator against the updated discriminator."""
    del folder
    generator, discriminator = _net(LATENTS, 2), _net(2, 1)
    optimizers = [keras.optimizers.Adam(samples.RATE) for _ in range(2)]
    losses = [keras.metrics.Mean() for _ in range(3)]
    for optimizer, net in zip(optimizers, (generator, discriminator), strict=True):
        optimizer.build(net.trainable_variables)

    def step(real: Any) -> None:
        fake = generator(tf.random.normal([samples.BATCH, LATENTS]), training=True)

        def of_discriminator() -> Any:
            logits = discriminator(real, training=True), discriminator(fake, training=True)
            own = tf.reduce_mean(tf.nn.softplus(-logits[0])) + tf.reduce_mean(tf.nn.softplus(logits[1]))
            return tf.reduce_mean(tf.nn.softplus(-logits[1])), own

        def of_generator() -> Any:
            made = generator(tf.random.normal([samples.BATCH, LATENTS]), training=True)
            return (tf.reduce_mean(tf.nn.softplus(-discriminator(made, training=True))),)

        other, own = _minimize(of_discriminator, discriminator, optimizers[1])
        _minimize(of_generator, generator, optimizers[0])
        for metric, value in zip(losses, (own + other, own, other), strict=True):
            metric.update_state(value)

    @tf.function
    def run(iterator: Any, steps: Any) -> Any:
        for metric in losses:
            metric.reset_state()
        for _ in tf.range(steps):
            step(next(iterator))
        return [metric.result() for metric in losses]

    iterator, steps = iter(_points()), tf.constant(loop)
    run_loops(pacer, loop, lambda: run(iterator, steps))


@tk.configclass
class GanBenchConfig(tk.GanConfig):
    """The GAN of `gan_by_hand`."""


@tk.register_task(GanBenchConfig)
class GanBenchTask(tk.GanTask):
    """The GAN of `gan_by_hand`."""

    def build_generator(self) -> Any:
        """Returns the generator."""
        return _net(LATENTS, 2)

    def build_discriminator(self) -> Any:
        """Returns the discriminator."""
        return _net(2, 1)

    def build_inputs(self, params: tk.DataConfig, input_context: Any = None) -> Any:
        """Returns the points."""
        return _points()


def gan(pacer: Pacer, folder: str, *, loop: int) -> None:
    """Trains the same GAN in trainer_kit."""
    optimizer = {"optimizer": ADAM, "learning_rate": _rate(samples.RATE)}
    optimizers = {"generator": optimizer, "discriminator": optimizer}
    steps = {"train_steps": FOR_EVER, "steps_per_loop": loop, "checkpoint_interval": FOR_EVER, "summary_interval": loop}
    data = tk.DataConfig(global_batch_size=samples.BATCH, is_training=True)
    config = tk.ExperimentConfig(
        task=GanBenchConfig(latent_size=LATENTS, train_data=data),
        trainer=tk.TrainerConfig().replace(optimizers=optimizers, validation_interval=FOR_EVER, **steps),
    )
    tk.launch(config, "train", f"{folder}/run", train_actions=[lambda logs: pacer.done(loop)])


def _net(inputs: int, outputs: int) -> Any:
    hidden = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(outputs)])


def _points() -> tf.data.Dataset:
    """Returns endless batches of points, float32 [batch, 2]."""
    points = tf.data.Dataset.from_tensor_slices(samples.arrays("dense")[0][:, :2]).shuffle(samples.EXAMPLES).repeat()
    return points.batch(samples.BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
