"""TrainState: everything that a run is made of at one moment, as its checkpoints hold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.checkpoints.random_state import process_generators, task_state, untracked_model_state
from trainer_kit.checkpoints.run_state import RunState
from trainer_kit.checkpoints.state import (
    OPTIONAL,
    difference,
    holds,
    restore,
    training_checkpoint,
    weights_checkpoint,
)
from trainer_kit.errors import UsageError

_SMALL = 4096  # elements


class TrainState:
    """Model, optimizers, global step, moving average, random state and run state. Made in the strategy's scope.

    Args:
      global_step: int64 scalar.
      model: Keras 3, tf_keras or tf.Module, built.
      optimizer: built, or a dict of them; None for evaluation, which needs no run state either.
      average: a MovingAverage, or None; or what has its `begin` and `reset`, and with `section` and `variables` tells
        what a checkpoint holds of it, and where.
      task: whose own variables and generators belong to the run.
      seed: of the process' random generators.
      items: further parts of every checkpoint, the best included, by their names; they are restored as far as both
        sides have them.

    Attributes:
      checkpoint: all of it.
      weights: the weights alone, as the best checkpoint keeps them.
      run_state: takes further parts, before the restore.
      loose: the names of the further parts.

    Raises:
      UsageError: when a further part has a name of the state's own.
    """

    def __init__(
        self,
        global_step: tf.Variable,
        model: Any,
        optimizer: Any,
        average: Any,
        task: Any,
        seed: int,
        items: Mapping[str, Any] | None = None,
    ) -> None:
        self._global_step, self._model, self._average = global_step, model, average
        self.run_state = RunState()
        others: dict[str, Any] = {}
        if optimizer is not None:
            generators: dict[str, Any] = process_generators(seed)
            others = {"run_state": self.run_state.variable, "task": task_state(task, model), "random": generators}
            if model_state := untracked_model_state(model):
                generators["model"] = model_state
        self._items, self.loose = dict(items or {}), frozenset(items or ())
        if taken := self.loose & {*OPTIONAL, "global_step", "model", "optimizer"}:
            raise UsageError(f"a checkpoint has {', '.join(sorted(taken))} of its own; give your item another name")
        others |= {"optimizer": optimizer, **self._average_section(), **self._items}
        self.checkpoint = training_checkpoint(global_step=global_step, model=model, **others)
        self.weights = weights_checkpoint(global_step=global_step, model=model, **self._items)
        self._optimizer = optimizer
        self._weights_finite = tf.function(self.finite, autograph=False)
        self._others_finite: tuple[int, Any] = (0, None)  # of so many variables

    def restored(self, path: str | None) -> None:
        """Brings what is no variable in line with what was restored; eager, in scope.

        Args:
          path: of the checkpoint; None when there was none. What it does not hold starts anew: the average at the
            weights.
        """
        if path is None or not holds(path, "run_state"):
            self.run_state.clear()
        else:
            self.run_state.load()
        if self._average is not None and path is None:
            self._average.begin()
        elif self._average is not None and path is not None and not holds(path, self._average.section):
            self._average.reset()

    def restore_weights(self, path: str) -> None:
        """Restores global step, model and average alone from a checkpoint of a run; eager, in scope.

        Raises:
          UsageError: when it does not fit.
          StorageError: when it is gone or damaged.
        """
        restore(self._evaluated(), path, whole=False, loose=self.loose)
        if self._average is not None and not holds(path, self._average.section):
            self._average.reset()

    def fits(self, path: str) -> bool:
        """Whether the checkpoint at `path` has all that `restore_weights` takes; reads names and shapes only.

        Raises:
          StorageError: when it is gone or damaged.
        """
        return difference(self._evaluated(), path, whole=False, loose=self.loose) == ""

    def _evaluated(self) -> tf.train.Checkpoint:
        others = {**self._average_section(), **self._items}
        return training_checkpoint(global_step=self._global_step, model=self._model, **others)

    def _average_section(self) -> dict[str, Any]:
        return {self._average.section: self._average.variables} if self._average is not None else {}

    def weights_are_sound(self) -> bool:
        """Whether all weights are finite; eager, on the host."""
        return bool(self._weights_finite().numpy())

    def is_sound(self) -> bool:
        """Whether the weights, and what optimizers and the average keep of them, are finite; eager, on the host."""
        averages = getattr(self._average, "variables", None)
        others = [*_kept_by(self._optimizer), *(averages.values() if isinstance(averages, Mapping) else ())]
        if self._others_finite[0] != len(others):  # some optimizers make theirs in the first step
            self._others_finite = len(others), tf.function(lambda: _all_finite(others), autograph=False)
        return self.weights_are_sound() and bool(self._others_finite[1]().numpy() if others else True)

    @tf.autograph.experimental.do_not_convert
    def finite(self) -> tf.Tensor:
        """Returns whether all of the model's variables of floating point are finite, a bool scalar; in graph.

        A sum is finite if all that it sums is, and reading once is all it costs. (One that overflows float32 belongs to
        a model that has diverged as well.)
        """
        return _all_finite(self._model.variables)


def _kept_by(optimizer: Any) -> list[Any]:
    """The variables of an optimizer of any kind, or of a dict of them."""
    if isinstance(optimizer, Mapping):
        return [variable for one in optimizer.values() for variable in _kept_by(one)]
    variables = getattr(optimizer, "variables", ())
    return list(variables() if callable(variables) else variables)


def _all_finite(variables: Iterable[Any]) -> tf.Tensor:
    native = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    alike: dict[Any, list[Any]] = {}  # small ones are summed together: each operation has to be traced, for a ms or so
    for number, variable in enumerate(v for v in native if v.dtype.is_floating):
        small = variable.shape.is_fully_defined() and variable.shape.num_elements() <= _SMALL
        alike.setdefault((tuple(variable.shape), variable.dtype) if small else number, []).append(variable)
    groups = (tf.stack(group) if len(group) > 1 else group[0] for group in alike.values())
    sums = [tf.reduce_sum(tf.cast(group, tf.float32)) for group in groups]
    return tf.reduce_all(tf.math.is_finite(tf.stack(sums))) if sums else tf.constant(True)
