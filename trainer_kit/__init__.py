"""trainer_kit runs machine-learning experiments on TensorFlow.

The public names are resolved at their first use, so that importing trainer_kit does not import
TensorFlow.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in typing, which takes time to import

__version__ = "0.2.0"

_HOME = {
    "Config": "config.schema.configclass",
    "configclass": "config.schema.configclass",
    "DataConfig": "config.schema.experiment",
    "ExperimentConfig": "config.schema.experiment",
    "RuntimeConfig": "config.schema.runtime",
    "TaskConfig": "config.schema.experiment",
    "TrainerConfig": "config.schema.experiment",
    "OptimizationConfig": "config.schema.optimization",
    "NamedOptimizerConfig": "config.schema.optimization",
    "GanConfig": "config.schema.gan_config",
    "MultiTaskConfig": "config.schema.multitask",
    "TaskRoutine": "config.schema.multitask",
    "BaseOptimizerConfig": "config.schema.optimizer_configs",
    "Callback": "callbacks.callback",
    "register_callback": "callbacks.configured_callbacks",
    "DataError": "errors",
    "StopTraining": "errors",
    "get_experiment": "config.experiment_registry",
    "register_experiment": "config.experiment_registry",
    "register_task": "config.experiment_registry",
    "register_optimizer": "config.registration",
    "register_schedule": "config.registration",
    "register_dataset": "config.registration",
    "register_gradient_processor": "config.registration",
    "register_metric": "config.registration",
    "ArraySource": "inputs.sources.arrays",
    "TFRecordSource": "inputs.sources.tfrecords",
    "apply_gradients": "optimizers.gradients",
    "needs_gradients": "optimizers.gradients",
    "scale_loss": "optimizers.gradients",
    "expose": "training.step_tensors",
    "export": "serving.model_export",
    "get_predictor": "serving.predictor",
    "predict": "serving.prediction",
    "load_model": "serving.model_loading",
    "load_weights": "serving.model_loading",
    "GanTask": "training.gan_task",
    "MultiTask": "training.multitask.multi_task",
    "Task": "training.task",
    "Trainer": "training.trainer",
    "launch": "run.launcher",
    "run_experiment": "run.runner",
    "supervise": "run.supervisor",
}

__all__ = [*_HOME, "__version__"]

if TYPE_CHECKING:
    from typing import Any

    from trainer_kit.callbacks.callback import Callback as Callback
    from trainer_kit.callbacks.configured_callbacks import register_callback as register_callback
    from trainer_kit.config.experiment_registry import get_experiment as get_experiment
    from trainer_kit.config.experiment_registry import register_experiment as register_experiment
    from trainer_kit.config.experiment_registry import register_task as register_task
    from trainer_kit.config.registration import register_dataset as register_dataset
    from trainer_kit.config.registration import (
        register_gradient_processor as register_gradient_processor,
    )
    from trainer_kit.config.registration import register_metric as register_metric
    from trainer_kit.config.registration import register_optimizer as register_optimizer
    from trainer_kit.config.registration import register_schedule as register_schedule
    from trainer_kit.config.schema.configclass import Config as Config
    from trainer_kit.config.schema.configclass import configclass as configclass
    from trainer_kit.config.schema.experiment import DataConfig as DataConfig
    from trainer_kit.config.schema.experiment import ExperimentConfig as ExperimentConfig
    from trainer_kit.config.schema.experiment import TaskConfig as TaskConfig
    from trainer_kit.config.schema.experiment import TrainerConfig as TrainerConfig
    from trainer_kit.config.schema.multitask import MultiTaskConfig as MultiTaskConfig
    from trainer_kit.config.schema.multitask import TaskRoutine as TaskRoutine
    from trainer_kit.config.schema.optimization import OptimizationConfig as OptimizationConfig
    from trainer_kit.config.schema.optimizer_configs import (
        BaseOptimizerConfig as BaseOptimizerConfig,
    )
    from trainer_kit.config.schema.runtime import RuntimeConfig as RuntimeConfig
    from trainer_kit.errors import DataError as DataError
    from trainer_kit.errors import StopTraining as StopTraining
    from trainer_kit.inputs.sources.arrays import ArraySource as ArraySource
    from trainer_kit.inputs.sources.tfrecords import TFRecordSource as TFRecordSource
    from trainer_kit.optimizers.gradients import apply_gradients as apply_gradients
    from trainer_kit.optimizers.gradients import needs_gradients as needs_gradients
    from trainer_kit.optimizers.gradients import scale_loss as scale_loss
    from trainer_kit.run.launcher import launch as launch
    from trainer_kit.run.runner import run_experiment as run_experiment
    from trainer_kit.run.supervisor import supervise as supervise
    from trainer_kit.serving.model_export import export as export
    from trainer_kit.serving.model_loading import load_model as load_model
    from trainer_kit.serving.model_loading import load_weights as load_weights
    from trainer_kit.serving.prediction import predict as predict
    from trainer_kit.serving.predictor import get_predictor as get_predictor
    from trainer_kit.training.gan_task import GanTask as GanTask
    from trainer_kit.training.multitask.multi_task import MultiTask as MultiTask
    from trainer_kit.training.step_tensors import expose as expose
    from trainer_kit.training.task import Task as Task
    from trainer_kit.training.trainer import Trainer as Trainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'trainer_kit' has no attribute {name!r}; it has: {', '.join(_HOME)}"
        )
    return getattr(importlib.import_module(f"trainer_kit.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
