"""The experiment that test_workers.py runs on two workers, and what happens to one of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import trainer_kit
from tests.fork_server import train
from trainer_kit.run import plan
from trainer_kit.testing import TinyConfig, TinyTask, tiny_experiment
from trainer_kit.training.trainer import Trainer

LOOP = 40
STEPS = 120  # where early stopping ends a run
TRAIN_STEPS = 160


def on_step() -> None:
    """Does nothing: it is replaced in the processes that something happens to."""


def on_batch() -> None:
    """Does nothing: it is replaced in the processes that something happens to."""


@trainer_kit.configclass
class NormalizedConfig(TinyConfig):
    """The tiny task with dropout and batch normalization."""

    dropout: float = 0.3


@trainer_kit.register_task(NormalizedConfig)
class NormalizedTask(TinyTask):
    """Calls `on_step` in every training step and `on_batch` in every step of an evaluation."""

    def build_model(self) -> keras.Model:
        """Returns a model whose moving averages are another for each replica."""
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((8,)),
                layers.BatchNormalization(),
                layers.Dropout(self.task_config.dropout),
                layers.Dense(3),
            ]
        )

    @tf.autograph.experimental.do_not_convert
    def train_step(self, *arguments: Any, **named: Any) -> Any:
        """Takes the step."""
        tf.py_function(lambda: on_step(), [], [])
        return super().train_step(*arguments, **named)

    @tf.autograph.experimental.do_not_convert
    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        """Takes the step."""
        tf.py_function(lambda: on_batch(), [], [])
        return super().validation_step(*arguments, **named)


@trainer_kit.register_experiment("normalized")
def build_normalized() -> Any:
    """Loops longer than the steps after which workers agree, so that a stop cuts one; changing
    rates; an early stop.
    """
    hand = {"step": LOOP, "text": "learning_rate: 0.02"}
    plateau = {
        "metric": "validation_loss",
        "metric_comp": "lower",
        "parameter": "learning_rate_factor",
        "patience": 1,
        "min_delta": 9.0,
    }
    never_better = {
        "metric": "validation_loss",
        "metric_comp": "lower",
        "min_delta": 100.0,
        "patience": 2,
    }
    config = tiny_experiment(
        train_steps=TRAIN_STEPS,
        steps_per_loop=LOOP,
        summary_interval=LOOP,
        checkpoint_interval=LOOP,
        validation_interval=LOOP,
        max_to_keep=2,
        best_checkpoint_eval_metric="accuracy",
        best_checkpoints={"two": {"metric": "validation_loss", "metric_comp": "lower", "keep": 2}},
        early_stopping=never_better,
        export=["saved_model"],
        callbacks=[
            {"name": "tests.process.end_to_end.hyper_parameters_experiment:Hand", "args": hand},
            {"name": "set_from_file"},
            {"name": "reduce_on_plateau", "args": plateau},
        ],
    )
    runtime = {"distribution_strategy": "multi_worker_mirrored"}
    return config.replace(task=NormalizedConfig(), runtime=runtime)


@trainer_kit.configclass
class AggregatingConfig(NormalizedConfig):
    """See AggregatingTask."""


@trainer_kit.register_task(AggregatingConfig)
class AggregatingTask(NormalizedTask):
    """Collects the losses of an evaluation."""

    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        """Adds the losses of one step."""
        return [*(state or []), *step_logs[self.loss]]


@trainer_kit.register_experiment("aggregating")
def build_aggregating() -> Any:
    """The same run with that task."""
    return build_normalized().replace(task=AggregatingConfig())


def worker(hosts: Sequence[str], index: int, *arguments: str) -> None:
    """Trains as one of the workers at `hosts`."""
    cluster = {"cluster": {"worker": list(hosts)}, "task": {"type": "worker", "index": index}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    train(*arguments)


def hasty_worker(hosts: Sequence[str], index: int, *arguments: str) -> None:
    """Trains, and waits two seconds for the heartbeat of the chief in place of a minute."""
    plan._VISIBILITY_TIMEOUT_SECONDS = 2.0
    worker(hosts, index, *arguments)


def watched_worker(
    hosts: Sequence[str], index: int, file: str, folder: str, *arguments: str
) -> None:
    """Trains, and notes in `file` what Python changes in `folder`, a line for each change."""
    changes = (
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "fcntl.flock",
        "os.truncate",
        "os.link",
        "os.symlink",
    )

    def note(event: str, details: tuple[Any, ...]) -> None:
        writes = (
            event == "open"
            and isinstance(details[2], int)
            and details[2] & (os.O_WRONLY | os.O_RDWR)
        )
        # A file without a name, whose path is the folder, shows whether the folder can be written.
        is_inside = any(str(detail).startswith(f"{folder}/") for detail in details)
        if (writes or event in changes) and is_inside:
            os.write(notes, f"{event} {details}\n".encode())

    notes = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.addaudithook(note)
    worker(hosts, index, *arguments)


def hit_worker(
    hosts: Sequence[str], index: int, number: int, moment: str, count: int, *arguments: str
) -> None:
    """Trains until its `count`-th training step or batch of an evaluation, where it gets the signal
    `number`.

    That step ends only when the run has seen the signal: others may come before it otherwise.

    Args:
      hosts, index: as `worker` takes them.
      number: of the signal.
      moment: on_step or on_batch.
      count: of those since the start of this process.
      *arguments: of the command.
    """
    stop_requested = threading.Event()
    request_stop = Trainer.request_stop
    calls = 0

    def request_and_note(trainer: Trainer) -> None:
        request_stop(trainer)
        stop_requested.set()

    def hit() -> None:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.Signals(number))
            assert stop_requested.wait(20)

    Trainer.request_stop = request_and_note  # type: ignore[method-assign]
    globals()[moment] = hit
    worker(hosts, index, *arguments)
