"""Controller: the outer loop, leaner than Orbit's: one Python look per loop, reports written by a thread.

It is an orbit.Controller, so that `controller_cls` may be either. Intervals are crossed (schedules.py), the step is
counted in Python, and a request to stop is honoured between loops, and by the loops themselves between steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orbit
import tensorflow as tf

from trainer_kit import schedules
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.checkpoints.selection import complete_checkpoints
from trainer_kit.errors import (
    DataError,
    DivergedError,
    NothingToWaitForError,
    StorageError,
)
from trainer_kit.telemetry.report import Report, Writer

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.5


class Controller(orbit.Controller):
    """Drives a Trainer: train, evaluate, train_and_evaluate, evaluate_continuously.

    Args:
      writer: takes a Report after each loop and each evaluation.
      batch_size: examples in a training step, over all replicas; for the rate of examples.
      stopping: tells whether a stop was asked for.
      loss_bound: `(bound, first step that it counts at)`; None: any loss will do.
      save_on_stop: whether a stop saves a checkpoint.
      on_evaluation: called with (step, logs, seconds, checkpoint) after each evaluation, before anything is reported;
        checkpoint is the path of the one that has the evaluated weights, None if they were not saved.
      evaluated_step: of the last evaluation of an earlier start, so that one that was cut off is made up.
      **orbit_arguments: those of orbit.Controller, whose constructor restores the newest checkpoint.
    """

    def __init__(
        self,
        *,
        writer: Writer,
        batch_size: int = 0,
        stopping: Callable[[], bool] = lambda: False,
        loss_bound: tuple[float, int] | None = None,
        save_on_stop: bool = True,
        on_evaluation: Callable[[int, Mapping[str, Any], float, str | None], None] = lambda *_: None,
        evaluated_step: int = -1,
        **orbit_arguments: Any,
    ) -> None:
        self._writer, self._batch_size, self._stopping = writer, batch_size, stopping
        self._loss_bound, self._save_on_stop, self._on_evaluation = loss_bound, save_on_stop, on_evaluation
        self._total: int | None = None
        self._saved_step, self._evaluated_step = -1, evaluated_step
        self._checkpoint: str | None = None
        super().__init__(**orbit_arguments)

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stopping()

    def train(self, steps: int, checkpoint_at_completion: bool = True) -> None:
        """Trains up to global step `steps`, or until the data ends if it is -1.

        Stops early, after saving, when a stop was asked for.

        Raises:
          DataError: when the data ends before `steps`.
          DivergedError: when the loss is not finite or above its bound.
        """
        step = int(self.global_step.numpy())
        if self._total is None:
            self._total = steps if steps >= 0 else None
        data_ended = False
        while step < steps or (steps < 0 and not data_ended):
            wanted = schedules.loop_length(step, steps, self._steps_per_loop)
            before, step = step, self._run_loop(step, wanted)
            data_ended = getattr(self.trainer, "data_ended", False)
            if data_ended or self.stopping:
                break
            if schedules.is_due(before, step, self._interval):
                self.save_checkpoint()
        if self._save_on_stop if self.stopping else checkpoint_at_completion or data_ended:
            self.save_checkpoint()
            self._sync_on_async_checkpointing()
        if data_ended and steps >= 0:
            raise DataError(
                f"task.train_data ended at step {step} of {self._total}; repeat the data (an ArraySource does with "
                "task.train_data.is_training=true), or set trainer.train_steps to -1 to train until it ends "
                "(the checkpoint of this step is saved)"
            )

    def evaluate(self, steps: int = -1) -> dict[str, Any]:
        """Evaluates `steps` batches, -1 for all, and returns the logs as NumPy values."""
        self._require("evaluator", for_method="evaluate")
        start = time.perf_counter()
        with self.eval_summary_manager.summary_writer().as_default():
            logs = self.evaluator.evaluate(tf.constant(steps, tf.int32)) or {}
        seconds = time.perf_counter() - start
        if self.stopping:
            return {}
        for action in self.eval_actions:
            action(logs)
        logs = tf.nest.map_structure(orbit.utils.get_value, logs)
        step = int(self.global_step.numpy())
        self._evaluated_step = step
        self._sync_on_async_checkpointing()  # nothing is recorded before it is there
        self._on_evaluation(step, logs, seconds, self._checkpoint if step == self._saved_step else None)
        self._report("validation", step, logs, seconds=seconds)
        return dict(logs)

    def train_and_evaluate(
        self, train_steps: int, eval_steps: int = -1, eval_interval: int | None = None
    ) -> dict[str, Any]:
        """Trains up to `train_steps` with an evaluation every `eval_interval` steps and one at the end.

        An evaluation that was due when an earlier start ended comes first.

        Returns:
          The logs of the last evaluation; empty when a stop was asked for.
        """
        self._total = train_steps if train_steps >= 0 else None
        step = int(self.global_step.numpy())
        output: dict[str, Any] = {}
        due = step == train_steps or (eval_interval and step % eval_interval == 0)
        if due and step > max(self._evaluated_step, 0):
            output = self.evaluate(eval_steps)
        while (step < train_steps or train_steps < 0) and not self.stopping:
            pause = schedules.next_stop(step, train_steps, eval_interval) if eval_interval else train_steps
            try:
                self.train(pause, checkpoint_at_completion=pause == train_steps)
            except DataError:
                if train_steps >= 0:
                    raise
                train_steps = int(self.global_step.numpy())
            step = int(self.global_step.numpy())
            if not self.stopping:
                output = self.evaluate(eval_steps)
        if self._save_on_stop or not self.stopping:
            self.save_checkpoint()
        self._sync_on_async_checkpointing()
        return output

    def evaluate_continuously(
        self, steps: int = -1, timeout: float | None = None, timeout_fn: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """Evaluates each checkpoint that appears in the manager's folder, in the order of steps.

        Args:
          steps: batches in an evaluation, -1 for all.
          timeout: seconds to wait for a checkpoint; None: for ever.
          timeout_fn: tells whether no more checkpoints will come; asked whenever there is none to evaluate.

        Returns:
          The logs of the last evaluation.

        Raises:
          NothingToWaitForError: when no checkpoint came in time although more were to come.
        """
        output: dict[str, Any] = {}
        for path in self._new_checkpoints(timeout, timeout_fn or (lambda: False)):
            try:
                self.restore_checkpoint(path)
            except StorageError as error:
                _LOG.warning("skipped: %s", error)
                continue
            output = self.evaluate(steps)
        return output

    def restore_checkpoint(self, checkpoint_path: str | None = None) -> str | None:
        """Restores a checkpoint, or the newest one, or initialises; returns what was restored."""
        manager = self.checkpoint_manager
        with self.strategy.scope():
            if checkpoint_path is None:
                checkpoint_path = manager.restore_or_initialize()
            elif isinstance(manager, CheckpointManager):
                manager.restore(checkpoint_path)
            else:
                manager.checkpoint.restore(checkpoint_path)
        if checkpoint_path is not None:
            self._saved_step, self._checkpoint = int(self.global_step.numpy()), checkpoint_path
            after_restore = getattr(self.trainer or self.evaluator, "after_restore", None)
            if after_restore is not None:
                after_restore(checkpoint_path)
        return checkpoint_path

    def save_checkpoint(self) -> None:
        """Saves the state as it is, unless this step is saved already."""
        step = int(self.global_step.numpy())
        if self.checkpoint_manager is not None and step != self._saved_step:
            try:
                self._writer.flush()  # what was measured before the checkpoint outlives the process with it
            finally:
                self._checkpoint = self.checkpoint_manager.save(checkpoint_number=step, check_interval=False)
                self._saved_step = step

    @property
    def _interval(self) -> int:
        manager = self.checkpoint_manager
        return (manager.checkpoint_interval if manager else None) or 2**62

    def _run_loop(self, step: int, wanted: int) -> int:
        """Runs one inner loop, reports it, and returns the step that it reached."""
        start = time.perf_counter()
        with self.summary_manager.summary_writer().as_default(), tf.summary.record_if(self._records_summaries()):
            logs = self.trainer.train(tf.constant(wanted, tf.int32)) or {}
        done = getattr(self.trainer, "loop_steps", None)
        if done is None:
            done = int(self.global_step.numpy()) - step
            if done != wanted and not getattr(self.trainer, "data_ended", False):
                _LOG.warning("the loop was to run %d steps and moved global_step by %d", wanted, done)
        seconds = time.perf_counter() - start
        for action in self.train_actions:
            action(logs)
        logs = tf.nest.map_structure(orbit.utils.get_value, logs)
        if done:
            self._report("train", step + done, logs, steps=done, seconds=seconds)
            self._check_loss(step + done, logs)
        return step + done

    def _records_summaries(self) -> Any:
        if not self.summary_interval:
            return False
        return lambda: tf.equal(self.global_step % self.summary_interval, 0)

    def _check_loss(self, step: int, logs: Mapping[str, Any]) -> None:
        if self._loss_bound is None or "training_loss" not in logs:
            return
        loss, (bound, first_step) = float(logs["training_loss"]), self._loss_bound
        if not math.isfinite(loss) or (step >= first_step and loss > bound):
            raise DivergedError(
                f"training_loss is {loss} at step {step} (trainer.loss_upper_bound is {bound}); this loop is not "
                "saved: lower the learning rate, or clip gradients (global_clipnorm), and run again"
            )

    def _report(self, kind: str, step: int, logs: Mapping[str, Any], *, seconds: float, steps: int = 0) -> None:
        rate = steps / seconds if steps and seconds > 0 else None
        exporter = getattr(self.evaluator, "checkpoint_exporter", None)
        self._writer.write(
            Report(
                kind=kind,
                step=step,
                total_steps=self._total,
                metrics=logs,
                steps_per_second=rate,
                examples_per_second=rate * self._batch_size if rate and self._batch_size else None,
                seconds=seconds,
                best=getattr(exporter, "best", None),
            )
        )

    def _new_checkpoints(self, timeout: float | None, finished: Callable[[], bool]) -> Iterator[str]:
        directory = getattr(self.checkpoint_manager, "source", self.checkpoint_manager.directory)
        last, waiting_since, told = -1, time.monotonic(), False
        while not self.stopping:
            ended = finished()
            new = [(step, path) for step, path in complete_checkpoints(directory).items() if step > last]
            if new:
                last, path = new[0]
                yield path
                waiting_since, told = time.monotonic(), False
                continue
            if ended:
                return
            waited = time.monotonic() - waiting_since
            if timeout is not None and waited >= timeout:
                raise NothingToWaitForError(
                    f"no checkpoint after step {last} appeared in {directory} for {waited:.0f} s "
                    "(trainer.continuous_eval_timeout); is the training run still there?"
                )
            if not told:
                limit = "" if timeout is None else f", at most {timeout:.0f} s"
                _LOG.info("waiting for %s/ckpt-*.index after step %d%s", directory, last, limit)
                told = True
            time.sleep(_POLL_SECONDS)
