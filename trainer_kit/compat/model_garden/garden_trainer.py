"""Trainer: trainer_kit's engine for Model Garden tasks, with the signature of their own Trainer.

The functions that gin files may bind are imported with this module, because bindings are read
before anything is built.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import official.core.train_lib  # noqa: F401
import tensorflow as tf
from official.core import base_task, base_trainer, task_factory

from trainer_kit.compat.model_garden.actions import GardenActionsTrainer
from trainer_kit.compat.model_garden.best_checkpoint import BestCheckpointExporter
from trainer_kit.compat.model_garden.build_errors import explain_config_errors
from trainer_kit.compat.model_garden.config_classes import build_original
from trainer_kit.compat.model_garden.conversion import TrainerSections, get_trainer_sections
from trainer_kit.compat.model_garden.gin_bindings import accept_gin_bindings, get_gin_bindings
from trainer_kit.compat.model_garden.optimizers import (
    OptimizerAverages,
    check_single_average,
    check_values,
    create_optimizer,
    create_optimizer_variables,
    find_averaging_optimizer,
)
from trainer_kit.compat.model_garden.trainer_adapter import adapt_trainer
from trainer_kit.config.schema.configclass import Config
from trainer_kit.files import is_remote
from trainer_kit.inputs.sources.source_protocol import Source
from trainer_kit.inputs.worker_pipeline import OnePassPipeline, WorkerPipeline
from trainer_kit.runtime.datasets import drop_partial_steps
from trainer_kit.training import trainer as engine
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.task_inputs import TaskInputs
from trainer_kit.typing import (
    CheckpointExporter,
    Dataset,
    ExperimentLike,
    Model,
    TaskLike,
    Variable,
)

if TYPE_CHECKING:
    from trainer_kit.compat.model_garden.garden_types import (
        AdaptableTrainer,
        ExperimentParams,
        GardenOptimizer,
        GardenTask,
    )

# Model Garden's own classes, looked up at import: a program may later replace them with
# trainer_kit's. _AsyncTrainer is the base of trainers with separate loops.
_GardenTrainer = base_trainer.Trainer
_AsyncTrainer = base_trainer._AsyncTrainer


class EqualStepsPipeline(OnePassPipeline):
    """One pass over the data of a section, with equally many steps for all replicas."""

    def build_dataset(
        self, data: tf.data.Dataset | Source, input_context: tf.distribute.InputContext | None
    ) -> tf.data.Dataset:
        """Returns one pass over the data of one worker."""
        dataset = super().build_dataset(data, input_context)
        return drop_partial_steps(dataset, input_context)


class ModelGardenInputs(TaskInputs):
    """Opens training and validation data by a task's build_inputs.

    Error messages name the section of the config.

    Args:
      config, task: See TaskInputs.

    Attributes:
      section_paths: The dotted paths in the config of those sections that are not sections of
        `task`.
    """

    pass_pipeline_class = EqualStepsPipeline

    def __init__(self, config: ExperimentLike, task: TaskLike) -> None:
        super().__init__(config, task)
        self.section_paths: dict[str, str] = {}

    def distribute(self, pipeline: WorkerPipeline) -> Dataset:
        """Returns the dataset of a pipeline over the replicas. Runs eagerly."""
        section = pipeline.section.path
        path = self.section_paths.get(section, f"task.{section}")
        with explain_config_errors(path):
            return super().distribute(pipeline)


class Trainer(GardenActionsTrainer, engine.Trainer):
    """Trains and evaluates a Model Garden task.

    Its arguments and methods are those of trainer_kit's Trainer. Created in strategy scope.

    The argument `config` is a config of either framework. The property `config` has Model Garden's
    section of the task, and trainer_kit's other sections. In the scope of a parameter-server
    strategy the constructor returns Model Garden's own Trainer, because trainer_kit's loops do not
    support that strategy yet.
    """

    # Model Garden can read the files of this exporter, too.
    best_checkpoint_class = BestCheckpointExporter
    inputs_class = ModelGardenInputs

    # The names of Model Garden's Trainer that its subclasses use in their own steps.
    _train_loss = property(attrgetter("train_loss"))
    _train_metrics = property(attrgetter("train_metrics"))
    _validation_loss = property(attrgetter("validation_loss"))
    _validation_metrics = property(attrgetter("validation_metrics"))
    _checkpoint = property(attrgetter("checkpoint"))
    _runtime_options = property(attrgetter("_run_options"))

    def __init__(
        self,
        config: ExperimentParams | TrainerSections,
        task: TaskLike,
        model: Model,
        optimizer: GardenOptimizer | None,
        train: bool = True,
        evaluate: bool = True,
        train_dataset: Dataset | None = None,
        validation_dataset: Dataset | None = None,
        checkpoint_exporter: CheckpointExporter | None = None,
    ) -> None:
        # An evaluator has no optimizer, but evaluates the averages that one keeps.
        self._constructor_optimizer = optimizer
        with explain_config_errors("task"):
            super().__init__(
                get_trainer_sections(config, task),
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
        strategy = tf.distribute.get_strategy()
        is_asynchronous = isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
        # Python does not call __init__ of this class for an object of another class.
        if cls is Trainer and is_asynchronous:
            return _GardenTrainer(*arguments, **named)
        return super().__new__(cls)

    @classmethod
    def create(
        cls,
        config: ExperimentLike,
        task: TaskLike,
        train: bool,
        evaluate: bool,
        checkpoint_exporter: CheckpointExporter | None = None,
    ) -> BaseTrainer:
        """Returns a trainer of this class with the task's model and optimizer.

        Called in strategy scope. The optimizer keeps the moving average. For Trainer itself, gin
        can bind another class of either framework.
        """
        # An argument overrides gin's binding.
        own_class = {} if cls is Trainer else {"trainer_cls": cls}
        trainer = create_trainer(config, task, train, evaluate, checkpoint_exporter, **own_class)
        adapted: BaseTrainer = adapt_trainer(trainer, config.runtime.random_seed)
        return adapted

    def train_loop_end(self) -> dict[str, Any]:
        """Returns the loop's logs: metrics, training_loss, learning_rate.

        Runs eagerly, on the host.
        """
        return add_numpy_method(super().train_loop_end())

    def initialize(self) -> None:
        """Lets the task load initial weights when there is no checkpoint to restore.

        Runs eagerly, in strategy scope.
        """
        with explain_config_errors("task.init_checkpoint"):
            super().initialize()

    def _compute_set_logs(self, name: str, state: Any) -> dict[str, Any]:
        return add_numpy_method(super()._compute_set_logs(name, state))

    def _build_optimizers(
        self,
        config: ExperimentLike,
        task: TaskLike,
        model: Model,
        optimizer: GardenOptimizer,
    ) -> GardenOptimizer:
        create_optimizer_variables(optimizer, model.trainable_variables)
        return optimizer

    def _build_average(
        self,
        config: ExperimentLike,
        task: TaskLike,
        model: Model,
        trainable: Sequence[Variable],
    ) -> OptimizerAverages | None:
        optimizer = self._constructor_optimizer
        if find_averaging_optimizer(optimizer) is None:
            return None
        check_single_average(config.trainer)
        return OptimizerAverages(optimizer, model)

    def _aggregates(self, task: GardenTask) -> bool:
        # Tasks of Model Garden inherit a method that aggregates nothing.
        own_reduce = type(self).eval_reduce is not engine.Trainer.eval_reduce
        return own_reduce or type(task).aggregate_logs is not base_task.Task.aggregate_logs


@accept_gin_bindings("official.core.train_utils.create_trainer")
def create_trainer(
    params: ExperimentParams,
    task: GardenTask,
    train: bool,
    evaluate: bool,
    checkpoint_exporter: CheckpointExporter | None = None,
    trainer_cls: Callable[..., AdaptableTrainer] = Trainer,
) -> AdaptableTrainer:
    """Returns a trainer with the task's model and optimizer.

    Called in strategy scope. gin can bind `trainer_cls`, and the arguments of Model Garden's
    Trainer that are not passed here.

    Args:
      params: The experiment's config, Model Garden's or trainer_kit's.
      task: A Model Garden task.
      train: Whether the trainer will train.
      evaluate: Whether the trainer will evaluate.
      checkpoint_exporter: An exporter of the best checkpoint.
      trainer_cls: A Trainer class of either framework, or a subclass.
    """
    check_values(task, params)
    with explain_config_errors("task.model"):
        model = task.build_model()
    optimizer = create_optimizer(task, params)
    arguments = {
        "model": model,
        "optimizer": optimizer,
        "train": train,
        "evaluate": evaluate,
        "checkpoint_exporter": checkpoint_exporter,
    }
    # gin itself binds the arguments of Model Garden's own class only.
    bindings: dict[str, Any] = {}
    if isinstance(trainer_cls, type) and issubclass(trainer_cls, Trainer):
        bindings = get_gin_bindings("official.core.base_trainer.Trainer", arguments)
    return trainer_cls(params, task, **arguments, **bindings)


def create_task(config: Config, logging_dir: str | None = None) -> GardenTask:
    """Returns the Model Garden task for a task's section that `convert` has created.

    Called in strategy scope. `logging_dir` exists during the call, because some tasks write to it
    when they are created.

    Raises:
      UsageError, DataError: When the task cannot be created from the section.
    """
    section = build_original(config)
    with ensure_logging_folder(logging_dir), explain_config_errors("task"):
        return task_factory.get_task(section, logging_dir=logging_dir)


@contextlib.contextmanager
def ensure_logging_folder(logging_dir: str | None) -> Iterator[None]:
    """A context in which a local folder exists.

    Afterwards it is removed if it was created here and is empty.
    """
    if not logging_dir or is_remote(logging_dir):
        yield
        return

    path = Path(logging_dir).absolute()
    folders = (path, *path.parents)
    missing_folders = [folder for folder in folders if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        # A folder that is not empty stays, with its parents.
        with contextlib.suppress(OSError):
            for folder in missing_folders:
                folder.rmdir()


def add_numpy_method(logs: Any) -> Any:
    """Returns logs whose NumPy numbers have a method `numpy()`.

    The tensors that Model Garden returns have it, too.
    """
    if isinstance(logs, Mapping):
        return {name: add_numpy_method(value) for name, value in logs.items()}
    scalar_class = _SCALAR_CLASSES.get(type(logs))
    if scalar_class is None:
        return logs
    return scalar_class(logs)


def _create_scalar_class(scalar_type: type[np.generic]) -> type[np.generic]:
    """Returns a subclass of a NumPy scalar type with a method `numpy()`.

    An object of it is pickled as the NumPy type.
    """
    methods = {
        "numpy": lambda self: scalar_type(self),
        "__reduce__": lambda self: scalar_type(self).__reduce__(),
    }
    return type(scalar_type.__name__, (scalar_type,), methods)


_SCALAR_CLASSES = {
    number: _create_scalar_class(number) for number in (np.float32, np.float64, np.int32, np.int64)
}
