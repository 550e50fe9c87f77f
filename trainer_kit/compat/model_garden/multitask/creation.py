"""Creates tasks and trainers for experiments with several tasks, for the runner and the command line."""

from __future__ import annotations

from typing import Any

import official.modeling.multitask.interleaving_trainer  # noqa: F401 - gin files may bind it
from official.core import task_factory
from official.modeling.multitask import task_sampler
from official.modeling.multitask.multitask import MultiTask

from trainer_kit.compat.model_garden.actions.best_checkpoint import BestCheckpointExporter
from trainer_kit.compat.model_garden.config.build_errors import sections_of, told
from trainer_kit.compat.model_garden.config.config_classes import original
from trainer_kit.compat.model_garden.config.gin_names import bindings_of
from trainer_kit.compat.model_garden.multitask.base_trainer import MultiTaskBaseTrainer
from trainer_kit.compat.model_garden.multitask.engine_task import EngineTask
from trainer_kit.compat.model_garden.multitask.evaluation import check_ours, evaluate_tasks
from trainer_kit.compat.model_garden.multitask.evaluator import MultiTaskEvaluator
from trainer_kit.compat.model_garden.multitask.interleaving_trainer import MultiTaskInterleavingTrainer
from trainer_kit.compat.model_garden.training.optimizers import check_values, create_optimizer
from trainer_kit.compat.model_garden.training.tasks import folder
from trainer_kit.config.schema.base import Config
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import UsageError, suggestion

TRAINERS: dict[str, Any] = {"interleaving": MultiTaskInterleavingTrainer, "joint": MultiTaskBaseTrainer}


class MultiTaskTrainers:
    """Creates trainers for experiments that train several tasks."""

    best_checkpoint = BestCheckpointExporter

    @classmethod
    def create(
        cls, config: ExperimentConfig, task: EngineTask, train: bool, evaluate: bool, checkpoint_exporter: Any = None
    ) -> Any:
        """Returns a trainer of the kind in trainer.trainer_type, or, if not `train`, an evaluator; called in scope."""
        check_values(task.multi_task, config)
        model, exporter = task.build_model(), task.checkpoint_exporter or checkpoint_exporter
        tasks, steps = task.tasks.values(), task.multi_task.task_eval_steps
        if not train:
            optimizer = create_optimizer(task.multi_task, config)
            return MultiTaskEvaluator(
                tasks, model, None, steps, exporter, config=config, optimizer=optimizer
            )  # fmt: skip
        trainer = create_trainer(config, task.multi_task, model)
        if evaluate:
            check_ours(trainer)
            evaluate_tasks(trainer, tasks, steps, exporter)
        return trainer


def create_trainer(config: ExperimentConfig, multi_task: Any, model: Any) -> Any:
    """Returns a trainer of the kind in trainer.trainer_type, with its optimizer; called in strategy scope.

    Raises:
      UsageError: for an unknown trainer type.
    """
    options: Any = config.trainer
    kind = options.trainer_type
    if kind not in TRAINERS:
        raise UsageError(f"trainer.trainer_type: there is no trainer type {kind!r}; {suggestion(kind, list(TRAINERS))}")
    trainer, optimizer = TRAINERS[kind], create_optimizer(multi_task, config)
    arguments: dict[str, Any] = {"config": config}
    if kind == "interleaving":
        sampling = original(options.task_sampler)
        arguments["task_sampler"] = task_sampler.get_task_sampler(sampling, multi_task.task_weights)
    named = [*arguments, "multi_task", "multi_task_model", "optimizer"]
    theirs = f"official.modeling.multitask.{trainer.__module__.rpartition('.')[2]}.{trainer.__name__}"
    bound = bindings_of(theirs, named)
    return trainer(multi_task, model, optimizer, **arguments, **bound)


def create_task(config: Config, logging_dir: str | None = None) -> EngineTask:
    """Returns an EngineTask around the MultiTask of a section from `convert`; called in strategy scope.

    The MultiTask has the class that is registered with task_factory for the class of its config, if there is one.
    `logging_dir` exists during the call, because some tasks write to it when they are created.
    """
    theirs = original(config)
    registered = task_factory._REGISTERED_TASK_CLS.get(type(theirs), MultiTask)
    with folder(logging_dir), told("task", sections_of(theirs.task_routines)):
        return EngineTask(registered.from_config(theirs, logging_dir=logging_dir))
