"""Actions: calls Orbit's actions, functions that take the logs, as a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.errors import StopTraining


class Actions(Callback):
    """Calls actions after each training loop and after each evaluation, on every worker.

    An action may raise StopTraining; the other actions are still called. If an action has restored an earlier
    checkpoint, after a loop or after an evaluation, the run goes back to that step. `keep_states` saves the states of
    train actions that have methods `state()` and `restore(state)`.

    Args:
      train_actions: Functions that take what the trainer's `train` returned.
      eval_actions: Functions that take what the trainer's `evaluate` returned.
    """

    chief_only = False
    name = "actions"

    def __init__(
        self, train_actions: Sequence[Callable[[Any], Any]] = (), eval_actions: Sequence[Callable[[Any], Any]] = ()
    ) -> None:
        self.train_actions, self.eval_actions = list(train_actions), list(eval_actions)

    def loop_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        """Calls the actions after training loops."""
        assert run.loop is not None
        _call(self.train_actions, run, logs, run.loop.end)

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Calls the actions after evaluations."""
        assert run.evaluation is not None
        if not run.evaluation.replayed:
            _call(self.eval_actions, run, logs, run.evaluation.step)


def _call(actions: Sequence[Callable[[Any], Any]], run: Run, logs: Any, before: int) -> None:
    """Calls actions at the step `before`, and asks for a rewind if they have set global_step to an earlier one."""
    for action in actions:
        try:
            action(logs)
        except StopTraining as stop:
            run.stop(str(stop))
    if actions and (step := run.read_step()) < before:
        run.rewind(step, f"an action has taken the run back from step {before} to step {step}")


def keep_states(trainer: Any, actions: Sequence[Any], kind: str = "action") -> None:
    """Adds the states of actions to every checkpoint; to be called before the restore.

    Args:
      trainer: The run's trainer.
      actions: The actions; those with methods `state()` and `restore(state)` have a state.
      kind: A prefix that distinguishes these actions in the checkpoint from others of the run.
    """
    for number, action in enumerate(actions):
        if hasattr(action, "state") and hasattr(action, "restore"):
            restore = action.restore
            trainer.keep_state(
                f"{kind} {number} {type(action).__name__}",
                action.state,
                lambda state, restore=restore: None if state is None else restore(state),
            )
