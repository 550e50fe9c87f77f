"""The experiment that test_preemption.py stops: signals sent from inside, at a named moment."""

from __future__ import annotations

import os
import time
from typing import Any

import tensorflow as tf

import trainer_kit
from tests.engine.linear_task import LinearTask, linear_experiment
from tests.fork_server import train
from trainer_kit import files
from trainer_kit.testing import TinyConfig

STEPS = 60
LOOP = 10
_MOMENT = ""
_SECONDS = 0.0
_SIGNALS: tuple[int, ...] = ()


def reach_moment(moment: str) -> None:
    """Sends the signals, once, if this is the moment, and then takes its time."""
    global _MOMENT
    if moment != _MOMENT:
        return
    _MOMENT = ""
    for number in _SIGNALS:
        os.kill(os.getpid(), number)
        time.sleep(1.2 if _SIGNALS.count(number) > 1 else 0.3)  # two of a kind are to count as two
    time.sleep(_SECONDS)


@trainer_kit.configclass
class StoppedConfig(TinyConfig):
    """The tiny task with dropout."""

    dropout: float = 0.3


@trainer_kit.register_task(StoppedConfig)
class StoppedTask(LinearTask):
    """Tells of the moments that it knows of."""

    def build_model(self) -> Any:
        """Returns the model."""
        reach_moment("build")
        return super().build_model()

    @tf.autograph.experimental.do_not_convert
    def train_step(self, *arguments: Any, **named: Any) -> Any:
        """Takes the step; tracing it is a part of the compilation."""
        reach_moment("compile")
        iterations = named["optimizer"].iterations
        tf.py_function(lambda step: reach_moment(f"step {int(step)}"), [iterations], [])
        return super().train_step(*arguments, **named)

    @tf.autograph.experimental.do_not_convert
    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        """Takes the step."""
        reach_moment("compile evaluation")
        tf.py_function(lambda: reach_moment("evaluation"), [], [])
        return super().validation_step(*arguments, **named)


@trainer_kit.register_experiment("stopped")
def build_stopped() -> Any:
    """Momentum, dropout, shuffled data; evaluations between the checkpoints, the best kept."""
    config = linear_experiment(
        train_steps=STEPS,
        steps_per_loop=LOOP,
        summary_interval=LOOP,
        checkpoint_interval=20,
        validation_interval=10,
        best_checkpoint_eval_metric="accuracy",
    )
    return config.replace(task=StoppedConfig())


def train_with_signals_at(
    moment: str, signals: tuple[int, ...], seconds: float, *arguments: str
) -> None:
    """Trains, and gets signals at a moment: a step, a compilation, an evaluation, a write point."""
    global _MOMENT, _SIGNALS, _SECONDS
    _MOMENT = moment
    _SIGNALS = signals
    _SECONDS = seconds

    def reach_point(point: str, path: str) -> None:
        reach_moment(point)

    files.on_write_point = reach_point
    train(*arguments)
