"""Lets a run drive a caller's orbit.Controller, and checks the actions that Orbit programs pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import orbit

from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.callbacks.orbit_actions import Actions
from trainer_kit.errors import StopTraining, UsageError
from trainer_kit.training.checks.global_step import StockLoops


class OrbitController:
    """Drives an orbit.Controller through the modes of a run.

    It keeps no ledger, does not rewind after a divergence, and stops between loops only.

    Args:
      kind: A subclass of orbit.Controller; its constructor restores the newest checkpoint.
      trainer, evaluator: As in Controller.
      callbacks: The callbacks of the run, which have no members.
      actions: The users' actions; the orbit.Controller calls them.
      stopping: Returns whether a stop was requested.
      **arguments: Further arguments of the class.
    """

    phase = "start"
    running = (0, 0)
    saves_after_errors = False  # the state after an error is not known

    def __init__(
        self,
        kind: type[orbit.Controller],
        *,
        trainer: Any,
        evaluator: Any,
        callbacks: CallbackList,
        actions: Actions,
        stopping: Callable[[], bool],
        **arguments: Any,
    ) -> None:
        self.trainer = trainer
        self.evaluator = evaluator
        self.strategy = arguments["strategy"]
        self.checkpoint_manager = arguments["checkpoint_manager"]
        self.callbacks = callbacks
        self.run = callbacks.run
        self.stopping = False
        self._stop_requested = stopping

        train_actions = list(actions.train_actions)
        if trainer is not None:
            train_actions.insert(0, StockLoops(trainer, lambda: stopping() or trainer.stop_requested))
        self._inner = kind(
            trainer=trainer,
            evaluator=evaluator,
            train_actions=train_actions,
            eval_actions=actions.eval_actions,
            **arguments,
        )
        self.restore_checkpoint = self._inner.restore_checkpoint
        self.save_checkpoint = self._inner.save_checkpoint
        self.sync = self.checkpoint_manager.sync

    def train(self, steps: int) -> None:
        """Trains up to global step `steps`."""
        self._until_stopped(self._inner.train, steps=steps)

    def train_and_evaluate(self, **arguments: Any) -> dict[str, Any]:
        """Trains with evaluations; returns the logs of the last one."""
        return self._until_stopped(self._inner.train_and_evaluate, **arguments)

    def evaluate(self, steps: int = -1) -> dict[str, Any]:
        """Evaluates `steps` batches, -1 for all; returns the logs."""
        return self._until_stopped(self._inner.evaluate, steps=steps)

    def evaluate_continuously(
        self, steps: int, timeout: float | None, timeout_fn: Callable[[], bool], **_: Any
    ) -> dict[str, Any]:
        """Evaluates the checkpoints that appear in the manager's folder; returns the last logs."""
        return self._until_stopped(
            self._inner.evaluate_continuously, steps=steps, timeout=timeout, timeout_fn=timeout_fn
        )

    def _until_stopped(self, method: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
        """Calls a method of the orbit.Controller. When an action stops the run, saves a checkpoint."""
        try:
            return dict(method(**arguments) or {})
        except StopTraining as stop:
            self.stopping = True
            if self.trainer is not None:
                self.save_checkpoint()
            if not self._stop_requested():
                self.run.stop_reason = str(stop)
            return {}
        finally:
            self.run.read_step()


def list_actions(name: str, actions: Iterable[Callable[[Any], Any]] | None) -> list[Callable[[Any], Any]]:
    """Returns train_actions or eval_actions as a list, even if they were an iterator.

    Args:
      name: The name of the argument, for the message.
      actions: The actions; None becomes an empty list.

    Raises:
      UsageError: when one of them cannot be called.
    """
    listed = list(actions or ())
    for action in listed:
        if not callable(action):
            raise UsageError(
                f"{name}: {action!r:.60} cannot be called; an action is a function that takes the "
                "logs, and a Keras callback is none"
            )
    return listed
