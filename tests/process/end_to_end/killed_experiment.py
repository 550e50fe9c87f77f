"""The experiment that test_kills.py kills: a task that tells of each training step, and faults to
import.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import trainer_kit
from tests.engine.linear_task import LinearConfig, LinearTask, linear_experiment
from tests.fork_server import train
from trainer_kit.run.controller import Controller
from trainer_kit.telemetry.metrics_jsonl import JsonLinesWriter
from trainer_kit.telemetry.report import Report
from trainer_kit.testing import TinyConfig, record_points, stop_at
from trainer_kit.testing.tiny_task import FEATURES, tiny_arrays
from trainer_kit.training.trainer import Trainer

LOOP = 5
STEPS = 60
INTERVAL = 5


def on_step() -> None:
    """Does nothing: it is replaced in the processes that are to be stopped."""


@trainer_kit.configclass
class KilledConfig(TinyConfig):
    """The linear task with dropout."""

    dropout: float = 0.3


@tf.autograph.experimental.do_not_convert
def move_points(batch: Any, seed: tf.Tensor) -> Any:
    """Moves each point a little, by the seed of its example, int32 [examples, 2]; in graph."""
    points, labels = batch
    angles = tf.cast(seed[:, :1] % 1000, tf.float32) * tf.range(1.0, FEATURES + 1.0)
    return points + 0.1 * tf.sin(angles), labels


@trainer_kit.register_task(KilledConfig)
class KilledTask(LinearTask):
    """Moves the training points, and calls `on_step` in every training step, once on each replica.

    A step returns a metric, the mean label of the loop so far.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.label = keras.metrics.Mean("label")

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        """Returns the points; those to train on are moved by the seed of each example."""
        arrays = tiny_arrays(bool(params.is_training), self.task_config.examples)
        return trainer_kit.ArraySource(
            arrays, params, transform=move_points if params.is_training else None
        )

    @tf.autograph.experimental.do_not_convert  # which is not the subject
    def train_step(self, *arguments: Any, **named: Any) -> Any:
        """Takes the step."""
        tf.py_function(lambda: on_step(), [], [])
        self.label.update_state(arguments[0][1])
        return {**super().train_step(*arguments, **named), "label": self.label}


@trainer_kit.register_experiment("killed")
def build_killed() -> Any:
    """Momentum, dropout, shuffled data; a checkpoint every 5 steps, an evaluation every 15, two
    bests kept.
    """
    config = linear_experiment(
        train_steps=STEPS,
        steps_per_loop=LOOP,
        summary_interval=LOOP,
        checkpoint_interval=INTERVAL,
        validation_interval=15,
        max_to_keep=2,
        best_checkpoint_eval_metric="accuracy",
        best_checkpoints={"two": {"metric": "validation_loss", "metric_comp": "lower", "keep": 2}},
    )
    return config.replace(task=KilledConfig())


@trainer_kit.register_experiment("killed_fused")
def build_killed_fused() -> Any:
    """The same, three steps in one program: the linear task itself, because XLA takes no Python;
    dropout too.
    """
    # With the optimizations that users have; see tests/conftest.py.
    os.environ.pop("XLA_FLAGS", None)
    return build_killed().replace(
        task=LinearConfig(dropout=0.3), trainer={"fuse_steps": 3, "checkpoint_interval": 10}
    )


def train_and_die_at(point: str, occurrence: int, file: str, *arguments: str) -> None:
    """Trains until a write point is reached, and dies there; notes the points that were reached in
    `file`.
    """
    stop_at(point, occurrence)
    train_and_record_points(file, *arguments)


def train_and_die_before_reports(*arguments: str) -> None:
    """Trains with a history that is slow to be written, and dies when the first checkpoint has all
    its files.
    """
    write = JsonLinesWriter.write

    def write_slowly(writer: JsonLinesWriter, report: Report) -> None:
        time.sleep(2)
        write(writer, report)

    JsonLinesWriter.write = write_slowly  # type: ignore[method-assign]
    stop_at("checkpoint.move")
    train(*arguments)


def train_and_hold_evaluation(step: int, file: str, *arguments: str) -> None:
    """Evaluates; makes `file` in the first evaluation of `step`, and ends that one when the file is
    removed.
    """
    evaluate = Controller.evaluate
    was_held = False

    def evaluate_slowly(controller: Controller, steps: int = -1) -> Any:
        nonlocal was_held
        logs = evaluate(controller, steps)
        if int(controller.global_step.numpy()) == step and not was_held:
            was_held = True
            Path(file).touch()
            while os.path.exists(file):
                time.sleep(0.05)
        return logs

    Controller.evaluate = evaluate_slowly  # type: ignore[method-assign]
    train(*arguments)


def train_and_record_points(file: str, *arguments: str) -> None:
    """Trains, and notes the write points that are reached in `file`."""
    with record_points(file):
        train(*arguments)


def train_and_stop_in_step(step: int, *arguments: str) -> None:
    """Trains with a SIGTERM in the middle of `step`, which ends only when the run has seen the
    signal.
    """
    global on_step
    stop_requested = threading.Event()
    request_stop = Trainer.request_stop
    count = 0

    def request_and_note(trainer: Trainer) -> None:
        request_stop(trainer)
        stop_requested.set()

    def stop() -> None:
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop_requested.wait(20)

    Trainer.request_stop = request_and_note  # type: ignore[method-assign]
    on_step = stop
    train(*arguments)
