"""The experiment that test_kills.py kills: a task that tells of each training step, and faults to
import.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
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

LOOP, STEPS, INTERVAL = 5, 60, 5
on_step: Callable[[], None] = lambda: None  # noqa: E731 -- replaced in the processes that are to be stopped


@trainer_kit.configclass
class KilledConfig(TinyConfig):
    """The linear task with dropout."""

    dropout: float = 0.3


@tf.autograph.experimental.do_not_convert
def moved(batch: Any, seed: tf.Tensor) -> Any:
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
            arrays, params, transform=moved if params.is_training else None
        )

    @tf.autograph.experimental.do_not_convert  # which is not the subject
    def train_step(self, *arguments: Any, **named: Any) -> Any:
        """Takes the step."""
        tf.py_function(lambda: on_step(), [], [])
        self.label.update_state(arguments[0][1])
        return {**super().train_step(*arguments, **named), "label": self.label}


@trainer_kit.register_experiment("killed")
def killed() -> Any:
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
def killed_fused() -> Any:
    """The same, three steps in one program: the linear task itself, because XLA takes no Python;
    dropout too.
    """
    os.environ.pop(
        "XLA_FLAGS", None
    )  # with the optimizations that users have; see tests/conftest.py
    return killed().replace(
        task=LinearConfig(dropout=0.3), trainer={"fuse_steps": 3, "checkpoint_interval": 10}
    )


def killed_at(point: str, occurrence: int, file: str, *arguments: str) -> None:
    """Trains until a write point is reached, and dies there; notes the points that were reached in
    `file`.
    """
    stop_at(point, occurrence)
    recorded(file, *arguments)


def killed_behind_its_reports(*arguments: str) -> None:
    """Trains with a history that is slow to be written, and dies when the first checkpoint has all
    its files.
    """
    write = JsonLinesWriter.write

    def slowly(writer: JsonLinesWriter, report: Report) -> None:
        time.sleep(2)
        write(writer, report)

    JsonLinesWriter.write = slowly  # type: ignore[method-assign]
    stop_at("checkpoint.move")
    train(*arguments)


def held_in_evaluation(step: int, file: str, *arguments: str) -> None:
    """Evaluates; makes `file` in the first evaluation of `step`, and ends that one when the file is
    removed.
    """
    evaluate, held = Controller.evaluate, False

    def slowly(controller: Controller, steps: int = -1) -> Any:
        nonlocal held
        logs = evaluate(controller, steps)
        if int(controller.global_step.numpy()) == step and not held:
            held = True
            Path(file).touch()
            while os.path.exists(file):
                time.sleep(0.05)
        return logs

    Controller.evaluate = slowly  # type: ignore[method-assign]
    train(*arguments)


def recorded(file: str, *arguments: str) -> None:
    """Trains, and notes the write points that are reached in `file`."""
    with record_points(file):
        train(*arguments)


def stopped_in_step(step: int, *arguments: str) -> None:
    """Trains with a SIGTERM in the middle of `step`, which ends only when the run has seen the
    signal.
    """
    global on_step
    seen, count, request_stop = threading.Event(), 0, Trainer.request_stop

    def noted(trainer: Trainer) -> None:
        request_stop(trainer)
        seen.set()

    def stop() -> None:
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen.wait(20)

    Trainer.request_stop = noted  # type: ignore[method-assign]
    on_step = stop
    train(*arguments)
