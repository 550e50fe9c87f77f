"""StateSearch: finds the variables of a training step beside weights and optimizer, for checkpoints to hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.training.checks.model_and_config import check_exact_resume


class StateSearch:
    """Has checkpoints hold every variable that the training step changes. Made in the scope of the strategy.

    All methods are eager, on the host, and raise UsageError if `required`, for state that cannot be saved.

    Args:
      state: of the run; it takes what is found.
      without_state: returns variables that need no saving, such as those of metrics that are reset.
      required: whether the config asks for an exact resume.
      trains: whether there will be training; if not, nothing is searched.
      own_loop: whether a subclass makes the training loop itself, whose graph is then not known.
      own_train: whether a subclass has a `train` of its own, which may not run our loop.

    Attributes:
      is_done: whether the training step was searched.
    """

    def __init__(
        self,
        state: TrainState,
        without_state: Callable[[], Sequence[Any]],
        *,
        required: bool,
        trains: bool,
        own_loop: bool,
        own_train: bool,
    ) -> None:
        self._state, self._without_state = state, without_state
        self._strategy, self._required = tf.distribute.get_strategy(), required
        self._trains, self._own_loop, self._own_train = trains, own_loop, own_train
        self.is_done = self._eagerly = self._searched = False
        self._evaluations: set[tf.Graph] = set()

    def watch_variables(self) -> None:
        """Remembers the values that `initialize`, actions and callbacks may change, before they do."""
        if self._trains and not self._own_loop:  # of which all is saved that can be found
            self._state.watch(self._without_state(), everything=self._own_train)

    def restored(self) -> None:
        """Searches a trainer whose loop is its own, after each restore: no graph of it will be known."""
        if self._trains and self._own_loop:
            self.look_into(None)

    def keep_what_changed(self) -> None:
        """Has checkpoints hold what has changed without a step of ours; before a save, from any thread."""
        if not self._trains:
            return
        unseen = self._own_train and not self.is_done and not self._searched
        self._searched = self._searched or unseen
        with self._state.in_use, self._strategy.scope():
            self._state.keep_changed(self._without_state() if unseen else None, self._required)

    def look_into(self, graph: tf.Graph | None) -> None:
        """Finds all state of the training step, once, before the first step.

        Args:
          graph: of the loop or of the step; None when neither is compiled.
        """
        if self.is_done:
            return
        self.is_done, self._eagerly = True, graph is None
        if graph is not None:
            check_exact_resume(graph, self._required)
        with self._strategy.scope():
            self._state.keep_written(graph, self._without_state(), self._required)

    def look_into_evaluation(self, graph: tf.Graph | None) -> None:
        """Warns of variables that an evaluation changes and the training step uses; after each evaluation.

        Args:
          graph: of the evaluation; None when it is not compiled.
        """
        if graph is not None and self.is_done and graph not in self._evaluations:
            self._evaluations.add(graph)
            self._state.report_evaluation(graph, self._without_state(), self._required)

    def first_step_done(self) -> None:
        """Finds the variables that the first step has made, where steps are not compiled."""
        if self._eagerly:
            with self._strategy.scope():
                self._state.keep_made(self._without_state(), self._required)
