"""A trainer that the runs of a test module share: to trace its steps takes most of the time of a short run."""

from __future__ import annotations

from typing import Any

from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.run.launcher import prepare
from trainer_kit.training.trainer_creation import create_trainer


class ReadyTrainer:
    """Hands out one trainer to a run after the other, each time as a new one would be.

    For runs whose trainers would be alike: their configs may differ in what the controller and the callbacks read.
    A run that stops on a signal, or has a best checkpoint, needs a trainer of its own.

    Args:
      config: An experiment that the runs have in common.
      task_type: The class of its task.
    """

    def __init__(self, config: ExperimentConfig, task_type: Any) -> None:
        prepare(config)
        self._trainer = create_trainer(config, task_type(config.task))
        variables = [*self._trainer.model.variables, *self._trainer.optimizer.variables, self._trainer.global_step]
        self._begun = [(variable, variable.numpy()) for variable in variables]
        self._state_parts = dict(self._trainer.state.python_state._parts)

    def again(self) -> Any:
        """Returns the trainer with its first weights, and without what the callbacks of earlier runs have added."""
        for variable, value in self._begun:
            variable.assign(value)
        self._trainer.state.python_state._parts = dict(self._state_parts)
        return self._trainer
