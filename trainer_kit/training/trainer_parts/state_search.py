"""StateSearch: finds the variables of a training step besides weights and optimizer, so that checkpoints hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.training.checks.model_and_config import check_deterministic_kernels, check_exact_resume


class StateSearch:
    """Adds every variable that the training step changes to checkpoints. Created in the scope of the strategy.

    All methods are eager, on the host. With `required` they raise UsageError for state that cannot be saved.

    Args:
      state: The TrainState of the run, to which the variables are added.
      without_state: A function that returns variables to leave out, such as those of metrics, which are reset.
      required: Whether the config asks for an exact resume.
      trains: Whether the trainer will train; if not, nothing is searched.
      own_loop: Whether a subclass overrides create_train_loop_fn; the graph of its loop is not known.
      own_train: Whether a subclass overrides `train`, which may not run trainer_kit's loop.

    Attributes:
      is_done: Whether the training step has been searched.
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
        """Remembers the current values, which `initialize`, actions and callbacks may change."""
        if self._trains and not self._own_loop:  # for a user's own loop, all variables that are found are saved
            self._state.watch(self._without_state(), everything=self._own_train)

    def restored(self) -> None:
        """Searches a trainer with a user's own loop after each restore, since the graph of the loop is never known."""
        if self._trains and self._own_loop:
            self.look_into(None)

    def keep_what_changed(self) -> None:
        """Adds variables that changed outside training steps to checkpoints; before a save, from any thread."""
        if not self._trains:
            return
        unseen = self._own_train and not self.is_done and not self._searched
        self._searched = self._searched or unseen
        with self._state.in_use, self._strategy.scope():
            self._state.keep_changed(self._without_state() if unseen else None, self._required)

    def look_into(self, graph: tf.Graph | None) -> None:
        """Finds all state of the training step, once, before the first step.

        Args:
          graph: The graph of the loop or of the step; None when neither is compiled.
        """
        if self.is_done:
            return
        self.is_done, self._eagerly = True, graph is None
        check_deterministic_kernels(self._strategy, self._required)
        if graph is not None:
            check_exact_resume(graph, self._required)
        with self._strategy.scope():
            self._state.keep_written(graph, self._without_state(), self._required)

    def look_into_evaluation(self, graph: tf.Graph | None, metrics: Sequence[Any] = ()) -> None:
        """Warns of variables that an evaluation changes and the training step uses; called after each evaluation.

        Args:
          graph: The graph of the evaluation; None when it is not compiled.
          metrics: The variables of metrics that the evaluation steps return, which are reset after each loop.
        """
        if graph is not None and self.is_done and graph not in self._evaluations:
            self._evaluations.add(graph)
            self._state.report_evaluation(graph, [*self._without_state(), *metrics], self._required)

    def first_step_done(self) -> None:
        """Finds the variables that the first step has created, if steps are not compiled."""
        if self._eagerly:
            with self._strategy.scope():
                self._state.keep_made(self._without_state(), self._required)
