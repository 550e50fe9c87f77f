"""CheckProgress: announces the parts of the run of `trainer-kit check`, and ends that run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable as Function
from collections.abc import Iterable, Mapping

import tensorflow as tf

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.callbacks.recovery import describe_remedy
from trainer_kit.checkpoints.state.variable_names import optimizer_variables
from trainer_kit.errors import DivergedError
from trainer_kit.telemetry.device_usage import read_peak_memory
from trainer_kit.telemetry.flops import describe_model_cost
from trainer_kit.telemetry.scalars import get_training_loss


class CheckProgress(Callback):
    """Announces training, checkpoint, evaluation and end of a run, and ends it after some steps.

    Runs eagerly, on the host, on the chief.

    Args:
      steps: The number of training steps.
      isolate_first_step: Whether the first step is a separate loop, so that a loss that is not
        finite there is recognised as such.
      announce: A function that is called with a description when the next part begins. The part
        before it has succeeded.
    """

    name = "check"

    def __init__(
        self, steps: int, isolate_first_step: bool, announce: Function[[str], None]
    ) -> None:
        self.every = steps
        self._steps = steps
        self._isolate_first_step = isolate_first_step
        self._announce = announce

    def next_boundary(self, step: int) -> int | None:
        """Returns step 1 if the first step is a separate loop."""
        return 1 if self._isolate_first_step and step < 1 else None

    def loop_begin(self, run: Run, steps: int) -> None:
        """Announces the training."""
        if run.step == 0:
            self._announce(f"train: {self._steps} steps")

    def loop_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Shows the loss and the size of model and optimizer, and ends the run."""
        if run.step < self._steps:
            return

        loss = get_training_loss(logs)
        print(f"      training_loss {loss:.4g}; {describe_model_cost(run.trainer)}")
        named_variables = optimizer_variables(run.trainer.optimizer, run.trainer.model)
        slot_bytes = 0
        for variable in tf.nest.flatten(named_variables):
            if isinstance(variable, tf.Variable):
                slot_bytes += variable.dtype.size * variable.shape.num_elements()
        mebibytes = slot_bytes / 2**20
        print(f"      optimizer slots of {mebibytes:.3g} MiB")
        memory = read_peak_memory()
        if memory is not None:
            gibibytes = memory / 2**30
            print(f"      peak memory of a step: {gibibytes:.3g} GiB")
        if run.step < (run.total_steps or run.step + 1):
            run.stop("the check ends here")

    def checkpoint_begin(self, run: Run) -> None:
        """Announces the checkpoint.

        The checkpoint after which a training fails because its data has ended too early is not
        announced.
        """
        if run.total_steps is None or run.step >= self._steps:
            self._announce("save: a checkpoint")

    def evaluation_begin(self, run: Run) -> None:
        """Announces the evaluation."""
        self._announce("evaluate: the first batches of each validation set, and the best metric")

    def boundary_end(self, run: Run) -> None:
        """Announces the end of the run, once this step is saved and evaluated."""
        # A run also has a boundary at step 0, before its first loop.
        if run.loop is not None and run.step >= self._steps:
            self._announce("end: callbacks and records of the run")

    def exception(self, run: Run, error: Exception) -> None:
        """Ends the announcements, so that the part that failed stays the last.

        The run may still save.

        Raises:
          DivergedError: when the run has diverged, since the report of the divergence would be
            deleted with the temporary folder.
        """
        self._announce = lambda part: None
        if isinstance(error, DivergedError):
            raise DivergedError(f"{error}; {describe_remedy(error, run)}") from error


def limit_intervals(steps: int, callbacks: Iterable[Callback]) -> list[Callback]:
    """Returns the callbacks, with intervals of at most `steps` steps."""
    limited_callbacks = list(callbacks)
    for callback in limited_callbacks:
        if callback.every is not None and callback.every > steps:
            # The interval may be a property of the callback's class, which cannot be set.
            with contextlib.suppress(AttributeError):
                callback.every = steps
    return limited_callbacks
