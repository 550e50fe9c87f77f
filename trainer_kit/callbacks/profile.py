"""Profile: traces some training steps with TensorFlow's profiler, as a callback."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import tensorflow as tf

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.process.error_report import format_reason
from trainer_kit.runtime.executor import SINGLE_THREADED
from trainer_kit.telemetry.profile_window import parse_profile_steps
from trainer_kit.training.loops.intervals import next_multiple

_LOG = logging.getLogger(__name__)


class Profile(Callback):
    """Traces a window of training steps for TensorBoard.

    Training loops end before the first step of the window and after its last step.

    The chief writes the trace to `folder`/plugins/profile/<time>/ after the last of the steps, or
    at the end of the training if that comes first. An error of TensorFlow's profiler is logged as a
    warning, and the run continues.

    Args:
      steps: The first and the last step to trace, as "10:20".
      folder: The folder of the training summaries.
      steps_per_loop: The number of steps in a training loop. The loops around the window end where
        they would end without it, too.

    Raises:
      UsageError: when `steps` is not a window of steps.
    """

    # All workers have to end their loops at the same steps.
    chief_only = False
    # The row of the time ledger.
    name = "trace"

    def __init__(self, steps: str, folder: str, steps_per_loop: int) -> None:
        self._steps = parse_profile_steps(steps)
        self._folder = folder
        self._steps_per_loop = steps_per_loop
        self._has_begun = False
        self._is_tracing = False

    def next_boundary(self, step: int) -> int | None:
        """Returns the next step at which a loop has to end for the window, or None.

        It is the step before the window, its last step, or a multiple of steps_per_loop that comes
        before these.
        """
        begin = self._steps.first - 1
        ends = [end for end in (begin, self._steps.last) if end > step]
        if begin <= step <= self._steps.last:
            ends.append(next_multiple(step, self._steps_per_loop))
        return min(ends, default=None)

    def train_begin(self, run: Run) -> None:
        """Logs if no trace will be written, or one without TensorFlow's operations."""
        if not run.is_chief or self._has_begun:
            return
        if run.step >= self._steps.last:
            _LOG.info(
                "profile=%s: no trace is written, since the run resumes from step %d",
                self._steps,
                run.step,
            )
            return
        if run.trainer.custom_parts.replaces_steps:
            return
        executor = getattr(run.trainer.config.runtime, "executor", "default")
        if executor == SINGLE_THREADED:
            _LOG.warning(
                "runtime.executor is single_threaded: the profile will show no TensorFlow"
                " operations"
            )

    def loop_begin(self, run: Run, steps: int) -> None:
        """Starts the trace before the first step of the window, once."""
        del steps
        is_inside = self._steps.first - 1 <= run.step < self._steps.last
        if not run.is_chief or self._has_begun or not is_inside:
            return

        self._has_begun = True
        try:
            tf.profiler.experimental.start(self._folder)
        except Exception as error:
            # The run is worth more than its trace.
            reason, *_ = format_reason(error)
            _LOG.warning("no trace is written: %s", reason)
        else:
            self._is_tracing = True

    def loop_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Writes the trace after the last step of the window."""
        del logs
        if run.step >= self._steps.last:
            self._write()

    def train_end(self, run: Run) -> None:
        """Writes the trace if the training ends inside the window."""
        self._write()
        if run.is_chief and not self._has_begun and run.step < self._steps.first:
            _LOG.info(
                "profile=%s: no trace is written, since the run ended before step %d",
                self._steps,
                self._steps.first,
            )

    def _write(self) -> None:
        if not self._is_tracing:
            return

        self._is_tracing = False
        try:
            tf.profiler.experimental.stop()
        except Exception as error:
            reason, *_ = format_reason(error)
            _LOG.warning("the trace cannot be written in %s: %s", self._folder, reason)
            return

        folder = os.path.join(self._folder, "plugins", "profile")
        _LOG.info(
            "the trace of steps %d to %d is in %s, for TensorBoard",
            self._steps.first,
            self._steps.last,
            folder,
        )
