"""Callback: the contract for code that runs around training steps.

The engine builds its own features on it, and users write subclasses of it. At the end of each
training loop a run reaches a boundary. It does the following there, in this order:

    1. loop_end         callbacks see the logs of the loop; `run.report` adds to them;
                        the loop is reported
    2. rewind           if a callback asked for it; the rest of the boundary is skipped then
    3. boundary_begin   no callback asked for a rewind; the engine checks whether the run
                        has diverged
    4. checkpoint       if one is due or asked for: checkpoint_begin, save. It is written in
                        the background; checkpoint_saved is called once it is on the disk,
                        before an evaluation is recorded
    5. evaluation       if one is due or asked for: evaluation_begin, evaluation_end
                        (the best weights are exported first, then the ledger records it,
                        then users' callbacks run)
    6. epoch_end        if an epoch ends with this step
    7. boundary_end     this step is saved, evaluated and reported
    8. stop             if a callback asked for it; a stop asked for before 4 saves and
                        evaluates this step as the last

Requests are carried out in this order, even those made late in the boundary. An evaluation that
boundary_end asks for runs at the end of the next loop. If boundary_end asks for a stop, the
validation sets that are left are evaluated at this step, and boundary_end is called once more.

What a callback changes in loop_end is in the checkpoint of that step. What it changes in
evaluation_end and epoch_end is not: a run that resumes from that checkpoint, after a kill, an error
or a rewind, calls them again with the same logs. An error of a required callback ends the run, and
the step is saved. This module imports neither TensorFlow nor NumPy, so that commands start quickly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.training.loops.intervals import Epochs

if TYPE_CHECKING:
    import numpy as np

    from trainer_kit.training.base_trainer import BaseTrainer
    from trainer_kit.training.hyper_parameters import HyperParameters
    from trainer_kit.typing import FloatLike


@dataclass(frozen=True)
class Loop:
    """A training loop that has ended.

    Attributes:
      begin: The global step before the loop.
      end: The global step after the loop.
      seconds: The duration of the loop.
      logs: The logs that the trainer returned: NumPy scalars by name, or whatever another kind of
        trainer returns.
    """

    begin: int
    end: int
    seconds: float
    logs: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """The number of training steps in the loop."""
        return self.end - self.begin


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that has ended.

    Attributes:
      step: The global step of the evaluated weights.
      logs: The metrics of the evaluated sets, without what callbacks add to them. With several
        validation sets they are nested under the names of the sets.
      sets: The names of the validation sets. A single set has the name "".
      seconds: The duration of the evaluation.
      seconds_of_sets: The duration for each of several validation sets, by name.
      checkpoint: The path of the checkpoint of these weights. None if they were not saved.
      is_replayed: Whether the evaluation ran before a restart and its logs come from the ledger.
    """

    step: int
    logs: Mapping[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = ("",)
    seconds: float = 0.0
    seconds_of_sets: Mapping[str, float] = field(default_factory=dict)
    checkpoint: str | None = None
    is_replayed: bool = False


@dataclass
class Requests:
    """The requests of callbacks that the controller has not carried out yet."""

    stop_reason: str = ""
    save: bool = False
    overwrite_checkpoint: bool = False
    sets_to_evaluate: set[str] = field(default_factory=set)
    rewind_step: int | None = None
    rewind_reason: str = ""


class Run:
    """The run as callbacks see it: its state, and the requests that they may make.

    Args:
      trainer: The run's trainer.
      directory: The run's folder, model_dir.
      is_chief: Whether this process writes the run's files.
      epochs: The epochs of the run. None if neither the config nor a callback names epochs.
      previous_stop_step: The step at which a callback ended an earlier start of the run. None if
        none did.

    Attributes:
      trainer, directory, is_chief, epochs, previous_stop_step: The arguments.
      step: The global step. It is set after each loop, restore and error. It is also set after
        actions and users' callbacks, which may restore a checkpoint. Each read of the variable
        costs up to 3 % of a loop of 10 ms.
      total_steps: The global step at which the run ends. None if it is not known.
      loop: The last training loop. None before the first one.
      evaluation: The last evaluation. None before the first one.
      reported_metrics: The numbers that callbacks have reported since the last line of metrics.
      requests: The requests of callbacks that the controller has not carried out yet.
      is_in_epoch_begin: Whether epoch_begin is being called.
      stop_reason: Why the run ends before its last step, once that is decided. "" if it continues.
      error: In train_end and run_end, the error that ends the training or the run. None if no
        error ended it.
    """

    def __init__(
        self,
        trainer: BaseTrainer,
        directory: str = "",
        is_chief: bool = True,
        epochs: Epochs | None = None,
        previous_stop_step: int | None = None,
    ) -> None:
        self.trainer = trainer
        self.directory = directory
        self.is_chief = is_chief
        self.epochs = epochs
        self.previous_stop_step = previous_stop_step

        self.step = 0
        self.total_steps: int | None = None
        self.loop: Loop | None = None
        self.evaluation: Evaluation | None = None
        self.reported_metrics: dict[str, float] = {}
        self.requests = Requests()
        self.stop_reason = ""
        self.error: BaseException | None = None
        self.is_in_epoch_begin = False

    @property
    def task(self) -> Any:
        """The task of the run."""
        return self.trainer.task

    @property
    def model(self) -> Any:
        """The model of the run."""
        return self.trainer.model

    @property
    def tensors(self) -> Mapping[str, np.ndarray]:
        """The tensors that callbacks ask for, by name, as NumPy arrays.

        The values are those of the last step of the last training loop. Over the replicas of this
        worker tensors are concatenated along the first axis, and scalars are averaged. A step in
        micro-batches has the values of the last micro-batch. Empty for a trainer with custom steps.
        """
        if self.trainer.custom_parts.replaces_steps:
            return {}
        return self.trainer.train_tensors.values

    @property
    def evaluation_tensors(self) -> Mapping[str, Any]:
        """The same for the last batch of the last evaluation.

        With several validation sets, the tensors are grouped by set, then by name.
        """
        if self.trainer.custom_parts.replaces_steps:
            return {}
        return self.trainer.eval_tensors.values

    @property
    def epoch(self) -> int | None:
        """The epoch that the last step belongs to, counted from 1. None without epochs.

        In epoch_begin it is the new epoch.
        """
        return self._epoch_and_step[0]

    @property
    def step_in_epoch(self) -> int | None:
        """The number of the last step in its epoch, counted from 1. None without epochs.

        It is 0 before the first step of the epoch.
        """
        return self._epoch_and_step[1]

    @property
    def _epoch_and_step(self) -> tuple[int, int] | tuple[None, None]:
        if self.epochs is None:
            return None, None
        if self.is_in_epoch_begin:
            return self.epochs.count_completed(self.step) + 1, 0
        return self.epochs.locate_step(self.step)

    def read_step(self) -> int:
        """Reads the global step from its variable, sets `step` to it and returns it."""
        self.step = int(self.trainer.global_step.numpy())
        return self.step

    def stop(self, reason: str) -> None:
        """Asks to end the run at this step, which is saved and evaluated like a last step.

        Args:
          reason: Why the run ends, for the log. The reason of the first request counts.
        """
        self.requests.stop_reason = self.requests.stop_reason or reason or "a callback asked for it"

    def report(self, name: str, value: FloatLike | np.generic | np.ndarray) -> None:
        """Adds a number to the metrics of the loop or evaluation that has just ended.

        The number appears with those metrics on the console, in metrics.jsonl and in TensorBoard.

        Args:
          name: The name of the number.
          value: A number or boolean, or an array or tensor with exactly one element.

        Raises:
          UsageError: when the value is not a single number.
        """
        import numpy as np

        number = np.asarray(value)
        if number.size != 1 or number.dtype.kind not in "biuf":
            raise UsageError(
                f"run.report({name!r}): {value!r:.60} is not a single number; report one number per"
                " name"
            )
        self.reported_metrics[name] = number.reshape(()).item()

    def change(self, parameter: str, value: float, reason: str = "") -> None:
        """Sets a hyper-parameter. The steps after this one use the new value.

        The change is logged and becomes a line of kind "change" in metrics.jsonl. With several
        workers, every worker has to make it, so set chief_only to False. Where nothing but
        `run.step`, the logs of an evaluation and the state of the callback decide, a resumed run
        makes the same changes.

        Args:
          parameter: The name of the hyper-parameter, such as learning_rate.
            docs/guides/hyper_parameters.md lists all names.
          value: The new value.
          reason: What changes it, in a few words, for the log and the line.

        Raises:
          UsageError: when there is no such hyper-parameter, or the value is not a finite number.
        """
        import numpy as np

        number = np.asarray(value)
        is_number = number.size == 1 and number.dtype.kind in "iuf"
        if not is_number or not np.isfinite(number).all():
            raise UsageError(
                f"run.change({parameter!r}): {value!r:.60} is not a finite number; give a number"
            )
        self.hyper_parameters.change(
            parameter, number.reshape(()).item(), self.step, reason or "a callback"
        )

    @property
    def hyper_parameters(self) -> HyperParameters:
        """The hyper-parameters that can be changed.

        Raises:
          UsageError: when the trainer has none.
        """
        if self.trainer.custom_parts.replaces_steps:
            raise UsageError(
                f"{self.trainer.class_name} has no hyper-parameters that can be changed; use a"
                " trainer_kit.Trainer"
            )
        return self.trainer.hyper_parameters

    def save(self, overwrite: bool = False) -> None:
        """Asks for a checkpoint of this step.

        Args:
          overwrite: Whether a checkpoint of this step that exists already is written again, for
            state that has changed since. A kill during that write leaves the checkpoint before it,
            and a resume repeats the steps.
        """
        self.requests.save = True
        self.requests.overwrite_checkpoint |= overwrite

    def evaluate(self, sets: Iterable[str] = ()) -> None:
        """Asks for an evaluation of this step's weights.

        The request has no effect in modes that do not evaluate.

        Args:
          sets: The names of the validation sets to evaluate. Empty for all sets.

        Raises:
          UsageError: when no validation set has one of these names.
        """
        configured_sets = self.trainer.validation_set_names
        names = list(sets)
        if isinstance(sets, str):
            names = [sets]
        for name in names:
            if name not in configured_sets:
                raise UsageError(
                    f"run.evaluate: there is no validation set {name!r};"
                    f" {suggest_names(name, list(configured_sets))}"
                )
        self.requests.sets_to_evaluate |= set(names or configured_sets)

    def rewind(self, step: int, reason: str) -> None:
        """Asks to restore the checkpoint of an earlier step and to continue from there.

        History, ledger, best checkpoint, data and the states of callbacks go back to that step too.
        So a callback that rewinds only once has to remember that in `rewound`, which is called
        afterwards.

        Args:
          step: The step of a checkpoint of this run.
          reason: Why the run goes back, for the log.
        """
        self.requests.rewind_step = step
        self.requests.rewind_reason = reason


class Callback:
    """Code that runs around training steps, eagerly and on the host.

    Methods that are not overridden cost nothing.

    Register a subclass with `@trainer_kit.register_callback("name")` to use it from a config
    (`trainer.callbacks: [{name: ..., args: {...}}]`), or pass an object to
    `run_experiment(callbacks=[...])`. A callback may raise `trainer_kit.StopTraining`, which is the
    same as `run.stop`.

    Attributes:
      every: An interval in global steps: loop_end is called at each multiple of it, and loops are
        shortened to end there. With None, loop_end is called at the end of each loop.
      required: Whether an error in the callback ends the run. Otherwise the error is logged and
        counted.
      chief_only: Whether only the chief of several workers calls it. Such a callback must not do
        anything that needs all workers: call the trainer, save, or read variables of which each
        replica has its own value.
      needs_epochs: Whether it reads run.epoch, run.step_in_epoch or run.epochs, so that the run has
        to find out how many steps an epoch has. For a callback with epoch_begin or epoch_end the
        run does so anyway.
      tensors: The names of tensors of the training step that it reads in run.tensors. These are the
        names of trainer_kit.expose and of layers.
      evaluation_tensors: The same for the evaluation step and run.evaluation_tensors.
      saved_state: What `state` returned for the checkpoint that this start begins with, before
        `restore` gets it.
    """

    every: int | None = None
    required: bool = True
    chief_only: bool = True
    needs_epochs: bool = False
    tensors: Sequence[str] = ()
    evaluation_tensors: Sequence[str] = ()
    saved_state: Any = None

    @property
    def name(self) -> str:
        """The callback's row in the time ledger, and its key in the checkpoint."""
        return type(self).__name__

    def next_boundary(self, step: int) -> int | None:
        """Returns the next step after `step` at which a training loop has to end, or None.

        Override it for steps that are not multiples of `every`. All workers call it, and all of
        them have to return the same step.
        """
        return None

    def run_begin(self, run: Run) -> None:
        """The run is built. In modes that train, its newest checkpoint is restored."""

    def train_begin(self, run: Run) -> None:
        """Training is about to start or to resume. `restore` is called after this."""

    def epoch_begin(self, run: Run, epoch: int) -> None:
        """The first step of an epoch is about to run.

        A run that resumes inside the epoch does not call it again.

        Args:
          run: The run.
          epoch: The number of the epoch, counted from 1.
        """

    def loop_begin(self, run: Run, steps: int) -> None:
        """A training loop of at most `steps` steps is about to run."""

    def loop_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        """A training loop has ended.

        Args:
          run: The run. `run.loop` tells more about the loop.
          logs: The metrics of the loop, scalars by name.
        """

    def boundary_begin(self, run: Run, logs: Mapping[str, Any]) -> None:
        """All callbacks have seen the logs of the loop, and none has asked for a rewind."""

    def checkpoint_begin(self, run: Run) -> None:
        """The state of this step is about to be saved."""

    def checkpoint_saved(self, run: Run, path: str, step: int) -> None:
        """The checkpoint of `step` is complete on disk. `step` may be earlier than `run.step`."""

    def evaluation_begin(self, run: Run) -> None:
        """An evaluation is about to begin."""

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """An evaluation has ended.

        Args:
          run: The run. `run.evaluation` tells more about the evaluation.
          logs: All metrics of this boundary by name. With several validation sets, the metrics are
            nested under the names of the sets.
        """

    def epoch_end(self, run: Run, epoch: int, logs: Mapping[str, Any]) -> None:
        """An epoch has ended. Its last step is saved, evaluated and reported, where due.

        Loops are shortened to end with each epoch if a callback has this method or epoch_begin.

        Args:
          run: The run.
          epoch: The number of the epoch, counted from 1.
          logs: The metrics of the last training loop, as in loop_end. After an evaluation at this
            step, `logs["validation"]` contains its metrics, as in evaluation_end. Otherwise that
            key does not exist.
        """

    def boundary_end(self, run: Run) -> None:
        """Everything that was due at this step has been saved, evaluated and reported."""

    def rewound(self, run: Run, step: int) -> None:
        """The run has gone back to the checkpoint of `step`."""

    def exception(self, run: Run, error: Exception) -> None:
        """An error in training is about to end the run.

        If the callback asks for a rewind, the run rewinds instead.
        """

    def train_end(self, run: Run) -> None:
        """Training has ended. It is also called after an error."""

    def run_end(self, run: Run) -> None:
        """The run has ended. It is also called after an error."""

    def run_finished(self, run: Run, record: Mapping[str, Any]) -> None:
        """A training run has finished: everything is on the disk, and final.json is written.

        It is called after run_end on the chief, and neither after a preemption nor after an error.

        Args:
          run: The run.
          record: The content of final.json.
        """

    def state(self) -> Any:
        """Returns the state that a checkpoint stores for this callback, or None for no state.

        The state may contain numbers, texts, NumPy arrays, tf.Variables, lists of them, and dicts
        with texts as keys. Arrays and variables come back as NumPy arrays, tuples as lists.
        """
        return None

    def restore(self, state: Any) -> None:
        """Receives what `state` returned when the checkpoint was saved.

        It is not called if the checkpoint contains no state of this callback.
        """
