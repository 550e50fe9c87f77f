"""Profile: traces some training steps with TensorFlow's profiler, as a callback."""

from __future__ import annotations

import contextlib

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.telemetry.profiler import profiled


class Profile(Callback):
    """Traces a window of training steps for TensorBoard, on every worker.

    Args:
      steps: The first and the last step to trace, as "10:20".
      folder: The folder of the training summaries.
    """

    chief_only = False
    name = "profile"

    def __init__(self, steps: str, folder: str) -> None:
        self._steps, self._folder = steps, folder
        self._tracing = contextlib.ExitStack()

    def train_begin(self, run: Run) -> None:
        """Opens the window.

        Raises:
          UsageError: when the trainer does not run its loops in parts.
        """
        self._tracing.enter_context(profiled(run.trainer, self._steps, self._folder, writes=run.chief))

    def train_end(self, run: Run) -> None:
        """Writes the trace if the run ends inside the window."""
        del run
        self._tracing.close()
