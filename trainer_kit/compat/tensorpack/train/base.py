"""Trainer: Tensorpack's trainer, whose loop the engine runs."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.compat.tensorpack.callbacks.base import Callback, ProxyCallback
from trainer_kit.compat.tensorpack.callbacks.group import Callbacks
from trainer_kit.compat.tensorpack.callbacks.inference_runner import InferenceRunnerBase
from trainer_kit.compat.tensorpack.callbacks.monitor import MonitorBase, Monitors
from trainer_kit.compat.tensorpack.callbacks.steps import MaintainStepCounter
from trainer_kit.compat.tensorpack.fused_steps import FusedSteps
from trainer_kit.compat.tensorpack.program_errors import ProgramError, explain_assertions
from trainer_kit.compat.tensorpack.program_graph import current_program_graph
from trainer_kit.compat.tensorpack.program_run import run_program
from trainer_kit.compat.tensorpack.reported_scalars import (
    ReportedScalars,
    continue_statistics,
)
from trainer_kit.compat.tensorpack.session import HookedSession, Session
from trainer_kit.compat.tensorpack.tfutils.common import get_global_step_var
from trainer_kit.compat.tensorpack.tfutils.model_utils import describe_trainable_vars
from trainer_kit.compat.tensorpack.tfutils.sesscreate import NewSessionCreator, ReuseSessionCreator
from trainer_kit.compat.tensorpack.tfutils.sessinit import JustCurrentSession
from trainer_kit.compat.tensorpack.train.config import DEFAULT_CALLBACKS, DEFAULT_MONITORS
from trainer_kit.compat.tensorpack.utils import logger
from trainer_kit.compat.tensorpack.utils.utils import humanize_time_delta

__all__ = ["StopTraining", "Trainer"]


class StopTraining(Exception):
    """Raised by a callback or a step to end the training."""


class TrainLoop:
    """The place of a training in its epochs.

    Attributes:
      steps_per_epoch: The number of steps in an epoch.
      starting_epoch: The number of the first epoch that this process runs.
      max_epoch: The number of the last epoch.
      first_epoch: The number of the first epoch of the run. A resumed run began with it.
      epoch_num: The number of the current epoch, or of the last one between two epochs.
      local_step: The index of the current step in its epoch.
      global_step: The number of times that the hooked session has run.
    """

    def __init__(self) -> None:
        self.steps_per_epoch = 0
        self.first_epoch = 1
        self.starting_epoch = 1
        self.max_epoch = 0
        self._epoch_num = 0
        self._global_step = 0
        self._local_step = -1

    def config(self, steps_per_epoch: int, starting_epoch: int, max_epoch: int) -> None:
        """Sets the length of the training.

        Raises:
          UsageError: When an epoch has no steps.
        """
        if int(steps_per_epoch) < 1 or int(max_epoch) < int(starting_epoch):
            raise ProgramError(
                f"steps_per_epoch={steps_per_epoch}, starting_epoch={starting_epoch},"
                f" max_epoch={max_epoch}: there is no step to run; give steps_per_epoch of at"
                " least 1, and a max_epoch that is not before starting_epoch"
            )
        self.steps_per_epoch = int(steps_per_epoch)
        self.first_epoch = int(starting_epoch)
        self.max_epoch = int(max_epoch)
        self.locate_step(0)

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole run."""
        return (self.max_epoch - self.first_epoch + 1) * self.steps_per_epoch

    def locate_step(self, step: int) -> None:
        """Moves to a step of the run, counted from 0, before it is taken."""
        epochs, self._local_step = divmod(step, self.steps_per_epoch)
        self.starting_epoch = self.first_epoch + epochs
        # Before the first step of an epoch, the epoch before it is the last one.
        self._epoch_num = self.starting_epoch - (self._local_step == 0)

    def enter_step(self, step: int) -> None:
        """Moves to a step of the run, counted from 0, which is taken now."""
        epochs, self._local_step = divmod(step, self.steps_per_epoch)
        self._epoch_num = self.first_epoch + epochs

    def count_calls(self, count: int) -> None:
        """Adds calls of the hooked session to the global step."""
        self._global_step += count

    def update_global_step(self) -> None:
        """Reads the global step of the graph. Runs on the host."""
        self._global_step = int(get_global_step_var().eval())

    @property
    def epoch_num(self) -> int:
        """The number of the current epoch, or of the last one between two epochs."""
        return self._epoch_num

    @property
    def global_step(self) -> int:
        """The number of times that the hooked session has run."""
        return self._global_step

    @property
    def local_step(self) -> int:
        """The index of the current step in its epoch."""
        return self._local_step


class Trainer:
    """Tensorpack's trainer. A subclass sets `train_op` or overrides `run_step`.

    `train` runs on the engine of trainer_kit: the logger directory is the run directory, and a
    program that is started again continues at its newest checkpoint.

    Attributes:
      is_chief: Whether this process writes the files of the run.
      sess: The session. Set by `initialize`.
      hooked_sess: The session of training steps, with the hooks of the callbacks.
      loop: The place in the epochs.
      scalars: The statistics that the program has reported.
      monitors: What receives statistics. Set by `setup_callbacks`.
      fuse_steps: The number of steps that run as one XLA program, for small models. A program may
        set it before the training.
      is_save_requested: Whether a ModelSaver has asked for a checkpoint.
      stop_reason: Why the program has ended its training before the last epoch. "" if it has not.
      has_begun: Whether a step or an evaluation has begun in this process.
    """

    is_chief = True
    train_op: Any
    sess: Session | None = None
    hooked_sess: HookedSession | None = None
    fuse_steps = 1
    is_save_requested = False
    stop_reason = ""
    has_begun = False

    def __init__(self) -> None:
        self.program = current_program_graph()
        self.loop = TrainLoop()
        self.session_init: Any = JustCurrentSession()
        self._callbacks: Any = []
        self.scalars = ReportedScalars()
        self._is_in_epoch = False
        self._step = 0
        self._fused_steps: FusedSteps | None = None
        self._epoch_start = 0.0

    # ---- What a program calls, in this order.

    def register_callback(self, cb: Callback | Sequence[Callback]) -> bool:
        """Adds a callback, or a list of them.

        Returns:
          Whether it was added.

        Raises:
          UsageError: When the training has been set up.
        """
        if isinstance(cb, (list, tuple)):
            return [self.register_callback(item) for item in cb].count(False) == 0
        if isinstance(self._callbacks, Callbacks):
            raise ProgramError(
                f"{type(cb).__name__}: callbacks are registered before the training begins; give it"
                " to TrainConfig(callbacks=...), or call register_callback before train"
            )
        if isinstance(cb, type) and issubclass(cb, Callback):
            raise ProgramError(f"{cb.__name__} is a class; give an object, {cb.__name__}(...)")
        if not isinstance(cb, Callback):
            raise ProgramError(f"{cb!r:.60} is no Callback; give a tensorpack.Callback")
        self._callbacks.append(cb)
        return True

    _register_callback = register_callback

    @explain_assertions
    def train(
        self,
        callbacks: list[Callback],
        monitors: list[MonitorBase],
        session_creator: Any,
        session_init: Any,
        steps_per_epoch: int,
        starting_epoch: int = 1,
        max_epoch: int = 9999999,
    ) -> None:
        """Trains until `max_epoch`. See Tensorpack's Trainer.train."""
        self.setup_callbacks(callbacks, monitors)
        self.initialize(session_creator, session_init)
        self.main_loop(steps_per_epoch, starting_epoch, max_epoch)

    def train_with_defaults(
        self,
        _sentinel: Any = None,
        callbacks: list[Callback] | None = None,
        monitors: list[MonitorBase] | None = None,
        session_creator: Any = None,
        session_init: Any = None,
        steps_per_epoch: int | None = None,
        starting_epoch: int = 1,
        max_epoch: int = 9999999,
        extra_callbacks: list[Callback] | None = None,
    ) -> None:
        """Trains with Tensorpack's default callbacks and monitors. See `train`.

        Raises:
          UsageError: Without steps_per_epoch, or for a positional argument.
        """
        if _sentinel or steps_per_epoch is None:
            raise ProgramError(
                "train_with_defaults needs steps_per_epoch, and takes keyword arguments only"
            )
        if extra_callbacks is None:
            extra_callbacks = DEFAULT_CALLBACKS()
        if monitors is None:
            monitors = DEFAULT_MONITORS()
        self.train(
            [*(callbacks or ()), *extra_callbacks],
            monitors,
            session_creator or NewSessionCreator(),
            session_init or JustCurrentSession(),
            steps_per_epoch,
            starting_epoch,
            max_epoch,
        )

    def setup_callbacks(self, callbacks: list[Callback], monitors: list[MonitorBase]) -> None:
        """Lets callbacks and monitors add to the graph.

        Raises:
          UsageError: When the trainer has nothing to run.
        """
        if type(self).run_step is Trainer.run_step:
            self._check_train_op()
        describe_trainable_vars()
        for callback in [MaintainStepCounter(), *callbacks, *monitors]:
            self.register_callback(callback)
        self.monitors = Monitors([*monitors, self.scalars])
        self.register_callback(self.monitors)
        self._callbacks = Callbacks(self._callbacks)
        self._callbacks.setup_graph(weakref.proxy(self))
        # Whatever triggers a runner, its statistics are those of an evaluation.
        for number, runner in enumerate(self.inference_runners()):
            runner.trigger = self.scalars.collect_runner(runner.trigger, number, lambda: self._step)

    def initialize(self, session_creator: Any, session_init: Any) -> None:
        """Creates the sessions. The variables get the values of `session_init` in a new run."""
        session_init._setup_graph()
        self.session_init = session_init
        self.sess = session_creator.create_session()
        self.initialize_hooks()

    def initialize_hooks(self) -> None:
        """Creates `hooked_sess` with the hooks of all callbacks."""
        self.hooked_sess = HookedSession(
            ReuseSessionCreator(self.sess), self._callbacks.get_hooks()
        )

    def main_loop(self, steps_per_epoch: int, starting_epoch: int, max_epoch: int) -> None:
        """Runs the training on the engine.

        Raises:
          UsageError: When there is no step to run.
        """
        self.loop.config(steps_per_epoch, starting_epoch, max_epoch)
        run_program(self)

    def run_step(self) -> None:
        """Runs one training step. Override it, or set `train_op`.

        Raises:
          UsageError: When neither was done.
        """
        self._check_train_op()
        assert self.hooked_sess is not None
        self.hooked_sess.run(self.train_op)

    def _check_train_op(self) -> None:
        if not hasattr(self, "train_op"):
            message = (
                f"{type(self).__name__} has no towers and no train_op; call setup_graph before"
                " train, set train_op in the constructor, or override run_step"
            )
            raise ProgramError(message)

    # ---- What the engine calls.

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks, with those of the monitors."""
        cbs: list[Callback] = self._callbacks.cbs
        return cbs

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """A context in which the graph and the session of the program are the default ones."""
        assert self.sess is not None
        with self.program.as_default(), self.sess.as_default():
            yield

    def run_steps(self, step: int, count: int, should_stop: Callable[[], bool]) -> int:
        """Runs steps, and the callbacks around them and between epochs. Runs on the host.

        Args:
          step: The number of steps that the run has taken.
          count: The number of steps to run.
          should_stop: Called before each step. When it returns True, the rest is left out.

        Returns:
          The number of steps that were run. `stop_reason` is set if the training ends with them.
        """
        end = step + count
        with self.enter():
            if not self.has_begun:
                self.has_begun = True
                seed = self.program.next_seed
                self._locate_step(step)
                continue_statistics(self.callbacks, step)
                self._callbacks.before_train()
                self.loop.update_global_step()
                # A run that is started again draws the same numbers as one that was not.
                self.program.next_seed = seed
            elif step != self._step:
                # The engine has gone back to an earlier checkpoint.
                self._is_in_epoch = False
                self._locate_step(step)
                continue_statistics(self.callbacks, step)
            self._step = step
            try:
                while self._step < end and not should_stop():
                    if not self._run_fused_steps(end):
                        self._run_one_step()
                    if self.is_save_requested:
                        break
            except (StopTraining, tf.errors.OutOfRangeError) as error:
                self.stop_reason = str(error) or "a callback raised StopTraining"
                logger.warn(
                    f"the training ends at step {self._step} of {self.loop.total_steps}:"
                    f" {self.stop_reason}"
                )
            except StopIteration as error:
                # The engine would take it for the end of the engine data.
                raise RuntimeError("a step or a callback has raised StopIteration") from error
        return self._step - step

    def _locate_step(self, step: int) -> None:
        self.loop.locate_step(step)
        self.loop.update_global_step()

    def _enter_step(self) -> None:
        """Moves to the next step, and begins its epoch."""
        loop = self.loop
        loop.enter_step(self._step)
        if not self._is_in_epoch:
            self._is_in_epoch = True
            logger.info(f"Start Epoch {loop.epoch_num} ...")
            self._callbacks.before_epoch()
            self._epoch_start = time.time()

    def _run_fused_steps(self, end: int) -> bool:
        """Runs a block of fused steps. Returns False if the next step has to run alone."""
        if self.fuse_steps == 1:
            return False
        if self._fused_steps is None:
            if type(self).run_step is not Trainer.run_step:
                message = f"{type(self).__name__} has its own run_step; leave fuse_steps at 1"
                raise ProgramError(f"trainer.fuse_steps={self.fuse_steps}: {message}")
            self._fused_steps = FusedSteps(self, self.fuse_steps)

        self._enter_step()
        epoch_end = self._step - self.local_step + self.steps_per_epoch
        count = self._fused_steps.run(min(end, epoch_end) - self._step - 1)
        for _ in range(count):
            self._step += 1
            self._callbacks.trigger_step()
        return count > 0

    def _run_one_step(self) -> None:
        self._enter_step()
        loop = self.loop
        self.run_step()
        self._step += 1
        self._callbacks.trigger_step()

        if loop.local_step == loop.steps_per_epoch - 1:
            self._callbacks.after_epoch()
            self._is_in_epoch = False
            seconds = humanize_time_delta(time.time() - self._epoch_start)
            logger.info(
                f"Epoch {loop.epoch_num} (global_step {loop.global_step}) finished, time:{seconds}."
            )
            self._callbacks.trigger_epoch()
        if self.hooked_sess is not None and self.hooked_sess.should_stop():
            raise StopTraining("a hook asked for a stop")

    def evaluate(self, step: int) -> dict[str, float]:
        """Returns the statistics of all InferenceRunners with the weights of a step.

        Runs on the host. If they have run at this step, nothing is run again. An evaluation that
        the program itself does not run is not in its statistics, and changes no random numbers.
        """
        runners = self.scalars.select_missing(self.inference_runners(), step)
        if not runners:
            return dict(self.scalars.evaluation)
        self._step = step
        seed = self.program.next_seed
        monitors = self.monitors
        self.monitors = Monitors([self.scalars])
        try:
            with self.enter():
                self.monitors.setup_graph(weakref.proxy(self))
                if not self.has_begun:
                    self._locate_step(step)
                for runner in runners:
                    if not self.has_begun:
                        runner.before_train()
                    runner.trigger()
        finally:
            self.monitors = monitors
            self.program.next_seed = seed
        return dict(self.scalars.evaluation)

    def inner_callbacks(self) -> list[Callback]:
        """Returns the callbacks, with those that proxies contain in place of the proxies."""
        inner = []
        for callback in self.callbacks:
            while isinstance(callback, ProxyCallback):
                callback = callback.cb
            inner.append(callback)
        return inner

    def inference_runners(self) -> list[InferenceRunnerBase]:
        """Returns the InferenceRunners among the callbacks."""
        callbacks = self.inner_callbacks()
        return [callback for callback in callbacks if isinstance(callback, InferenceRunnerBase)]

    def take_scalars(self) -> dict[str, float]:
        """Returns the statistics of the steps since the last call, by name."""
        return self.scalars.take()

    def finish(self) -> None:
        """Ends the training. Called after the last step or an error."""
        if self.has_begun:
            with self.enter():
                self._callbacks.after_train()

    # ---- The place in the epochs.

    @property
    def global_step(self) -> int:
        """The number of times that the hooked session has run."""
        return self.loop.global_step

    @property
    def local_step(self) -> int:
        """The index of the current step in its epoch."""
        return self.loop.local_step

    @property
    def epoch_num(self) -> int:
        """The number of the current epoch, or of the last one between two epochs."""
        return self.loop.epoch_num

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in an epoch."""
        return self.loop.steps_per_epoch

    @property
    def starting_epoch(self) -> int:
        """The number of the first epoch that this process runs."""
        return self.loop.starting_epoch

    @property
    def max_epoch(self) -> int:
        """The number of the last epoch."""
        return self.loop.max_epoch
