"""Decorators that register parts of training for use in configs.

They register optimizers, schedules, gradient processors, datasets and metrics. A registered name is
used like a built-in one: `trainer.optimizer_config.optimizer: {type: NAME, NAME: {...}}` in YAML,
`OptimizerConfig.type = 'NAME'` and the bindings of its config class in gin. Its module has to be
imported before the config is read, with --import_module or from the module of the experiment.
Nothing here needs TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.experiment import DatasetConfig
from trainer_kit.config.schema.gradient_processor_configs import GradientProcessorConfig
from trainer_kit.config.schema.metric_configs import MetricConfig
from trainer_kit.config.schema.open_choice import register_branch
from trainer_kit.config.schema.optimizer_configs import BaseOptimizerConfig, OptimizerConfig
from trainer_kit.config.schema.schedules import LrConfig

Builder = TypeVar("Builder", bound=Callable[..., object])


@configclass
class NoSettings(Config):
    """The section of something registered that has no settings."""


def register_optimizer(
    name: str, config_class: type[Config] = BaseOptimizerConfig
) -> Callable[[Builder], Builder]:
    """Returns a decorator that registers a function as an optimizer of the config.

    The function is called as `build(config, learning_rate)` in the scope of the strategy, with the
    optimizer's section and a float or a Keras schedule, and returns an optimizer of Keras 3.
    trainer_kit clips gradients as the section says if its class inherits from
    `trainer_kit.BaseOptimizerConfig`.

    Args:
      name: The name under which it is registered, a value of
        `trainer.optimizer_config.optimizer.type`.
      config_class: The config class of the section. By default it contains only the settings of
        clipping.

    Raises:
      UsageError: When the name is taken, or the class is not decorated with
        `@trainer_kit.configclass`.
    """
    return register_branch(OptimizerConfig, name, config_class)


def register_schedule(
    name: str, config_class: type[Config] = NoSettings
) -> Callable[[Builder], Builder]:
    """Returns a decorator that registers a function as a learning-rate schedule of the config.

    The function is called as `build(config)` with the schedule's section. It returns a Keras
    LearningRateSchedule, or a function that maps a step, an integer scalar tensor, to a learning
    rate.

    Args:
      name: The name under which it is registered, a value of
        `trainer.optimizer_config.learning_rate.type`.
      config_class: The config class of the section. By default it has no fields.

    Raises:
      UsageError: When the name is taken, or the class is not decorated with
        `@trainer_kit.configclass`.
    """
    return register_branch(LrConfig, name, config_class)


def register_dataset(
    name: str, config_class: type[Config] = NoSettings
) -> Callable[[Builder], Builder]:
    """Returns a decorator that registers a function as a dataset of the config.

    The function is called as `build(config, params)`, and with `input_context` if it has such an
    argument. It returns what `Task.build_inputs` does: a Source or a tf.data.Dataset, in batches
    for one replica.

    Args:
      name: The name under which it is registered, a value of
        `task.train_data.dataset.type` and of the same field in `task.validation_data`.
      config_class: The config class of the dataset's section. By default it has no fields. `params`
        is the DataConfig around it, with the batch size, the seed and is_training.

    Raises:
      UsageError: When the name is taken, or the class is not decorated with
        `@trainer_kit.configclass`.
    """
    return register_branch(DatasetConfig, name, config_class)


def register_metric(
    name: str, config_class: type[Config] = NoSettings
) -> Callable[[Builder], Builder]:
    """Returns a decorator that registers a function as a metric of the config.

    The function is called as `build(config)` in the scope of the strategy, and returns a new Keras
    metric.

    Args:
      name: The name under which it is registered, a value of `type` in the list `trainer.metrics`.
      config_class: The config class of the metric's section. By default it has no fields.

    Raises:
      UsageError: When the name is taken, or the class is not decorated with
        `@trainer_kit.configclass`.
    """
    return register_branch(MetricConfig, name, config_class)


def register_gradient_processor(
    name: str, config_class: type[Config] = NoSettings
) -> Callable[[Builder], Builder]:
    """Returns a decorator that registers a function as a gradient processor of the config.

    The function is called as `build(config)` in the scope of the strategy. It returns a function of
    one gradient, which returns the gradient to use instead, or a function of two lists, the
    gradients and their variables, which returns a list of gradients. Both run in graph, on a
    replica, with dense gradients that are the same on all replicas.

    Args:
      name: The name under which it is registered, a value of `type` in the list
        `trainer.optimizer_config.gradient_processors`.
      config_class: The config class of the processor's section. By default it has no fields.

    Raises:
      UsageError: When the name is taken, or the class is not decorated with
        `@trainer_kit.configclass`.
    """
    return register_branch(GradientProcessorConfig, name, config_class)
