"""The state of a trainer in checkpoints besides weights and optimizer: variables of the step, and Python state."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.optimizers.learning_rate import ConfiguredRates
from trainer_kit.runtime.replica_values import put_replica_values, replica_values
from trainer_kit.training.checks.model_and_config import check_deterministic_kernels, check_exact_resume
from trainer_kit.training.metrics import MetricSet

_LOG = logging.getLogger(__name__)


def has_own_state(task: Any) -> bool:
    """Whether a task has methods `state()` and `restore(state)`, which save its plain values in checkpoints."""
    return all(callable(getattr(task, name, None)) for name in ("state", "restore"))


@contextlib.contextmanager
def kept_states(tasks: Iterable[Any]) -> Iterator[None]:
    """Restores the own state of tasks at the end of this context; tasks without methods for it stay as they are."""
    before = [
        (task, copy.deepcopy(task.state()))
        for task in {id(task): task for task in tasks}.values()
        if has_own_state(task)
    ]
    yield
    for task, state in before:
        if state is not None:
            task.restore(state)


class InterruptedMetrics:
    """Saves and restores the metrics of an interrupted loop, which the next start continues. Runs eagerly, on the host.

    Args:
      trainer: The trainer; its `metrics_continue` says whether a checkpoint holds them, and is set after a restore.
      metrics: The training metrics, whose variables may be created in a step.
      strategy: The strategy of the trainer.
    """

    def __init__(self, trainer: Any, metrics: MetricSet, strategy: tf.distribute.Strategy) -> None:
        self._trainer = trainer
        self._metrics = metrics
        self._strategy = strategy

    def state(self) -> Any:
        """Returns the values of the metrics on each replica; None if no loop was interrupted."""
        return replica_values(self._metrics.variables(), self._strategy) if self._trainer.metrics_continue else None

    def restore(self, state: Any) -> None:
        """Restores what `state` returned; if the run has other metrics now, warns and begins them again."""
        fits = state is not None and put_replica_values(self._metrics.variables(), self._strategy, state)
        self._trainer.metrics_continue = fits
        if state is not None and not fits:
            _LOG.warning(
                "the checkpoint holds the state of other metrics than this run has, so the first training metrics "
                "leave out a few steps"
            )


def keep_python_state(trainer: Any, metrics: MetricSet) -> None:
    """Adds the state that is not in variables to every checkpoint of a trainer.

    Args:
      trainer: The trainer, with its data.
      metrics: The training metrics.
    """
    rates, parts = ConfiguredRates(trainer.optimizer), trainer.state.python_state
    parts.add("data", trainer.data.state, trainer.data.put_state)
    of_loop = InterruptedMetrics(trainer, metrics, trainer.strategy)
    parts.add("metrics", of_loop.state, of_loop.restore)
    parts.add("learning rates", rates.state, rates.restore)
    trainer.state.keep_replicas(trainer.strategy)
    if has_own_state(trainer.task):
        restore = trainer.task.restore
        parts.add("task", trainer.task.state, lambda state: None if state is None else restore(state))


class TrackedState:
    """Adds variables to checkpoints, and reports evaluations that change some. Created in the scope of the strategy.

    All methods are eager, on the host. With `required` they raise UsageError for state that cannot be saved.

    Args:
      state: The TrainState of the run, to which the variables are added.
      without_state: A function that returns variables to leave out, such as those of metrics, which are reset.
      required: Whether the config asks for an exact resume.
      trains: Whether the trainer will train; if not, nothing is added.
      own_loop: Whether a subclass overrides create_train_loop_fn; the graph of its loop is not known.
      own_train: Whether a subclass overrides `train`, which may not run trainer_kit's loop.

    Attributes:
      is_done: Whether the training step is known.
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
        self.is_done = self._is_eager = False
        self._evaluations: set[tf.Graph] = set()

    def after_restore(self) -> None:
        """Adds and restores the variables in attributes; called after each restore, also of nothing."""
        self._keep_attributes()
        if self._own_loop and self._trains:
            self.keep_written(None)
        if self.is_done:
            self._state.end_restore(strict=not self._is_eager)

    def before_save(self) -> None:
        """Adds the variables that attributes have since the restore; called before each save, from any thread."""
        if self._own_train and not self.is_done:
            self._state.end_restore(strict=False)
        self._keep_attributes()

    def keep_written(self, graph: tf.Graph | None) -> None:
        """Adds and restores all state of the training step, once, before the first step.

        Args:
          graph: The graph of the loop or of the step; None when neither is compiled, so that its writes are not known.
        """
        if self.is_done:
            return
        self.is_done, self._is_eager = True, graph is None
        check_deterministic_kernels(self._strategy, self._required)
        self._keep_attributes()
        if graph is not None:
            check_exact_resume(graph, self._required)
            with self._strategy.scope():
                self._state.keep_written(graph, self._without_state(), self._required)
        self._state.end_restore(strict=graph is not None)

    def first_step_done(self) -> None:
        """Checks the variables that the first step has created, if steps are not compiled."""
        if self._is_eager:
            self._state.check_made_in_first_step()

    def check_evaluation(self, graph: tf.Graph | None, metrics: Sequence[Any] = ()) -> None:
        """Warns of variables that an evaluation changes and the training step uses; called after each evaluation.

        Args:
          graph: The graph of the evaluation; None when it is not compiled.
          metrics: The variables of metrics that the evaluation steps return, which are reset after each loop.
        """
        if graph is not None and self.is_done and graph not in self._evaluations:
            self._evaluations.add(graph)
            self._state.report_evaluation(graph, [*self._without_state(), *metrics], self._required)

    def _keep_attributes(self) -> None:
        if self._trains:
            with self._state.in_use, self._strategy.scope():
                self._state.keep_attributes(self._without_state())
