"""Loops as one writes them by hand: what all else is compared with.

Each function is run by a process of its own, takes its turns from a Pacer and never returns. Metrics are reset before
and read after each loop, which is what it takes to see the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from scripts.benchmarks import nets, samples
from scripts.benchmarks.pacer import Pacer

Step = Callable[[Any, Any], None]


def train(pacer: Pacer, folder: str, *, net: str, loop: int, size: int = 0, metrics: int = 1, actions: int = 0) -> None:
    """Trains in loops of `loop` steps, each one call of one tf.function; then calls `actions` functions."""
    del folder
    _let_gpus_grow()
    step, results = _step(net, size, metrics)

    @tf.function
    def run(iterator: Any, steps: Any) -> None:
        for _ in tf.range(steps):
            features, labels = next(iterator)
            step(features, labels)

    iterator, steps = iter(nets.pipeline(net)), tf.constant(loop)
    after = [Latest() for _ in range(actions)]
    _run_loops(pacer, loop, lambda: run(iterator, steps), results, after)


def train_fused(pacer: Pacer, folder: str, *, net: str, loop: int, fuse: int) -> None:
    """Trains with `fuse` steps in one XLA program, over stacked batches."""
    del folder
    _let_gpus_grow()
    step, results = _step(net, 0, 1)

    @tf.function(jit_compile=True)
    def fused(features: Any, labels: Any) -> None:
        for number in tf.range(fuse):
            step(features[number], labels[number])

    @tf.function
    def run(iterator: Any, programs: Any) -> None:
        for _ in tf.range(programs):
            features, labels = next(iterator)
            fused(features, labels)

    iterator, programs = iter(nets.pipeline(net, stack=fuse)), tf.constant(loop // fuse)
    _run_loops(pacer, loop, lambda: run(iterator, programs), results)


def train_replicas(pacer: Pacer, folder: str, *, net: str, loop: int, replicas: int) -> None:
    """Trains on logical CPUs under MirroredStrategy, strategy.run inside the loop."""
    del folder
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    _let_gpus_grow()
    devices = [f"CPU:{number}" for number in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        step, results = _step(net, 0, 1, replicas)

    @tf.function
    def run(iterator: Any, steps: Any) -> None:
        for _ in tf.range(steps):
            strategy.run(step, args=next(iterator))

    def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return nets.pipeline(net, context.get_per_replica_batch_size(samples.BATCH))

    iterator, steps = iter(strategy.distribute_datasets_from_function(batches)), tf.constant(loop)
    _run_loops(pacer, loop, lambda: run(iterator, steps), results)


def evaluate(pacer: Pacer, folder: str, *, net: str, examples: int) -> None:
    """Evaluates all of the data again and again, each time from its start; all in one tf.function."""
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
    _run_loops(pacer, batches, lambda: [float(result) for result in run(iter(data), count)], [])


class Latest:
    """Something called after each loop: keeps the least of what it is given."""

    def __init__(self) -> None:
        self.least = float("inf")

    def __call__(self, logs: Any) -> None:
        """Looks at a loop's loss."""
        self.least = min(self.least, float(logs["training_loss"]))


def _step(net: str, size: int, metrics: int, replicas: int = 1) -> tuple[Step, list[Any]]:
    """Returns a training step and the metrics that it updates, the mean loss first. In scope of the strategy."""
    model, optimizer = nets.build(keras, net, size), nets.optimizer(keras, net)
    optimizer.build(model.trainable_variables)
    accuracies, mean_loss = nets.accuracies(keras, metrics), keras.metrics.Mean()

    def step(features: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            loss = nets.loss(keras, labels, logits)
            share = loss / replicas if replicas > 1 else loss  # gradients are summed over the replicas
        gradients = tape.gradient(share, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        for accuracy in accuracies:
            accuracy.update_state(labels, logits)
        mean_loss.update_state(loss)

    return step, [mean_loss, *accuracies]


def _run_loops(
    pacer: Pacer,
    count: int,
    run: Callable[[], Any],
    metrics: Sequence[Any],
    after: Sequence[Callable[[Any], None]] = (),
) -> None:
    while True:
        for metric in metrics:
            metric.reset_state()
        run()
        results = [float(metric.result()) for metric in metrics]
        for action in after:
            action({"training_loss": results[0]})
        pacer.done(count)


def _let_gpus_grow() -> None:
    """Without it the first process would take all memory of all GPUs."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
