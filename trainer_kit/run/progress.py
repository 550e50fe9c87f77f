"""The phase and step of a run, for its heartbeat and watchdog, and its late save.

The late save comes at the end of the grace time after a signal.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer_kit.process.run_lock import release_all_locks
from trainer_kit.process.signals import StoppableRun
from trainer_kit.telemetry.report import EVALUATING, TRAINING
from trainer_kit.telemetry.time_ledger import TimeLedger

if TYPE_CHECKING:
    from trainer_kit.run.controller import Controller
    from trainer_kit.run.orbit_adapters import OrbitController

# The phase between loops: actions, reports and decisions.
REPORT_PHASE = "report"
# The phase after the last training step or evaluation.
END_PHASE = "end"
_LOG = logging.getLogger(__name__)


class Phases:
    """The phase of a run's main thread, and the time spent in each phase.

    Args:
      times: The ledger that adds up the time of each phase.

    Attributes:
      now: The phase: start, train, evaluate, save, wait (for a checkpoint), report (between loops)
        or end.
      times: The ledger.
    """

    def __init__(self, times: TimeLedger) -> None:
        self.now = "start"
        self.times = times

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Sets the phase for a block.

        After an error the phase stays, to show where the error came from.
        """
        outer_phase = self.now
        self.now = phase
        with self.times.during(phase):
            yield
        self.now = outer_phase

    @contextlib.contextmanager
    def during_run(self) -> Iterator[None]:
        """Sets the phase between loops for a block, and the last phase after it."""
        self.times.end_start()
        self.now = REPORT_PHASE
        with self.times.during(REPORT_PHASE):
            yield
        self.now = END_PHASE


class Progress(StoppableRun):
    """Reports the phase and step of a run.

    The phase is "start" until there is a controller.

    Attributes:
      controller: The controller. None until it is made.
      trainer: The trainer. None until it is made.
      times: The time ledger of the run, which begins now.
      startup_activity: A text that says what the run does before its first loop or evaluation.
      is_exporting: Whether the run has ended, and its weights are exported.
    """

    def __init__(self) -> None:
        self.times = TimeLedger()
        self.controller: Any = None
        self.trainer: Any = None
        self.startup_activity = "building the model"
        self.is_exporting = False
        self._has_trained = False

    def attach_controller(self, controller: Controller | OrbitController) -> None:
        """Reports on this controller from now on."""
        self.controller = controller
        self.startup_activity = "preparing the data"

    def abort_startup(self) -> bool:
        """Releases the locks if the run is still being built.

        Returns:
          Whether the run is still being built, so that the process may end.
        """
        if self.controller is None:
            release_all_locks()
        return self.controller is None

    def stop(self) -> None:
        """Makes the trainer stop before its next step.

        Before there is a trainer, the builder checks the signals itself.
        """
        if self.trainer is not None:
            self.trainer.request_stop()

    @property
    def _phase(self) -> str:
        return "start" if self.controller is None else self.controller.phase

    def get_phase_and_step(self) -> tuple[str, int]:
        """Returns (phase, global step), for the heartbeat."""
        phase = self._phase
        step = 0
        if self.trainer is not None:
            step = int(self.trainer.global_step.numpy())
        return phase, step

    def get_progress_token(self) -> tuple[str, object]:
        """Returns (phase, token), for the watchdog.

        The token changes with every training and evaluation step. Waiting for a checkpoint has its
        own limit and counts as progress. So does an export, which has no steps.
        """
        phase, step = self.get_phase_and_step()
        if phase == "wait" or self.is_exporting:
            return phase, time.monotonic()
        if phase == "evaluate":
            return phase, f"{step}, batch {self._count_evaluated_batches()}"
        return phase, step

    def _count_evaluated_batches(self) -> int:
        """Returns the number of batches that the trainer has evaluated so far.

        Returns 0 where the trainer does not count them.
        """
        if self.trainer.custom_parts.replaces_steps:
            return 0
        return int(self.trainer.evaluated_batches.numpy())

    def describe_activity(self) -> tuple[str, int, int, int]:
        """Returns the activity of the run, for the console. See RunProgress."""
        phase = self._phase
        activities = {
            "start": self.startup_activity,
            "evaluate": EVALUATING,
            "train": TRAINING,
            "save": "saving",
        }
        activity = activities.get(phase, "")
        if self.trainer is None:
            return activity, 0, 0, 0

        _, step = self.get_phase_and_step()
        begin = self.controller.planned_loop.begin if phase == "train" else step
        if phase == "train" and not self._has_trained:
            # The first step of the process shows that the loop is compiled.
            self._has_trained = step > begin
            if not self._has_trained:
                activity = "compiling the training loop and running its first step"
        return activity, begin, step, self._count_evaluated_batches()

    def find_total(self, activity: str) -> int | None:
        """Returns the number of batches of an evaluation, or of steps of the run.

        Returns None when it is not known.
        """
        if self.controller is None:
            return None
        if activity == EVALUATING:
            batches: int | None = self.trainer.evaluation_batches()
            return batches
        return self.controller.run.total_steps if activity == TRAINING else None

    def save_late(self) -> bool:
        """Saves a checkpoint from another thread when the main thread does not stop in time.

        Between training loops the variables do not change, and averaged weights of an evaluation
        are swapped back first. In the middle of a training step nothing can be saved.

        Returns:
          Whether all steps are saved, so that the process may end.
        """
        controller = self.controller
        trainer = self.trainer
        if self._phase not in ("train", "evaluate", REPORT_PHASE):
            return self.is_exporting
        if trainer.is_stop_agreed is not None:
            # A save takes all workers.
            _LOG.warning(
                "the workers have not finished a step together, so no checkpoint is saved now"
            )
            return False

        step = int(trainer.global_step.numpy())
        saved_step = controller.checkpoint_manager.saved_step
        if controller.phase == "train":
            if step > max(saved_step, 0):
                _LOG.warning(
                    "a training step takes long: unless it ends in time, the steps after %d are"
                    " lost",
                    saved_step,
                )
            return False

        trainer.restore_trained_weights()
        if step > max(saved_step, 0):
            controller.save_checkpoint()
            _LOG.warning("stopped in the middle of an evaluation or a report; saved step %d", step)
        controller.sync()
        return True
