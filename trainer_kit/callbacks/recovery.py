"""Recovery: restores the last finite checkpoint when a run has diverged, or ends the run with an explanation.

Everything here is a function of the run's state, so a run that is killed while it recovers, and restarted, ends like
one that was not killed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.distribution.collectives import broadcast_from_chief
from trainer_kit.errors import DivergedError, UsageError
from trainer_kit.training.checks.finite_gradients import GradientDivergence
from trainer_kit.training.losses import reported_loss
from trainer_kit.training.trainer_parts.hyper_parameters import RECOVERY_FACTOR

_LOG = logging.getLogger(__name__)


class Recovery(Callback):
    """Rewinds a run that has diverged, at most `recovery_max_trials` times; on every worker.

    Args:
      options: The section `trainer` of the config.
      trainer: The run's trainer.
      manager: The run's checkpoint manager.
      explain: A function of (this object, error, begin, end) that is called when no trial is left; it writes a report
        of the divergence and returns its path, and what to do if the batch is the cause, else "".

    Attributes:
      trials: How often the run has gone back.
    """

    chief_only = False
    name = "recovery"

    def __init__(
        self,
        options: TrainerConfig,
        trainer: Any,
        manager: CheckpointManager,
        explain: Callable[[Any, DivergedError, int, int], tuple[str, str]],
    ) -> None:
        self._options, self._trainer, self._manager, self._explain = options, trainer, manager, explain
        self._factor = 1.0
        self._change_after_rewind: Callable[[], str] = lambda: ""
        self.trials = 0
        trainer.keep_state("recovery", self._state, self._put_state)

    def train_begin(self, run: Run) -> None:
        """Asks for a checkpoint of the initial weights, so that the run can go back to them."""
        if self._options.recovery_max_trials > 0 and self._manager.saved_step < 0:
            run.save()

    def exception(self, run: Run, error: Exception) -> None:
        """After a divergence, asks to go back to the last checkpoint whose values are all finite.

        Raises:
          DivergedError: when no trial is left, or no checkpoint is finite.
        """
        if not isinstance(error, DivergedError):
            return
        options, end = self._options, error.step if isinstance(error, GradientDivergence) else run.step
        begin = run.loop.begin if run.loop is not None and run.loop.end == end else max(end - 1, 0)
        if self.trials >= options.recovery_max_trials:
            self._give_up(error, begin, end, remedy(error, run))
        self.trials += 1
        step = self._restore_last_sound()
        trials = options.recovery_max_trials
        _LOG.warning("%s: the run returns to step %d (trial %d of %d)", error, step, self.trials, trials)
        self._change_after_rewind = lambda: "nothing is changed"
        if options.recovery_policy == "skip":
            bad = self.first_bad_step(step, end)
            batch = None if bad is None else self._trainer.data.batch_of(bad)
            self._change_after_rewind = lambda: self._leave_out(bad, batch)
        elif options.recovery_policy == "lower_learning_rate":
            self._change_after_rewind = lambda: self._lower(step, options.recovery_learning_rate_factor)
        run.rewind(step, str(error))

    def rewound(self, run: Run, step: int) -> None:
        """Applies the change of recovery_policy after the run has gone back."""
        change, self._change_after_rewind = self._change_after_rewind, lambda: ""
        if description := change():
            _LOG.warning("training resumes from step %d; %s", step, description)

    def restore_checkpoint(self, path: str) -> int:
        """Restores the checkpoint at `path` and returns its step; runs eagerly, in scope."""
        self._manager.restore(path)
        return self._manager.saved_step

    def _leave_out(self, step: int | None, batch: int | None) -> str:
        if step is None or batch is None:
            return "the divergence did not happen again step by step, so no batch is left out"
        self._trainer.data.leave_out(batch)
        return f"batch {batch}, of step {step}, is left out"

    def first_bad_step(self, step: int, end: int, until: float = math.inf) -> int | None:
        """Trains step by step up to `end` and returns the first step that diverges; None if no step does.

        Args:
          step: The current global step.
          end: The last step to take, which the diverged loop had reached.
          until: The time.monotonic() at which the search ends; with several workers, the chief's clock counts.
        """
        options = self._options
        while step < end and broadcast_from_chief(self._trainer.strategy, time.monotonic() < until):
            step += 1
            try:
                logs = self._trainer.train(tf.constant(1, tf.int32))
            except GradientDivergence:
                return step
            loss = reported_loss(logs)
            above = step >= options.recovery_begin_steps and loss > options.loss_upper_bound
            if above or not math.isfinite(loss) or not self._trainer.state.is_sound():
                return step
            if self._trainer.stop_requested:
                break
        return None

    def _restore_last_sound(self) -> int:
        """Restores the newest checkpoint whose values are all finite, and returns its step."""
        path = self._manager.newest()
        while path is not None:
            step = self.restore_checkpoint(path)
            if self._trainer.state.is_sound():
                return step
            _LOG.warning("%s holds weights that are not finite; it was moved to diverged/", path)
            path = self._manager.discard(path)
        source = self._manager.source
        raise DivergedError(f"no checkpoint in {source} holds only finite values, so the run cannot go back to one")

    def _give_up(self, error: DivergedError, begun: int, end: int, advice: str) -> None:
        tried = f" after {self.trials} trial{'s' * (self.trials > 1)}" if self.trials else ""
        otherwise = "" if self.trials else ", or set trainer.recovery_max_trials to go back to a checkpoint and retry"
        try:
            path, advice_for_batch = self._explain(self, error, begun, end)
            more, advice = f" (see {path})", advice_for_batch or advice
        except Exception as second:  # the exit code has to be that of the divergence: another try would not help
            _LOG.warning("the report of the divergence could not be written: %s", str(second).partition("\n")[0])
            more = ""
        raise DivergedError(f"{error}{tried}; this loop is not saved{more}; {advice}{otherwise}") from error

    def _lower(self, step: int, factor: float) -> str:
        self._factor *= factor
        for name in self._factor_names():
            self._trainer.hyper_parameters.change(name, self._factor, step, "recovery")
        return f"the learning rate is {self._factor:g} times what the config says"

    def _factor_names(self) -> list[str]:
        """Returns the names of the factors of recovery, one for each optimizer.

        Raises:
          UsageError: when an optimizer is not a Keras 3 optimizer.
        """
        names: list[str] = self._trainer.hyper_parameters.factor_names(RECOVERY_FACTOR)
        try:
            for name in names:
                self._trainer.hyper_parameters.variable(name)
        except UsageError as error:
            raise UsageError(f"trainer.recovery_policy=lower_learning_rate: {error}, or use skip") from error
        return names

    def _state(self) -> dict[str, Any]:
        return {"trials": self.trials, "learning_rate_factor": self._factor}

    def _put_state(self, state: dict[str, Any] | None) -> None:
        # Going back does not give trials back.
        if state is not None and state["trials"] > self.trials:
            self.trials = state["trials"]
            self._factor = state["learning_rate_factor"]
        if self._factor != 1.0:
            for name in self._factor_names():
                self._trainer.hyper_parameters.set(name, self._factor)


def remedy(error: DivergedError, run: Run) -> str:
    """Returns what to do about a divergence: no learning rate is its cause if the first step had it."""
    loss = 0.0 if run.loop is None else reported_loss(run.loop.logs)
    if run.step <= 1 and (isinstance(error, GradientDivergence) or not math.isfinite(loss)):
        return "the weights were still the initial ones, so the cause is the data, the model or the loss: check them"
    return "lower the learning rate or clip gradients (global_clipnorm)"
