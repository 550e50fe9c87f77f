"""Saves the state of a run after an error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from trainer_kit.errors import (
    DivergedError,
    InterruptedRunError,
    StopTraining,
    StorageError,
    TrainerKitError,
)
from trainer_kit.errors.user_exits import convert_system_exit
from trainer_kit.run.controller import Controller
from trainer_kit.run.orbit_adapters import OrbitController
from trainer_kit.runtime.collectives import worker_count
from trainer_kit.training.checks.failed_step import describe_lost_steps, is_state_complete

_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def save_after_errors(controller: Controller | OrbitController) -> Iterator[None]:
    """Saves the state after an error or the user's sys.exit, if the weights are finite.

    Then raises the error again.

    Raises:
      InterruptedRunError: instead of a KeyboardInterrupt that the user's code raised.
      TrainerKitError: when code other than a callback or an action raised StopTraining.
    """
    try:
        with convert_system_exit():
            yield
    except StopTraining as stop:
        raise TrainerKitError(
            f"StopTraining ({stop}) was raised in the middle of a loop or an evaluation; raise it"
            " in a callback, or in train_actions or eval_actions, which run after a loop or an"
            " evaluation"
        ) from stop
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, (DivergedError, StorageError)):
            try:
                is_single_worker = worker_count(controller.strategy) == 1
                _save_if_finite(controller, error, is_single_worker=is_single_worker)
            except Exception as save_error:
                _LOG.warning("nothing could be saved after the error: %s", save_error)
        if isinstance(error, Exception):
            raise
        raise InterruptedRunError(
            f"your code raised KeyboardInterrupt at step {controller.run.step}"
        ) from error


def _save_if_finite(
    controller: Controller | OrbitController, error: BaseException, is_single_worker: bool
) -> None:
    """Saves after an error if the state is that of a step's end and the weights are finite.

    After an error inside a step it saves only if that step has written no variable. Otherwise it
    logs the checkpoint that the run resumes from, and how many steps are lost.

    Args:
      controller: The controller of the run. With a caller's orbit.Controller nothing is saved.
      error: The error that ends the run.
      is_single_worker: Whether the run has a single worker. Several workers can save only together,
        and the others may be gone.
    """
    # The state of an orbit.Controller after an error is not known.
    if not isinstance(controller, Controller):
        return
    trainer = controller.trainer
    manager = controller.checkpoint_manager
    step = controller.run.step
    if trainer is None or trainer.weights_finite is False:
        return
    if step <= max(manager.saved_step, 0):
        return

    begin, end = controller.planned_loop
    if controller.phase == "train" or not is_single_worker:
        can_save = is_single_worker and begin <= step <= end and is_state_complete(trainer, error)
        if not can_save:
            if is_single_worker:
                controller.sync()
            text = describe_lost_steps(
                step, manager.saved_step, manager.saved_path, is_single_worker
            )
            _LOG.warning("%s", text)
            return

        if begin < step < end:
            controller.mark_loop_interrupted()
        # The weights have changed since the last check.
        trainer.weights_finite = None

    controller.save_checkpoint()
    controller.sync()
    _LOG.info("saved step %d after the error; the same command resumes from there", step)
