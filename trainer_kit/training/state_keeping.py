"""How a trainer finds the state of its training step beside weights and optimizer, for checkpoints to hold it."""

from __future__ import annotations

import json
import logging
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.training.checks import check_exact_resume, tell_dropped_assertions
from trainer_kit.training.python_state import PlainValues

_LOG = logging.getLogger(__name__)


class StateKeeping:
    """The methods of a trainer that concern such state; to be inherited from."""

    _strategy: tf.distribute.Strategy
    stop_flag: Any  # a StopFlag
    _fuse_steps: int
    _weights_in_use: Any  # a lock
    trains: bool
    _eval_set: Any  # MetricSet
    config: Any
    evaluated_batches: tf.Variable
    metric_variables: Any
    model: Any
    state: Any  # TrainState
    task: Any

    def init_state_keeping(self, own_loop: bool, own_train: bool) -> None:
        """Has the task's own state, if it has methods `state()` and `restore(state)`, be in every checkpoint.

        Args:
          own_loop: whether a subclass makes the training loop itself.
          own_train: whether a subclass has a `train` of its own, which may not run our loop.
        """
        self._own_loop, self._own_train = own_loop, own_train
        self._looked_into = self._eagerly = self._searched = False
        self._plain_values: PlainValues | None = None
        self._reported_values: set[str] = set()
        self._before_evaluation = ""
        self._looks = 0
        self._evaluations: set[tf.Graph] = set()
        self.state.step_state.roots["trainer"] = self
        if self._has_own_state():
            restore = self.task.restore
            self.state.run_state.add("task", self.task.state, lambda state: None if state is None else restore(state))

    def watch_values(self) -> None:
        """Remembers what `initialize`, actions and callbacks may change, before they do; eager, in scope."""
        if self.trains and not self._own_loop:  # of which all is saved that can be found
            self.state.watch(self._without_state(), everything=self._own_train)

    def keep_what_changed(self) -> None:
        """Has checkpoints hold what has changed meanwhile without a step of ours; eager, before a save.

        Raises:
          UsageError: if trainer.require_exact_resume, for state that cannot be saved.
        """
        if not self.trains:
            return
        unseen = self._own_train and not self._looked_into and not self._searched
        self._searched = self._searched or unseen
        with self._weights_in_use, self._strategy.scope():  # a late save comes from another thread
            self.state.keep_changed(self._without_state() if unseen else None, self._required())

    def look_into(self, graph: tf.Graph | None) -> None:
        """Finds all state of the training step, once, before the first step; eager.

        Args:
          graph: of the loop or of the step; None when neither is compiled.

        Raises:
          UsageError: if trainer.require_exact_resume, for state that cannot be saved.
        """
        if self._looked_into:
            return
        self._looked_into, self._eagerly = True, graph is None
        if graph is not None:
            check_exact_resume(graph, self._required())
            if self._fuse_steps > 1:
                tell_dropped_assertions(graph)
        with self._strategy.scope():
            self.state.keep_written(graph, self._without_state(), self._required())

    def look_into_evaluation(self, graph: tf.Graph | None) -> None:
        """Warns of what an evaluation changes and the training step uses; called after each evaluation; eager.

        Args:
          graph: of the evaluation; None when it is not compiled.

        Raises:
          UsageError: if trainer.require_exact_resume.
        """
        if graph is not None and self._looked_into and graph not in self._evaluations:
            self._evaluations.add(graph)
            self.state.report_evaluation(graph, self._without_state(), self._required())

    def on_first_step(self) -> None:
        """Called when the first step of a loop function is done: its caches are filled, and its variables made."""
        if self._eagerly:
            with self._strategy.scope():
                self.state.keep_made(self._without_state(), self._required())
        if not self._has_own_state():
            self._plain_values = PlainValues(self.task)

    def prepare_save(self, quiet: bool) -> None:
        """Has the checkpoint that is about to be saved hold what has changed, and says what it cannot hold; eager.

        Args:
          quiet: do not say what it cannot hold, as where a run is stopped, which has to save in any case.

        Raises:
          UsageError: if trainer.require_exact_resume, for state that cannot be saved.
        """
        self.keep_what_changed()
        if not quiet:
            self.report_python_state()

    def look_at_python_state(self) -> None:
        """Does as `report_python_state`, when called before and after loops 1, 2, 4, 8 and so on.

        A loop of one small step takes less time than a look. Saves and evaluations look in any case.
        """
        self._looks += 1
        loop = (self._looks + 1) // 2
        if loop & (loop - 1) == 0:
            self.report_python_state()

    def report_python_state(self) -> None:
        """Warns, once for each attribute, of plain values of the task that have changed since the first step; eager.

        Raises:
          UsageError: if trainer.require_exact_resume.
        """
        changed = [] if self._plain_values is None else self._plain_values.changed()
        new = [name for name in changed if name not in self._reported_values]
        if not new:
            return
        self._reported_values.update(new)
        text = (
            f"{', '.join(new)} changes while the run trains, and no checkpoint holds it: a resumed run begins with the "
            "initial value; give the task methods state() and restore(state), or keep the value in a tf.Variable"
        )
        if self._required():
            raise UsageError(f"trainer.require_exact_resume: {text}")
        _LOG.warning("%s", text)

    def before_evaluation(self) -> None:
        """Reports the task's plain values, and remembers what its `state()` returns, for `report_evaluated_state`."""
        self.report_python_state()
        self._before_evaluation = self._own_state()

    def report_evaluated_state(self) -> None:
        """Warns, once, if the evaluation has changed what the task's `state()` returns; eager.

        Raises:
          UsageError: if trainer.require_exact_resume.
        """
        if self._own_state() == self._before_evaluation:
            return
        text = (
            f"the evaluation changes what {type(self.task).__name__}.state() returns: a checkpoint is saved before the "
            "evaluation of its step, and a resumed run does not repeat the evaluations on record, so it will not be "
            "the same as one that was never stopped; change that state in training only"
        )
        if self._required():
            raise UsageError(f"trainer.require_exact_resume: {text}")
        if text not in self._reported_values:
            self._reported_values.add(text)
            _LOG.warning("%s", text)

    def _own_state(self) -> str:
        """Returns what the task's `state()` returns, as text to compare; "" where there is no such state."""
        if not (self.trains and self._has_own_state()):
            return ""
        return json.dumps(self.task.state(), default=repr, sort_keys=True)

    def forget_python_state(self) -> None:
        """Takes the task's values as they are now: what an evaluation changes is not the state of training."""
        if self._plain_values is not None:
            self._plain_values.changed()

    def _required(self) -> bool:
        return bool(getattr(self.config.trainer, "require_exact_resume", False))

    def _has_own_state(self) -> bool:
        return all(callable(getattr(self.task, name, None)) for name in ("state", "restore"))

    def _without_state(self) -> list[Any]:
        """Variables that the steps write to and no checkpoint has to hold: metrics are reset, and so on."""
        metrics = [variable for metric in getattr(self.model, "metrics", None) or [] for variable in metric.variables]
        own = [*self.stop_flag.variables, self.evaluated_batches]
        return [*metrics, *self.metric_variables(), *self._eval_set.variables(), *own]
