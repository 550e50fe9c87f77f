"""trainer_kit runs machine-learning experiments on TensorFlow.

The public names are resolved when first used, so that importing trainer_kit does not import TensorFlow.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as typing has it; a command's first lines import nothing that takes time

__version__ = "0.1.0"

_HOME = {
    "Config": "config.base",
    "configclass": "config.base",
    "DataConfig": "config.schema",
    "ExperimentConfig": "config.schema",
    "RuntimeConfig": "config.runtime",
    "TaskConfig": "config.schema",
    "TrainerConfig": "config.schema",
    "OptimizationConfig": "config.optimization",
    "DataError": "errors",
    "StopTraining": "errors",
    "get_experiment": "experiment",
    "register_experiment": "experiment",
    "register_task": "experiment",
    "ArraySource": "inputs.arrays",
    "TFRecordSource": "inputs.records",
    "apply_gradients": "optimizers.gradients",
    "scale_loss": "optimizers.gradients",
    "load_model": "serving.load",
    "load_weights": "serving.load",
    "Task": "tasks.base",
    "Trainer": "trainer",
    "launch": "launcher",
    "run_experiment": "runner",
    "supervise": "supervisor.attempts",
}

__all__ = [*_HOME, "__version__"]

if TYPE_CHECKING:
    from typing import Any

    from trainer_kit.config.base import Config as Config
    from trainer_kit.config.base import configclass as configclass
    from trainer_kit.config.optimization import OptimizationConfig as OptimizationConfig
    from trainer_kit.config.runtime import RuntimeConfig as RuntimeConfig
    from trainer_kit.config.schema import DataConfig as DataConfig
    from trainer_kit.config.schema import ExperimentConfig as ExperimentConfig
    from trainer_kit.config.schema import TaskConfig as TaskConfig
    from trainer_kit.config.schema import TrainerConfig as TrainerConfig
    from trainer_kit.errors import DataError as DataError
    from trainer_kit.errors import StopTraining as StopTraining
    from trainer_kit.experiment import get_experiment as get_experiment
    from trainer_kit.experiment import register_experiment as register_experiment
    from trainer_kit.experiment import register_task as register_task
    from trainer_kit.inputs.arrays import ArraySource as ArraySource
    from trainer_kit.inputs.records import TFRecordSource as TFRecordSource
    from trainer_kit.launcher import launch as launch
    from trainer_kit.optimizers.gradients import apply_gradients as apply_gradients
    from trainer_kit.optimizers.gradients import scale_loss as scale_loss
    from trainer_kit.runner import run_experiment as run_experiment
    from trainer_kit.serving.load import load_model as load_model
    from trainer_kit.serving.load import load_weights as load_weights
    from trainer_kit.supervisor.attempts import supervise as supervise
    from trainer_kit.tasks.base import Task as Task
    from trainer_kit.trainer import Trainer as Trainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trainer_kit' has no attribute {name!r}; it has: {', '.join(_HOME)}")
    return getattr(importlib.import_module(f"trainer_kit.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
