"""EpochEvents: decides when epoch_begin and epoch_end of callbacks are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trainer_kit.callbacks.base import Run
from trainer_kit.training.loops.intervals import next_multiple
from trainer_kit.training.metrics import to_numpy

NAMES = ("epoch_begin", "epoch_end")


class EpochEvents:
    """Gives callbacks two more events: epoch_begin before the first loop of an epoch, epoch_end after its last loop.

    What happens between two loops, such as evaluations and checkpoints, is done by the time of epoch_end.

    Args:
      run: The run; its `epochs` are set before training begins.
      wanted: Whether a callback has one of these events.

    Attributes:
      wanted: The argument of this name.
      training: Whether the run trains at present; an evaluation without training has no epochs.
    """

    def __init__(self, run: Run, wanted: bool) -> None:
        self._run, self.wanted, self.training = run, wanted, False
        self._logs: dict[str, Any] = {}  # of the last loop, and of the evaluations after it as "validation"
        self._ended_at = -1  # the step of the last epoch_end, while no loop has followed

    def next_cut(self, step: int) -> int | None:
        """Returns the step after `step` that ends an epoch; None if no callback has an event of epochs."""
        epochs = self._run.epochs
        return next_multiple(step, epochs.steps) if self.wanted and epochs else None

    def before(self, event: str, arguments: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Yields the name and the arguments of each epoch event to call before `event`."""
        epochs, step = self._run.epochs, self._run.step
        if not self.wanted or epochs is None or not self.training:
            return
        if event == "loop_end" and isinstance(arguments[0], Mapping):
            self._logs |= arguments[0]
        elif event == "evaluation_end" and isinstance(arguments[0], Mapping):
            self._logs["validation"] = {**self._logs.get("validation", {}), **arguments[0]}
        elif event == "rewound":
            self._ended_at = -1
        elif event == "loop_begin":
            self._logs, self._ended_at = {}, -1
            if step == 0 or epochs.is_end(step):
                self._run.in_epoch_begin = True
                yield "epoch_begin", epochs.ended(step) + 1
                self._run.in_epoch_begin = False
        elif event == "boundary_end" and epochs.is_end(step) and self._ended_at != step:
            self._ended_at = step
            yield "epoch_end", epochs.ended(step), self._logs

    def state(self) -> dict[str, float] | None:
        """Returns the numbers of the last loop at the end of an epoch, for the checkpoint: epoch_end comes after it.

        After a resume, evaluations of this step follow again.
        """
        epochs = self._run.epochs
        if epochs is None or not epochs.is_end(self._run.step):
            return None
        values = {name: np.asarray(to_numpy(value)) for name, value in self._logs.items()}
        return {name: float(value) for name, value in values.items() if value.ndim == 0 and value.dtype.kind in "biuf"}

    def restore(self, state: dict[str, float] | None) -> None:
        """Takes the numbers of a checkpoint."""
        self._logs, self._ended_at = dict(state or {}), -1
