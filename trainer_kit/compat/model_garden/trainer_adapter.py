"""Runs Model Garden's trainers, and subclasses of them, under trainer_kit's runner.

A subclass of official.core's Trainer that is not ported yet keeps its own loops. trainer_kit's
runner adds what it adds to its own trainers: checkpoints with random state, stops between loops,
ledgers and best checkpoints. A resume is exact if the trainer's data has a position. Data that the
trainer distributes itself starts from its beginning, and a warning says so. Several workers agree
between loops whether to stop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import orbit
import tensorflow as tf

from trainer_kit.checkpoint_names import ITERATOR_SUFFIX
from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.compat.model_garden.actions import GardenActionsTrainer
from trainer_kit.compat.model_garden.optimizers import (
    OptimizerAverages,
    create_optimizer_variables,
    find_averaging_optimizer,
)
from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.dataset_iterator import describe_endless_data, is_endless
from trainer_kit.inputs.dataset_resume import ResumePolicy
from trainer_kit.inputs.train_data import TrainData
from trainer_kit.optimizers.learning_rate import ConfiguredRates
from trainer_kit.runtime.datasets import has_plain_iterator
from trainer_kit.training.loops.iterators import StopFlag
from trainer_kit.training.trainer import Trainer
from trainer_kit.typing import CheckpointExporter, Dataset, IntLike

if TYPE_CHECKING:
    from trainer_kit.compat.model_garden.garden_types import AdaptableTrainer

_REQUIRED_ATTRIBUTES = ("strategy", "config", "model", "optimizer", "global_step", "checkpoint")
_STANDARD_CHECKPOINT_ITEMS = ("global_step", "model", "optimizer", "save_counter")


def adapt_trainer(trainer: AdaptableTrainer | None, seed: int = 0) -> Any:
    """Returns a trainer that trainer_kit's runner can use.

    This is `trainer` itself, or a TrainerAdapter around it. Called in strategy scope.

    Args:
      trainer: A trainer of trainer_kit or of Model Garden. None stays None.
      seed: The run's random seed.

    Raises:
      UsageError: For any other object, and for best weights that the trainer does not keep.
    """
    if trainer is None or isinstance(trainer, (Trainer, TrainerAdapter)):
        return trainer

    missing = [name for name in _REQUIRED_ATTRIBUTES if not hasattr(trainer, name)]
    if missing:
        raise UsageError(
            f"{type(trainer).__name__} has no {', '.join(missing)}; give a trainer of Orbit or"
            f" Model Garden the attributes {', '.join(_REQUIRED_ATTRIBUTES)}, or pass a Trainer of"
            " trainer_kit"
        )

    section = getattr(trainer.config, "trainer", None)
    metric = getattr(section, "best_checkpoint_eval_metric", "")
    if metric and not hasattr(trainer, "checkpoint_exporter"):
        raise UsageError(
            f"trainer.best_checkpoint_eval_metric={metric}: {type(trainer).__name__} keeps no best"
            " weights; remove this field, or have the trainer's eval_end call a"
            " checkpoint_exporter, an attribute of the trainer"
        )
    return TrainerAdapter(trainer, seed)


class TrainerAdapter(GardenActionsTrainer):
    """Wraps a Model Garden trainer in the interface that trainer_kit's runner needs.

    Created in strategy scope. All other attributes are those of the wrapped trainer.

    Args:
      inner: The Model Garden trainer.
      seed: The run's random seed.

    Attributes:
      can_train: Whether the trainer has training data.
      state: What a checkpoint of the run contains.
      data: The training data with its position.
      weights_finite: Whether the weights are finite. None: this is not known.
      stop_flag: The workers' agreement whether to stop.
    """

    def __init__(self, inner: orbit.StandardTrainer, seed: int) -> None:
        self._inner = inner
        self._dataset = getattr(inner, "_train_dataset", None)
        self.can_train = self._dataset is not None
        optimizer = inner.optimizer
        if self.can_train and optimizer is not None:
            create_optimizer_variables(optimizer, inner.model.trainable_variables)

        self._average: OptimizerAverages | None = None
        averaging_optimizer = find_averaging_optimizer(optimizer)
        if averaging_optimizer is not None:
            # Model Garden's own exchange, which the trainer's evaluations call, changes last bits
            # of the weights.
            self._average = OptimizerAverages(optimizer, inner.model)
            averaging_optimizer.swap_weights = self._average.swap

        # Checkpoints also contain what the trainer's own checkpoint contains beyond the parts that
        # every run has.
        model_items = getattr(inner.model, "checkpoint_items", None) or ()
        saved_elsewhere = {*_STANDARD_CHECKPOINT_ITEMS, *model_items}
        own_items = {}
        for name, item in inner.checkpoint._trackable_children().items():
            if name not in saved_elsewhere:
                own_items[name] = item
        trained_optimizer = optimizer if self.can_train else None
        task = getattr(inner, "task", None)
        self.state = TrainState(
            inner.global_step, inner.model, trained_optimizer, self._average, task, seed, own_items
        )

        policy = ResumePolicy(has_single_iterator=has_plain_iterator(inner.strategy))
        advice = f"have {type(inner).__name__} inherit from trainer_kit.compat.model_garden.Trainer"
        self.data = TrainData(None, None, policy, inner.global_step, self._dataset, advice=advice)

        rates = ConfiguredRates(trained_optimizer)
        self.state.add_root("trainer", inner)
        self.state.python_state.add("learning rates", rates.state, rates.restore)
        self.state.python_state.add("data", self.data.state, self.data.restore)
        self.weights_finite: bool | None = True
        self.stop_flag: StopFlag = StopFlag(inner.strategy)

    def __getattr__(self, name: str) -> Any:
        # Before __init__, such as in copy.copy, there is no _inner.
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def class_name(self) -> str:
        """The name of the wrapped trainer's class, for messages."""
        return type(self._inner).__name__

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """The checkpoint with everything that the run saves."""
        return self.state.checkpoint

    @property
    def checkpoint_exporter(self) -> CheckpointExporter | None:
        """The exporter of the best checkpoint, or None."""
        return getattr(self._inner, "checkpoint_exporter", None)

    @property
    def train_dataset(self) -> Dataset:
        """The training data. Setting it takes effect with the next loop."""
        return self._inner.train_dataset

    @train_dataset.setter
    def train_dataset(self, dataset: Dataset) -> None:
        self._inner.train_dataset = dataset

    @contextlib.contextmanager
    def use_weights(self, name: str = "") -> Iterator[None]:
        """A context with the optimizer's averages, if it has any, in place of the weights.

        Runs eagerly, on the host.

        Args:
          name: Not used: there is one average.
        """
        del name
        if self._average is not None and not self._average.active_average:
            self._average.swap()
        try:
            yield
        finally:
            self.restore_trained_weights()

    def train(self, num_steps: IntLike) -> orbit.runner.Output | None:
        """Runs the trainer's own loop from the run's position in the data, eagerly, on the host.

        Raises:
          UsageError: When the trainer has no attribute _train_dataset.
        """
        if not self.can_train:
            kind = type(self._inner).__name__
            raise UsageError(
                f"{kind} cannot train: it lacks the attribute _train_dataset, in which Model"
                " Garden's trainers keep their data; call super().__init__ of Model Garden's"
                " trainer, or set the attribute"
            )

        # It may have been replaced since the last loop.
        if self._inner._train_dataset is not self._dataset:
            self._dataset = self._inner._train_dataset
            self.data.replace(self._dataset)
        # Orbit creates an iterator only where there is none.
        self._inner._train_iter = self.data.iterator()
        self.weights_finite = None
        logs = self._inner.train(num_steps)
        self.stop_flag.sync_workers_between_loops()
        return logs

    def evaluate(self, num_steps: IntLike) -> orbit.runner.Output | None:
        """Runs the trainer's own evaluation, eagerly, on the host."""
        try:
            return self._inner.evaluate(num_steps)
        finally:
            self.restore_trained_weights()

    def restore_trained_weights(self) -> None:
        """Restores the weights if the optimizer's averages are in their place."""
        if self._average is not None and self._average.active_average:
            self._average.swap()

    def register_state(
        self, name: str, get_state: Callable[[], Any], restore_state: Callable[[Any], None]
    ) -> None:
        """Saves what `get_state` returns, in JSON types, in checkpoints.

        `restore_state` gets it after a restore.
        """
        self.state.python_state.add(name, get_state, restore_state)

    def check_data(self) -> None:
        """Raises DataError when an evaluation would read all of an endless validation dataset.

        Missing data is reported by the trainer's own loops.
        """
        dataset = getattr(self._inner, "_validation_dataset", None)
        section = getattr(self.config, "trainer", None)
        reads_all = getattr(section, "validation_steps", 0) == -1
        if dataset is not None and reads_all and is_endless(dataset):
            raise DataError(describe_endless_data("validation_data", "trainer.validation_steps"))

    def initialize(self) -> None:
        """Initializes the trainer when there is no checkpoint to restore.

        Runs eagerly, in strategy scope.
        """
        if hasattr(self._inner, "initialize"):
            self._inner.initialize()
        self.after_restore()

    def before_save(self, prefix: str) -> None:
        """Prepares the state that is not in variables for the checkpoint at `prefix`.

        Runs eagerly, before the checkpoint is saved.
        """
        self.state.before_save(self._metric_variables())
        self.data.save_iterator(f"{prefix}{ITERATOR_SUFFIX}")

    def after_restore(self, path: str | None = None) -> None:
        """Moves the data to the position of the restored checkpoint.

        Args:
          path: The path of the restored checkpoint. None if there was none.
        """
        iterator_path = None
        if path:
            iterator_path = f"{path}{ITERATOR_SUFFIX}"
        self.data.prepare_iterator_restore(iterator_path)
        self.state.after_restore(path)
        # What the trainer's own loops change is not known.
        if self.can_train:
            self.state.track_attributes(self._metric_variables())
        self.state.end_restore()
        self.weights_finite = None
        self.has_data_ended = False

    def _metric_variables(self) -> list[tf.Variable]:
        """Returns the variables of the trainer's metrics.

        They are not saved, because each loop resets them.
        """
        metrics = []
        for attribute in vars(self._inner).values():
            # An attribute may be a list or a dict of metrics.
            for value in tf.nest.flatten(attribute):
                if hasattr(value, "update_state") and hasattr(value, "variables"):
                    metrics.append(value)
        metrics += getattr(self._inner.model, "metrics", None) or []

        variables: list[tf.Variable] = []
        for metric in metrics:
            variables += metric.variables
        return variables
