"""MultiTaskConfig: the config of several tasks that share a model.

The names are those of Model Garden, where it has the field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import SerializeAsAny

from trainer_kit.config.schema.configclass import Config, OneOfConfig, configclass
from trainer_kit.config.schema.experiment import TaskConfig, TrainerConfig
from trainer_kit.config.schema.number_types import NonNegativeFloat, PositiveInt
from trainer_kit.errors import suggest_names


@configclass
class TaskRoutine(Config):
    """One of several tasks.

    Attributes:
      task_config: The config of the task, with its training and validation data. Its class decides
        the task's class.
      task_weight: With joint training, the factor of the task's loss. With interleaving, the task's
        share of the steps, as the sampler uses it.
    """

    task_config: SerializeAsAny[TaskConfig]
    task_weight: NonNegativeFloat = 1.0


@configclass
class UniformSampleConfig(Config):
    """All tasks are drawn equally often, whatever their weights."""


@configclass
class ProportionalSampleConfig(Config):
    """Tasks are drawn in proportion to task_weight ** alpha.

    Attributes:
      alpha: The exponent; 1 is in proportion to the weights, and 0 draws all tasks equally often.
    """

    alpha: float = 1.0


@configclass
class AnnealingSampleConfig(Config):
    """Tasks are drawn in proportion to task_weight ** alpha, where alpha falls from epoch to epoch.

    It falls from 1 in the first epoch to 0.2. In epoch e of E it is 1 - 0.8 (e - 1) / (E - 1).
    Source: Stickland and Murray 2019 (arXiv 1902.02671).

    Attributes:
      steps_per_epoch: The number of steps after which alpha falls.
      total_steps: The step at which the last epoch ends; alpha stays as it is then.
    """

    steps_per_epoch: PositiveInt
    total_steps: PositiveInt


@configclass
class TaskSamplingConfig(OneOfConfig):
    """Which task an interleaved step trains.

    Attributes:
      type: Which of the samplers below is used.
      uniform: All tasks are drawn equally often.
      proportional: The settings of draws in proportion to the weights.
      annealing: The settings of draws that come closer to equal shares as training goes on.
    """

    type: Literal["uniform", "proportional", "annealing"] = "proportional"
    uniform: UniformSampleConfig | None = None
    proportional: ProportionalSampleConfig | None = None
    annealing: AnnealingSampleConfig | None = None


@configclass
class MultiTaskConfig(TaskConfig):
    """Several tasks that share a model.

    Inherit from it for a MultiTask of your own.

    Attributes:
      task_routines: The tasks by name. The order in which they are given changes nothing.
      training: How a step trains. `interleaving` draws one task for each step and trains on a batch
        of it. `joint` trains on a batch of every task, by the sum of their losses times their
        weights.
      task_sampler: How interleaving draws the tasks.
      sampling_seed: The seed of these draws.
      evaluated_tasks: The names of the tasks that are evaluated; empty means all of them.
      train_data: Has to be unset: each task has training data of its own.
      validation_data: Has to be unset: each task has validation data of its own.
    """

    task_routines: dict[str, TaskRoutine]
    training: Literal["interleaving", "joint"] = "interleaving"
    task_sampler: TaskSamplingConfig = TaskSamplingConfig()
    sampling_seed: int = 0
    evaluated_tasks: tuple[str, ...] = ()
    train_data: None = None  # type: ignore[assignment]
    validation_data: None = None  # type: ignore[assignment]

    def get_validation_sets(self) -> dict[str, Any]:
        """Returns the validation data of each task that is evaluated, by the name of the task."""
        names = self.evaluated_tasks or self.task_routines
        return {name: self.task_routines[name].task_config.validation_data for name in names}

    def get_training_sets(self) -> dict[str, Any]:
        """Returns the training data of each task, by its dotted path in the experiment's config."""
        return {
            f"task.task_routines.{name}.task_config.train_data": routine.task_config.train_data
            for name, routine in self.task_routines.items()
        }

    def get_evaluation_values(self, name: str) -> dict[str, Any]:
        """Returns the plain values that an evaluation depends on.

        Args:
          name: The name of the evaluated task. "" stands for all tasks.
        """
        values = self.as_dict()
        for field in ("training", "task_sampler", "sampling_seed", "evaluated_tasks"):
            del values[field]

        task_values = {
            task_name: routine["task_config"]
            for task_name, routine in values["task_routines"].items()
        }
        for config_values in task_values.values():
            config_values.pop("train_data", None)
        if name in task_values:
            task_values = {name: task_values[name]}
        values["task_routines"] = task_values
        return values

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks the tasks: their names, that one of them trains, and their validation sets."""
        if not any(routine.task_weight for routine in self.task_routines.values()):
            yield "task_routines", "has no task with a task_weight above 0; name at least one"
        for name, routine in self.task_routines.items():
            path = f"task_routines.{name}.task_config"
            if not re.fullmatch(r"[\w-]+", name) or name in ("training_loss", "learning_rate"):
                yield (
                    "task_routines",
                    f"{name!r} cannot name a task; use another word of letters, digits, _ and -",
                )
            if isinstance(routine.task_config, MultiTaskConfig):
                yield path, "is a MultiTaskConfig itself; give its tasks one by one"
            elif isinstance(routine.task_config.validation_data, Mapping):
                yield (
                    f"{path}.validation_data",
                    "has several sets; a task among several has one, so keep one",
                )
        for name in self.evaluated_tasks:
            if name not in self.task_routines:
                yield (
                    "evaluated_tasks",
                    f"there is no task {name!r}; {suggest_names(name, list(self.task_routines))}",
                )

    def rules_with_trainer(self, trainer: TrainerConfig) -> Iterator[tuple[str, str]]:
        """Checks that no setting is used that works only for a single task.

        Such settings are micro-batches, cut data and tensors of a step.
        """
        settings = {
            "accumulate_steps": trainer.accumulate_steps != 1,
            "overfit_batches": trainer.overfit_batches is not None,
            "metrics": any(metric.tensor for metric in trainer.metrics),
            "summaries": bool(trainer.summaries) and self.training == "interleaving",
        }
        for name, is_used in settings.items():
            if is_used:
                tensors = "tensors of " if name in ("metrics", "summaries") else ""
                yield (
                    f"trainer.{name}",
                    f"is for {tensors}the step of one task, and there are several; remove it",
                )
