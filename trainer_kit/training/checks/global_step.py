"""Whether a training loop has moved global_step, and which method has to count if it did not. Eager, on the host."""

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
    """Says how many steps each loop of a trainer has done, by global_step.

    Args:
      trainer: that runs the loops.
      step: returns the global step.
      stopping: tells whether a stop was asked for.
    """

    def __init__(self, trainer: Any, step: Callable[[], int], stopping: Callable[[], bool]) -> None:
        self._trainer, self._step, self._stopping, self._warned = trainer, step, stopping, False

    @contextlib.contextmanager
    def out_of_data(self) -> Iterator[None]:
        """Takes the end of the data, which a trainer with a train() of its own raises, for the end of the loop."""
        try:
            yield
        except (tf.errors.OutOfRangeError, StopIteration):
            self._trainer.data_ended = True

    def counted(self, before: int, end: int, logs: Any) -> tuple[Mapping[str, Any], int]:
        """Returns the logs of a loop, and the global step that it has reached.

        Warns once if that is not the step that was asked for, and neither a stop nor the end of the data is the reason.

        Args:
          before: the global step before the loop.
          end: the global step that the loop was to reach.
          logs: what the trainer's `train` has returned.

        Raises:
          TrainerKitError: when the loop was not stopped and has not moved global_step, or has moved it back.
          UsageError: when the trainer's `train` returned something else than a dict or None.
        """
        trainer, reached = self._trainer, self._step()
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
    """An action after the loops of a controller of Orbit's own, which asks neither what a loop did nor for a stop.

    Without it a run would make loops of 0 steps for ever once it was asked to stop, its data has ended, or where the
    trainer does not count.

    Args:
      trainer: that runs the loops.
      stopping: tells whether a stop was asked for.
    """

    def __init__(self, trainer: Any, stopping: Callable[[], bool]) -> None:
        self._trainer, self._stopping, self._before = trainer, stopping, -1

    def __call__(self, logs: Any) -> None:
        """Ends the run where another loop would come to nothing; the first loop has nothing to compare with.

        Raises:
          StopTraining: when a stop was asked for.
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
    """Returns the user's methods that run or count training steps, with their places; else the trainer's `train`."""
    trainer = vars(trainer).get("_inner", trainer)  # of a trainer that was adopted
    own = [_with_place(type(trainer), name) for name in _METHODS if is_users(type(trainer), name)]
    return " or ".join(own) or f"{type(trainer).__name__}.train"


def is_users(kind: type, name: str) -> bool:
    """Whether a class has a method of this name from outside the libraries whose loops count and order their steps."""
    owner = next((one for one in kind.__mro__ if name in vars(one)), None)
    return owner is not None and owner.__module__.split(".")[0] not in _LIBRARIES


def _with_place(kind: type, name: str) -> str:
    """Returns "Class.name (file:line)"."""
    owner = next(one for one in kind.__mro__ if name in vars(one))
    code = getattr(vars(owner)[name], "__code__", None)
    place = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else ""
    return f"{owner.__name__}.{name}{place}"
