"""Has trainer_kit's Trainer evaluate several tasks of Model Garden: each is a validation set with steps and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainer_kit.compat.model_garden.multitask.engine_task import part_for
from trainer_kit.compat.model_garden.training.trainer import Trainer
from trainer_kit.config.schema.evaluation import ValidationSetConfig
from trainer_kit.errors import UsageError
from trainer_kit.training.metrics import MetricSet, task_metrics
from trainer_kit.training.trainer_parts.validation_sets import ValidationSet, ValidationSets


def evaluate_tasks(
    trainer: Trainer,
    tasks: Iterable[Any],
    steps: Mapping[str, int | None] | None = None,
    checkpoint_exporter: Any = None,
) -> None:
    """Has evaluations be those of `tasks` from now on, whatever the trainer was made to evaluate; eager.

    Args:
      trainer: of trainer_kit.compat.model_garden; see `check_ours`.
      tasks: Model Garden's; each evaluates the model's part of its name, on its own validation_data.
      steps: batches in an evaluation by the name of the task; all others go by what `evaluate` is asked for.
      checkpoint_exporter: keeps the best checkpoint by metrics such as `task|metric`.

    Raises:
      UsageError: when two tasks have one name, or the model has no part for one.
    """
    tasks, names = list(tasks), set()
    for task in tasks:
        if task.name in names:
            raise UsageError(f"two tasks to evaluate are called {task.name!r}; give each a name of its own")
        names.add(task.name)
    trainer.inputs.add_evaluated(tasks)
    with trainer.strategy.scope():
        trainer.set_validation_sets(
            ValidationSets(_set_of(trainer, task, (steps or {}).get(task.name)) for task in tasks)
        )
    trainer.checkpoint_exporter = checkpoint_exporter


def check_ours(trainer: Any) -> None:
    """Raises UsageError for one of Model Garden's own trainers, which cannot evaluate several tasks here."""
    if not isinstance(trainer, Trainer):
        kind = type(getattr(trainer, "_inner", trainer))  # of an AdoptedTrainer
        raise UsageError(
            f"{kind.__module__}.{kind.__name__} cannot evaluate several tasks in trainer_kit's run; give a "
            "trainer of trainer_kit.compat.model_garden, whose arguments are the same, or none"
        )


def _set_of(trainer: Trainer, task: Any, steps: int | None) -> ValidationSet:
    feed = trainer.inputs.validation_feed(task.name, task.task_config.validation_data, task)
    metrics = MetricSet("validation_loss", task_metrics(task, False), exact=True)
    options = trainer.config.trainer.validation_sets.get(task.name)
    if steps and (options is None or options.steps is None):
        options = (options or ValidationSetConfig()).replace(steps=steps)
    return ValidationSet(task.name, feed, task, part_for(trainer.model, task.name), metrics, options)
