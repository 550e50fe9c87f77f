"""Creates a trainer and its best-checkpoint exporter from a config.

The module also checks both before a run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, TypeVar

from trainer_kit.config.experiment_registry import find_trainer_class
from trainer_kit.config.imported_names import import_object
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.schema.multitask import MultiTaskConfig
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.errors import UsageError
from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
from trainer_kit.evals.best.criterion import guess_comparison
from trainer_kit.evals.best.exporter import BestWeightsExporter
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.multitask.multi_task_trainer import MultiTaskTrainer
from trainer_kit.training.task import Task
from trainer_kit.training.trainer import Trainer
from trainer_kit.typing import CheckpointExporter, ExperimentLike, TaskLike

_LOG = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT", bound=ExperimentConfig)

# Keras's default for Adam. Most models train with it, if not at their best.
_DEFAULT_OPTIMIZER = "adam"
_DEFAULT_LEARNING_RATE = 1e-3


def create_trainer(
    config: ExperimentLike,
    task: TaskLike,
    train: bool = True,
    evaluate: bool = True,
    checkpoint_exporter: CheckpointExporter | None = None,
) -> Any:
    """Returns a trainer of the class registered with the task, with model and optimizer.

    Called in strategy scope.
    """
    trainer_class = get_trainer_class(config)
    return trainer_class.create(config, task, train, evaluate, checkpoint_exporter)


def get_trainer_class(config: ExperimentLike) -> Any:
    """Returns the class of the trainer.

    It is the class that the config names, the one that the task is registered with, or Trainer.
    Without a name, several tasks are trained by a MultiTaskTrainer.

    Raises:
      UsageError: when the class that the config names cannot be imported, or is no trainer class.
    """
    name = getattr(config.trainer, "trainer_class", "")
    if not name:
        default_class: type[Trainer] = Trainer
        if isinstance(config.task, MultiTaskConfig):
            default_class = MultiTaskTrainer
        return find_trainer_class(config.task) or default_class

    # A BaseTrainer of the user's own has to be created as a Trainer is.
    def is_trainer_class(value: object) -> bool:
        is_trainer = isinstance(value, type) and issubclass(value, BaseTrainer)
        return is_trainer and hasattr(value, "create")

    return import_object(
        "trainer.trainer_class", name, is_trainer_class, "subclass of trainer_kit.Trainer"
    )


def create_exporter(
    config: ExperimentLike, directory: RunDirectory, is_chief: bool = True
) -> BestWeightsExporter | BestCheckpoints | None:
    """Returns the exporter that keeps the best checkpoints in their folders.

    Args:
      config: The experiment's config.
      directory: The run's directory.
      is_chief: Whether this worker's files are kept. Only the chief's files are.

    Returns:
      The exporter. None when the config names no metric.
    """
    options = config.trainer
    metric = options.best_checkpoint_eval_metric
    primary = None
    if metric:
        comparison = options.best_checkpoint_metric_comp
        _warn_of_other_comparison("trainer.best_checkpoint_metric_comp", metric, comparison)
        # A subclass of Trainer may have its own class of exporters.
        exporter_class = get_trainer_class(config).best_checkpoint_class
        primary = exporter_class(
            directory.output_best_dir,
            metric,
            comparison,
            is_chief=is_chief,
        )

    named = {}
    for name, section in options.best_checkpoints.items():
        named[name] = BestWeightsExporter(
            os.path.join(directory.output_named_bests_dir, name),
            section.metric,
            section.metric_comp,
            keep=section.keep,
            min_delta=section.min_delta,
            is_chief=is_chief,
            option=f"trainer.best_checkpoints.{name}.metric",
        )
    for name, section in options.best_checkpoints.items():
        field = f"trainer.best_checkpoints.{name}.metric_comp"
        _warn_of_other_comparison(field, section.metric, section.metric_comp)
    if named:
        return BestCheckpoints(primary, named)
    return primary


def _warn_of_other_comparison(field: str, metric: str, comparison: str) -> None:
    """Warns where the name of a metric indicates that the other values are better.

    For example, the lower values of a loss are better.
    """
    comparison_by_name = guess_comparison(metric)
    if comparison_by_name not in (None, comparison):
        _LOG.warning(
            "%s is %s, so that the weights with the %s %s are kept as the best; "
            "set it to %s if %s values are better",
            field,
            comparison,
            "highest" if comparison == "higher" else "lowest",
            metric,
            comparison_by_name,
            comparison_by_name,
        )


def choose_optimizer(config: ConfigT, task_type: type[TaskLike]) -> ConfigT:
    """Returns the config with an optimizer, which training needs.

    Where neither the config nor the user's code has one, it is Adam, and 0.001 is its learning rate
    unless the config sets one. This is no default of the config classes, since only the classes of
    task and trainer indicate whether they create an optimizer.
    """
    options = config.trainer
    # The section of a Model Garden task has another class.
    section: object = options.optimizer_config
    if not isinstance(section, OptimizationConfig) or options.optimizers or section.optimizer.type:
        return config

    # The user's code may create an optimizer, or need none.
    methods = [
        getattr(task_type, "create_optimizer", None),
        getattr(get_trainer_class(config), "create", None),
    ]
    functions = [getattr(method, "__func__", None) for method in methods]
    if functions != [Task.create_optimizer.__func__, Trainer.create.__func__]:  # type: ignore[attr-defined]
        return config

    changes: dict[str, object] = {"optimizer": _DEFAULT_OPTIMIZER}
    if not section.learning_rate.type:
        changes["learning_rate"] = _DEFAULT_LEARNING_RATE
    _LOG.info("no optimizer is chosen; the run takes trainer.optimizer_config=%s", changes)
    return config.replace(trainer={"optimizer_config": changes})


def check_trainer(trainer: object) -> None:
    """Checks that the engine can drive a ready-made trainer.

    Raises:
      UsageError: when it cannot, such as a trainer of Orbit.
    """
    if not isinstance(trainer, BaseTrainer):
        raise UsageError(
            f"trainer: {type(trainer).__name__} is not a trainer_kit.Trainer; "
            "inherit from trainer_kit.Trainer, "
            "or call trainer_kit.compat.model_garden.run_experiment, "
            "which also runs trainers of Orbit and Model Garden"
        )


def check_accumulation(trainer: BaseTrainer, steps: int) -> None:
    """Checks that a trainer can split batches into `steps` micro-batches.

    A Trainer of trainer_kit checks more when it is created.

    Raises:
      UsageError: when the trainer has its own steps, which do not split batches.
    """
    if steps != 1 and trainer.custom_parts.replaces_steps:
        raise UsageError(
            f"trainer.accumulate_steps={steps}: {trainer.class_name} has training loops of its "
            "own, which do not split batches; set it to 1, "
            "or inherit from the Trainer of trainer_kit"
        )


def check_overfit_batches(trainer: BaseTrainer, options: TrainerConfig) -> None:
    """Checks that the data can be cut, if the config requests it.

    Raises:
      UsageError: when the trainer opens its data itself.
    """
    if getattr(options, "overfit_batches", None) and trainer.custom_parts.replaces_steps:
        raise UsageError(
            f"trainer.overfit_batches: {trainer.class_name} opens its data itself, "
            "which would not be cut; leave it out, or inherit from the Trainer of trainer_kit"
        )


def check_freeze(trainer: BaseTrainer, patterns: Sequence[str]) -> None:
    """Checks that the trainer can freeze variables, if the config requests it.

    Raises:
      UsageError: when the trainer is one of another framework, which freezes no variables.
    """
    if patterns and trainer.custom_parts.replaces_steps:
        raise UsageError(
            f"trainer.freeze: {trainer.class_name} freezes no variables; "
            "remove freeze, or inherit from the Trainer of trainer_kit"
        )


def check_best_metric(trainer: BaseTrainer, best: BestCheckpoints | None) -> None:
    """Checks that evaluations report the metrics of the best checkpoints.

    Only a run can tell where the trainer does not know the names of its metrics. Nothing is checked
    then.

    Raises:
      UsageError: when no evaluation will report a metric of the best checkpoints.
    """
    if best is None:
        return
    names = trainer.validation_metric_names()
    if names is None:
        return

    # An exporter of the caller checks its logs itself.
    for exporter in best:
        exporter.check_metric(names)
