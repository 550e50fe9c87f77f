"""Hand-written training and evaluation loops, the baseline of all comparisons.

Each function is run by a process of its own, takes its turns from a Pacer and never returns.
Metrics are reset before each loop and read after it, in the same graph, which is the fastest way
to see the same numbers.

`python -m scripts.benchmarks.by_hand` trains for ever in loops of one step, and prints the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from scripts.benchmarks import nets
from scripts.benchmarks.pacer import Pacer


class Learner:
    """A net with its optimizer, loss and metrics. Created in strategy scope.

    Args:
      net, size: See nets.build.
      metrics: The number of metrics in addition to the mean loss.
      replicas: The number of replicas that share a batch.
    """

    def __init__(self, net: str, size: int = 0, metrics: int = 1, replicas: int = 1) -> None:
        self.model = nets.build(keras, net, size)
        self.optimizer = nets.optimizer(keras, net)
        self.optimizer.build(self.model.trainable_variables)
        self.metrics = [keras.metrics.Mean(), *nets.accuracies(keras, metrics)]
        self._replicas = replicas

    def step(self, features: Any, labels: Any) -> None:
        """Takes a training step; in graph, on a replica."""
        self.update(self.gradients(features, labels))

    def gradients(self, features: Any, labels: Any) -> list[Any]:
        """Returns the gradients of a batch, and updates the metrics; in graph, on a replica."""
        with tf.GradientTape() as tape:
            logits = self.model(features, training=True)
            loss = nets.loss(keras, labels, logits)
            # Gradients are summed over the replicas.
            share = loss / self._replicas if self._replicas > 1 else loss
        gradients: list[Any] = tape.gradient(share, self.model.trainable_variables)

        mean_loss, *accuracies = self.metrics
        mean_loss.update_state(loss)
        for accuracy in accuracies:
            accuracy.update_state(labels, logits)
        return gradients

    def update(self, gradients: list[Any]) -> None:
        """Updates the weights; in graph, on a replica."""
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))


def make_loop(step: Callable[..., Any], metrics: Sequence[Any]) -> Any:
    """Returns a tf.function of an iterator and a number of steps that returns the metrics."""

    @tf.function
    def run(iterator: Any, steps: Any) -> list[Any]:
        for metric in metrics:
            metric.reset_state()
        for _ in tf.range(steps):
            step(next(iterator))
        return [metric.result() for metric in metrics]

    return run


def train(
    pacer: Pacer,
    folder: str,
    *,
    net: str,
    loop: int,
    size: int = 0,
    metrics: int = 1,
    actions: int = 0,
) -> None:
    """Trains in loops of `loop` steps; calls `actions` functions after each loop."""
    del folder
    learner = Learner(net, size, metrics)
    train_learner(pacer, learner, net, loop, [LeastLoss() for _ in range(actions)])


def train_learner(
    pacer: Pacer, learner: Learner, net: str, loop: int, actions: Sequence[Any] = ()
) -> None:
    """Trains in loops of `loop` steps; calls the actions after each loop."""
    run = make_loop(lambda batch: learner.step(*batch), learner.metrics)
    repeat(pacer, run, iter(nets.pipeline(net)), loop, actions=actions)


def train_fused(pacer: Pacer, folder: str, *, net: str, loop: int, fuse: int) -> None:
    """Trains with `fuse` steps in one XLA program, over stacked batches."""
    del folder
    learner = Learner(net)

    @tf.function(jit_compile=True)
    def fused(features: Any, labels: Any) -> None:
        for number in tf.range(fuse):
            learner.step(features[number], labels[number])

    run = make_loop(lambda batches: fused(*batches), learner.metrics)
    repeat(pacer, run, iter(nets.pipeline(net, stack=fuse)), loop // fuse, steps=fuse)


def train_replicas(pacer: Pacer, folder: str, *, net: str, loop: int, replicas: int) -> None:
    """Trains on logical CPUs under MirroredStrategy, strategy.run inside the loop."""
    del folder
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)]
    tf.config.set_logical_device_configuration(cpu, logical)
    devices = [f"CPU:{number}" for number in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        learner = Learner(net, replicas=replicas)

    def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return nets.pipeline(net, context.get_per_replica_batch_size(nets.BATCH))

    run = make_loop(lambda batch: strategy.run(learner.step, args=batch), learner.metrics)
    repeat(pacer, run, iter(strategy.distribute_datasets_from_function(batches)), loop)


def evaluate(pacer: Pacer, folder: str, *, net: str, examples: int) -> None:
    """Evaluates all of the data repeatedly, each time from its start, in one tf.function."""
    del folder
    model = nets.build(keras, net)
    data = nets.one_pass(net, examples)
    mean_loss = keras.metrics.Mean()
    accuracy = nets.accuracies(keras, 1)[0]

    def step(batch: Any) -> None:
        features, labels = batch
        logits = model(features, training=False)
        accuracy.update_state(labels, logits)
        mean_loss.update_state(nets.loss(keras, labels, logits), sample_weight=tf.shape(labels)[0])

    run = make_loop(step, [mean_loss, accuracy])
    batches = tf.constant(-(-examples // nets.BATCH))
    while True:
        [float(result) for result in run(iter(data), batches)]
        pacer.report_steps(int(batches))


def save(pacer: Pacer, folder: str, *, net: str, size: int) -> None:
    """Saves with TensorFlow's manager after each step; the loop waits for each save."""
    learner = Learner(net, size)
    run = make_loop(lambda batch: learner.step(*batch), learner.metrics)
    iterator = iter(nets.pipeline(net))
    checkpoint = tf.train.Checkpoint(model=learner.model, optimizer=learner.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, f"{folder}/run", max_to_keep=1)
    while True:
        [float(result) for result in run(iterator, tf.constant(1))]
        begin = time.perf_counter()
        manager.save()
        pacer.report_figure(time.perf_counter() - begin)


class LeastLoss:
    """An action that is called after each loop, and keeps the least loss."""

    least = float("inf")

    def __call__(self, logs: Any) -> None:
        """Updates the least loss with a loop's loss."""
        self.least = min(self.least, float(logs["training_loss"]))


def repeat(
    pacer: Pacer,
    run: Callable[[Any, Any], Any],
    iterator: Any,
    rounds: int,
    *,
    steps: int = 1,
    actions: Sequence[Callable[[Any], None]] = (),
) -> None:
    """Runs loops of `rounds` times `steps` steps for ever; the first result is the mean loss."""
    length = tf.constant(rounds)
    while True:
        results = [float(result) for result in run(iterator, length)]
        for action in actions:
            action({"training_loss": results[0]})
        pacer.report_steps(rounds * steps)


class _StepPrinter(Pacer):
    """A Pacer without a measuring process, which prints the steps as trainer_kit does."""

    def __init__(self) -> None:
        self._step = 0

    def report_steps(self, count: int) -> None:
        """Prints the step."""
        self._step += count
        print(f"train | step {self._step}", flush=True)


if __name__ == "__main__":
    train(_StepPrinter(), "", net="dense", loop=1)
