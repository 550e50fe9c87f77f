"""Model Garden's trainers, and subclasses of them, under trainer_kit's runner.

A subclass of official.core's Trainer that is not ported yet keeps its own loops. trainer_kit's runner does around
them what it does around its own: checkpoints with random state, stops between loops, ledgers, best. Resumes are exact
as far as the trainer's data have a position: data that it distributes itself begin anew, and a warning says so. Stops
are those of one worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoint_names import ITERATOR
from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.compat.model_garden.actions.actions import get_eval_actions, get_train_actions
from trainer_kit.compat.model_garden.training.moving_average import OptimizersAverage, averaging
from trainer_kit.compat.model_garden.training.optimizers import make_whole
from trainer_kit.distribution.datasets import has_plain_iterator
from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.dataset_iterator import endless, is_endless
from trainer_kit.inputs.train_data import TrainData
from trainer_kit.optimizers.learning_rate import ConfiguredRates
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_parts.stop_flag import StopFlag

_NEEDED = ("strategy", "model", "optimizer", "global_step", "checkpoint")
_KNOWN = ("global_step", "model", "optimizer", "save_counter")


def adopted(trainer: Any, seed: int = 0) -> Any:
    """Returns `trainer` as trainer_kit's runner can drive it: itself, if it is one of trainer_kit's.

    Args:
      trainer: trainer_kit's or Model Garden's; None stays None.
      seed: of the run.

    Raises:
      UsageError: for anything else.
    """
    if trainer is None or isinstance(trainer, (Trainer, AdoptedTrainer)):
        return trainer
    missing = [name for name in _NEEDED if not hasattr(trainer, name)]
    if missing:
        raise UsageError(
            f"{type(trainer).__name__} has no {', '.join(missing)}; give a Trainer of trainer_kit, or one with the "
            "attributes of Model Garden's"
        )
    return AdoptedTrainer(trainer, seed)


class AdoptedTrainer(BaseTrainer):
    """A trainer of Model Garden's with what trainer_kit's runner asks of one. Made in the scope of its strategy.

    What is not here is that of the trainer itself.

    Args:
      inner: the trainer.
      seed: of the run.
    """

    def __init__(self, inner: Any, seed: int) -> None:
        self._inner, self._strategy = inner, inner.strategy
        optimizer, self._dataset = inner.optimizer, getattr(inner, "_train_dataset", None)
        self.trains = self._dataset is not None
        if self.trains and optimizer is not None:
            make_whole(optimizer, inner.model.trainable_variables)
        task, step = getattr(inner, "task", None), inner.global_step
        self._average = _exact_average(optimizer, inner.model)
        trained = optimizer if self.trains else None
        self.state = TrainState(step, inner.model, trained, self._average, task, seed, self._own_items())
        self.data = TrainData(
            lambda _: self._dataset,
            lambda: int(step.numpy()),
            self._dataset,
            one_iterator=has_plain_iterator(inner.strategy),
            instead=f"have {type(inner).__name__} inherit from trainer_kit.compat.model_garden.Trainer",
        )
        rates = ConfiguredRates(trained)
        self.state.discovered.roots["trainer"] = inner
        self._searched = False  # for what its first steps have made
        self.state.python_state.add("learning rates", rates.state, rates.restore)
        self.state.python_state.add("data", self.data.state, self.data.put_state)
        self.sound: bool | None = True
        self.stop_flag = StopFlag(self._strategy)

    def _own_items(self) -> dict[str, Any]:
        """Returns what the trainer's own checkpoint has beside what trainer_kit's has anyway."""
        found = dict(self._inner.checkpoint._trackable_children())
        known = {*_KNOWN, *(getattr(self._inner.model, "checkpoint_items", None) or ())}
        return {name: item for name, item in found.items() if name not in known}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy in whose scope the trainer was made."""
        return self._strategy

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """All that a checkpoint of the run holds."""
        return self.state.checkpoint

    @property
    def checkpoint_exporter(self) -> Any:
        """Keeps the best checkpoint; None if there is none to keep."""
        return getattr(self._inner, "checkpoint_exporter", None)

    @property
    def saves_position(self) -> bool:
        """Whether checkpoints hold the state of the data's iterator."""
        return self.data.saves_position

    @property
    def train_dataset(self) -> Any:
        """The training data; setting it takes effect with the next loop."""
        return self._inner.train_dataset

    @train_dataset.setter
    def train_dataset(self, dataset: Any) -> None:
        self._inner.train_dataset = dataset

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Has the average that the optimizer keeps, if any, in place of the weights; eager, on the host."""
        if self._average is not None and not self._average.swapped:
            self._average.swap()
        try:
            yield
        finally:
            self.end_averaging()

    def train(self, num_steps: Any) -> Any:
        """Runs the trainer's own loop, from the place in the data at which the run stands; eager, on the host.

        Raises:
          UsageError: when it has no data that trainer_kit's runner can find.
        """
        if not self.trains:
            kind = type(self._inner).__name__
            raise UsageError(f"{kind} has no _train_dataset, as trainers of Model Garden and Orbit do; it cannot train")
        if self._inner._train_dataset is not self._dataset:  # it was set meanwhile
            self._dataset = self._inner._train_dataset
            self.data.feed.replace(self._dataset)
        self._inner._train_iter, self.sound = self.data.iterator(), None
        return self._inner.train(num_steps)

    def evaluate(self, num_steps: Any) -> Any:
        """Runs the trainer's own evaluation; eager, on the host."""
        try:
            return self._inner.evaluate(num_steps)
        except BaseException:
            self.end_averaging()
            raise

    def end_averaging(self) -> None:
        """Puts back the weights, if the trainer has put the averages of its optimizer in their place."""
        if self._average is not None and self._average.swapped:
            self._average.swap()

    def own_train_actions(self, params: Any, model_dir: str, manager: Any) -> list[Any]:
        """Returns what happens after each training loop; gin can bind it."""
        return get_train_actions(params, self, model_dir, checkpoint_manager=manager)

    def own_eval_actions(self, params: Any, model_dir: str) -> list[Any]:
        """Returns what happens after each evaluation; gin can bind it."""
        return get_eval_actions(params, self, model_dir)

    def keep_state(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Has checkpoints hold what `get` returns, as JSON can hold it, and `put` take it after a restore."""
        self.state.python_state.add(name, get, put)

    def check_data(self) -> None:
        """Raises DataError when all validation data is to be evaluated, and is known to be endless.

        The trainer's own loops say when there are no data.
        """
        dataset, options = getattr(self._inner, "_validation_dataset", None), getattr(self.config, "trainer", None)
        if dataset is not None and getattr(options, "validation_steps", 0) == -1 and is_endless(dataset):
            raise DataError(endless("validation_data", "trainer.validation_steps"))

    def validation_metric_names(self) -> None:
        """Returns None: only a run can tell what it reports."""

    def initialize(self) -> None:
        """Called when there is no checkpoint to restore; eager, in scope."""
        self._watch_values()
        if hasattr(self._inner, "initialize"):
            self._inner.initialize()
        self.after_restore()

    def before_save(self, prefix: str) -> None:
        """Gets all ready that is no variable for the checkpoint that is about to be saved at `prefix`; eager."""
        unseen, self._searched = not self._searched, True
        with self._strategy.scope():
            self.state.keep_changed(self._metric_variables() if unseen else None, self._required())
        self.state.python_state.store()
        self.data.save_iterator(f"{prefix}{ITERATOR}")

    def after_restore(self, path: str | None = None) -> None:
        """Brings the data in line with the restored variables.

        Args:
          path: of the checkpoint that was restored; None when there was none.
        """
        self.data.restored(f"{path}{ITERATOR}" if path else None)
        self.state.restored(path)
        if path is not None:
            self._watch_values()
        self.sound, self.data_ended = None, False

    def _watch_values(self) -> None:
        """Remembers what the trainer's own loops may change, of which no graph is known; eager, in scope."""
        if self.trains:
            self.state.watch(self._metric_variables(), everything=True)

    def _metric_variables(self) -> list[Any]:
        """Returns the variables of the trainer's metrics, which need no saving: loops begin with them at zero."""
        values = [one for value in vars(self._inner).values() for one in tf.nest.flatten(value)]
        metrics = [one for one in values if hasattr(one, "update_state") and hasattr(one, "variables")]
        own = getattr(self._inner.model, "metrics", None) or []
        return [variable for metric in (*metrics, *own) for variable in metric.variables]

    def _required(self) -> bool:
        return bool(getattr(getattr(self.config, "trainer", None), "require_exact_resume", False))


def _exact_average(optimizer: Any, model: Any) -> OptimizersAverage | None:
    """Returns the average that Model Garden's optimizer keeps, with an exact swap; None if it keeps none."""
    inner = averaging(optimizer)
    if inner is None:
        return None
    average = OptimizersAverage(optimizer, model)
    inner.swap_weights = average.swap
    return average
