"""Tiny experiments of several tasks as Model Garden registers them, for the command line: their
data are in $TINY_DATA.

Use --experiment=tfm/tiny_joint with
--import_module=tests.process.compat.model_garden.multitask.registered.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from official.core import exp_factory, task_factory
from official.modeling.multitask import configs, multitask

from tests.engine.compat.model_garden.tiny import multi_task
from tests.fork_server import train
from trainer_kit.testing import stop_at
from trainer_kit.training.trainer import Trainer

BEST = {
    "best_checkpoint_eval_metric": "sum|sum_error",
    "best_checkpoint_metric_comp": "lower",
    "best_checkpoint_export_subdir": "best_ckpt",
}
EVALUATED: tuple[tuple[str, int | None], ...] = (("all", None), ("some", 1))
BAD_BATCH = 4


def on_step() -> None:
    """Does nothing: it is replaced in the processes that are to be stopped."""


@dataclasses.dataclass
class TinyConfig(configs.MultiTaskConfig):
    """Two regressions."""


@task_factory.register_task_cls(TinyConfig)
class TinyMultiTask(multitask.MultiTask):
    """Knows its model."""

    def build_multitask_model(self) -> Any:
        """Returns the model of both."""
        return multi_task.SharedModel()


@dataclasses.dataclass
class NotingConfig(multi_task.RegressionConfig):
    """A regression, one batch of whose training data may be spoilt."""

    bad_batch: int = -1


@task_factory.register_task_cls(NotingConfig)
class NotingTask(multi_task.RegressionTask):
    """Has a model of its own as well, and calls `on_step` in every step that trains it alone."""

    def build_model(self) -> Any:
        """Returns one small model."""
        return multi_task.SharedModel().sub_tasks["sum"]

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        """Has NaN in the one batch."""
        data = super().build_inputs(params, input_context)
        bad_batch = self.task_config.bad_batch
        if not params.is_training or bad_batch < 0:
            return data

        def spoil(number: Any, batch: Any) -> Any:
            return batch[0] * tf.where(tf.equal(number, bad_batch), math.nan, 1.0), batch[1]

        return data.enumerate().map(spoil)

    def train_step(self, *arguments: Any, **named: Any) -> Any:
        """Takes the step."""
        tf.py_function(lambda: on_step(), [], [])
        return super().train_step(*arguments, **named)


def data() -> Path:
    """Where the records are."""
    return Path(os.environ["TINY_DATA"])


def config_of_several(make: Callable[[Path], Any]) -> Any:
    """The experiment that `make` returns, with tasks that tell of their steps, and one that knows
    the model.
    """
    config = make(data())
    config.task = TinyConfig(task_routines=config.task.task_routines)
    for routine in config.task.task_routines:
        routine.task_config = NotingConfig(routine.task_config.as_dict())
    config.override({"trainer": BEST})
    return config


@exp_factory.register_config_factory("tiny_joint")
def joint() -> Any:
    """Each step trains both."""
    return config_of_several(multi_task.config_joint)


@exp_factory.register_config_factory("tiny_interleaving")
def interleaving() -> Any:
    """Each step trains one."""
    return config_of_several(multi_task.config_interleaving)


@exp_factory.register_config_factory("tiny_modelless")
def modelless() -> Any:
    """Nobody knows the model."""
    return multi_task.config_joint(data())


@exp_factory.register_config_factory("tiny_separate")
def separate() -> Any:
    """One regression is trained, and evaluated on two sets: all of the data, and a batch of it."""
    single = multi_task.config_joint(data())
    task = NotingConfig(single.task.task_routines[0].task_config.as_dict())
    routines = tuple(_routine(name, task, steps) for name, steps in EVALUATED)
    config = configs.MultiEvalExperimentConfig(task=task, eval_tasks=routines)
    trainer = single.trainer.as_dict()
    del trainer["trainer_type"], trainer["task_sampler"]
    config.override({"trainer": trainer, "runtime": single.runtime.as_dict()})
    config.override({"trainer": {**BEST, "best_checkpoint_eval_metric": "all|sum_error"}})
    return config


def _routine(name: str, config: Any, steps: int | None) -> Any:
    named = NotingConfig({**config.as_dict(), "name": name})  # theirs finds the steps by this name
    return configs.TaskRoutine(task_name=name, task_config=named, eval_steps=steps)


def create_eval_tasks(config: Any) -> list[Any]:
    """The tasks of `config.eval_tasks`; in strategy scope."""
    return [
        task_factory.get_task(routine.task_config, name=routine.task_name)
        for routine in config.eval_tasks
    ]


@exp_factory.register_config_factory("tiny_bad_joint")
def bad_joint() -> Any:
    """One batch of one task is spoilt, and left out."""
    return _spoil_batch(joint())


@exp_factory.register_config_factory("tiny_bad_interleaving")
def bad_interleaving() -> Any:
    """The same, in turns."""
    return _spoil_batch(interleaving())


def _spoil_batch(config: Any) -> Any:
    config.task.task_routines[1].task_config.override({"bad_batch": BAD_BATCH})
    config.override({"trainer": {"recovery_max_trials": 1}})
    return config


def train_on_data(data: str, *arguments: str) -> None:
    """Trains on the data in a folder."""
    os.environ["TINY_DATA"] = data
    train(*arguments)


def train_and_die_at(point: str, occurrence: int, data: str, *arguments: str) -> None:
    """Trains until a write point is reached, and dies there."""
    stop_at(point, occurrence)
    train_on_data(data, *arguments)


def train_and_stop_in_step(step: int, data: str, *arguments: str) -> None:
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
    train_on_data(data, *arguments)
