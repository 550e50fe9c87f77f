"""Trainer: trainer_kit's engine for a Model Garden task, with the signature of Model Garden's Trainer."""

from __future__ import annotations

import functools
import operator
from typing import Any

import tensorflow as tf
from official.core import base_task, base_trainer

from trainer_kit.compat.model_garden.actions.actions import get_eval_actions, get_train_actions
from trainer_kit.compat.model_garden.actions.best_checkpoint import BestCheckpointExporter
from trainer_kit.compat.model_garden.config.build_errors import told
from trainer_kit.compat.model_garden.config.conversion import sections
from trainer_kit.compat.model_garden.config.gin_names import bindings_of, configurable
from trainer_kit.compat.model_garden.training.adopted_trainer import adopted
from trainer_kit.compat.model_garden.training.model_building import build_model
from trainer_kit.compat.model_garden.training.moving_average import OptimizersAverage, averaging, check_one_average
from trainer_kit.compat.model_garden.training.optimizers import check_values, create_optimizer, make_whole
from trainer_kit.compat.model_garden.training.task_inputs import ModelGardenInputs
from trainer_kit.compat.model_garden.training.trainer_names import TrainerNames, with_numpy
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.training import trainer as engine

# Model Garden's own classes, looked up at import: a program may later replace them with trainer_kit's.
_MODEL_GARDENS = getattr(base_trainer, "Trainer", None)
_AsyncTrainer = getattr(base_trainer, "_AsyncTrainer", None)  # the base of trainers with loops of their own


class Trainer(TrainerNames, engine.Trainer):
    """Trains and evaluates a Model Garden task, with the arguments and methods of trainer_kit's Trainer.

    The argument `config` is a config of either framework. The property `config` has Model Garden's section of the task,
    and trainer_kit's other sections. In the scope of a parameter-server strategy the constructor returns Model Garden's
    own Trainer, because trainer_kit's loops do not support that strategy yet.
    """

    best_checkpoint = BestCheckpointExporter  # its files can be read by Model Garden too
    inputs_class = ModelGardenInputs

    def __init__(
        self,
        config: Any,
        task: Any,
        model: Any,
        optimizer: Any,
        train: bool = True,
        evaluate: bool = True,
        train_dataset: Any = None,
        validation_dataset: Any = None,
        checkpoint_exporter: Any = None,
    ) -> None:
        _check_sections(config, train and train_dataset is None, evaluate and validation_dataset is None)
        self._given_optimizer = optimizer
        build_model(task, model, train, train_dataset if train else validation_dataset)
        with told("task", task.task_config):
            super().__init__(
                sections(config, task),
                task,
                model,
                optimizer if train else None,
                train,
                evaluate,
                train_dataset,
                validation_dataset,
                checkpoint_exporter,
            )
        self._optimizer = optimizer

    @functools.wraps(__init__, assigned=())  # type: ignore[misc]  # it has the same signature
    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        """Returns a trainer of the class that the current strategy needs."""
        if cls is Trainer and _MODEL_GARDENS is not None and _is_asynchronous():
            return _MODEL_GARDENS(*arguments, **named)
        return super().__new__(cls)

    @classmethod
    def create(
        cls, config: ExperimentConfig, task: Any, train: bool, evaluate: bool, checkpoint_exporter: Any = None
    ) -> Any:
        """Returns a trainer of this class with the task's model and optimizer; called in strategy scope.

        The optimizer keeps the moving average. For Trainer itself, gin can bind another class of either framework.
        """
        chosen = {} if cls is Trainer else {"trainer_cls": cls}  # an argument overrides gin's binding
        made = create_trainer(config, task, train, evaluate, checkpoint_exporter, **chosen)
        return adopted(made, config.runtime.random_seed)

    def own_train_actions(self, params: Any, model_dir: str, manager: Any) -> list[Any]:
        """Returns the actions that run after each training loop; gin can bind their factory."""
        return get_train_actions(params, self, model_dir, checkpoint_manager=manager)

    def own_eval_actions(self, params: Any, model_dir: str) -> list[Any]:
        """Returns the actions that run after each evaluation; gin can bind their factory."""
        return get_eval_actions(params, self, model_dir)

    def train_loop_end(self) -> dict[str, Any]:
        """Returns the loop's logs: metrics, training_loss, learning_rate. Runs eagerly, on the host."""
        return with_numpy(super().train_loop_end())

    def initialize(self) -> None:
        """Lets the task load initial weights when there is no checkpoint to restore.

        Runs eagerly, in strategy scope.
        """
        with told("task.init_checkpoint", self.task.task_config):
            super().initialize()

    def _logs_of(self, name: str, state: Any) -> dict[str, Any]:
        return with_numpy(super()._logs_of(name, state))

    def _built_optimizers(self, config: Any, task: Any, model: Any, optimizer: Any) -> Any:
        make_whole(optimizer, model.trainable_variables)
        return optimizer

    def _moving_average(self, config: Any, task: Any, model: Any) -> Any:
        if averaging(self._given_optimizer) is None:
            return None
        check_one_average(config.trainer)
        return OptimizersAverage(self._given_optimizer, model)

    def _aggregates(self, task: Any) -> bool:
        own_reduce = type(self).eval_reduce is not engine.Trainer.eval_reduce
        return own_reduce or type(task).aggregate_logs is not base_task.Task.aggregate_logs


def _check_sections(config: Any, train_data: bool, validation_data: bool) -> None:
    """Raises AttributeError, in Model Garden's words, when `config` lacks a section that is needed."""
    wanted = {"train_data": train_data, "validation_data": validation_data}
    data = [f"task.{name}" for name, needed in wanted.items() if needed]
    for path in ("trainer", "task", *data):
        try:
            operator.attrgetter(path)(config)
        except AttributeError:
            message = f"The trainer requires the configuration contains an attribute `{path}`."
            raise AttributeError(message) from None


def _is_asynchronous() -> bool:
    return isinstance(tf.distribute.get_strategy(), tf.distribute.experimental.ParameterServerStrategy)


@configurable("official.core.train_utils.create_trainer")
def create_trainer(
    params: Any,
    task: Any,
    train: bool,
    evaluate: bool,
    checkpoint_exporter: Any = None,
    trainer_cls: Any = Trainer,
) -> Any:
    """Returns a trainer with the task's model and optimizer; called in strategy scope.

    gin can bind `trainer_cls`, and the arguments of Model Garden's Trainer that are not passed here.

    Args:
      params: The experiment's config, Model Garden's or trainer_kit's.
      task: A Model Garden task.
      train: Whether the trainer will train.
      evaluate: Whether the trainer will evaluate.
      checkpoint_exporter: An exporter of the best checkpoint.
      trainer_cls: A Trainer class of either framework, or a subclass.
    """
    check_values(task, params)
    with told("task.model", task.task_config):
        model = task.build_model()
    optimizer = create_optimizer(task, params)
    arguments = {
        "model": model,
        "optimizer": optimizer,
        "train": train,
        "evaluate": evaluate,
        "checkpoint_exporter": checkpoint_exporter,
    }
    of_the_door = isinstance(trainer_cls, type) and issubclass(trainer_cls, Trainer)
    bound = bindings_of("official.core.base_trainer.Trainer", arguments) if of_the_door else {}
    return trainer_cls(params, task, **arguments, **bound)
