"""Compares the speed of fused and separate training steps, with a trainer and a data pipeline for each form."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.fused_batches import bytes_of, problem_of_stacking
from trainer_kit.training.loops.fused_loop import UnfusableError, refusal_of_xla

LARGEST = 100  # steps in a program: more gain nothing, and a stop waits for them
_STACK_BYTES = 128 * 2**20
_ROUNDS = 5
_SECONDS = 0.4  # of a timing; as long before it each form uses up what its pipeline has read ahead


@dataclass(frozen=True)
class FuseTiming:
    """The rates of both forms of the training loop in the round with the median gain, including the wait for data.

    Attributes:
      fuse_steps: The number of steps in one program of the fused form.
      fused_rate, separate_rate: Steps per second.
    """

    fuse_steps: int
    fused_rate: float
    separate_rate: float

    @property
    def gain(self) -> float:
        """The fused rate divided by the separate rate."""
        return self.fused_rate / self.separate_rate


class CannotFuseError(Exception):
    """The training steps of an experiment cannot be fused; the message says why."""


def largest_stack(steps_per_loop: int, batch_bytes: int) -> int:
    """Returns the largest useful number of fused steps: a divisor of steps_per_loop, so that programs are complete."""
    most = min(LARGEST, steps_per_loop, max(1, _STACK_BYTES // max(1, batch_bytes)))
    return max(size for size in range(1, most + 1) if steps_per_loop % size == 0)


class FuseTimer:
    """Times one experiment. Runs eagerly, on the host, in the scope of the strategy.

    Args:
      create: A function of trainer.fuse_steps that returns a new trainer with a new model.

    Raises:
      CannotFuseError: when the config, the trainer or the batches do not allow fused steps.
      DataError: when the training data is empty.
    """

    def __init__(self, create: Callable[[int], Any]) -> None:
        self._create, self._separate = create, create(1)
        if problem := self._separate.problem_of_fusing():
            raise CannotFuseError(problem)
        spec = self._separate.train_dataset.element_spec
        if problem := problem_of_stacking(spec):
            raise CannotFuseError(problem)
        self._steps_per_loop: int = self._separate.config.trainer.steps_per_loop
        self._batch_bytes = bytes_of(spec)
        _train(self._separate, 1)

    def candidate(self) -> int:
        """Returns the number of steps to try first.

        Raises:
          CannotFuseError: when no divisor of steps_per_loop but 1 is small enough.
        """
        size = largest_stack(self._steps_per_loop, self._batch_bytes)
        if size == 1:
            raise CannotFuseError(
                f"no number from 2 to {LARGEST} divides trainer.steps_per_loop={self._steps_per_loop}, or two batches "
                f"take more than {_STACK_BYTES // 2**20} MiB"
            )
        return size

    def time(self, fuse_steps: int) -> FuseTiming:
        """Trains alternately with separate steps and with `fuse_steps` in one program, for several rounds.

        Raises:
          CannotFuseError: when XLA does not compile the training step.
          DataError: when the training data ends.
        """
        fused = self._create(fuse_steps)
        with _raising_refusals(fuse_steps):
            _train(fused, 1)
        rounds = [
            FuseTiming(fuse_steps, self._rate(fused, fuse_steps), self._rate(self._separate, fuse_steps))
            for _ in range(_ROUNDS)
        ]
        return sorted(rounds, key=lambda timing: timing.gain)[_ROUNDS // 2]

    def _rate(self, trainer: Any, fuse_steps: int) -> float:
        """Returns steps per second, measured in loops of the run's length or of about `_SECONDS`."""
        seconds_per_step = _seconds_per_step(trainer, 1, 0.0)
        for _ in range(2):  # the first round uses up batches that were read ahead, and shows how many steps fit
            steps = max(1, min(self._steps_per_loop, int(_SECONDS / seconds_per_step)))
            if steps >= fuse_steps:
                steps -= steps % fuse_steps
                if trainer.fuse_steps > 1:  # complete the started program
                    _train(trainer, fuse_steps - int(trainer.global_step.numpy()) % fuse_steps)
            seconds_per_step = _seconds_per_step(trainer, steps, _SECONDS)
        return 1 / seconds_per_step


def _seconds_per_step(trainer: Any, steps: int, at_least: float) -> float:
    """Runs loops of `steps` steps until `at_least` seconds have passed, and returns the seconds per step."""
    begin, done, seconds = time.perf_counter(), 0, 0.0
    while not done or seconds < at_least:
        _train(trainer, steps)
        done += steps
        seconds = time.perf_counter() - begin
    return seconds / done


def _train(trainer: Any, steps: int) -> None:
    """Runs one training loop; its summaries are compiled as in a run, but not written."""
    tf.summary.experimental.set_step(trainer.global_step)
    with tf.summary.record_if(lambda: tf.less(trainer.global_step, 0)):
        trainer.train(tf.constant(steps, tf.int32))
    if trainer.data_ended:
        raise DataError(
            f"task.train_data ended after {int(trainer.global_step.numpy())} steps, before both forms of the loop were "
            "timed; repeat the data"
        )


@contextlib.contextmanager
def _raising_refusals(fuse_steps: int) -> Iterator[None]:
    """Turns refusals of XLA into CannotFuseError; other errors pass through."""
    try:
        yield
    except UnfusableError as error:
        raise CannotFuseError(error.reason) from error
    except UsageError as error:
        if error.__cause__ is None or (reason := refusal_of_xla(error.__cause__)) is None:
            raise
        raise CannotFuseError(f"XLA cannot compile the training step: {reason}") from error
    except tf.errors.ResourceExhaustedError as error:
        raise CannotFuseError(f"{fuse_steps} steps in one program need more memory than there is") from error
