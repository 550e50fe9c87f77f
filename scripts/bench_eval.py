"""How fast an evaluation is: ours, a hand-written tf.function and Model Garden's, of one small net on the same data.

    python -m scripts.bench_eval [--rounds=5] [--contenders=by_hand,by_hand_again,ours]

Each contender runs in a process of its own, in turn, round after round, so that a slow minute of the machine hits each;
the table has the medians of batches a second and the ratios to the hand-written loop, paired within a round. The
hand-written loop runs against itself too: what that ratio is off from 1 says nothing. Each evaluation begins its data
anew, resets loss and accuracy, and brings them to the host: 57 batches of 32 examples in `short`, 1,000 in `long`.

by_hand: one tf.function with a loop over a number of batches that it is told. ours: Trainer.evaluate with default
settings and an ArraySource; ours_same_data: with the pipeline of the hand-written one. ours_aggregating, ours_in_graph:
the same, with the outputs of all examples aggregated, step by step (the default) and by eval_tf_while_loop.
model_garden: its Trainer.evaluate with default settings and the pipeline of the hand-written one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

BATCH = 32
SIZES = {"short": 57 * BATCH - 27, "long": 1000 * BATCH}  # examples; the first is that of the digits
REPEATS = {"short": 40, "long": 4}
Evaluate = Callable[[], Any]


def arrays(examples: int) -> Any:
    """Returns random images float32 [examples, 64] and labels int32 [examples]."""
    import numpy as np

    random = np.random.default_rng(0)
    return random.random((examples, 64), np.float32), random.integers(0, 10, examples).astype(np.int32)


def pipeline(examples: int) -> Any:
    """Returns them as a tf.data.Dataset, as one writes it by hand."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays(examples)).batch(BATCH).prefetch(tf.data.AUTOTUNE)


def net(library: Any) -> Any:
    """Returns the net, of Keras 3 or tf_keras."""
    layers = library.layers
    return library.Sequential([library.Input((64,)), layers.Dense(32, activation="relu"), layers.Dense(10)])


def by_hand(examples: int) -> Evaluate:
    """Returns an evaluation as one writes it by hand."""
    import keras
    import tensorflow as tf

    model, data = net(keras), pipeline(examples)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy, loss = keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean()

    @tf.function
    def loop(iterator: Any, batches: Any) -> Any:
        accuracy.reset_state()
        loss.reset_state()
        for _ in tf.range(batches):
            images, labels = next(iterator)
            logits = model(images, training=False)
            accuracy.update_state(labels, logits)
            loss.update_state(loss_of(labels, logits), sample_weight=tf.shape(images)[0])
        return loss.result(), accuracy.result()

    batches = tf.constant(-(-examples // BATCH))
    return lambda: [float(value) for value in loop(iter(data), batches)]


def ours(examples: int, *, same_data: bool = False, aggregates: bool = False, **options: bool) -> Evaluate:
    """Returns an evaluation of a Trainer."""
    import keras
    import tensorflow as tf

    import trainer_kit as tk
    from trainer_kit.trainer import Trainer

    class BenchTask(tk.Task):
        def build_model(self) -> Any:
            return net(keras)

        def build_inputs(self, params: Any, input_context: Any = None) -> Any:
            return pipeline(examples) if same_data else tk.ArraySource(arrays(examples), params)

        def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
            losses = keras.losses.sparse_categorical_crossentropy(labels, model_outputs, from_logits=True)
            return tf.reduce_mean(losses)

        def build_metrics(self, training: bool = True) -> list[Any]:
            return [keras.metrics.SparseCategoricalAccuracy("accuracy")]

    class AggregatingTask(BenchTask):
        def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
            return {**super().validation_step(inputs, model, metrics), "labels": inputs[1]}

        def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
            counts = tf.math.bincount(step_logs["labels"][0], minlength=10, maxlength=10)
            return counts if state is None else state + counts

    data = {"global_batch_size": BATCH, "is_training": False}
    config = tk.ExperimentConfig(task=tk.TaskConfig()).replace(task={"validation_data": data}, trainer=options)
    task = (AggregatingTask if aggregates else BenchTask)(config.task)
    trainer, steps = Trainer(config, task, task.build_model(), None, train=False), tf.constant(-1)
    return lambda: trainer.evaluate(steps)


def model_garden(examples: int) -> Evaluate:
    """Returns an evaluation of Model Garden's trainer."""
    import tensorflow as tf
    import tf_keras
    from official.core import base_task, base_trainer, config_definitions

    class PeerTask(base_task.Task):
        def build_model(self) -> Any:
            return net(tf_keras)

        def build_inputs(self, params: Any, input_context: Any = None) -> Any:
            return pipeline(examples)

        def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
            losses = tf_keras.losses.sparse_categorical_crossentropy(labels, model_outputs, from_logits=True)
            return tf.reduce_mean(losses)

        def build_metrics(self, training: bool = True) -> list[Any]:
            return [tf_keras.metrics.SparseCategoricalAccuracy("accuracy")]

    config = config_definitions.ExperimentConfig()
    task = PeerTask(config.task)
    trainer = base_trainer.Trainer(config, task, task.build_model(), tf_keras.optimizers.SGD(), train=False)
    steps = tf.constant(-1)
    return lambda: {name: float(value) for name, value in trainer.evaluate(steps).items()}


CONTENDERS: dict[str, Callable[[int], Evaluate]] = {
    "by_hand": by_hand,
    "by_hand_again": by_hand,
    "ours": ours,
    "ours_same_data": lambda examples: ours(examples, same_data=True),
    "ours_aggregating": lambda examples: ours(examples, aggregates=True),
    "ours_in_graph": lambda examples: ours(examples, aggregates=True, eval_tf_while_loop=True),
    "model_garden": model_garden,
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print("RATES", *[_rate(CONTENDERS[arguments.one], size) for size in SIZES])
        return
    names = arguments.contenders.split(",")
    rates: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
        for name in names:
            rates[name].append(_in_a_process(name))
    _print_table(rates)


def _rate(make: Callable[[int], Evaluate], size: str) -> float:
    """Batches a second, the median of single evaluations after two that trace and warm up."""
    evaluate, seconds = make(SIZES[size]), []
    for _ in range(REPEATS[size] + 2):
        begin = time.perf_counter()
        evaluate()
        seconds.append(time.perf_counter() - begin)
    return -(-SIZES[size] // BATCH) / statistics.median(seconds[2:])


def _in_a_process(name: str) -> list[float]:
    command = [sys.executable, "-m", "scripts.bench_eval", "--one", name]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RATES")]
    if not lines:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return [float(rate) for rate in lines[0].split()[1:]]


def _print_table(rates: dict[str, list[list[float]]]) -> None:
    base = next(iter(rates.values()))
    print(f"{'batches/s, medians':<20}" + "".join(f"{size:>10}{'ratio':>8}{'least':>7}{'most':>7}" for size in SIZES))
    for name, rounds in rates.items():
        row = f"{name:<20}"
        for column in range(len(SIZES)):
            ratios = [one[column] / first[column] for one, first in zip(rounds, base, strict=True)]
            median = statistics.median(one[column] for one in rounds)
            row += f"{median:>10,.0f}{statistics.median(ratios):>8.2f}{min(ratios):>7.2f}{max(ratios):>7.2f}"
        print(row)


if __name__ == "__main__":
    main()
