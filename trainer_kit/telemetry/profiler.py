"""Traces some steps of a run with TensorFlow's profiler, for TensorBoard."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.telemetry.profile_window import NO_WINDOW, ProfileSteps, ProfileWindow, profile_steps

_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def profiled(trainer: Any, profile: str | None, folder: str, writes: bool = True) -> Iterator[None]:
    """While entered, traces `trainer` during the steps of `profile`. Runs eagerly.

    The steps compute the same.

    The trace is written to `folder`/plugins/profile/<time>/ after the last of the steps, or at the exit if that comes
    first. An error of TensorFlow's profiler is logged as a warning, and the run continues.

    Args:
      trainer: The trainer, whose loops can be split; the run starts at its global_step.
      profile: The first and the last step to trace, as "10:20"; None traces nothing.
      folder: The folder of the training summaries.
      writes: Whether this worker writes the trace; the others split their loops in the same way.

    Raises:
      UsageError: when `profile` is not a window of steps, or the trainer cannot split its loops.
    """
    if profile is None:
        yield
        return
    steps = profile_steps(profile)
    _check(trainer, steps)
    window = ProfileWindow(steps, lambda: writes and _start(folder), lambda: _stop(steps, folder))
    step = int(trainer.global_step.numpy())
    window.after(step)
    if window.passed and writes:
        _LOG.info("profile=%s: no trace is written, since the run resumes from step %d", steps, step)
    trainer.loop_parts.window = window
    try:
        yield
    finally:
        trainer.loop_parts.window = NO_WINDOW
        window.close()
        if not window.started and not window.passed and writes:
            _LOG.info("profile=%s: no trace is written, since the run ended before step %d", steps, steps.first)


def _check(trainer: Any, steps: ProfileSteps) -> None:
    if trainer.own.steps:
        what = "a ready-made trainer that is not a trainer_kit.training.trainer.Trainer"
    elif isinstance(trainer.strategy, tf.distribute.experimental.ParameterServerStrategy):
        what = "asynchronous training"
    else:
        return
    raise UsageError(f"profile={steps}: {what} runs each loop as a whole, so single steps cannot be traced; omit it")


def _start(folder: str) -> bool:
    try:
        tf.profiler.experimental.start(folder)
    except Exception as error:  # the run is worth more than its trace
        _LOG.warning("no trace is written: %s", _reason(error))
        return False
    return True


def _stop(steps: ProfileSteps, folder: str) -> None:
    try:
        tf.profiler.experimental.stop()
    except Exception as error:
        _LOG.warning("the trace cannot be written in %s: %s", folder, _reason(error))
        return
    where = os.path.join(folder, "plugins", "profile")
    _LOG.info("the trace of steps %d to %d is in %s, for TensorBoard", steps.first, steps.last, where)


def _reason(error: Exception) -> str:
    return (str(getattr(error, "message", None) or error).splitlines() or [type(error).__name__])[0]
