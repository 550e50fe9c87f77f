"""Controller: the outer loop of a run. It runs training loops, evaluations, saves and events.

    controller = Controller(
        trainer=trainer,
        evaluator=trainer,
        global_step=trainer.global_step,
        checkpoint_manager=manager,
        callbacks=callbacks,
        steps_per_loop=100,
    )
    controller.restore_checkpoint()
    logs = controller.train_and_evaluate(train_steps=10_000, eval_interval=1_000)

Training has this order:

    _catch_up         does what an earlier start has left undone at the first step
    _run_loop         trains up to `steps_per_loop` steps in one call of `trainer.train`
    _run_boundary     does what is due after the loop, in the order of callbacks/callback.py. Steps
                      5 to 8 are in _finish_boundary, which _catch_up calls too.
    save_checkpoint   saves the last step, unless its boundary has done so

Loops and boundaries alternate until one of these happens:

    the end         The current step is the last one. It is saved, and all validation sets are
                    evaluated. `_find_end` returns the reason: `run.total_steps` is reached, the
                    data has ended, or a callback has called `run.stop`.
    a stop request  A signal or `trainer.request_stop` has made `should_stop` true. The loop ends
                    before its next step. The step is saved and not evaluated: RunStopped skips the
                    rest of the boundary. A later process resumes from there.
    a rewind        A callback has called `run.rewind`. The checkpoint of an earlier step is
                    restored. RunRewound skips the rest of the boundary, and the run catches up at
                    that step as at its first one.

What callbacks call on `run` is a request at first, in `run.requests`. `_carry_out_requests` takes
the requests after loop_end, after each evaluation and after boundary_end. Taking `run.stop` sets
`run.stop_reason`, which `_find_end` reads.

Three objects from other modules have the state between these calls:

    EvaluationState     Which validation sets are evaluated at a step, which of these evaluations
                        the callbacks have received, and which sets callbacks have asked for.
    InterruptedLoop     The first and last step of a loop that a stop has cut. It is in the
                        checkpoint, so the process that resumes ends this loop at the same step.
    LoopChecker         Compares global_step after a loop with the step that the loop was asked to
                        reach. It raises an error after a loop that does not advance, and warns once
                        of one that falls short or goes too far. After a stop, or where the data
                        ends, a short loop is expected.

A loop covers the steps by which global_step has moved, which may differ from the number that it was
asked for. An interval is due if one of its multiples is among them.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from trainer_kit.callbacks.callback import Evaluation, Loop, Requests
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.callbacks.finite_check import CollectiveDivergedError
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.config.schema.durations import is_due
from trainer_kit.errors import DataError, DivergedError, StorageError, UsageError
from trainer_kit.errors.user_exits import convert_system_exit
from trainer_kit.evals.checkpoint_watcher import CheckpointWatcher
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.run_history import RunHistory
from trainer_kit.process.signals import StopSignals
from trainer_kit.run.evaluation_state import (
    SINGLE_SET,
    EvaluationState,
    LastLogs,
    Logs,
    ungroup_single_set,
)
from trainer_kit.run.progress import END_PHASE, REPORT_PHASE, Phases
from trainer_kit.runtime.collectives import broadcast_int
from trainer_kit.telemetry.summary_manager import SummaryManager, SummaryManagerLike
from trainer_kit.telemetry.time_ledger import TimeLedger
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.checks.failed_step import LoopChecker
from trainer_kit.training.loops.intervals import (
    InterruptedLoop,
    LoopRange,
    StepsPerLoop,
    next_stop,
)
from trainer_kit.training.loops.iterators import as_int32, is_stopping
from trainer_kit.training.loops.train_loop import SummaryTimer, summary_condition
from trainer_kit.training.metric_set import to_numpy

_LOG = logging.getLogger(__name__)


class RunRewound(Exception):
    """The run has gone back to an earlier step.

    The rest of the boundary is skipped, and training resumes at that step.
    """


class RunStopped(Exception):
    """A stop was requested. The rest of the boundary is skipped, and the run ends."""


class RunEnd(enum.Enum):
    """Why the current step is the last one of the run. A stop request does not make it that."""

    # A callback has ended the run.
    CALLBACK = "callback"
    # The training data has ended.
    DATA = "data"
    # `run.total_steps` is reached.
    TOTAL_STEPS = "total_steps"


@dataclass(frozen=True)
class BoundarySchedule:
    """What a training run evaluates and saves on the way to its last step.

    Attributes:
      eval_steps: The number of batches in an evaluation. -1 means all.
      eval_intervals: The number of steps between evaluations, by the name of the validation set.
        None means only at the end. An empty mapping means no evaluations.
      saves_last: Whether the last step is always saved.
    """

    eval_steps: int
    eval_intervals: Mapping[str, int | None]
    saves_last: bool

    def due_sets(
        self, begin: int, step: int, is_last: bool, requested: Collection[str]
    ) -> list[str]:
        """Returns the validation sets to evaluate after the steps from `begin` + 1 to `step`.

        Args:
          begin: The global step before these steps.
          step: The global step after them.
          is_last: Whether the run ends with them. All sets are due then.
          requested: The names of the sets that callbacks have asked for.
        """
        return [
            name
            for name, interval in self.eval_intervals.items()
            if is_last or name in requested or (interval and is_due(begin, step, interval))
        ]


class Controller:
    """Drives a Trainer through training loops, evaluations and saves.

    The methods of a caller have the names of Orbit's. They are called eagerly, on all workers:

        restore_checkpoint      restores a checkpoint, or initialises the weights. It comes first.
        train                   trains up to a step
        train_and_evaluate      trains up to a step, with evaluations on the way and at the end
        evaluate                evaluates the current weights
        evaluate_continuously   evaluates the checkpoints that another process saves
        save_checkpoint         starts a save of the current step
        sync                    waits for the save in flight

    Args:
      trainer: The BaseTrainer that trains. None in modes that do not train.
      evaluator: The BaseTrainer that evaluates. None in modes that do not evaluate.
      global_step: The variable of the global step, an int64 scalar.
      checkpoint_manager: The manager of the run's checkpoints.
      callbacks: The callbacks to call around loops, evaluations and saves.
      strategy: The strategy in whose scope checkpoints are restored. None means the current one.
      steps_per_loop: The number of steps between two boundaries, or a function of the global step.
      summary_interval: The number of steps between summaries that the task writes, or their timer.
        None means no summaries.
      summary_manager: The manager of the task's training summaries. None means no summaries.
      eval_summary_manager: The manager of the task's evaluation summaries. None means no summaries.
      signals: The stop signals of the run. None means that only the trainer can be asked to stop.
      save_on_stop: Whether a stop saves a checkpoint.
      history: Knows the recorded evaluations. A validation set without a record is evaluated when
        the run begins. None means that no evaluations are recorded.
      boundary_intervals: The intervals at whose multiples loops end, such as the epochs between
        checkpoints.

    Attributes:
      run: The Run that callbacks receive.
      planned_loop: The LoopRange of the current training loop, or of the last one. It is the plan:
        `run.loop` has the steps that this process has trained. They differ if the loop has missed
        its end, or if an earlier process has begun the loop.
    """

    def __init__(
        self,
        *,
        trainer: BaseTrainer | None = None,
        evaluator: BaseTrainer | None = None,
        global_step: tf.Variable,
        checkpoint_manager: CheckpointManager,
        callbacks: CallbackList,
        strategy: tf.distribute.Strategy | None = None,
        steps_per_loop: StepsPerLoop = 1,
        summary_interval: int | SummaryTimer | None = None,
        summary_manager: SummaryManagerLike | None = None,
        eval_summary_manager: SummaryManagerLike | None = None,
        signals: StopSignals | None = None,
        save_on_stop: bool = True,
        history: RunHistory | None = None,
        boundary_intervals: Sequence[int] = (),
    ) -> None:
        self.trainer = trainer
        self.evaluator = evaluator
        self.global_step = global_step
        self.checkpoint_manager = checkpoint_manager
        self.strategy = strategy or tf.distribute.get_strategy()
        self.callbacks = callbacks
        self.run = callbacks.run
        self.steps_per_loop = steps_per_loop
        self.summary_interval = summary_interval
        self.summary_manager = summary_manager or SummaryManager(None)
        self.eval_summary_manager = eval_summary_manager or SummaryManager(None)
        self._signals = signals
        self._save_on_stop = save_on_stop
        self._boundary_intervals = boundary_intervals
        self._phases = Phases(callbacks.times)

        # The state of training loops.
        self.planned_loop = LoopRange(0, 0)
        self._interrupted_loop = InterruptedLoop()
        # A callback of Keras may call run.stop after a batch. That ends the loop early, before the
        # request is taken.
        self._loop_checker = LoopChecker(
            trainer, lambda: self.should_stop or bool(self.run.requests.stop_reason)
        )

        # The state of evaluations and checkpoints. Progress.save_late saves from another thread.
        self._evaluations = EvaluationState(self.strategy, history)
        self._save_lock = threading.RLock()
        # The step of the last checkpoint that callbacks know.
        self._announced_checkpoint_step = checkpoint_manager.saved_step

        if trainer is not None:
            trainer.register_state(
                "loop", self._interrupted_loop.state, self._interrupted_loop.restore
            )
            self._evaluations.register_with(trainer)
        tf.summary.experimental.set_step(global_step)
        self.run.read_step()

    @property
    def should_stop(self) -> bool:
        """Whether a stop was requested by a signal or `request_stop` of the trainer.

        With several workers, whether they have agreed to stop. A callback that ends the run does
        not count.
        """
        signals = self._signals
        return is_stopping(
            self.run.trainer, lambda: signals is not None and signals.is_stop_requested()
        )

    @property
    def phase(self) -> str:
        """The phase that the main thread is in. See Phases."""
        return self._phases.now

    @property
    def times(self) -> TimeLedger:
        """The time ledger of the run."""
        return self.callbacks.times

    def train(self, steps: int, checkpoint_at_completion: bool = True) -> None:
        """Trains up to global step `steps`, or until the data ends if it is -1.

        See train_and_evaluate.
        """
        self.train_and_evaluate(
            steps, evaluates=False, checkpoint_at_completion=checkpoint_at_completion
        )

    def train_and_evaluate(
        self,
        train_steps: int,
        eval_steps: int = -1,
        eval_interval: int | None = None,
        *,
        evaluates: bool = True,
        checkpoint_at_completion: bool = True,
    ) -> Logs:
        """Trains up to `train_steps`, with evaluations on the way and one at the end.

        When a callback ends the run, the last step is saved and evaluated as at the end of a full
        run. After a stop request the step is saved only. An evaluation that was due when an earlier
        start ended comes first.

        Args:
          train_steps: The global step to train up to. -1 means until the data ends.
          eval_steps: The number of batches in an evaluation. -1 means all.
          eval_interval: The number of steps between evaluations. None means only the evaluation at
            the end.
          evaluates: Whether there are evaluations at all.
          checkpoint_at_completion: Whether the last step is always saved.

        Returns:
          The logs of the last evaluation, as NumPy values. Empty without an evaluation.

        Raises:
          DataError: when the training data ends before `train_steps`, or there is no validation
            data.
          DivergedError: when the loss or a weight is not finite, and no callback rewinds the run.
          StorageError: when a checkpoint or a record of an evaluation cannot be written.
          TrainerKitError: when a training loop does not advance global_step.
          UsageError: when the controller has no trainer, or evaluates without an evaluator.
        """
        self.run.total_steps = train_steps if train_steps >= 0 else None
        intervals: dict[str, int | None] = {}
        if evaluates:
            evaluator = _require(self.evaluator, "evaluator")
            intervals = evaluator.validation_intervals(eval_interval)
        schedule = BoundarySchedule(eval_steps, intervals, checkpoint_at_completion)
        last_logs = LastLogs()
        writer = self.summary_manager.summary_writer()
        self.callbacks.log_shortened_loops(self.steps_per_loop)

        with (
            self._phases.during_run(),
            self.callbacks.call_begin_and_end("train"),
            writer.as_default(),
        ):
            while True:
                # The run begins here, or continues from the step to which it has gone back.
                try:
                    with convert_system_exit():
                        logs = self._catch_up(schedule)
                        last_logs.add(logs, self.run.step)
                        while self._find_end() is None and not self.should_stop:
                            self._run_loop(schedule)
                            logs = self._run_boundary(schedule)
                            last_logs.add(logs, self.run.step)
                    break
                except RunStopped:
                    break
                except RunRewound:
                    continue
                except Exception as error:
                    self._rewind_after_error(error)

            # This saves nothing if the last boundary has saved the step.
            saves_last = self._saves_last_step(schedule)
            saves = self._save_on_stop if self.should_stop else saves_last
            if saves:
                self.save_checkpoint()
            self.sync()
        return last_logs.logs

    def _run_loop(self, schedule: BoundarySchedule) -> None:
        """Runs one training loop, with loop_begin before it and loop_end after it.

        There is no loop_end if the loop took no step, as where the
        data has ended, or if a stop interrupted it. An interrupted loop is reported by the process
        that ends it.
        """
        trainer = _require(self.trainer, "trainer")

        # The loop ends at the next multiple of an interval, or where a callback asks for it.
        step = self.run.step
        pause = next_stop(
            step,
            self.run.total_steps,
            *schedule.eval_intervals.values(),
            *self._boundary_intervals,
            self.callbacks.find_next_boundary(step),
        )
        # An interrupted loop continues, so its begin is before the current step.
        planned_loop = self._interrupted_loop.next(step, pause, self.steps_per_loop)
        self.planned_loop = planned_loop
        begin, end = planned_loop
        steps = end - step
        self.callbacks.call("loop_begin", steps)

        start = time.perf_counter()
        # The data may end inside the loop, which then returns nothing.
        output: object = None
        records_summaries = summary_condition(self.summary_interval, self.global_step, end)
        with (
            self._phases.during("train"),
            tf.summary.record_if(records_summaries),
            self._loop_checker.catch_end_of_data(),
        ):
            output = trainer.train(as_int32(steps))
        logs, reached = self._loop_checker.check_loop(step, end, output)
        self.run.step = reached

        seconds = time.perf_counter() - start
        # Below 0 if the loop had no first step of a new function, but called an earlier one.
        first_step_seconds = trainer.first_step_at - start
        self.times.add_loop(reached - step, trainer.input_seconds, first_step_seconds)

        # The next checkpoint contains the range of an interrupted loop.
        is_interrupted = begin < reached < end and self.should_stop
        self._interrupted_loop.steps = planned_loop if is_interrupted else None

        # 1. loop_end, the first step of the boundary: the callbacks see the loop and report it.
        if reached > step and not is_interrupted:
            self.run.loop = Loop(step, reached, seconds, logs)
            self.callbacks.call("loop_end", logs)

    def _run_boundary(self, schedule: BoundarySchedule) -> Logs:
        """Does steps 2 to 8 of a boundary. Step 1, loop_end, is at the end of `_run_loop`.

        Args:
          schedule: What the run evaluates and saves on the way to its last step.

        Returns:
          The logs of the evaluations at this step. Empty if none was due.

        Raises:
          RunRewound: when a callback has asked for a rewind, at any of the steps.
          RunStopped: when a stop was requested.
          DataError: when the training data ends before the last step.
          Exception: the first error of a required callback.
        """
        # 2. rewind. A save that is asked for waits for step 4.
        requests = self._carry_out_requests(saves_now=False)

        # 3. boundary_begin: the engine checks whether the loop that ended here has diverged.
        # If the newest loop took no step, it is the one before. An interrupted loop has not ended.
        last_loop = self.run.loop
        if last_loop is not None and last_loop.end == self.run.step:
            self.callbacks.call("boundary_begin", last_loop.logs)

        # 4. checkpoint. A stop request ends the run here. Its save may find a divergence, which can
        # rewind the run only from inside a boundary.
        if self.should_stop:
            if self._save_on_stop:
                self.save_checkpoint()
            raise RunStopped

        # A loop that an earlier process has begun counts from its begin: where it was interrupted,
        # nothing was due.
        begin = self.planned_loop.begin
        step = self.run.step
        saves = requests.save or self._saves_last_step(schedule)
        if saves or self.checkpoint_manager.is_due(begin, step):
            self.save_checkpoint(requests.overwrite_checkpoint)
        self._check_data_has_not_ended()

        # 5. evaluation, 6. epoch_end, 7. boundary_end and 8. stop
        is_last = self._find_end() is not None
        sets = self._select_sets(begin, is_last, schedule)
        return self._finish_boundary(sets, schedule)

    def _carry_out_requests(self, saves_now: bool = True) -> Requests:
        """Takes the requests that callbacks have made since the last call, and carries them out.

        A rewind comes first. A stop becomes `run.stop_reason`. Evaluations that are asked for wait
        in EvaluationState until the next evaluations.

        Args:
          saves_now: Whether a checkpoint that is asked for is saved here. Otherwise the caller has
            to save it.

        Returns:
          The requests.

        Raises:
          RunRewound: after a rewind. The other requests are dropped.
        """
        requests = self.callbacks.take_requests()
        if requests.rewind_step is not None and self.trainer is None:
            _LOG.warning(
                "a callback asked to go back to step %d, in a mode that does not train",
                requests.rewind_step,
            )
        elif requests.rewind_step is not None:
            self._rewind(requests.rewind_step, requests.rewind_reason)
            raise RunRewound

        self._evaluations.requested_sets |= requests.sets_to_evaluate
        if requests.save and saves_now:
            self.save_checkpoint(requests.overwrite_checkpoint)
        return requests

    def _check_data_has_not_ended(self) -> None:
        """Checks that there is data up to the last step, unless a callback ends the run here.

        Raises:
          DataError: when there is not. The checkpoint of this step is on the disk then.
        """
        if self._find_end() is RunEnd.DATA and self.run.total_steps is not None:
            self.sync()
            raise DataError(
                f"task.train_data ended at step {self.run.step} of {self.run.total_steps}; repeat"
                " the data (an ArraySource does with task.train_data.is_training=true), or set"
                " trainer.train_steps to -1 to train until it ends (the checkpoint of this step is"
                " saved)"
            )

    def _finish_boundary(self, sets: Collection[str], schedule: BoundarySchedule) -> Logs:
        """Does steps 5 to 8 of a boundary.

        Args:
          sets: The names of the validation sets to evaluate.
          schedule: What the run evaluates and saves on the way to its last step.

        Returns:
          The logs of the evaluations at this step. Empty without one.

        Raises:
          RunRewound: when a callback has asked for a rewind.
          RunStopped: when a stop was requested.
        """
        # 5. evaluation of the validation sets that are due or asked for
        logs = self._evaluate_sets(sets, {}, schedule)

        # 6. epoch_end
        self.callbacks.end_epoch_if_complete()

        # 7. boundary_end
        self.callbacks.call("boundary_end")
        requests = self._carry_out_requests()

        # 8. stop. If boundary_end has asked for it, the remaining sets are evaluated. boundary_end
        # promises that this step is evaluated, so it comes a second time.
        if requests.stop_reason and not self.should_stop:
            remaining_sets = self._select_sets(self.run.step, is_last=True, schedule=schedule)
            if remaining_sets:
                logs = self._evaluate_sets(remaining_sets, logs, schedule)
                self.callbacks.call("boundary_end")
                self._carry_out_requests()
        if self.should_stop:
            raise RunStopped
        return logs

    def _evaluate_sets(self, sets: Collection[str], logs: Logs, schedule: BoundarySchedule) -> Logs:
        """Evaluates validation sets, and those that callbacks ask for meanwhile.

        If a callback ends the run here, all sets are evaluated. A stop request ends that.

        Args:
          sets: The names of the validation sets.
          logs: The logs of other sets at this step.
          schedule: What the run evaluates and saves on the way to its last step.

        Returns:
          All logs of this step.

        Raises:
          RunRewound: when a callback has asked for a rewind.
          RunStopped: when a stop cut an evaluation short.
        """
        while sets and not self.should_stop:
            logs = self._run_evaluation(schedule.eval_steps, sets, logs)
            self._carry_out_requests()

            # What intervals ask for is done, so no steps are given. Callbacks may have asked for
            # more sets, or have ended the run.
            is_last = self._find_end() is RunEnd.CALLBACK
            sets = self._select_sets(self.run.step, is_last, schedule)
        return logs

    def _select_sets(self, begin: int, is_last: bool, schedule: BoundarySchedule) -> list[str]:
        """Returns the validation sets that are due at this step and not evaluated at it.

        Args:
          begin: The global step before the steps that have led here.
          is_last: Whether all sets are due.
          schedule: The intervals of the sets.
        """
        step = self.run.step
        due = schedule.due_sets(begin, step, is_last, self._evaluations.requested_sets)
        return self._evaluations.select_unevaluated(due, step)

    def _find_end(self) -> RunEnd | None:
        """Returns why the current step is the last one of the run. None if it is not."""
        trainer = _require(self.trainer, "trainer")
        if self.run.stop_reason:
            return RunEnd.CALLBACK
        if trainer.has_data_ended:
            return RunEnd.DATA
        if self.run.total_steps is not None and self.run.step >= self.run.total_steps:
            return RunEnd.TOTAL_STEPS
        return None

    def _saves_last_step(self, schedule: BoundarySchedule) -> bool:
        """Whether the current step is the last one of the run, and is saved as such."""
        end = self._find_end()
        # A caller who wants no save at the end expects the run to reach its last step.
        return schedule.saves_last if end is RunEnd.TOTAL_STEPS else end is not None

    def _catch_up(self, schedule: BoundarySchedule) -> Logs:
        """Does what remains to be done at the step at which the run begins, or after a rewind.

        It is a boundary without a loop. An earlier process may have been killed in the boundary of
        this step, after its checkpoint. What it has recorded at this step counts as evaluated.
        Callbacks whose state in the checkpoint is from before a recorded evaluation receive its
        logs. Records of later steps do not count, since those steps are trained again.

        Returns:
          The logs of all evaluations of this step, recorded and new ones.

        Raises:
          RunRewound: when a callback has asked for a rewind.
          RunStopped: when a stop was requested.
        """
        step = self.run.step
        recorded: Logs = {}
        unannounced: Logs = {}
        if schedule.eval_intervals and step > 0:
            recorded, unannounced = self._evaluations.adopt_recorded(step)

        # evaluation_end for the recorded evaluations that callbacks have not received
        if unannounced:
            replayed_logs = ungroup_single_set(unannounced)
            # Callbacks may change the logs that they receive.
            own_logs = tf.nest.map_structure(to_numpy, replayed_logs)
            self.run.evaluation = Evaluation(step, own_logs, tuple(unannounced), is_replayed=True)
            self.callbacks.call("evaluation_end", replayed_logs)
            if step == self.run.previous_stop_step:
                # The record of the earlier start says that a callback ended it at this step. The
                # same logs have made the callback ask again. The run was started once more in order
                # to continue.
                self.run.requests.stop_reason = ""

        # rewind and checkpoint
        self._carry_out_requests()

        # evaluation of the validation sets that are due, asked for or were cut short. No loop has
        # led to this step, so a set is due if the step is itself a multiple of the interval.
        sets: list[str] = []
        if step > 0:
            is_last = self._find_end() is not None
            sets = self._select_sets(step - 1, is_last, schedule)
        logs = self._finish_boundary(sets, schedule)
        return {**ungroup_single_set(recorded), **logs}

    def evaluate(self, steps: int = -1) -> Logs:
        """Evaluates the weights of the current step.

        Args:
          steps: The number of batches. -1 means all.

        Returns:
          The logs as NumPy values. Empty when a stop cut the evaluation short.

        Raises:
          RunRewound: when a callback has asked for a rewind. Training has to continue from there.
          DataError: when there is no data, or too little.
          DivergedError: when a weight is not finite.
          StorageError: when the record of the evaluation, or the save before it, cannot be written.
          UsageError: when the controller has no evaluator.
        """
        evaluator = _require(self.evaluator, "evaluator")
        try:
            logs = self._run_evaluation(steps, evaluator.validation_intervals(None), {})
        except RunStopped:
            return {}

        # Both events may ask for a save, and one save serves both. A mode that does not train saves
        # nothing.
        evaluation_requests = self._carry_out_requests(saves_now=False)
        self.callbacks.call("boundary_end")
        boundary_requests = self._carry_out_requests(saves_now=False)
        if self.trainer is not None and (evaluation_requests.save or boundary_requests.save):
            self.save_checkpoint(
                evaluation_requests.overwrite_checkpoint or boundary_requests.overwrite_checkpoint
            )
            self.sync()
        return {} if self.should_stop else logs

    def _run_evaluation(
        self, steps: int, sets: Collection[str], other_logs: Mapping[str, object]
    ) -> Logs:
        """Evaluates, and shows the evaluation to the callbacks.

        The engine's own callbacks export the best weights and record the evaluation.

        Args:
          steps: The number of batches. -1 means all.
          sets: The names of the validation sets.
          other_logs: The logs of other sets at the same step.

        Returns:
          All logs of this step, as NumPy values.

        Raises:
          RunStopped: when a stop cut the evaluation short.
        """
        evaluator = _require(self.evaluator, "evaluator")
        step = self.run.step
        self.callbacks.call("evaluation_begin")
        start = time.perf_counter()
        with (
            self._phases.during("evaluate"),
            self.eval_summary_manager.summary_writer().as_default(),
        ):
            # Evaluators with a single set need not have the parameter `sets`.
            options = {} if SINGLE_SET in sets else {"sets": list(sets)}
            logs = dict(evaluator.evaluate(as_int32(steps), **options) or {})
        # The evaluator may have computed the logs before, in its training loop.
        seconds = time.perf_counter() - start
        seconds = max(seconds, evaluator.eval_seconds.get(SINGLE_SET, 0.0))
        if self.should_stop:
            # The evaluation may have been cut short.
            raise RunStopped
        self._evaluations.add_evaluated(sets, step)

        # An evaluation is recorded after its checkpoint is on the disk.
        self.sync()
        manager = self.checkpoint_manager
        seconds_of_sets = {
            name: set_seconds
            for name, set_seconds in evaluator.eval_seconds.items()
            if name != SINGLE_SET
        }
        path = manager.saved_path if step == manager.saved_step else None
        # Callbacks may change the logs that they receive.
        own_logs = tf.nest.map_structure(to_numpy, logs)
        self.run.evaluation = Evaluation(
            step, own_logs, tuple(sets), seconds, seconds_of_sets, path
        )
        merged_logs = {**other_logs, **logs}
        self.callbacks.call("evaluation_end", merged_logs)

        # An action, or eval_end of the user's trainer, may have restored a checkpoint.
        self.run.read_step()
        return dict(tf.nest.map_structure(to_numpy, merged_logs))

    def evaluate_continuously(
        self,
        steps: int = -1,
        timeout: float | None = None,
        *,
        sidecar: Sidecar,
        newest_only: bool = False,
    ) -> Logs:
        """Evaluates the checkpoints in the manager's folder and those that appear there.

        Recorded checkpoints are skipped.

        Args:
          steps: The number of batches in an evaluation. -1 means all.
          timeout: The seconds to wait for a checkpoint without a sign of life of the run. None
            means no limit.
          sidecar: The sidecar of the run that saves the checkpoints.
          newest_only: Whether to evaluate only the newest checkpoint each time, instead of all in
            order.

        Returns:
          The logs of the last evaluation. Empty without an evaluation, or when a stop cut the last
          one short.

        Raises:
          NothingToWaitForError: when no checkpoint came in time although the run was not finished.
        """
        logs: Logs = {}
        folder = self.checkpoint_manager.restore_folder
        watcher = CheckpointWatcher(folder, timeout, sidecar, newest_only)

        def is_over() -> bool:
            return self.should_stop or bool(self.run.stop_reason)

        for path in watcher.follow(is_over, lambda: self._phases.during("wait")):
            try:
                self.restore_checkpoint(path)
            except StorageError as error:
                _LOG.warning("a checkpoint is skipped: %s", error)
                continue
            logs = self.evaluate(steps)
        self._phases.now = END_PHASE
        return logs

    def restore_checkpoint(self, path: str | None = None) -> str | None:
        """Restores a checkpoint in the scope of the strategy.

        Args:
          path: The path of the checkpoint. None means the newest one. If there is none, the weights
            are initialised.

        Returns:
          The path of the restored checkpoint.
        """
        manager = self.checkpoint_manager
        with self.strategy.scope():
            if path is None:
                path = manager.restore_or_initialize()
            else:
                manager.restore(path)

        # Callbacks do not hear of a checkpoint that existed before.
        self._announced_checkpoint_step = manager.saved_step
        self.run.read_step()
        return path

    def save_checkpoint(self, overwrite: bool = False) -> None:
        """Saves a checkpoint of the current step, unless there is one already.

        Args:
          overwrite: Whether to write it once more if there is one.

        Raises:
          DivergedError: when a weight is not finite. Nothing is saved.
        """
        manager = self.checkpoint_manager
        # Another thread may save before the loop's steps are counted.
        step = self.run.read_step()

        with self._save_lock:
            if step == manager.saved_step and not overwrite:
                return
            self.sync()
            self.callbacks.call("checkpoint_begin")
            with self._phases.during("save"):
                manager.save(checkpoint_number=step, check_interval=False, overwrite=overwrite)

    def sync(self) -> None:
        """Waits for the save in flight, and calls checkpoint_saved on the callbacks for it.

        A save ends in a background thread. Its event waits for this call, so that callbacks do not
        run there.

        Raises:
          StorageError: when that save failed.
        """
        manager = self.checkpoint_manager
        with self._save_lock:
            with self._phases.during("save"):
                manager.sync()
            # There is no path after a save that failed.
            path = manager.saved_path
            if path is not None and self._announced_checkpoint_step != manager.saved_step:
                self._announced_checkpoint_step = manager.saved_step
                self.callbacks.call("checkpoint_saved", path, manager.saved_step)

    def mark_loop_interrupted(self) -> None:
        """Notes the current loop as interrupted, after an error inside it.

        The next checkpoint stores the end of the loop.
        """
        trainer = _require(self.trainer, "trainer")
        self._interrupted_loop.steps = self.planned_loop
        trainer.should_continue_metrics = True

    def _rewind_after_error(self, error: Exception) -> None:
        """Lets callbacks rewind the run after an error.

        Raises the error when no callback requests that.
        """
        self.run.read_step()
        # Requests from before the error are dropped with the loop.
        self.run.requests = Requests()
        self.callbacks.call_after_error("exception", error)
        if self.callbacks.shares_requests and not isinstance(error, CollectiveDivergedError):
            # Other workers may not have the error.
            raise error

        # Of the requests that `exception` has made, only a rewind is carried out.
        requests = self.callbacks.take_requests()
        if requests.rewind_step is None:
            raise error
        if not isinstance(error, DivergedError):
            _LOG.warning("%s: %s", type(error).__name__, error)
        self._rewind(requests.rewind_step, requests.rewind_reason)

    def _rewind(self, step: int, reason: str) -> None:
        """Restores the checkpoint of an earlier step in the middle of a run.

        The run has to catch up at that step next.

        Raises:
          UsageError: when that step has no checkpoint.
        """
        self.sync()
        folder = self.checkpoint_manager.restore_folder
        # The chief decides whether the checkpoint exists.
        exists = int(step in complete_checkpoints(folder))
        if not broadcast_int(self.strategy, exists):
            raise UsageError(
                f"the run cannot go back to step {step} ({reason}): {folder} holds no checkpoint of"
                " that step; request a step that has a checkpoint"
            )

        _LOG.warning("the run goes back to step %d: %s", step, reason)
        # After an error the phase is still that of the error.
        self._phases.now = REPORT_PHASE
        with self.times.during("recovery"):
            self.restore_checkpoint(os.path.join(folder, f"ckpt-{step}"))
            self._interrupted_loop.steps = None
            self.run.stop_reason = ""
            # Evaluations of the dropped steps no longer count.
            self._evaluations.forget_evaluated()
            self.callbacks.call("rewound", step)


def _require(trainer: BaseTrainer | None, argument: str) -> BaseTrainer:
    """Returns the trainer or evaluator that a method needs.

    Raises:
      UsageError: when the controller was created without it.
    """
    if trainer is None:
        raise UsageError(f"this Controller has no {argument}; create it with {argument}=")
    return trainer
