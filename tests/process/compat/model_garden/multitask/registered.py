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
on_step: Callable[[], None] = lambda: None  # noqa: E731 -- replaced in the processes that are to be stopped


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
class ToldConfig(multi_task.RegressionConfig):
    """A regression, one batch of whose training data may be spoilt."""

    bad_batch: int = -1


@task_factory.register_task_cls(ToldConfig)
class ToldTask(multi_task.RegressionTask):
    """Has a model of its own as well, and calls `on_step` in every step that trains it alone."""

    def build_model(self) -> Any:
        """Returns one small model."""
        return multi_task.SharedModel().sub_tasks["sum"]

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        """Has NaN in the one batch."""
        data, bad = super().build_inputs(params, input_context), self.task_config.bad_batch
        if not params.is_training or bad < 0:
            return data

        def spoil(number: Any, batch: Any) -> Any:
            return batch[0] * tf.where(tf.equal(number, bad), math.nan, 1.0), batch[1]

        return data.enumerate().map(spoil)

    def train_step(self, *arguments: Any, **named: Any) -> Any:
        """Takes the step."""
        tf.py_function(lambda: on_step(), [], [])
        return super().train_step(*arguments, **named)


def data() -> Path:
    """Where the records are."""
    return Path(os.environ["TINY_DATA"])


def several(make: Callable[[Path], Any]) -> Any:
    """The experiment that `make` returns, with tasks that tell of their steps, and one that knows
    the model.
    """
    config = make(data())
    config.task = TinyConfig(task_routines=config.task.task_routines)
    for one in config.task.task_routines:
        one.task_config = ToldConfig(one.task_config.as_dict())
    config.override({"trainer": BEST})
    return config


@exp_factory.register_config_factory("tiny_joint")
def joint() -> Any:
    """Each step trains both."""
    return several(multi_task.config_joint)


@exp_factory.register_config_factory("tiny_interleaving")
def interleaving() -> Any:
    """Each step trains one."""
    return several(multi_task.config_interleaving)


@exp_factory.register_config_factory("tiny_modelless")
def modelless() -> Any:
    """Nobody knows the model."""
    return multi_task.config_joint(data())


@exp_factory.register_config_factory("tiny_separate")
def separate() -> Any:
    """One regression is trained, and evaluated on two sets: all of the data, and one batch of it."""
    single = multi_task.config_joint(data())
    one = ToldConfig(single.task.task_routines[0].task_config.as_dict())
    routines = tuple(_routine(name, one, steps) for name, steps in EVALUATED)
    config = configs.MultiEvalExperimentConfig(task=one, eval_tasks=routines)
    trainer = single.trainer.as_dict()
    trainer = {
        name: value
        for name, value in trainer.items()
        if name not in ("trainer_type", "task_sampler")
    }
    config.override({"trainer": trainer, "runtime": single.runtime.as_dict()})
    config.override({"trainer": {**BEST, "best_checkpoint_eval_metric": "all|sum_error"}})
    return config


def _routine(name: str, config: Any, steps: int | None) -> Any:
    named = ToldConfig({**config.as_dict(), "name": name})  # theirs finds the steps by this name
    return configs.TaskRoutine(task_name=name, task_config=named, eval_steps=steps)


def eval_tasks(config: Any) -> list[Any]:
    """The tasks of `config.eval_tasks`; in strategy scope."""
    return [task_factory.get_task(one.task_config, name=one.task_name) for one in config.eval_tasks]


@exp_factory.register_config_factory("tiny_bad_joint")
def bad_joint() -> Any:
    """One batch of one task is spoilt, and left out."""
    return _bad(joint())


@exp_factory.register_config_factory("tiny_bad_interleaving")
def bad_interleaving() -> Any:
    """The same, in turns."""
    return _bad(interleaving())


def _bad(config: Any) -> Any:
    config.task.task_routines[1].task_config.override({"bad_batch": BAD_BATCH})
    config.override({"trainer": {"recovery_max_trials": 1}})
    return config


def trained(data: str, *arguments: str) -> None:
    """Trains on the data in a folder."""
    os.environ["TINY_DATA"] = data
    train(*arguments)


def killed_at(point: str, occurrence: int, data: str, *arguments: str) -> None:
    """Trains until a write point is reached, and dies there."""
    stop_at(point, occurrence)
    trained(data, *arguments)


def stopped_in_step(step: int, data: str, *arguments: str) -> None:
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
    trained(data, *arguments)
