"""Makes trainer_kit's Trainer evaluate several Model Garden tasks, each as a validation set with steps and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainer_kit.compat.model_garden.training.trainer import Trainer
from trainer_kit.config.schema.evaluation import ValidationSetConfig
from trainer_kit.errors import UsageError
from trainer_kit.training.metrics import MetricSet, task_metrics
from trainer_kit.training.multitask.model import model_of_task
from trainer_kit.training.trainer_parts.validation_sets import ValidationSet, ValidationSets


def evaluate_tasks(
    trainer: Trainer,
    tasks: Iterable[Any],
    steps: Mapping[str, int | None] | None = None,
    checkpoint_exporter: Any = None,
) -> None:
    """Makes the trainer evaluate `tasks` from now on, in place of its validation sets; runs eagerly.

    Args:
      trainer: A Trainer of trainer_kit.compat.model_garden; see `check_ours`.
      tasks: Model Garden's tasks; each evaluates the model's part with its name on its own validation_data.
      steps: A dict from task name to batches per evaluation; for other tasks the argument of `evaluate` counts.
      checkpoint_exporter: An exporter of the best checkpoint, by metrics such as `task|metric`.

    Raises:
      UsageError: when two tasks have the same name, or the model has no part for a task.
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
    """Raises UsageError for a trainer of Model Garden, which cannot evaluate several tasks in trainer_kit's run."""
    if trainer is not None and not isinstance(trainer, Trainer):
        kind = type(getattr(trainer, "_inner", trainer))  # an AdoptedTrainer has it as _inner
        raise UsageError(
            f"{kind.__module__}.{kind.__name__} cannot evaluate several tasks in trainer_kit's run; pass a "
            "trainer of trainer_kit.compat.model_garden (its arguments are the same), or no trainer"
        )


def _set_of(trainer: Trainer, task: Any, steps: int | None) -> ValidationSet:
    feed = trainer.inputs.validation_feed(task.name, task.task_config.validation_data, task)
    metrics = MetricSet("validation_loss", task_metrics(task, False), exact=True)
    options = getattr(trainer.config.trainer, "validation_sets", {}).get(task.name)
    if steps and (options is None or options.steps is None):
        options = (options or ValidationSetConfig()).replace(steps=steps)
    return ValidationSet(task.name, feed, options, task, model_of_task(trainer.model, task.name), metrics)
