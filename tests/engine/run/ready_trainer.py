"""A trainer that the runs of a test module share, since traces take most of a short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.run.launcher import prepare_runtime
from trainer_kit.training.trainer_creation import create_exporter, create_trainer


class ReadyTrainer:
    """Hands out one trainer to a run after the other, each time as a new one would be.

    For runs whose trainers would be alike: their configs may differ in what the controller and the
    callbacks read. A run that is asked to stop needs a trainer of its own.

    Args:
      config: An experiment that the runs have in common.
      task_type: The class of its task.
    """

    def __init__(self, config: ExperimentConfig, task_type: Any) -> None:
        prepare_runtime(config)
        self._config = config
        self._trainer = create_trainer(config, task_type(config.task))
        variables = [
            *self._trainer.model.variables,
            *self._trainer.optimizer.variables,
            self._trainer.global_step,
        ]
        self._begun = [(variable, variable.numpy()) for variable in variables]
        self._state_parts = dict(self._trainer.state.python_state._parts)

    def again(self, keeps_best_in: Path | None = None) -> Any:
        """Returns the trainer with its first weights, and without what the callbacks of earlier
        runs have added.

        Args:
          keeps_best_in: The folder of a run whose evaluations keep the best checkpoints of the
            config; None: none do.
        """
        for variable, value in self._begun:
            variable.assign(value)
        self._trainer.state.python_state._parts = dict(self._state_parts)
        best = RunDirectory(str(keeps_best_in), self._config.trainer) if keeps_best_in else None
        self._trainer.checkpoint_exporter = best and create_exporter(self._config, best)
        return self._trainer
