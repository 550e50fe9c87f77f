"""Checks that training loops add to global_step, and names the method that has to. Runs eagerly, on the host."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.errors import DataError, StopTraining, TrainerKitError, UsageError

_LOG = logging.getLogger(__name__)
_METHODS = ("train_step", "create_train_loop_fn", "train")
_LIBRARIES = ("trainer_kit", "orbit", "official")


class CountedLoops:
    """Counts the steps of each loop of a trainer by global_step.

    Args:
      trainer: The trainer that runs the loops.
      stopping: A function that returns whether the run was asked to stop.
    """

    def __init__(self, trainer: Any, stopping: Callable[[], bool]) -> None:
        self._trainer, self._stopping, self._warned = trainer, stopping, False

    @contextlib.contextmanager
    def out_of_data(self) -> Iterator[None]:
        """Treats the end of the data, which a user's train() may raise, as the end of the loop."""
        try:
            yield
        except (tf.errors.OutOfRangeError, StopIteration):
            self._trainer.data_ended = True

    def counted(self, before: int, end: int, logs: Any) -> tuple[Mapping[str, Any], int]:
        """Returns the logs of a loop and the global step that it reached.

        Warns once if the loop did not reach `end`, unless a stop or the end of the data is the reason.

        Args:
          before: The global step before the loop.
          end: The global step that the loop was asked to reach.
          logs: The value that the trainer's `train` returned.

        Raises:
          TrainerKitError: when the loop was not stopped and did not move global_step, or moved it back.
          UsageError: when the trainer's `train` returned neither a dict nor None.
        """
        trainer = self._trainer
        reached = int(trainer.global_step.numpy()) if trainer.reached is None else trainer.reached
        if logs is not None and not isinstance(logs, Mapping):
            raise UsageError(f"{_described(trainer)} returned {logs!r:.60}; return a dict of metrics, or None")
        if reached == end:
            return logs or {}, reached
        stopped = self._stopping() or trainer.data_ended
        if reached < before or (reached == before and not stopped and not trainer.is_out_of_data()):
            raise _not_counted(trainer, before, reached)
        if not self._warned and not (reached < end and stopped) and reached > before:
            self._warned = True
            _LOG.warning(
                "a loop was asked for %d steps, but %s moved global_step by %d; the run counts train_steps, the "
                "intervals and the position of the data by global_step",
                *(end - before, _described(trainer), reached - before),
            )
        return logs or {}, reached


class StockLoops:
    """An action that ends runs under Orbit's own controller, which checks neither the steps of a loop nor a stop.

    Without it a run would make loops of 0 steps for ever after a stop request, after the end of the data, or when the
    trainer does not count steps.

    Args:
      trainer: The trainer that runs the loops.
      stopping: A function that returns whether the run was asked to stop.
    """

    def __init__(self, trainer: Any, stopping: Callable[[], bool]) -> None:
        self._trainer, self._stopping, self._before = trainer, stopping, -1

    def __call__(self, logs: Any) -> None:
        """Ends the run when another loop would run no steps; the first loop has no earlier step to compare with.

        Raises:
          StopTraining: when the run was asked to stop.
          DataError: when the data has ended.
          TrainerKitError: when the loop has not moved global_step.
        """
        del logs
        before, self._before = self._before, int(self._trainer.global_step.numpy())
        if self._stopping():
            raise StopTraining("a stop was asked for")
        if before != self._before:
            return
        if self._trainer.data_ended:
            raise DataError(f"task.train_data ended at step {before}; repeat the data, or lower trainer.train_steps")
        raise _not_counted(self._trainer, before, before)


def _not_counted(trainer: Any, before: int, after: int) -> TrainerKitError:
    return TrainerKitError(
        f"{_described(trainer)} did not add to global_step: it is {before} before and {after} after a training loop, "
        "so the run would never end; call self.global_step.assign_add(1) in each training step"
    )


def _described(trainer: Any) -> str:
    """Returns the user's methods that run or count training steps, with file and line; else the trainer's `train`."""
    trainer = vars(trainer).get("_inner", trainer)  # the wrapped trainer of an adopted one
    own = [_with_place(type(trainer), name) for name in _METHODS if is_users(type(trainer), name)]
    return " or ".join(own) or f"{type(trainer).__name__}.train"


def is_users(kind: type, name: str) -> bool:
    """Whether a class has a method of this name from user code, not from trainer_kit, Orbit or Model Garden."""
    owner = next((one for one in kind.__mro__ if name in vars(one)), None)
    return owner is not None and owner.__module__.split(".")[0] not in _LIBRARIES


def _with_place(kind: type, name: str) -> str:
    """Returns "Class.name (file:line)"."""
    owner = next(one for one in kind.__mro__ if name in vars(one))
    code = getattr(vars(owner)[name], "__code__", None)
    place = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else ""
    return f"{owner.__name__}.{name}{place}"
