"""The section `task` of compiled Keras models. Imports no TensorFlow."""

from __future__ import annotations

from trainer_kit.config.experiments import register_task
from trainer_kit.config.schema.base import configclass
from trainer_kit.config.schema.experiment import TaskConfig

TRAINER = "trainer_kit.compat.keras.trainer:KerasTrainer"


@configclass
class KerasTaskConfig(TaskConfig):
    """The section `task` of a compiled Keras model."""


register_task(KerasTaskConfig, "trainer_kit.compat.keras.task:KerasTask", trainer=TRAINER)
