"""The section `task` of compiled Keras models, and the parts of their experiments.

Imports no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import DataConfig, TaskConfig

if TYPE_CHECKING:
    from trainer_kit.compat.keras.keras_types import Callbacks, CompiledModel

TRAINER = "trainer_kit.compat.keras.keras_trainer:KerasTrainer"


@configclass
class KerasTaskConfig(TaskConfig):
    """The section `task` of a compiled Keras model."""


@dataclass(frozen=True)
class KerasExperiment:
    """The parts of the runs of an experiment. See `register_keras_experiment`.

    Attributes:
      build_fn: Returns a compiled model.
      data_fn: Returns the data of a DataConfig.
      callbacks: Returns new callbacks.
    """

    build_fn: Callable[[], CompiledModel]
    data_fn: Callable[[DataConfig], Any]
    callbacks: Callable[[], Callbacks] = list


register_task(KerasTaskConfig, "trainer_kit.compat.keras.keras_task:KerasTask", trainer=TRAINER)
