"""The section `task` of programs of Tensorpack. Imports no TensorFlow."""

from __future__ import annotations

from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import TaskConfig

_FOLDER = "trainer_kit.compat.tensorpack"
TRAINER = f"{_FOLDER}.program_trainer:ProgramTrainer"


@configclass
class ProgramConfig(TaskConfig):
    """The section `task` of a program of Tensorpack, which describes itself in Python."""


register_task(
    ProgramConfig,
    f"{_FOLDER}.program_task:ProgramTask",
    trainer=TRAINER,
)
