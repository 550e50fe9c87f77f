"""Controller: the outer loop, leaner than Orbit's: one Python look per loop, reports written by a thread.

It is an orbit.Controller, so that `controller_cls` may be either. Intervals are crossed, global_step
says how many steps a loop has done, and a stop is honoured between loops, and by the loops themselves between steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import orbit
import tensorflow as tf

from trainer_kit.callbacks.early_stopping import StopRequest
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.errors import DataError, DivergedError, StorageError
from trainer_kit.evals.checkpoint_watcher import CheckpointWatcher, Unknown, WatchedRun
from trainer_kit.run.progress import Phases
from trainer_kit.telemetry.report import Writer
from trainer_kit.telemetry.reporter import Reporter
from trainer_kit.telemetry.time_ledger import TimeLedger
from trainer_kit.training.failed_step import is_between_steps, loss_message
from trainer_kit.training.finite_checks import FiniteCheck
from trainer_kit.training.loops.interrupted_loop import InterruptedLoop
from trainer_kit.training.loops.intervals import all_due, is_due, next_stop
from trainer_kit.training.metrics import to_numpy
from trainer_kit.training.step_count import CountedLoops
from trainer_kit.training.stopping import is_stopping

_LOG = logging.getLogger(__name__)


class Controller(orbit.Controller):
    """Drives a Trainer: train, evaluate, train_and_evaluate, evaluate_continuously.

    Args:
      writer: takes a Report after each loop and each evaluation.
      batch_size: examples in a training step, over all replicas; for the rate of examples.
      stopping: tells whether a stop was asked for.
      loss_bound: `(bound, first step that it counts at)`; None: any loss and any weights will do.
      save_on_stop: whether a stop saves a checkpoint.
      on_evaluation: called with (step, logs, seconds, checkpoint) after each evaluation, before anything is reported;
        seconds are by name if there are several validation sets; checkpoint is the path of the one that has the
        evaluated weights, None if they were not saved. Like an action, it may raise StopTraining.
      recorded_sets: returns which validation sets have an evaluation of the step that it is given on record, so that
        one that was cut off is made up; a single set is called "".
      on_divergence: called with the error and the steps before and after the loop that diverged; returns whether the
        run went back to an earlier step, to go on from there. Otherwise the error is raised.
      on_return: called with an earlier step that an action has taken the run back to; returns the checkpoint of it.
      followed: the run whose checkpoints `evaluate_continuously` takes; None: all that it knows is the folder.
      newest_only: whether it takes the newest one next, not all in order.
      times: counts what the run spends its time on; None: one of its own.
      **orbit_arguments: those of orbit.Controller, whose constructor restores the newest checkpoint.

    Attributes:
      running: the global steps that the training loop which runs, or ran last, was to run between.
      total: the global step to train up to; None where that is not known.
    """

    def __init__(
        self,
        *,
        writer: Writer,
        batch_size: int = 0,
        stopping: Callable[[], bool] = lambda: False,
        loss_bound: tuple[float, int] | None = None,
        save_on_stop: bool = True,
        on_evaluation: Callable[[int, Mapping[str, Any], Any, str | None], None] = lambda *_: None,
        recorded_sets: Callable[[int], Collection[str]] = lambda _: (),
        on_divergence: Callable[[DivergedError, int, int], bool] = lambda *_: False,
        on_return: Callable[[int], str | None] = lambda _: None,
        followed: WatchedRun | None = None,
        newest_only: bool = False,
        times: TimeLedger | None = None,
        **orbit_arguments: Any,
    ) -> None:
        self._writer, self._stopping = writer, stopping
        self._reporter = Reporter(writer, batch_size, orbit_arguments.get("evaluator"))
        self._save_on_stop, self._on_evaluation = save_on_stop, on_evaluation
        self._finite_check = FiniteCheck(orbit_arguments.get("trainer"), loss_bound)
        self._on_divergence, self._followed, self._newest_only = on_divergence, followed, newest_only
        self.total: int | None = None
        self._recorded_sets, self._on_return = recorded_sets, on_return
        self._evaluated: dict[str, int] = {}  # the step at which this process has evaluated each validation set last
        self._saved_step = -1
        self._checkpoint: str | None = None
        self.stop_request = StopRequest(lambda: int(self.global_step.numpy()))
        self._interrupted_loop, self._num_steps = InterruptedLoop(), (0, tf.constant(0))
        self.running = (0, 0)
        self._phases = Phases(times or TimeLedger())
        self._saving = threading.RLock()  # a late save comes from another thread
        trainer = orbit_arguments.get("trainer")
        self._loops = CountedLoops(trainer, lambda: int(self.global_step.numpy()), lambda: self.stopping)
        if trainer is not None and hasattr(trainer, "state"):
            trainer.state.run_state.add("loop", self._interrupted_loop.state, self._interrupted_loop.put_back)
        super().__init__(**orbit_arguments)

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for; of several workers, whether they have agreed to stop."""
        return is_stopping(self.trainer or self.evaluator, self._stopping)

    @property
    def phase(self) -> str:
        """What the main thread is doing; see Phases."""
        return self._phases.now

    @property
    def times(self) -> TimeLedger:
        """What the run has spent its time on."""
        return self._phases.times

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint, saved or restored; -1 before the first."""
        return self._saved_step

    def train(self, steps: int, checkpoint_at_completion: bool = True) -> None:
        """Trains up to global step `steps`, or until the data ends if it is -1.

        Stops early, after saving, when a stop was asked for, or an action has ended the run.

        Raises:
          DataError: when the data ends before `steps`.
          DivergedError: when the loss or a weight is not finite, or the loss is above its bound.
          TrainerKitError: when a loop of the trainer does not move global_step.
        """
        if self.total is None:
            self.total = steps if steps >= 0 else None
        with self._phases.at_work():
            while not self._train_until(steps, checkpoint_at_completion):
                pass

    def _train_until(self, steps: int, checkpoint_at_completion: bool) -> bool:
        """Trains as `train` does; returns False as soon as the run has gone back to an earlier step."""
        # Left here, and not after each loop: TensorFlow flushes the writer then. Actions have it as their writer, too.
        with self.summary_manager.summary_writer().as_default():
            return self._run_loops(steps, checkpoint_at_completion)

    def _run_loops(self, steps: int, checkpoint_at_completion: bool) -> bool:
        """Runs loops, looks at what they have come to and saves it, up to `steps` or until the run has gone back."""
        step = int(self.global_step.numpy())
        data_ended = False
        while not self.stop_request.reason and (step < steps or (steps < 0 and not data_ended)):
            begun, end = self._interrupted_loop.next(step, steps, self._steps_per_loop)
            try:
                step = self._run_loop(step, begun, end)
                if step < begun:
                    return False
                save = is_due(begun, step, self._interval)
                if (
                    save or step >= steps >= 0 or self.stopping or self.stop_request.reason
                ):  # before a save, or an evaluation
                    self._finite_check.require(step)
            except DivergedError as error:
                with self.times.during("recovery"):
                    if not self._on_divergence(error, begun, end):
                        raise
                return False
            data_ended = getattr(self.trainer, "data_ended", False)
            if data_ended or self.stopping or self.stop_request.reason:
                break
            if save:
                self.save_checkpoint()
        complete = checkpoint_at_completion or data_ended or self.stop_request.reason
        if self._save_on_stop if self.stopping else complete:
            self.save_checkpoint()
            self.sync()
        if data_ended and self.total is not None and not self.stop_request.reason:
            raise DataError(
                f"task.train_data ended at step {step} of {self.total}; repeat the data (an ArraySource does with "
                "task.train_data.is_training=true), or set trainer.train_steps to -1 to train until it ends "
                "(the checkpoint of this step is saved)"
            )
        return True

    def evaluate(self, steps: int = -1, sets: Sequence[str] | None = None) -> dict[str, Any]:
        """Evaluates `steps` batches, -1 for all, and returns the logs as NumPy values.

        Args:
          steps: batches.
          sets: names of the validation sets, if there are several; None: all.

        Raises:
          DataError: when there is no data, or too little.
          DivergedError: when a weight is not finite.
          StorageError: when what was found, or the save before it, cannot be written.
        """
        self._require("evaluator", for_method="evaluate")
        return self._tell(*self._evaluate_sets(steps, sets, {}))

    def _evaluate_due(self, steps: int, due: Sequence[str], sets: Sequence[str]) -> dict[str, Any]:
        """Evaluates what is due, and all other `sets` too if that ends the run: its last step is evaluated whole."""
        logs, seconds, of_sets = self._evaluate_sets(steps, due, {})
        left = self._not_evaluated(sets) if self.stop_request.reason and not self.stopping else []
        if left:
            logs, more, of_others = self._evaluate_sets(steps, left, logs)
            seconds, of_sets = seconds + more, {**of_sets, **of_others}
        return self._tell(logs, seconds, of_sets)

    def _evaluate_sets(
        self, steps: int, sets: Sequence[str] | None, before: dict[str, Any]
    ) -> tuple[dict[str, Any], float, dict[str, float]]:
        """Evaluates, calls the actions and puts on record; nothing of it if a stop has cut the evaluation.

        Args:
          steps: batches.
          sets: as of `evaluate`.
          before: logs of other sets at the same step.

        Returns:
          (all logs of this step, seconds that this evaluation took, those of each set by name).
        """
        step = int(self.global_step.numpy())
        self._finite_check.require(step)
        start = time.perf_counter()
        with self._phases.during("evaluate"), self.eval_summary_manager.summary_writer().as_default():
            chosen = {} if not sets or "" in sets else {"sets": sets}
            logs = self.evaluator.evaluate(tf.constant(steps, tf.int32), **chosen) or {}
        seconds, of_sets = time.perf_counter() - start, self._seconds_of_sets()
        if self.stopping:
            return {}, seconds, of_sets
        self._call(self.eval_actions, {**before, **logs})
        logs = tf.nest.map_structure(to_numpy, dict(logs))
        self._evaluated.update(dict.fromkeys(self._eval_intervals(None) if sets is None else sets, step))
        self.sync()  # nothing is recorded before it is there
        checkpoint = self._checkpoint if step == self._saved_step else None
        with self.stop_request.heard():
            self._on_evaluation(step, logs, of_sets or seconds, checkpoint)
        return {**before, **logs}, seconds, of_sets

    def _tell(self, logs: dict[str, Any], seconds: float, of_sets: dict[str, float]) -> dict[str, Any]:
        """Reports an evaluation, unless a stop has cut it, and returns its logs."""
        if self.stopping:
            return {}
        step = int(self.global_step.numpy())
        self._reporter.report("validation", step, self.total, logs, seconds, of_sets=of_sets)
        return logs

    def _not_evaluated(self, sets: Iterable[str]) -> list[str]:
        """Those of `sets` that were not evaluated at this step, by this process or, as is on record, before it."""
        step = int(self.global_step.numpy())
        recorded = self._recorded_sets(step)
        return [name for name in sets if self._evaluated.get(name) != step and name not in recorded]

    def train_and_evaluate(
        self, train_steps: int, eval_steps: int = -1, eval_interval: int | None = None
    ) -> dict[str, Any]:
        """Trains up to `train_steps` with an evaluation every `eval_interval` steps and one at the end.

        An evaluation that was due when an earlier start ended comes first. Where an action ends the run, its last
        step is evaluated and saved as that of a whole run is.

        Returns:
          The logs of the last evaluation; empty when a stop was asked for.

        Raises:
          DataError, DivergedError, StorageError: as `train` and `evaluate` do.
        """
        with self._phases.at_work():
            return self._train_and_evaluate(train_steps, eval_steps, eval_interval)

    def _train_and_evaluate(self, train_steps: int, eval_steps: int, eval_interval: int | None) -> dict[str, Any]:
        self.total = train_steps if train_steps >= 0 else None
        step = int(self.global_step.numpy())
        output: dict[str, Any] = {}
        intervals = self._eval_intervals(eval_interval)
        last = step if self.stop_request.reason else train_steps
        due = self._not_evaluated(all_due(step - 1, step, last, intervals))
        if due and step > 0:
            output = self._evaluate_due(eval_steps, due, list(intervals))
        while (step < train_steps or train_steps < 0) and not self.stopping and not self.stop_request.reason:
            begun, pause = step, next_stop(step, train_steps, *intervals.values())
            reached = self._train_until(pause, checkpoint_at_completion=pause == train_steps)
            step = int(self.global_step.numpy())
            if reached and getattr(self.trainer, "data_ended", False):
                train_steps = step
            if reached and not self.stopping:
                last = step if bool(self.stop_request.reason) else train_steps
                due = all_due(begun, step, last, intervals)
                output = self._evaluate_due(eval_steps, due, list(intervals))
        if self._save_on_stop or not self.stopping:
            self.save_checkpoint()
        self.sync()
        return output

    def evaluate_continuously(
        self, steps: int = -1, timeout: float | None = None, timeout_fn: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """Evaluates the checkpoints that are, or appear, in the manager's folder; what is on record not once more.

        Args:
          steps: batches in an evaluation, -1 for all.
          timeout: seconds to wait for a checkpoint when nothing tells that the run is alive; None: for ever.
          timeout_fn: tells whether no more checkpoints will come, if the run followed does not.

        Returns:
          The logs of the last evaluation.

        Raises:
          NothingToWaitForError: when no checkpoint came in time although more were to come.
        """
        output: dict[str, Any] = {}
        directory = getattr(self.checkpoint_manager, "source", self.checkpoint_manager.directory)
        run = self._followed or Unknown(timeout_fn or (lambda: False))
        watcher = CheckpointWatcher(directory, timeout, run, self._newest_only)
        for path in watcher.follow(
            lambda: self.stopping or bool(self.stop_request.reason), lambda: self._phases.during("wait")
        ):
            try:
                self.restore_checkpoint(path)
            except StorageError as error:
                _LOG.warning("skipped: %s", error)
                continue
            start = time.perf_counter()
            output = self.evaluate(steps)
            seconds = time.perf_counter() - start
            if not self.stopping:
                self._writer.flush()  # a record never precedes what it tells of
                run.record(self._saved_step, output, self._seconds_of_sets() or seconds, path)
        self._phases.now = "end"
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
        """Saves the state as it is, unless this step is saved already.

        Raises:
          DivergedError: when a weight is not finite; nothing is saved.
        """
        with self._saving:
            step = int(self.global_step.numpy())
            if self.checkpoint_manager is not None and step != self._saved_step:
                self._finite_check.require(step)
                self._save(step)

    def save_what_is_sound(self, error: Exception, alone: bool = True) -> None:
        """Saves after an error if the state is that of a step's end, and the weights are finite.

        After an error inside a step it saves only if that step has written no variable. Else it logs the checkpoint
        that the run resumes from, and how many steps are lost.

        Args:
          error: that ends the run.
          alone: False: one of several workers, which can save only together. The others would not come, or are gone.
        """
        trainer, step = self.trainer, int(self.global_step.numpy())
        if trainer is None or getattr(trainer, "sound", True) is False or step <= max(self._saved_step, 0):
            return
        if self.phase == "train" or not alone:
            if not alone or not self.running[0] <= step <= self.running[1] or not is_between_steps(trainer, error):
                if alone:
                    self.sync()
                _LOG.warning("%s", loss_message(step, self._saved_step, self._checkpoint, alone))
                return
            if self.running[0] < step < self.running[1]:
                self._interrupted_loop.steps, trainer.cut_short = self.running, True
            trainer.sound = None
        self.save_checkpoint()
        self.sync()
        _LOG.info("saved step %d after the error; the same command goes on from there", step)

    def sync(self) -> None:
        """Waits for the save in flight.

        Raises:
          StorageError: when it failed.
        """
        with self._saving, self._phases.during("save"):
            self._sync_on_async_checkpointing()

    def go_back(self, path: str | None) -> int:
        """Restores the checkpoint at `path` in the middle of a run, and returns its step."""
        self._interrupted_loop.steps, self.stop_request.reason = None, ""
        self._evaluated.clear()  # what was evaluated on the way that is given up counts no more
        self.restore_checkpoint(path)
        return self._saved_step

    def _eval_intervals(self, default: int | None) -> dict[str, int | None]:
        """The steps between evaluations of each validation set; a single one is called ""."""
        intervals = getattr(self.evaluator, "validation_intervals", None)
        return {"": default} if intervals is None else intervals(default)

    def _seconds_of_sets(self) -> dict[str, float]:
        """How long each of several validation sets took in the last evaluation."""
        return {name: spent for name, spent in getattr(self.evaluator, "eval_seconds", {}).items() if name}

    @property
    def _interval(self) -> int:
        manager = self.checkpoint_manager
        return (manager.checkpoint_interval if manager else None) or 2**62

    def _save(self, step: int) -> None:
        with self._phases.during("save"):
            self._checkpoint = self.checkpoint_manager.save(checkpoint_number=step, check_interval=False)
            self._saved_step = step

    def _run_loop(self, step: int, begun: int, end: int) -> int:
        """Runs one inner loop up to `end`, reports it unless it was stopped before, and returns the step it reached."""
        start, self.running = time.perf_counter(), (begun, end)
        with self._phases.during("train"), tf.summary.record_if(self._records_summaries()):
            logs, done = self._loops.run(step, self._tensor_of(end - step))
        parts = getattr(self.trainer, "parts", None)
        ready_at, tracing = getattr(parts, "ready_at", 0.0), getattr(parts, "tracing", 0.0)
        seconds = time.perf_counter() - start - tracing
        self.times.add_loop(done, getattr(self.trainer, "input_seconds", None), ready_at - start, tracing)
        reached = step + done
        self._interrupted_loop.steps = (begun, end) if begun < reached < end and self.stopping else None
        if self._interrupted_loop.steps is None and done:
            values = tf.nest.map_structure(to_numpy, logs)
            self._reporter.report("train", reached, self.total, values, seconds, steps=done)  # an action may raise
            self._call(self.train_actions, logs)
            if self.train_actions and (now := int(self.global_step.numpy())) < reached:
                return self._follow_back(reached, now)
        self._finite_check.check(reached, logs)
        return reached

    def _follow_back(self, reached: int, step: int) -> int:
        """Goes to the step that an action has gone back to, with all that it knows nothing of; returns that step."""
        _LOG.warning("an action has taken the run back from step %d to step %d", reached, step)
        return self.go_back(self._on_return(step))

    def _tensor_of(self, steps: int) -> tf.Tensor:
        """Returns an int32 scalar, the same one for loop after loop."""
        if self._num_steps[0] != steps:
            self._num_steps = steps, tf.constant(steps, tf.int32)
        return self._num_steps[1]

    def _call(self, actions: Any, logs: Any) -> None:
        with self.times.during("callbacks"):
            self.stop_request.call(actions, logs)

    def _records_summaries(self) -> Any:
        if not self.summary_interval:
            return False
        return lambda: tf.equal(self.global_step % self.summary_interval, 0)
