"""Callback: the one contract for what happens around training steps, for the engine's own features and for users'.

At the end of each training loop a run comes to a boundary. There, in this order:

    1. loop_end         callbacks see the logs of the loop; `run.report` adds to them; the loop is reported
    2. rewind           if a callback asked for it; nothing else of this boundary is done then
    3. boundary_begin   the loop stays; the engine looks whether the run has diverged
    4. checkpoint       if one is due, or asked for: checkpoint_begin, save, checkpoint_saved
    5. evaluation       if one is due, or asked for: evaluation_begin, evaluation_end
                        (the ledger records it first, then the best weights are exported, then come users' callbacks)
    6. boundary_end     all of this step is saved, evaluated and reported
    7. stop             if a callback asked for it

A request is carried out in this order, also one that is made later in the boundary. An evaluation that boundary_end
asks for is made at the end of the next loop.

What a callback changes in loop_end is in the checkpoint of that step. What it changes in evaluation_end comes after it:
a run that resumes there, after a kill, an error or a rewind, calls evaluation_end again with the logs on record. An
error of a required callback ends the run; the step is saved. No TensorFlow here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer_kit.errors import UsageError, suggestion


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
      begin: the global step before it.
      end: the global step that it has reached.
      seconds: that it took.
      logs: what the trainer has returned of it: NumPy scalars by name, or what a trainer of another kind returns.
    """

    begin: int
    end: int
    seconds: float
    logs: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """How many steps it has done."""
        return self.end - self.begin


@dataclass(frozen=True)
class Evaluation:
    """An evaluation.

    Attributes:
      step: the global step of the weights.
      sets: the names of the validation sets; a single one is called "".
      seconds: that it took.
      seconds_of_sets: that each of several validation sets took, by name.
      checkpoint: the path of the checkpoint of these weights; None if they were not saved.
      replayed: whether it was made before a restart, and its logs are those on record.
    """

    step: int
    sets: tuple[str, ...] = ("",)
    seconds: float = 0.0
    seconds_of_sets: Mapping[str, float] = field(default_factory=dict)
    checkpoint: str | None = None
    replayed: bool = False


@dataclass
class Requests:
    """What callbacks have asked for, until the controller carries it out."""

    stop: str = ""
    save: bool = False
    evaluate: set[str] = field(default_factory=set)
    rewind: int | None = None
    rewind_reason: str = ""


class Run:
    """What every callback is handed: where the run is, and what may be asked of it.

    Args:
      trainer: of the run.
      directory: model_dir.
      chief: whether this process writes the run's files.

    Attributes:
      trainer, directory, chief: as given.
      total: the global step at which the run ends; None where that is not known.
      loop: the last training loop; None before the first.
      evaluation: the last evaluation; None before the first.
      reported: what callbacks have reported since the last line of metrics.
      requests: what callbacks have asked for and the controller has not carried out yet.
      was_stopped: whether a callback had ended the run at the step that it goes on from.
      stop_reason: why the run ends before its last step, once that is decided; "" if it goes on.
    """

    def __init__(self, trainer: Any, directory: str = "", chief: bool = True) -> None:
        self.trainer, self.directory, self.chief = trainer, directory, chief
        self.total: int | None = None
        self.loop: Loop | None = None
        self.evaluation: Evaluation | None = None
        self.reported: dict[str, Any] = {}
        self.requests = Requests()
        self.stop_reason = ""
        self.was_stopped = False

    @property
    def step(self) -> int:
        """The global step."""
        return int(self.trainer.global_step.numpy())

    @property
    def task(self) -> Any:
        """The task that is trained."""
        return self.trainer.task

    @property
    def model(self) -> Any:
        """The model."""
        return self.trainer.model

    def stop(self, reason: str) -> None:
        """Asks to end the run at this step, saved and evaluated like its last one; the first reason counts."""
        self.requests.stop = self.requests.stop or reason or "a callback asked for it"

    def report(self, name: str, value: Any) -> None:
        """Adds a number to the metrics of the loop or of the evaluation that has just ended.

        It goes where they go: the console, metrics.jsonl, TensorBoard.

        Raises:
          UsageError: when the value is no single number.
        """
        number = np.asarray(value)
        if number.size != 1 or number.dtype.kind not in "biuf":
            raise UsageError(f"run.report({name!r}): {value!r:.60} is not a single number; report one number per name")
        self.reported[name] = number.reshape(()).item()

    def save(self) -> None:
        """Asks for a checkpoint of this step."""
        self.requests.save = True

    def evaluate(self, sets: Iterable[str] = ()) -> None:
        """Asks for an evaluation of this step's weights; in modes that evaluate, else it does nothing.

        Args:
          sets: names of validation sets, if there are several; none: all.

        Raises:
          UsageError: when there is no validation set of such a name.
        """
        known, names = self.trainer.validation_sets, [sets] if isinstance(sets, str) else list(sets)
        for name in names:
            if name not in known:
                raise UsageError(f"run.evaluate: there is no validation set {name!r}; {suggestion(name, list(known))}")
        self.requests.evaluate |= set(names or known)

    def rewind(self, step: int, reason: str) -> None:
        """Asks to restore the checkpoint of an earlier step, and to go on from there.

        What was recorded for later steps counts no more: history, ledger and best go back as well. So do the data and
        the states of callbacks: one that rewinds once has to remember that in `rewound`, which is called afterwards.

        Args:
          step: of a checkpoint of this run.
          reason: for the log.
        """
        self.requests.rewind, self.requests.rewind_reason = step, reason


class Callback:
    """Something that happens around training steps. Eager, on the host; a method that is not overridden costs nothing.

    Register a subclass with `@trainer_kit.register_callback("name")` to use it from a config
    (`trainer.callbacks: [{name: ..., args: {...}}]`), or pass an object to `run_experiment(callbacks=[...])`.
    A callback may raise `trainer_kit.StopTraining`, which is the same as `run.stop`.

    Attributes:
      every: the callback's loop_end is called at each multiple of so many global steps, and loops are cut to end
        there; None: at the end of each loop.
      required: whether an error in it ends the run; else the error is logged, counted, and the run goes on.
      chief_only: whether it is called on the chief alone, of several workers. Such a callback must not do what takes
        all workers: call the trainer, save, or read variables that replicas hold each for themselves.
    """

    every: int | None = None
    required: bool = True
    chief_only: bool = True

    @property
    def name(self) -> str:
        """Its row in the time ledger, and its key in the checkpoint."""
        return type(self).__name__

    def run_begin(self, run: Run) -> None:
        """The run is built; in modes that train, its newest checkpoint is restored."""

    def train_begin(self, run: Run) -> None:
        """Training is about to begin or to go on; `restore` is called after this."""

    def loop_begin(self, run: Run, steps: int) -> None:
        """A training loop of at most `steps` steps is about to run."""

    def loop_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        """A training loop has ended; `logs` are its metrics by name, scalars; see `run.loop` for more."""

    def boundary_begin(self, run: Run, logs: Mapping[str, Any]) -> None:
        """All callbacks have seen the logs of the loop, and none takes the run back."""

    def checkpoint_begin(self, run: Run) -> None:
        """The state of this step is about to be saved."""

    def checkpoint_saved(self, run: Run, path: str, step: int) -> None:
        """The checkpoint of `step` is complete on disk; `step` may be earlier than `run.step`."""

    def evaluation_begin(self, run: Run) -> None:
        """An evaluation is about to begin."""

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """An evaluation has ended; `logs` are all metrics of this step by name; see `run.evaluation` for more.

        Of several validation sets they are nested by the set's name.
        """

    def boundary_end(self, run: Run) -> None:
        """All that was due at this step is saved, evaluated and reported."""

    def rewound(self, run: Run, step: int) -> None:
        """The run has gone back to the checkpoint of `step`."""

    def exception(self, run: Run, error: Exception) -> None:
        """An error in training is about to end the run; a rewind that is asked for now takes its place."""

    def train_end(self, run: Run) -> None:
        """Training has ended; called after errors, too."""

    def run_end(self, run: Run) -> None:
        """The run has ended; called after errors, too."""

    def state(self) -> Any:
        """Returns what a checkpoint keeps of it; None: nothing.

        Numbers, texts, NumPy arrays, tf.Variables, lists of them, and dicts with texts as keys. Arrays and variables
        come back as NumPy arrays, tuples as lists.
        """
        return None

    def restore(self, state: Any) -> None:
        """Takes what `state` returned when the checkpoint was made; not called where the checkpoint holds nothing."""
