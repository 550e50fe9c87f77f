"""OrbitController: lets a run drive a caller's orbit.Controller like trainer_kit's Controller."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import orbit
import tensorflow as tf

from trainer_kit.callbacks.base import Callback, Evaluation, Loop
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.callbacks.orbit_actions import Actions
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.errors import StopTraining, UsageError
from trainer_kit.training.checks.global_step import StockLoops

_LOG = logging.getLogger(__name__)


class OrbitController:
    """Drives an orbit.Controller through the modes of a run.

    It keeps no ledger, does not rewind after a divergence, and stops between loops only. Users' callbacks are called
    around training, after loops and after evaluations. Of their requests only a stop is carried out.

    Args:
      kind: A subclass of orbit.Controller; its constructor restores the newest checkpoint.
      trainer, evaluator, global_step, strategy: As in Controller.
      checkpoint_manager: The manager of the run's checkpoints.
      callbacks: The users' callbacks.
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
        global_step: tf.Variable,
        checkpoint_manager: CheckpointManager,
        strategy: tf.distribute.Strategy,
        callbacks: CallbackList,
        actions: Actions,
        stopping: Callable[[], bool],
        **arguments: Any,
    ) -> None:
        self.trainer, self.evaluator, self.strategy = trainer, evaluator, strategy
        self.checkpoint_manager, self.callbacks, self.run = checkpoint_manager, callbacks, callbacks.run
        self.stopping, self._stopping = False, stopping
        self._begun = 0  # the step at which the training loop under way began
        if callbacks.epochs.wanted:
            raise UsageError(
                f"{kind.__name__} does not end training loops with epochs, which a callback with epoch_begin or "
                "epoch_end needs; give a subclass of trainer_kit.run.controller.Controller as controller_cls"
            )
        if wanting := [one.name for one in callbacks.members if one.every or _chooses_boundaries(one)]:
            raise UsageError(
                f"{kind.__name__} cannot end training loops at the steps that {', '.join(wanting)} asks for; give a "
                "subclass of trainer_kit.run.controller.Controller as controller_cls, or remove that callback's steps"
            )
        stop = [] if trainer is None else [StockLoops(trainer, lambda: stopping() or trainer.stop_requested)]
        self._inner = kind(
            strategy=strategy,
            trainer=trainer,
            evaluator=evaluator,
            global_step=global_step,
            checkpoint_manager=checkpoint_manager,
            train_actions=[*stop, self._loop_end, *actions.train_actions],
            eval_actions=[self._evaluation_end, *actions.eval_actions],
            **arguments,
        )
        self.run.read_step()

    def restore_checkpoint(self, path: str | None = None) -> str | None:
        """Restores a checkpoint; the constructor has already restored the newest one."""
        restored: str | None = self._inner.restore_checkpoint(path)
        self.run.read_step()
        return restored

    def train(self, steps: int) -> None:
        """Trains up to global step `steps`."""
        self._train(lambda: self._inner.train(steps=steps))

    def train_and_evaluate(
        self, train_steps: int, eval_steps: int = -1, eval_interval: int | None = None
    ) -> dict[str, Any]:
        """Trains up to `train_steps`, with evaluations; returns the logs of the last one."""
        return self._train(lambda: self._inner.train_and_evaluate(train_steps, eval_steps, eval_interval))

    def evaluate(self, steps: int = -1) -> dict[str, Any]:
        """Evaluates `steps` batches, -1 for all; returns the logs."""
        return self._until_stopped(lambda: self._inner.evaluate(steps=steps))

    def evaluate_continuously(
        self, steps: int, timeout: float | None, timeout_fn: Callable[[], bool], **_: Any
    ) -> dict[str, Any]:
        """Evaluates the checkpoints that appear in the manager's folder; returns the logs of the last evaluation."""
        watch = self._inner.evaluate_continuously
        return self._until_stopped(lambda: watch(steps=steps, timeout=timeout, timeout_fn=timeout_fn))

    def save_checkpoint(self) -> None:
        """Saves a checkpoint of the current step."""
        self._inner.save_checkpoint()

    def sync(self) -> None:
        """Waits for the save in flight."""
        self.checkpoint_manager.sync()

    def _train(self, work: Callable[[], Any]) -> dict[str, Any]:
        with self.callbacks.around("train"):
            self._begun = self.run.read_step()
            return self._until_stopped(work)

    def _until_stopped(self, work: Callable[[], Any]) -> dict[str, Any]:
        """Calls `work`. When an action stops the run, saves a checkpoint if the run trains, without an evaluation."""
        try:
            return dict(work() or {})
        except StopTraining as stop:
            self.stopping = True
            if self.trainer is not None:
                self._inner.save_checkpoint()
            if not self._stopping():
                self.run.stop_reason = str(stop)
                kind = type(self._inner).__name__
                _LOG.warning("%s does not evaluate at the end of a run that an action has stopped", kind)
            return {}

    def _loop_end(self, logs: Any) -> None:
        begun, self._begun = self._begun, self.run.read_step()
        self.run.loop = Loop(begun, self._begun, 0.0, logs)
        self.callbacks.call("loop_end", logs)
        self._add_reported(logs)
        self._stop_if_asked()

    def _evaluation_end(self, logs: Any) -> None:
        self.run.evaluation = Evaluation(self.run.read_step())
        self.callbacks.call("evaluation_end", logs)
        self._add_reported(logs)
        self._stop_if_asked()

    def _add_reported(self, logs: Any) -> None:
        """Adds the values that callbacks reported to the logs, which the controller then writes as summaries."""
        reported, self.run.reported = self.run.reported, {}
        if isinstance(logs, dict):
            logs.update(reported)

    def _stop_if_asked(self) -> None:
        asked = self.callbacks.take_requests()
        if asked.save or asked.evaluate or asked.rewind is not None:
            kind = type(self._inner).__name__
            _LOG.warning("%s ignores the requests of callbacks to save, evaluate or rewind; it can only stop", kind)
        if self.run.stop_reason:
            raise StopTraining(self.run.stop_reason)


def _chooses_boundaries(callback: Callback) -> bool:
    return type(callback).next_boundary is not Callback.next_boundary
