"""Adapters for Orbit programs.

Their actions become a callback, and their own orbit.Controller drives the modes of a run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.errors import StopTraining, UsageError
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.run_history import RunHistory
from trainer_kit.process.signals import StopSignals
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.checks.failed_step import OrbitLoopCheck
from trainer_kit.training.loops.intervals import LoopRange
from trainer_kit.typing import Action


class Actions(Callback):
    """Calls actions after each training loop and after each evaluation, on every worker.

    An action may raise StopTraining. The other actions are still called. If an action has restored
    an earlier checkpoint, after a loop or after an evaluation, the run goes back to that step.
    `register_states` saves the states of train actions that have methods `state()` and
    `restore(state)`.

    Args:
      train_actions: Functions that take what the trainer's `train` returned.
      eval_actions: Functions that take what the trainer's `evaluate` returned.
    """

    chief_only = False
    name = "actions"

    def __init__(
        self,
        train_actions: Sequence[Action] = (),
        eval_actions: Sequence[Action] = (),
    ) -> None:
        self.train_actions = list(train_actions)
        self.eval_actions = list(eval_actions)

    def loop_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Calls the actions after training loops."""
        assert run.loop is not None
        _call_actions(self.train_actions, run, logs, run.loop.end)

    def evaluation_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Calls the actions after evaluations."""
        assert run.evaluation is not None
        if not run.evaluation.is_replayed:
            _call_actions(self.eval_actions, run, logs, run.evaluation.step)


def _call_actions(
    actions: Sequence[Action], run: Run, logs: Mapping[str, object], before: int
) -> None:
    """Calls actions at the step `before`.

    Asks for a rewind if they have set global_step to an earlier step.
    """
    for action in actions:
        try:
            action(logs)
        except StopTraining as stop:
            run.stop(str(stop))
    if not actions:
        return

    # An action may have restored a checkpoint.
    step = run.read_step()
    if step < before:
        run.rewind(step, f"an action has taken the run back from step {before} to step {step}")


def register_states(trainer: BaseTrainer, actions: Sequence[Action], kind: str = "action") -> None:
    """Adds the states of actions to every checkpoint. To be called before the restore.

    Args:
      trainer: The run's trainer.
      actions: The actions. Those with methods `state()` and `restore(state)` have a state.
      kind: A prefix that distinguishes these actions in the checkpoint from others of the run.
    """
    for number, action in enumerate(actions):
        if hasattr(action, "state") and hasattr(action, "restore"):
            name = f"{kind} {number} {type(action).__name__}"
            restore = functools.partial(_restore_action, action)
            trainer.register_state(name, action.state, restore)


def _restore_action(action: Any, state: Any) -> None:
    # A checkpoint may have no state of the action.
    if state is not None:
        action.restore(state)


def list_actions(name: str, actions: Iterable[Action] | None) -> list[Action]:
    """Returns train_actions or eval_actions as a list, even if they were an iterator.

    Args:
      name: The name of the argument, for the message.
      actions: The actions. None becomes an empty list.

    Raises:
      UsageError: when one of them cannot be called.
    """
    action_list = list(actions or ())
    for action in action_list:
        if not callable(action):
            raise UsageError(
                f"{name}: {action!r:.60} cannot be called; an action is a function that takes the"
                " logs, and a Keras callback is none"
            )
    return action_list


class OrbitController:
    """Drives an orbit.Controller through the modes of a run.

    It keeps no ledger, does not rewind after a divergence, and stops between loops only.

    Args:
      controller_cls: A subclass of orbit.Controller. Its constructor restores the newest
        checkpoint.
      trainer, evaluator: As in Controller.
      callbacks: The callbacks of the run, which have no members.
      actions: The users' actions. The orbit.Controller calls them.
      signals: The stop signals of the run.
      history: Knows the evaluations that a Controller has recorded. None means that no evaluations
        are recorded.
      **arguments: Further arguments of the class.
    """

    phase = "start"
    planned_loop = LoopRange(0, 0)

    def __init__(
        self,
        controller_cls: type[Any],
        *,
        trainer: BaseTrainer | None,
        evaluator: BaseTrainer | None,
        callbacks: CallbackList,
        actions: Actions,
        signals: StopSignals,
        history: RunHistory | None = None,
        **arguments: Any,
    ) -> None:
        # Methods that train are called only with a trainer, and those that evaluate only with an
        # evaluator.
        self.trainer: Any = trainer
        self.evaluator: Any = evaluator
        self.strategy = arguments["strategy"]
        self.checkpoint_manager = arguments["checkpoint_manager"]
        self.callbacks = callbacks
        self.times = callbacks.times
        self.run = callbacks.run
        self.should_stop = False
        self._signals = signals
        self._history = history

        train_actions = list(actions.train_actions)
        if trainer is not None:
            loop_check = OrbitLoopCheck(
                trainer, lambda: signals.is_stop_requested() or trainer.is_stop_requested
            )
            train_actions.insert(0, loop_check)
        self._orbit_controller = controller_cls(
            trainer=trainer,
            evaluator=evaluator,
            train_actions=train_actions,
            eval_actions=actions.eval_actions,
            **arguments,
        )
        self.restore_checkpoint = self._orbit_controller.restore_checkpoint
        self.save_checkpoint = self._orbit_controller.save_checkpoint
        self.sync = self.checkpoint_manager.sync

    def train_and_evaluate(
        self, train_steps: int, *, evaluates: bool = True, **arguments: Any
    ) -> dict[str, Any]:
        """Trains up to global step `train_steps`, with evaluations if it `evaluates`.

        Returns the logs of the last evaluation.
        """
        if not evaluates:
            return self._call_until_stopped(self._orbit_controller.train, steps=train_steps)

        logs = self._call_until_stopped(
            self._orbit_controller.train_and_evaluate, train_steps=train_steps, **arguments
        )
        if logs or self.should_stop or self._history is None:
            return logs

        # No step was left to train. An earlier start with a Controller may have evaluated the last
        # one.
        return self._history.metrics_at(self.run.step)

    def evaluate(self, steps: int = -1) -> dict[str, Any]:
        """Evaluates `steps` batches, -1 for all, and returns the logs."""
        return self._call_until_stopped(self._orbit_controller.evaluate, steps=steps)

    def evaluate_continuously(
        self,
        steps: int,
        timeout: float | None,
        *,
        sidecar: Sidecar,
        **_: Any,
    ) -> dict[str, Any]:
        """Evaluates the checkpoints that appear in the manager's folder.

        Orbit takes no Sidecar, so this tells it only whether the run is finished.

        Returns:
          The last logs.
        """
        return self._call_until_stopped(
            self._orbit_controller.evaluate_continuously,
            steps=steps,
            timeout=timeout,
            timeout_fn=sidecar.is_finished,
        )

    def _call_until_stopped(self, method: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
        """Calls a method of the orbit.Controller.

        When an action stops the run, a checkpoint is saved.
        """
        try:
            return dict(method(**arguments) or {})
        except StopTraining as stop:
            self.should_stop = True
            if self.trainer is not None:
                self.save_checkpoint()
            if not self._signals.is_stop_requested():
                self.run.stop_reason = str(stop)
            return {}
        finally:
            self.run.read_step()
