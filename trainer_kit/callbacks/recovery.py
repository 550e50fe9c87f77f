"""Recovery: restores the last finite checkpoint of a diverged run, or ends the run with a report.

The report is one file that explains the divergence: the step, batches, layers, and a command that
repeats it. Everything here is a function of the run's state, so a run that is killed while it
recovers, and restarted, ends like one that was not killed.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit import files
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.checkpoints.startup_scan import DIVERGED
from trainer_kit.checkpoints.state.variable_names import model_variables
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.errors import DivergedError, UsageError
from trainer_kit.optimizers import gradients
from trainer_kit.runtime.collectives import broadcast_int
from trainer_kit.runtime.replica_values import native_variable
from trainer_kit.telemetry.scalars import get_training_loss, to_json_number
from trainer_kit.training.checks.failed_step import GradientDivergence
from trainer_kit.training.hyper_parameters import RECOVERY_FACTOR
from trainer_kit.training.loops.iterators import SingleElementIterator
from trainer_kit.training.trainer import Trainer
from trainer_kit.typing import Model, Variable

_LOG = logging.getLogger(__name__)
# How long the steps since the last checkpoint are repeated one by one to find a diverging one.
SEARCH_SECONDS = 60.0


class Recovery(Callback):
    """Rewinds a run that has diverged, at most `recovery_max_trials` times. Runs on every worker.

    Args:
      options: The section `trainer` of the config.
      trainer: The run's trainer.
      manager: The run's checkpoint manager.

    Attributes:
      trials: How many times the run has gone back.
    """

    chief_only = False
    name = "recovery"

    def __init__(
        self, options: TrainerConfig, trainer: Trainer, manager: CheckpointManager
    ) -> None:
        self._options = options
        self._trainer = trainer
        self._manager = manager
        self._factor = 1.0
        self._is_rewinding = False
        self._diverging_step: int | None = None
        self._bad_batch: int | None = None
        self.trials = 0
        trainer.register_state(
            "recovery",
            lambda: {"trials": self.trials, "learning_rate_factor": self._factor},
            self._restore_state,
        )

    def train_begin(self, run: Run) -> None:
        """Asks for a checkpoint of the initial weights, so that the run can go back to them."""
        if self._options.recovery_max_trials > 0 and self._manager.saved_step < 0:
            run.save()

    def exception(self, run: Run, error: Exception) -> None:
        """After a divergence, asks to go back to the last checkpoint whose values are all finite.

        Raises:
          DivergedError: when no trial is left, or no checkpoint is finite.
        """
        if not isinstance(error, DivergedError):
            return

        # A gradient that is not finite ends its loop in the middle, before run.loop is set.
        options = self._options
        end = error.step if isinstance(error, GradientDivergence) else run.step
        begin = max(end - 1, 0)
        if run.loop is not None and run.loop.end == end:
            begin = run.loop.begin
        if self.trials >= options.recovery_max_trials:
            remedy = describe_remedy(error, run)
            self._give_up(error, begin, end, remedy)

        self.trials += 1
        newest = self._manager.find_newest()
        if self._manager.restore_finite(newest) is None:
            source = self._manager.restore_folder
            raise DivergedError(
                f"no checkpoint in {source} holds only finite values, so the run cannot go back"
                " to one"
            )
        step = self._manager.saved_step
        trials = options.recovery_max_trials
        _LOG.warning(
            "%s: the run returns to step %d (trial %d of %d)", error, step, self.trials, trials
        )

        self._is_rewinding = True
        if options.recovery_policy == "skip":
            self._diverging_step = self.find_diverging_step(step, end)
            if self._diverging_step is not None:
                data = self._trainer.data
                self._bad_batch = data.get_batch_index(self._diverging_step)
        run.rewind(step, str(error))

    def rewound(self, run: Run, step: int) -> None:
        """Applies the change of recovery_policy after the run has gone back."""
        if not self._is_rewinding:
            return

        self._is_rewinding = False
        change = "nothing is changed"
        if self._options.recovery_policy == "skip":
            change = "the divergence did not happen again step by step, so no batch is left out"
            if self._diverging_step is not None and self._bad_batch is not None:
                self._trainer.data.skip_batch(self._bad_batch)
                change = f"batch {self._bad_batch}, of step {self._diverging_step}, is left out"
            self._diverging_step = None
            self._bad_batch = None
        elif self._options.recovery_policy == "lower_learning_rate":
            self._factor *= self._options.recovery_learning_rate_factor
            hyper_parameters = self._trainer.hyper_parameters
            for name in self._factor_names():
                hyper_parameters.change(name, self._factor, step, "recovery")
            change = f"the learning rate is {self._factor:g} times what the config says"
        _LOG.warning("training resumes from step %d; %s", step, change)

    def restore_checkpoint(self, path: str) -> int:
        """Restores the checkpoint at `path` and returns its step. Runs eagerly, in scope."""
        self._manager.restore(path)
        return self._manager.saved_step

    def find_diverging_step(self, step: int, end: int, deadline: float = math.inf) -> int | None:
        """Trains step by step up to `end` and returns the first step that diverges.

        Returns None if no step diverges before `end`, the deadline or a requested stop. Runs
        eagerly.

        Args:
          step: The current global step.
          end: The last step to take, which the diverged loop had reached.
          deadline: The time.monotonic() at which the search ends. With several workers, the chief's
            clock counts.
        """
        options = self._options
        while step < end:
            # The clock of the chief decides, so that all workers take the same steps.
            has_time = time.monotonic() < deadline
            if not broadcast_int(self._trainer.strategy, has_time):
                break
            step += 1
            try:
                logs = self._trainer.train(tf.constant(1, tf.int32))
            except GradientDivergence:
                return step

            loss = get_training_loss(logs)
            if not math.isfinite(loss):
                return step
            is_bounded = step >= options.recovery_begin_steps
            if is_bounded and loss > options.loss_upper_bound:
                return step
            if not self._trainer.state.all_finite():
                return step
            if self._trainer.is_stop_requested:
                break
        return None

    def _give_up(self, error: DivergedError, begin: int, end: int, advice: str) -> None:
        attempts = ""
        alternative = ", or set trainer.recovery_max_trials to go back to a checkpoint and retry"
        if self.trials:
            plural = "s" if self.trials > 1 else ""
            attempts = f" after {self.trials} trial{plural}"
            alternative = ""
        try:
            path, advice_for_batch = write_divergence_report(
                self._trainer, self._manager, self, error, begin, end
            )
            reference = f" (see {path})"
            advice = advice_for_batch or advice
        # The exit code has to be that of the divergence, because another attempt would not help.
        except Exception as report_error:
            _LOG.warning(
                "the report of the divergence could not be written: %s",
                str(report_error).partition("\n")[0],
            )
            reference = ""
        raise DivergedError(
            f"{error}{attempts}; this loop is not saved{reference}; {advice}{alternative}"
        ) from error

    def _factor_names(self) -> list[str]:
        """Returns the names of recovery's learning rate factors, one for each optimizer.

        Raises:
          UsageError: when an optimizer is not a Keras 3 optimizer.
        """
        hyper_parameters = self._trainer.hyper_parameters
        names: list[str] = hyper_parameters.factor_names(RECOVERY_FACTOR)
        try:
            for name in names:
                hyper_parameters.variable(name)
        except UsageError as error:
            raise UsageError(
                f"trainer.recovery_policy=lower_learning_rate: {error}, or use skip"
            ) from error
        return names

    def _restore_state(self, state: dict[str, Any] | None) -> None:
        # Going back does not give trials back.
        if state is not None and state["trials"] > self.trials:
            self.trials = state["trials"]
            self._factor = state["learning_rate_factor"]
        if self._factor != 1.0:
            for name in self._factor_names():
                self._trainer.hyper_parameters.set(name, self._factor)


def describe_remedy(error: DivergedError, run: Run) -> str:
    """Returns advice on what to do about a divergence.

    The learning rate is not the cause if the first step diverged.
    """
    loss = 0.0
    if run.loop is not None:
        loss = get_training_loss(run.loop.logs)
    is_finite = math.isfinite(loss) and not isinstance(error, GradientDivergence)
    if run.step <= 1 and not is_finite:
        return (
            "the weights were still the initial ones, so the cause is the data, the model or the"
            " loss: check them"
        )
    return (
        "lower the learning rate or clip gradients (global_clipnorm), and look at the data"
        " (trainer-kit doctor data)"
    )


def write_divergence_report(
    trainer: Trainer,
    manager: CheckpointManager,
    recovery: Recovery,
    error: DivergedError,
    begin: int,
    end: int,
) -> tuple[str, str]:
    """Writes `diverged/step-<n>.json`. Runs eagerly.

    Every worker calls it, and the chief writes the file.

    It restores the last checkpoint and trains step by step until a step diverges, for
    SEARCH_SECONDS at most. Then it computes the gradients of that step. The state of the run cannot
    be used afterwards, because the run is about to end.

    Args:
      trainer: The run's trainer.
      manager: The run's checkpoint manager.
      recovery: The run's Recovery, which finds the step that diverges.
      error: The error that ended the run.
      begin, end: The global steps before and after the loop that diverged.

    Returns:
      The path of the file, and advice if the batch of the step has values that are not finite. The
      advice is "" otherwise.
    """
    # What the diverged state shows, before the restore of a checkpoint replaces it.
    data = trainer.data
    nonfinite_variable = find_nonfinite_variable(trainer.model)
    first_step = begin + 1
    first_batch = data.get_batch_index(first_step)
    last_batch = data.get_batch_index(end)
    record: dict[str, Any] = {
        "error": str(error),
        "steps": [first_step, end],
        "trials": recovery.trials,
        "not_finite": nonfinite_variable,
        "batches": [first_batch, last_batch],
    }

    path = manager.find_newest()
    step: int | None = None
    advice = ""
    if path is not None:
        checkpoint_step = recovery.restore_checkpoint(path)
        record["checkpoint"] = os.path.basename(path)
        deadline = time.monotonic() + SEARCH_SECONDS
        step = recovery.find_diverging_step(checkpoint_step, end, deadline)
        if step is not None:
            record["step"] = step
            record["batch"] = data.get_batch_index(step)
            recovery.restore_checkpoint(path)
            steps_before = step - checkpoint_step - 1
            if steps_before > 0:
                trainer.train(tf.constant(steps_before, tf.int32))

        # The trainer is at another step if a stop was requested meanwhile.
        if step is not None and int(trainer.global_step.numpy()) == step - 1:
            batch = trainer.next_batch()
            if examples := find_nonfinite_examples(trainer.strategy, batch):
                record["examples_not_finite"] = examples
                advice = (
                    f"values of example {examples[0]} in batch {record['batch']} are not finite:"
                    " repair the data"
                )

            # The step changes the weights, so a variable may have become infinite by it.
            norms = compute_gradient_norms(trainer, batch)
            record["gradient_norms"] = {name: to_json_number(norm) for name, norm in norms.items()}
            new_variable = find_nonfinite_variable(trainer.model)
            record["not_finite"] = new_variable or nonfinite_variable

    if step is None:
        record["hint"] = (
            "to find the step, its batch and its gradients, the steps since a checkpoint are"
            " repeated: there was no checkpoint, or the search took too long;"
            " trainer.recovery_max_trials=1 saves a checkpoint at the start"
        )

    last_step = end if step is None else step
    folder = manager.restore_folder
    record["command"] = format_rerun_command(folder, path, last_step)
    target = os.path.join(folder, DIVERGED, f"step-{last_step}.json")
    if trainer.strategy.extended.should_checkpoint:
        files.write_json(target, record, point="divergence")
    return target, advice


def find_nonfinite_examples(strategy: tf.distribute.Strategy, batch: Any) -> list[int]:
    """Returns the places of the examples with values that are not finite.

    The places are those in the batch of this worker.
    """
    places: set[int] = set()
    for leaf in tf.nest.flatten(batch):
        parts = strategy.experimental_local_results(leaf)
        is_checkable = all(
            isinstance(part, tf.Tensor) and part.dtype.is_floating and part.shape.rank
            for part in parts
        )
        if is_checkable:
            values = tf.concat(parts, 0)
            is_finite = np.isfinite(values.numpy())
            indices = np.argwhere(~is_finite)
            examples = indices[:, 0]
            places.update(examples.tolist())
    return sorted(places)


def find_nonfinite_variable(model: Model) -> str | None:
    """Returns the name of the model's first variable with a value that is not finite, or None."""
    for name, variable in _named_variables(model):
        if not variable.dtype.is_floating:
            continue
        values = tf.cast(variable, tf.float32)
        is_finite = np.isfinite(values.numpy())
        if not np.all(is_finite):
            return str(name)
    return None


def _named_variables(model: Model) -> list[tuple[str, Variable]]:
    variables = model_variables(model)
    if isinstance(variables, dict):
        return list(variables.items())
    return [(variable.name, variable) for variable in model.variables]


def compute_gradient_norms(trainer: Trainer, batch: Any) -> dict[str, float]:
    """Takes one training step eagerly on a batch and returns the norm of each gradient.

    The norms are L2 norms before clipping, by the name of the variable. The gradients are those of
    the first replica. The result is empty when the task applies gradients without
    trainer_kit.apply_gradients.
    """
    norms: dict[str, float] = {}
    names = {id(variable): name for name, variable in _named_variables(trainer.model)}

    def record_norms(pairs: list[tuple[tf.Tensor | tf.IndexedSlices, Variable]]) -> None:
        for gradient, variable in pairs:
            # The norm of a sparse gradient is that of its rows.
            values = tf.cast(gradients.get_values(gradient), tf.float32)
            norm = tf.norm(values)
            # Keras 3 wraps the variable of TensorFlow that the model's names belong to.
            variable = native_variable(variable)
            name = names.get(id(variable), variable.name)
            norms.setdefault(name, float(norm))

    runs_eagerly = tf.config.functions_run_eagerly()
    gradients.on_gradients = record_norms
    tf.config.run_functions_eagerly(True)
    try:
        trainer.train_step(SingleElementIterator(batch))
    except (tf.errors.OpError, RuntimeError, ValueError, TypeError) as error:
        # Some steps cannot run eagerly, under this strategy or by their nature: the rest of the
        # report is still useful.
        lines = str(error).splitlines()
        first_line = lines[0] if lines else ""
        _LOG.warning("the norms of the gradients could not be computed: %s", first_line)
    finally:
        gradients.on_gradients = None
        tf.config.run_functions_eagerly(runs_eagerly)
    return norms


def format_rerun_command(model_dir: str, checkpoint: str | None, step: int) -> str:
    """Returns shell commands that repeat the steps up to `step` in a separate folder.

    If another program than `python -m trainer_kit.train` started the run, a comment describes the
    last command.

    Args:
      model_dir: The run's folder.
      checkpoint: The path of the checkpoint to begin with. None begins with step 0.
      step: The last step to repeat.
    """
    rerun_folder = os.path.join(model_dir, DIVERGED, "again")
    overrides = f"trainer.train_steps={step},trainer.steps_per_loop=1,trainer.summary_interval=1"
    # The repeated run ends at the first divergence.
    overrides += ",trainer.recovery_max_trials=0"
    quoted_folder = shlex.quote(rerun_folder)
    quoted_cwd = shlex.quote(os.getcwd())
    begin = f"cd {quoted_cwd} && mkdir -p {quoted_folder} && "
    if checkpoint:
        quoted_checkpoint = shlex.quote(checkpoint)
        begin += f"cp {quoted_checkpoint}.* {quoted_folder} && "

    module_path = os.path.realpath(files.__file__)
    package_folder = os.path.dirname(module_path)
    command_path = os.path.join(package_folder, "train.py")
    program_path = os.path.realpath(sys.argv[0])
    if program_path != command_path:
        return (
            f"{begin}true  # then run your program again with model_dir={rerun_folder} and"
            f" {overrides}"
        )

    # The flags of the run follow, without those of its folder and its restarts.
    flags: list[str] = []
    arguments = iter(sys.argv[1:])
    for argument in arguments:
        name, equals_sign, _ = argument.lstrip("-").partition("=")
        is_flag = argument.startswith("-")
        is_dropped = is_flag and name in ("model_dir", "max_restarts", "from_step")
        if not is_dropped:
            flags.append(shlex.quote(argument))
        elif not equals_sign:
            # The value is the next argument.
            next(arguments, None)
    words = ["python -m trainer_kit.train", *flags, f"--model_dir={quoted_folder}"]
    rerun = " ".join(words)
    return f"{begin}{rerun} --params_override={overrides}"
