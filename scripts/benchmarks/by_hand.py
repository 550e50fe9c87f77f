"""Hand-written training and evaluation loops, the baseline of all comparisons.

Each function is run by a process of its own, takes its turns from a Pacer and never returns. Metrics are reset before
and read after each loop, which is what it takes to see the same numbers; in the same graph, which is the fastest way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from scripts.benchmarks import nets, samples
from scripts.benchmarks.pacer import Pacer


class Learner:
    """A net with its optimizer, loss and metrics. Created in strategy scope.

    Args:
      net, size: as `nets.build` takes them.
      metrics: The number of metrics in addition to the mean loss.
      replicas: The number of replicas that share a batch.
    """

    def __init__(self, net: str, size: int = 0, metrics: int = 1, replicas: int = 1) -> None:
        self.model, self.optimizer = nets.build(keras, net, size), nets.optimizer(keras, net)
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
            share = loss / self._replicas if self._replicas > 1 else loss  # gradients are summed over the replicas
        gradients: list[Any] = tape.gradient(share, self.model.trainable_variables)
        mean_loss, *accuracies = self.metrics
        mean_loss.update_state(loss)
        for accuracy in accuracies:
            accuracy.update_state(labels, logits)
        return gradients

    def update(self, gradients: list[Any]) -> None:
        """Updates the weights; in graph, on a replica."""
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))

    def loop(self) -> Any:
        """Returns a tf.function that takes an iterator and a number of steps, and returns `results()`."""

        @tf.function
        def run(iterator: Any, steps: Any) -> Any:
            self.begin()
            for _ in tf.range(steps):
                features, labels = next(iterator)
                self.step(features, labels)
            return self.results()

        return run

    def begin(self) -> None:
        """Resets the metrics; in graph."""
        for metric in self.metrics:
            metric.reset_state()

    def results(self) -> list[Any]:
        """Returns the values of the metrics; in graph."""
        return [metric.result() for metric in self.metrics]


def train(pacer: Pacer, folder: str, *, net: str, loop: int, size: int = 0, metrics: int = 1, actions: int = 0) -> None:
    """Trains in loops of `loop` steps, each one call of one tf.function; then calls `actions` functions."""
    del folder
    _let_gpus_grow()
    run, iterator, steps = Learner(net, size, metrics).loop(), iter(nets.pipeline(net)), tf.constant(loop)
    run_loops(pacer, loop, lambda: run(iterator, steps), [Latest() for _ in range(actions)])


def train_fused(pacer: Pacer, folder: str, *, net: str, loop: int, fuse: int) -> None:
    """Trains with `fuse` steps in one XLA program, over stacked batches."""
    del folder
    _let_gpus_grow()
    learner = Learner(net)

    @tf.function(jit_compile=True)
    def fused(features: Any, labels: Any) -> None:
        for number in tf.range(fuse):
            learner.step(features[number], labels[number])

    @tf.function
    def run(iterator: Any, programs: Any) -> Any:
        learner.begin()
        for _ in tf.range(programs):
            features, labels = next(iterator)
            fused(features, labels)
        return learner.results()

    iterator, programs = iter(nets.pipeline(net, stack=fuse)), tf.constant(loop // fuse)
    run_loops(pacer, loop, lambda: run(iterator, programs))


def train_replicas(pacer: Pacer, folder: str, *, net: str, loop: int, replicas: int) -> None:
    """Trains on logical CPUs under MirroredStrategy, strategy.run inside the loop."""
    del folder
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    _let_gpus_grow()
    devices = [f"CPU:{number}" for number in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        learner = Learner(net, replicas=replicas)

    @tf.function
    def run(iterator: Any, steps: Any) -> Any:
        learner.begin()
        for _ in tf.range(steps):
            strategy.run(learner.step, args=next(iterator))
        return learner.results()

    def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return nets.pipeline(net, context.get_per_replica_batch_size(samples.BATCH))

    iterator, steps = iter(strategy.distribute_datasets_from_function(batches)), tf.constant(loop)
    run_loops(pacer, loop, lambda: run(iterator, steps))


def evaluate(pacer: Pacer, folder: str, *, net: str, examples: int) -> None:
    """Evaluates all of the data repeatedly, each time from its start, in one tf.function."""
    del folder
    _let_gpus_grow()
    model, data = nets.build(keras, net), nets.one_pass(net, examples)
    accuracy, mean_loss = nets.accuracies(keras, 1)[0], keras.metrics.Mean()

    @tf.function
    def run(iterator: Any, batches: Any) -> Any:
        accuracy.reset_state()
        mean_loss.reset_state()
        for _ in tf.range(batches):
            features, labels = next(iterator)
            logits = model(features, training=False)
            accuracy.update_state(labels, logits)
            mean_loss.update_state(nets.loss(keras, labels, logits), sample_weight=tf.shape(labels)[0])
        return mean_loss.result(), accuracy.result()

    batches = -(-examples // samples.BATCH)
    count = tf.constant(batches)
    run_loops(pacer, batches, lambda: run(iter(data), count))


class Latest:
    """An action that is called after each loop, and keeps the least loss."""

    def __init__(self) -> None:
        self.least = float("inf")

    def __call__(self, logs: Any) -> None:
        """Updates the least loss with a loop's loss."""
        self.least = min(self.least, float(logs["training_loss"]))


def run_loops(
    pacer: Pacer,
    count: int,
    run: Callable[[], Any],
    after: Sequence[Callable[[Any], None]] = (),
) -> None:
    """Runs loops for ever; the first result of `run` is the mean loss."""
    while True:
        results = [float(result) for result in run()]
        for action in after:
            action({"training_loss": results[0]})
        pacer.done(count)


def _let_gpus_grow() -> None:
    """Lets GPU memory grow: otherwise the first process would take all memory of all GPUs."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
