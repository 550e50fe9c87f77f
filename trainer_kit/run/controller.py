"""Controller: the outer loop of a run. It knows loops, evaluations, saves and events, and nothing else.

The order of what happens at a boundary is in callbacks/base.py. Intervals are crossed, global_step says how many steps
a loop has done, and a stop is honoured between loops, and by the loops themselves between steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.callbacks.base import Evaluation, Loop, Requests
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.callbacks.finite_check import Divergence
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.errors import DivergedError, StorageError
from trainer_kit.errors.user_exits import exits_as_errors
from trainer_kit.evals.checkpoint_watcher import CheckpointWatcher, Unknown, WatchedRun
from trainer_kit.run.checkpointing import RunCheckpoints
from trainer_kit.run.goal import Goal, data_ended_early
from trainer_kit.run.progress import BETWEEN, Phases
from trainer_kit.telemetry.tensorboard import SummaryManager
from trainer_kit.telemetry.time_ledger import TimeLedger
from trainer_kit.training.checks.global_step import CountedLoops
from trainer_kit.training.loops.interrupted_loop import InterruptedLoop
from trainer_kit.training.loops.intervals import StepsPerLoop, is_due, next_stop
from trainer_kit.training.metrics import to_numpy
from trainer_kit.training.trainer_parts.stop_flag import is_stopping

_LOG = logging.getLogger(__name__)


class Controller:
    """Drives a Trainer: train, evaluate, train_and_evaluate, evaluate_continuously; the names are those of Orbit's.

    Args:
      trainer: that trains, a BaseTrainer; None in modes that do not train.
      evaluator: that evaluates, a BaseTrainer; None in modes that do not evaluate.
      global_step: int64 scalar.
      checkpoint_manager: of the run's checkpoints.
      callbacks: called around loops, evaluations and saves.
      strategy: in whose scope checkpoints are restored; None: the current one.
      steps_per_loop: steps between two boundaries, or a function of the global step.
      summary_interval: steps between summaries that the task itself writes; None: it writes none.
      summary_manager: of the task's own summaries in training; None: there are none.
      eval_summary_manager: of those in evaluations; None: there are none.
      stopping: tells whether a stop was asked for.
      save_on_stop: whether a stop saves a checkpoint.
      recorded: returns the logs that are on record for a step, by validation set; a single set is called "". What is
        missing there is evaluated when the run begins.
      times: counts what the run spends its time on; None: one of its own.

    Attributes:
      run: what callbacks are handed.
      running: the global steps that the training loop which runs, or ran last, was to run between.
    """

    saves_after_errors = True

    def __init__(
        self,
        *,
        trainer: Any = None,
        evaluator: Any = None,
        global_step: tf.Variable,
        checkpoint_manager: CheckpointManager,
        callbacks: CallbackList,
        strategy: tf.distribute.Strategy | None = None,
        steps_per_loop: StepsPerLoop = 1,
        summary_interval: int | None = None,
        summary_manager: Any = None,
        eval_summary_manager: Any = None,
        stopping: Callable[[], bool] = lambda: False,
        save_on_stop: bool = True,
        recorded: Callable[[int], Mapping[str, Any]] = lambda _: {},
        times: TimeLedger | None = None,
    ) -> None:
        self.trainer, self.evaluator, self.global_step = trainer, evaluator, global_step
        self.checkpoint_manager, self.strategy = checkpoint_manager, strategy or tf.distribute.get_strategy()
        self.callbacks, self.run = callbacks, callbacks.run
        self.steps_per_loop, self.summary_interval = steps_per_loop, summary_interval
        self.summary_manager = summary_manager or SummaryManager(None)
        self.eval_summary_manager = eval_summary_manager or SummaryManager(None)
        self._stopping, self._save_on_stop, self._recorded = stopping, save_on_stop, recorded
        self._evaluated: dict[str, int] = {}  # the step at which this process evaluated each validation set last
        self._seen: dict[str, int] = {}  # the step of the last evaluation that callbacks saw; in the checkpoint
        self._wanted: set[str] = set()  # the validation sets that callbacks have asked for; in the checkpoint
        self._catches_up = False  # whether the run begins, or has gone back
        self._interrupted_loop, self._num_steps = InterruptedLoop(), (0, tf.constant(0))
        self.running = (0, 0)
        self._phases = Phases(times or TimeLedger())
        self._checkpoints = RunCheckpoints(checkpoint_manager, self.strategy, callbacks, self._phases)
        self._loops = CountedLoops(trainer, lambda: self.run.step, lambda: self.stopping)
        if trainer is not None:
            trainer.keep_state("loop", self._interrupted_loop.state, self._interrupted_loop.put_back)
            trainer.keep_state("evaluated", lambda: self._seen or None, self._put_seen)
            trainer.keep_state("evaluations asked for", lambda: sorted(self._wanted) or None, self._put_wanted)
        tf.summary.experimental.set_step(global_step)

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

    def train(self, steps: int, checkpoint_at_completion: bool = True) -> None:
        """Trains up to global step `steps`, or until the data ends if it is -1; see train_and_evaluate."""
        self.train_and_evaluate(steps, evaluates=False, checkpoint_at_completion=checkpoint_at_completion)

    def train_and_evaluate(
        self,
        train_steps: int,
        eval_steps: int = -1,
        eval_interval: int | None = None,
        *,
        evaluates: bool = True,
        checkpoint_at_completion: bool = True,
    ) -> dict[str, Any]:
        """Trains up to `train_steps` with an evaluation every `eval_interval` steps and one at the end.

        Stops early, saved and evaluated like a whole run, when a callback ends the run; stops early, saved, when a stop
        was asked for. An evaluation that was due when an earlier start ended comes first.

        Args:
          train_steps: the global step to train up to; -1: until the data ends.
          eval_steps: batches in an evaluation; -1: all.
          eval_interval: steps between evaluations; None: there is only the one at the end.
          evaluates: whether there are evaluations at all.
          checkpoint_at_completion: whether the last step is saved in any case.

        Returns:
          The logs of the last evaluation, NumPy values; empty without one.

        Raises:
          DataError: when the data ends before `train_steps`, or there is none to evaluate.
          DivergedError: when the loss or a weight is not finite, and no callback takes the run back.
          StorageError: when a checkpoint, or what an evaluation found, cannot be written.
          TrainerKitError: when a loop of the trainer does not move global_step.
        """
        self.run.total = train_steps if train_steps >= 0 else None
        intervals = self.evaluator.validation_intervals(eval_interval) if evaluates else {}
        goal, output = Goal(train_steps, eval_steps, intervals, checkpoint_at_completion), dict[str, Any]()
        writer = self.summary_manager.summary_writer()
        self.callbacks.log_cuts(self.steps_per_loop)
        with self._phases.at_work(), self.callbacks.around("train"), writer.as_default():
            self._catches_up = True
            while self._catches_up or not (self._is_last(goal) or self.stopping):
                try:
                    with exits_as_errors():
                        if self._catches_up:
                            output = self._catch_up(goal) or output
                            continue
                        begun = self._train_loop(goal)
                        output = self._at_boundary(begun, goal) or output
                except Exception as error:
                    self._go_back_after(error)
            if self._save_on_stop if self.stopping else checkpoint_at_completion or self.run.stop_reason:
                self.save_checkpoint()
            self.sync()
        return output

    def _train_loop(self, goal: Goal) -> int:
        """Runs one training loop, up to the next boundary; returns the step before it."""
        step = self.run.step
        pause = next_stop(step, goal.step, *goal.intervals.values(), self.callbacks.next_cut(step))
        begun, end = self._interrupted_loop.next(step, pause, self.steps_per_loop)
        self.callbacks.call("loop_begin", end - step)
        logs: Any = None
        start, self.running = time.perf_counter(), (begun, end)
        with self._phases.during("train"), tf.summary.record_if(self._records_summaries()), self._loops.out_of_data():
            logs = self.trainer.train(self._tensor_of(end - step))
        logs, reached = self._loops.counted(step, end, logs)
        seconds = time.perf_counter() - start - self.trainer.tracing_seconds
        first_seconds = self.trainer.first_step_at - start
        self.times.add_loop(reached - step, self.trainer.input_seconds, first_seconds, self.trainer.tracing_seconds)
        interrupted = begun < reached < end and self.stopping
        self._interrupted_loop.steps = (begun, end) if interrupted else None
        if reached > step and not interrupted:
            self.run.loop = Loop(step, reached, seconds, logs)
            self.callbacks.call("loop_end", logs)
        return begun

    def _at_boundary(self, begun: int, goal: Goal) -> dict[str, Any]:
        """Does what is due or was asked for after the loop that began at `begun`; returns the logs of an evaluation."""
        asked, loop, step = self._take_requests(), self.run.loop, self.run.step
        if asked is None:
            return {}
        if loop is not None and loop.end == step:
            self.callbacks.call("boundary_begin", loop.logs)
        if self.stopping:
            if self._save_on_stop:
                self.save_checkpoint()
            return {}
        last, data_ended = self._is_last(goal), self.trainer.data_ended
        saves_last = last and (goal.saves_last or data_ended or bool(self.run.stop_reason))
        if saves_last or asked.save or is_due(begun, step, self.checkpoint_manager.checkpoint_interval or 2**62):
            self.save_checkpoint()
        if data_ended and self.run.total is not None and not self.run.stop_reason:
            self.sync()
            raise data_ended_early(step, self.run.total)
        due = goal.due(begun, step, last, self._wanted)
        return self._evaluate_at_step([name for name in due if self._evaluated.get(name) != step], goal)

    def _is_last(self, goal: Goal) -> bool:
        """Whether the run ends at this step: it is the last one, the data has ended, or a callback asked for it."""
        return self.run.step >= goal.step >= 0 or bool(self.run.stop_reason) or self.trainer.data_ended

    def _take_requests(self) -> Requests | None:
        """Takes what callbacks have asked for, and notes the evaluations; None: a rewind, which is done."""
        asked = self.callbacks.take_requests()
        if asked.rewind is not None:
            self._rewind(asked.rewind, asked.rewind_reason)
            return None
        self._wanted |= asked.evaluate
        return asked

    def _catch_up(self, goal: Goal) -> dict[str, Any]:
        """Makes up what was due at the step that the run begins at, or has gone back to; returns logs of evaluations.

        Callbacks are called with the logs of evaluations that are on record and came after the checkpoint.
        """
        self._catches_up, step = False, self.run.step
        recorded = self._recorded(step) if goal.intervals and step > 0 else {}
        self._wanted -= recorded.keys()
        if unseen := {name: logs for name, logs in recorded.items() if self._seen.get(name) != step}:
            self.run.evaluation = Evaluation(step, tuple(unseen), replayed=True)
            self.callbacks.call("evaluation_end", dict(unseen.get("", unseen)))
            self._seen.update(dict.fromkeys(unseen, step))
            if self.run.was_stopped:  # by what it was then: another start goes on
                self.run.requests.stop = ""
        asked = self._take_requests()
        if asked is None:
            return {}
        if asked.save:
            self.save_checkpoint()
        due = goal.due(step - 1, step, self._is_last(goal), self._wanted) if step > 0 else []
        return self._evaluate_at_step(self._not_evaluated(due), goal)

    def _evaluate_at_step(self, due: Collection[str], goal: Goal) -> dict[str, Any]:
        """Evaluates what is due, and what callbacks ask for then; all sets where the run ends at this step.

        Then all that belongs to this step is done.
        """
        logs: dict[str, Any] = {}
        while True:
            while due and not self.stopping:
                found = self._evaluate(goal.eval_steps, due, logs)
                asked = self._take_requests() if found is not None else None
                if found is None or asked is None:
                    return {}
                logs = found
                if asked.save:
                    self.save_checkpoint()
                wanted = goal.intervals if self.run.stop_reason else self._wanted
                due = self._not_evaluated(name for name in goal.intervals if name in wanted)
            self.callbacks.call("boundary_end")
            asked = self._take_requests()
            if asked is None:
                return {}
            if asked.save:
                self.save_checkpoint()
            due = self._not_evaluated(goal.intervals) if asked.stop else []
            if not due or self.stopping:
                return {} if self.stopping else logs

    def evaluate(self, steps: int = -1, sets: Sequence[str] | None = None) -> dict[str, Any]:
        """Evaluates `steps` batches, -1 for all, and returns the logs as NumPy values; {} when a stop has cut it.

        Args:
          steps: batches.
          sets: names of the validation sets, if there are several; None: all.

        Raises:
          DataError: when there is no data, or too little.
          DivergedError: when a weight is not finite.
          StorageError: when what was found, or the save before it, cannot be written.
        """
        logs = self._evaluate(steps, sets or list(self.evaluator.validation_intervals(None)), {})
        if logs is None:
            return {}
        saves = self.callbacks.take_requests().save
        self.callbacks.call("boundary_end")
        saves = self.callbacks.take_requests().save or saves
        if saves and self.trainer is not None:
            self.save_checkpoint()
            self.sync()
        return {} if self.stopping else logs

    def _evaluate(self, steps: int, sets: Collection[str], before: Mapping[str, Any]) -> dict[str, Any] | None:
        """Evaluates and calls evaluation_end.

        Args:
          steps: batches.
          sets: names of validation sets; a single one is called "".
          before: logs of other sets at the same step.

        Returns:
          All logs of this step; None: a stop has cut the evaluation.
        """
        run, step = self.run, self.run.step
        self.callbacks.call("evaluation_begin")
        start = time.perf_counter()
        with self._phases.during("evaluate"), self.eval_summary_manager.summary_writer().as_default():
            chosen = {} if "" in sets else {"sets": list(sets)}
            logs = self.evaluator.evaluate(tf.constant(steps, tf.int32), **chosen) or {}
        seconds = time.perf_counter() - start
        if self.stopping:
            return None
        self._wanted -= set(sets)
        self._evaluated.update(dict.fromkeys(sets, step))
        self._seen.update(dict.fromkeys(sets, step))
        self.sync()  # nothing is recorded before it is there
        manager, of_sets = self.checkpoint_manager, {name: s for name, s in self.evaluator.eval_seconds.items() if name}
        path = manager.saved_path if step == manager.saved_step else None
        run.evaluation = Evaluation(step, tuple(sets), seconds, of_sets, path)
        merged = {**before, **logs}
        self.callbacks.call("evaluation_end", merged)
        return dict(tf.nest.map_structure(to_numpy, merged))

    def _not_evaluated(self, sets: Iterable[str]) -> list[str]:
        """Those of `sets` that were not evaluated at this step, by this process or, as is on record, before it."""
        step, names = self.run.step, list(sets)
        recorded = self._recorded(step) if names else {}
        return [name for name in names if self._evaluated.get(name) != step and name not in recorded]

    def evaluate_continuously(
        self,
        steps: int = -1,
        timeout: float | None = None,
        timeout_fn: Callable[[], bool] | None = None,
        *,
        watched: WatchedRun | None = None,
        newest_only: bool = False,
    ) -> dict[str, Any]:
        """Evaluates the checkpoints that are, or appear, in the manager's folder; what is on record not once more.

        Args:
          steps: batches in an evaluation, -1 for all.
          timeout: seconds to wait for a checkpoint when nothing tells that the run is alive; None: for ever.
          timeout_fn: tells whether no more checkpoints will come, where `watched` is None.
          watched: the run that saves the checkpoints; None: all that is known of it is the folder.
          newest_only: whether to take the newest one next, and not all in order.

        Returns:
          The logs of the last evaluation.

        Raises:
          NothingToWaitForError: when no checkpoint came in time although more were to come.
        """
        output: dict[str, Any] = {}
        run = watched or Unknown(timeout_fn or (lambda: False))
        watcher = CheckpointWatcher(self.checkpoint_manager.source, timeout, run, newest_only)
        ends = lambda: self.stopping or bool(self.run.stop_reason)  # noqa: E731
        for path in watcher.follow(ends, lambda: self._phases.during("wait")):
            try:
                self.restore_checkpoint(path)
            except StorageError as error:
                _LOG.warning("a checkpoint is skipped: %s", error)
                continue
            output = self.evaluate(steps)
        self._phases.now = "end"
        return output

    def restore_checkpoint(self, path: str | None = None) -> str | None:
        """Restores a checkpoint, or the newest one, or initialises; returns the path of what was restored."""
        return self._checkpoints.restore(path)

    def save_checkpoint(self) -> None:
        """Saves the state as it is, unless this step is saved already.

        Raises:
          DivergedError: when a weight is not finite; nothing is saved.
        """
        self._checkpoints.save(self.run.step)

    def sync(self) -> None:
        """Waits for the save in flight, and calls checkpoint_saved for it.

        Raises:
          StorageError: when it failed.
        """
        self._checkpoints.sync()

    def interrupt_loop(self) -> None:
        """Has the next checkpoint hold the loop that runs as one to go on with; after an error inside it."""
        self._interrupted_loop.steps, self.trainer.cut_short = self.running, True

    def _go_back_after(self, error: Exception) -> None:
        """Lets callbacks take the run back to an earlier step; raises the error where none does."""
        self.run.requests = Requests()  # what was asked for before is given up with the loop
        self.callbacks.call_after_error("exception", error)
        if self.callbacks.shares_requests and not isinstance(error, Divergence):
            raise error  # which other workers may not have
        asked = self.callbacks.take_requests()
        if asked.rewind is None:
            raise error
        if not isinstance(error, DivergedError):
            _LOG.warning("%s: %s", type(error).__name__, error)
        self._rewind(asked.rewind, asked.rewind_reason)

    def _rewind(self, step: int, reason: str) -> None:
        """Restores the checkpoint of an earlier step in the middle of a run; the run goes on from there."""
        path = self._checkpoints.path_of(step, reason)
        _LOG.warning("the run goes back to step %d: %s", step, reason)
        self._phases.now = BETWEEN  # after an error it is still that of the error
        with self.times.during("recovery"):
            self.restore_checkpoint(path)
            self._interrupted_loop.steps, self.run.stop_reason = None, ""
            self._evaluated.clear()  # what was evaluated on the way that is given up counts no more
            self.callbacks.call("rewound", step)
        self._catches_up = True

    def _put_seen(self, state: dict[str, int] | None) -> None:
        self._seen = dict(state or {})

    def _put_wanted(self, state: list[str] | None) -> None:
        self._wanted = set(state or ())

    def _tensor_of(self, steps: int) -> tf.Tensor:
        """Returns an int32 scalar, the same one for loop after loop."""
        if self._num_steps[0] != steps:
            self._num_steps = steps, tf.constant(steps, tf.int32)
        return self._num_steps[1]

    def _records_summaries(self) -> Any:
        if not self.summary_interval:
            return False
        return lambda: tf.equal(self.global_step % self.summary_interval, 0)
