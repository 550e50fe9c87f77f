"""Checks what training loops have done: counted steps, refused gradients, and failed steps.

Runs eagerly, on the host.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from trainer_kit.errors import DataError, DivergedError, StopTraining, TrainerKitError, UsageError
from trainer_kit.inputs.sources.tfrecords import is_read_error
from trainer_kit.optimizers.gradient_processing import parse_non_finite_gradient
from trainer_kit.training.loops.loop_function import reads_before_writes

if TYPE_CHECKING:
    from trainer_kit.training.base_trainer import BaseTrainer

_LOG = logging.getLogger(__name__)
_METHODS = ("train_step", "create_train_loop_fn", "train")
_LIBRARIES = ("trainer_kit", "orbit", "official")


class GradientDivergence(DivergedError):
    """Raised when a gradient is not finite. The step has not updated the weights.

    Args:
      variable: The path of the variable whose gradient it is.
      step: The global step that failed.

    Attributes:
      step: The argument of this name.
    """

    def __init__(self, variable: str, step: int) -> None:
        super().__init__(
            f"the gradient of {variable} is not finite at step {step} "
            "(the gradient processor check)"
        )
        self.step = step


@contextlib.contextmanager
def explain_gradient_errors() -> Iterator[None]:
    """Raises GradientDivergence in place of the error of a step whose gradients were refused.

    Runs eagerly, on the host.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        refusal = parse_non_finite_gradient(error)
        if refusal:
            raise GradientDivergence(*refusal) from error
        raise


class LoopChecker:
    """Counts the steps of each loop of a trainer by global_step.

    Args:
      trainer: The trainer that runs the loops. None in a run that only evaluates.
      should_stop: A function that returns whether the run was asked to stop.
    """

    def __init__(self, trainer: BaseTrainer | None, should_stop: Callable[[], bool]) -> None:
        # The methods are called only in runs that train.
        self._trainer: Any = trainer
        self._should_stop = should_stop
        self._has_warned = False

    @contextlib.contextmanager
    def catch_end_of_data(self) -> Iterator[None]:
        """Treats the end of the data, which a user's train() may raise, as the end of the loop."""
        try:
            yield
        except (tf.errors.OutOfRangeError, StopIteration):
            self._trainer.has_data_ended = True

    def check_loop(self, before: int, end: int, logs: object) -> tuple[Mapping[str, Any], int]:
        """Returns the logs of a loop and the global step that it reached.

        Warns once if the loop did not reach `end`, unless a stop or the end of the data is the
        reason.

        Args:
          before: The global step before the loop.
          end: The global step that the loop was asked to reach.
          logs: The value that the trainer's `train` returned.

        Raises:
          TrainerKitError: when the loop was not stopped and did not move global_step, or moved it
            back.
          UsageError: when the trainer's `train` returned neither a dict nor None.
        """
        trainer = self._trainer
        reached = trainer.reached_step
        if reached is None:
            reached = int(trainer.global_step.numpy())

        if logs is not None and not isinstance(logs, Mapping):
            raise UsageError(
                f"{_describe_loop_methods(trainer)} returned {logs!r:.60}; "
                "return a dict of metrics, or None"
            )
        if reached == end:
            return logs or {}, reached

        # The run would never end if the loops did not move global_step.
        has_ended = self._should_stop() or trainer.has_data_ended
        is_stuck = reached == before and not has_ended and not trainer.probe_end_of_data()
        if reached < before or is_stuck:
            raise _create_uncounted_steps_error(trainer, before, reached)

        is_expected = reached < end and (has_ended or trainer.ends_loops_early)
        if not self._has_warned and not is_expected and reached > before:
            self._has_warned = True
            _LOG.warning(
                "a loop was asked for %d steps, but %s moved global_step by %d; "
                "the run counts train_steps, the intervals and the position of the data "
                "by global_step",
                end - before,
                _describe_loop_methods(trainer),
                reached - before,
            )
        return logs or {}, reached


class OrbitLoopCheck:
    """An action that ends runs under Orbit's own controller.

    That controller checks neither the steps of a loop nor a stop. Without the action a run would
    make loops of 0 steps permanently after a stop request, after the end of the data, or when the
    trainer does not count steps.

    Args:
      trainer: The trainer that runs the loops.
      should_stop: A function that returns whether the run was asked to stop.
    """

    def __init__(self, trainer: BaseTrainer, should_stop: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._should_stop = should_stop
        self._last_step = -1

    def __call__(self, logs: object) -> None:
        """Ends the run when another loop would run no steps. Runs eagerly, on the host.

        The first loop has no earlier step to compare with.

        Args:
          logs: The logs of the loop, which are not used.

        Raises:
          StopTraining: when the run was asked to stop.
          DataError: when the data has ended.
          TrainerKitError: when the loop has not moved global_step.
        """
        del logs
        before = self._last_step
        self._last_step = int(self._trainer.global_step.numpy())
        if self._should_stop():
            raise StopTraining("a stop was asked for")
        if before != self._last_step:
            return
        if self._trainer.has_data_ended:
            raise DataError(
                f"task.train_data ended at step {before}; "
                "repeat the data, or lower trainer.train_steps"
            )
        raise _create_uncounted_steps_error(self._trainer, before, before)


def _create_uncounted_steps_error(trainer: BaseTrainer, before: int, after: int) -> TrainerKitError:
    return TrainerKitError(
        f"{_describe_loop_methods(trainer)} did not add to global_step: "
        f"it is {before} before and {after} after a training loop, so the run would never end; "
        "call self.global_step.assign_add(1) in each training step"
    )


def _describe_loop_methods(trainer: BaseTrainer) -> str:
    """Returns the user's methods that run or count training steps, with file and line.

    Without any, this is the trainer's `train`.
    """
    # An adopted trainer has its methods in the trainer that it wraps.
    trainer = vars(trainer).get("_inner", trainer)

    kind = type(trainer)
    locations = []
    for name in _METHODS:
        if not is_user_defined(kind, name):
            continue
        owner = next(base for base in kind.__mro__ if name in vars(base))

        # A decorator may return an object without code.
        code = getattr(vars(owner)[name], "__code__", None)
        place = ""
        if code:
            file = os.path.basename(code.co_filename)
            place = f" ({file}:{code.co_firstlineno})"
        locations.append(f"{owner.__name__}.{name}{place}")
    return " or ".join(locations) or f"{type(trainer).__name__}.train"


def is_user_defined(kind: type, name: str) -> bool:
    """Whether a class has a method of this name from user code.

    Methods of trainer_kit, Orbit and Model Garden do not count.
    """
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    return owner is not None and owner.__module__.split(".")[0] not in _LIBRARIES


def is_state_complete(trainer: BaseTrainer, error: BaseException) -> bool:
    """Whether the state after an error in a training loop is that of the last complete step.

    That is so in three cases: when the loop was done, when a batch could not be read and the step
    reads it before it writes, and when Python failed while a graph was traced. False if not known.
    Runs eagerly, on the host.

    Args:
      trainer: The trainer that ran the loop. For a user's own loop the answer is False.
      error: The error that the loop raised.
    """
    if trainer.is_at_step_boundary:
        return True
    if trainer.custom_parts.replaces_steps:
        return False

    loop = trainer.current_loop
    kind = type(trainer)
    if (
        loop is None
        or is_user_defined(kind, "train")
        or is_user_defined(kind, "create_train_loop_fn")
    ):
        return False

    cause = error if error.__cause__ is None else error.__cause__
    if (
        isinstance(error, TrainerKitError)
        and not isinstance(error, DataError)
        and not isinstance(cause, SystemExit)
    ):
        return False

    # Without an error of an operation, Python has failed, which runs while a graph is traced.
    if not isinstance(cause, tf.errors.OpError):
        return loop.newest_graph is not None
    if not is_read_error(cause):
        return False
    if loop.newest_graph is not None:
        return reads_before_writes(loop.newest_graph)

    # Without a graph, only trainer_kit's own step is known to read its batch first.
    reads_first = not is_user_defined(kind, "train_step")
    return reads_first and not is_user_defined(kind, "next_train_inputs")


def describe_lost_steps(
    step: int, saved_step: int, checkpoint: str | None, is_single_worker: bool
) -> str:
    """Returns the message for a run that failed and could not be saved.

    Args:
      step: The global step.
      saved_step: The step of the newest checkpoint. Negative if there is none.
      checkpoint: The path of the newest checkpoint. None if there is none.
      is_single_worker: Whether the run has one worker.
    """
    if is_single_worker:
        reason = "the training step that failed may have written some of its variables"
    else:
        reason = "a save needs all workers"

    if saved_step >= 0:
        restart = f"the same command resumes from step {saved_step} ({checkpoint})"
    else:
        restart = "there is no checkpoint, so the same command starts again from step 0"

    lost = step - max(saved_step, 0)
    verb = " is" if lost == 1 else "s are"
    return f"nothing was saved after the error: {reason}; {restart}, and {lost} step{verb} lost"
