"""What it costs to lose nothing: the stall of a save, the way to a far position, the start from a checkpoint.

`python -m scripts.bench_checkpoints [rounds]` prints medians, side by side, of saves in the background and on the main
thread, of a model of 200 variables of 4 MiB; of seeks to steps 1,000 and 1,000,000; and the size of the position.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import trainer_kit as tk
from trainer_kit.controller import Controller

VARIABLES, SIDE = 200, 1024  # of 4 MiB each


class ManyWeights(keras.layers.Layer):
    """200 square matrices, of which each step reads a row."""

    def build(self, shape: Any) -> None:
        """Makes the weights."""
        self.matrices = [self.add_weight(shape=(SIDE, SIDE), name=f"matrix_{i}") for i in range(VARIABLES)]

    def call(self, inputs: Any) -> Any:
        """Returns one number for each example."""
        return tf.reduce_sum(inputs, axis=-1) * sum(matrix[0, 0] for matrix in self.matrices)


@tk.register_task(tk.TaskConfig)
class LargeTask(tk.Task):
    """A model that takes long to save and no time to train."""

    def build_model(self) -> keras.Model:
        """Returns the model."""
        return keras.Sequential([keras.Input((2,)), ManyWeights()])

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        """Returns the data."""
        return tk.ArraySource((np.ones((64, 2), np.float32), np.ones(64, np.float32)), params)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        """Returns the loss."""
        return tf.reduce_mean((model_outputs - labels) ** 2) * 1e-6


class TimedController(Controller):
    """Notes how long the loop stands still for each save."""

    stalls: list[float]

    def save_checkpoint(self) -> None:
        """Saves."""
        start = time.perf_counter()
        super().save_checkpoint()
        type(self).stalls.append(time.perf_counter() - start)
        time.sleep(4.0)  # intervals longer than a save: otherwise the next one waits for it


class _Silent:
    def write(self, report: Any) -> None:
        pass

    flush = close = lambda self: None


def save_stalls(asynchronous: bool, saves: int) -> list[float]:
    """Returns the seconds of each of the saves but the first, which also traces the copy."""
    sgd = {"optimizer": {"type": "sgd"}, "learning_rate": {"type": "constant", "constant": {"learning_rate": 1e-9}}}
    steps = {"train_steps": saves + 1, "steps_per_loop": 1, "summary_interval": 1, "checkpoint_interval": 1}
    config = tk.ExperimentConfig(task=tk.TaskConfig()).replace(
        task={"train_data": {"global_batch_size": 8, "is_training": True}},
        trainer={**steps, "optimizer_config": sgd, "max_to_keep": 1},
    )
    TimedController.stalls = []
    with tempfile.TemporaryDirectory() as folder:
        task = LargeTask(config.task)
        tk.run_experiment(
            None, task, "train", config, folder, save_summary=False, controller_cls=TimedController,
            enable_async_checkpointing=asynchronous, console=_Silent(),
        )  # fmt: skip
    return TimedController.stalls[1 : saves + 1]


def seconds_of(action: Callable[[], Any]) -> float:
    """Returns how long a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _first_batch(source: tk.ArraySource, position: int) -> Any:
    return next(iter(source.at(position)))


def main(rounds: int = 3) -> None:
    """Prints the figures as lines of text and, last, as JSON."""
    figures: dict[str, float] = {}
    for name, asynchronous in (("background", True), ("main thread", False)):
        figures[f"stall of a save, {name}, s"] = statistics.median(save_stalls(asynchronous, rounds))
    ratio = figures["stall of a save, background, s"] / figures["stall of a save, main thread, s"]
    figures["stall, background to main thread"] = ratio
    examples = (np.arange(100_000, dtype=np.int32),)
    source = tk.ArraySource(examples, tk.DataConfig(is_training=True, global_batch_size=32, seed=1))
    for position in (1_000, 1_000_000):
        times = [seconds_of(functools.partial(_first_batch, source, position)) for _ in range(2 * rounds + 1)]
        figures[f"seek to step {position:,}, arrays, s"] = statistics.median(times)
    for name, value in figures.items():
        print(f"{name:45} {value:.4f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
