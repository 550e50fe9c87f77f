"""KerasCallbacks: calls callbacks of Keras 3 or tf_keras at the epochs and batches of a run, and saves their state."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import keras
import numpy as np

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.compat.keras.callback_state import AttributeState, CsvFiles, write_to_temporary_folders
from trainer_kit.compat.keras.keras_batches import KerasBatches, is_stock
from trainer_kit.errors import UsageError
from trainer_kit.runtime.keras_internals import compilation
from trainer_kit.runtime.tensorflow_internals import SummaryState
from trainer_kit.telemetry.report import SilentWriter, Writer
from trainer_kit.telemetry.scalars import as_scalar

_LOG = logging.getLogger(__name__)
_NAMES = {"training_loss": "loss", "validation_loss": "loss"}


class KerasCallbacks(Callback):
    """Calls callbacks of Keras as `Model.fit` does, with epochs and batches counted from 0.

    All callbacks get the same dict of logs, and each may add keys to it. If a callback stops the
    run, the run is finished, and another start trains nothing. A callback with a method around
    batches makes training loops or evaluations run in parts of one step, or of
    `steps_per_execution` of the model.

    Args:
      callbacks: The callbacks, in the order in which they are called.
      params: The `params` that each of them gets. None: the run tells the numbers of epochs and
        steps, and metrics of training are those of the epoch so far.
      validation_freq: The argument of `Model.fit`: which epochs have the evaluation in their logs.

    Attributes:
      callbacks, params: The arguments.
      has_begun: Whether `on_train_begin` was called.
    """

    chief_only = False

    def __init__(
        self,
        callbacks: Sequence[Any],
        params: Mapping[str, Any] | None = None,
        validation_freq: int | Sequence[int] = 1,
    ) -> None:
        self.callbacks = list(callbacks)
        self.params = dict(params or {})
        self.has_begun = False
        self._validation_freq = validation_freq
        self._states: list[AttributeState] = []
        self._files = CsvFiles(self.callbacks)
        self._summaries = SummaryState()
        self._loop_logs: dict[str, Any] = {}  # of the last training loop
        self._eval_logs: dict[str, Any] = {}  # of the evaluation at the same step
        self._ended = 0  # the epochs whose end the callbacks have seen
        self._stopped = False
        self._trained: list[int] | None = None  # the ids of the variables that are trained

    def run_begin(self, run: Run) -> None:
        """Hands out the model, and has loops split if there are methods around batches."""
        self._run = run
        if not self.params and run.epochs is not None:
            run.trainer.epoch_steps = steps = math.ceil(run.epochs.steps)
            epochs = math.ceil(run.trainer.config.trainer.train_steps / steps)
            self.params = parameters(epochs, steps, verbose=1)
        self._compilation = compilation(run.model)
        if not run.chief:
            write_to_temporary_folders(self.callbacks)
        for callback in self.callbacks:
            callback.set_params(self.params)
            with self._summaries.in_use():
                callback.set_model(run.model)
        self._batches = KerasBatches(run, self.callbacks, self._summaries, self._training_logs, keras_logs)

    def train_begin(self, run: Run) -> None:
        """Calls `on_train_begin`, unless the training had ended; a resumed run keeps the values of its checkpoint."""
        run.model.stop_training = False
        self._states = [AttributeState(callback) for callback in self.callbacks]
        saved = self.saved_state
        if saved is None or not (saved["stopped"] or saved["ended"] >= self.params["epochs"]):
            # The copy needs as much memory as the state, and callbacks of Keras change none of it.
            changes_state = run.step > 0 and any(_runs_own_code(callback) for callback in self.callbacks)
            restored = run.trainer.state.undisturbed(everything=True) if changes_state else contextlib.nullcontext()
            with self._files.kept(resumes=run.step > 0), restored:
                self._call("on_train_begin", {})
        for state in self._states:
            state.begin()
        self.has_begun = True

    def epoch_begin(self, run: Run, epoch: int) -> None:
        """Calls `on_epoch_begin`, and checks that callbacks have left what the training step was traced with."""
        self._call("on_epoch_begin", epoch - 1, {})
        if compilation(run.model) is not self._compilation:
            raise UsageError(
                "a callback called model.compile, which has no effect on a run that has begun; compile the model after "
                "this fit and call fit again with another model_dir, or change the rate: optimizer.learning_rate = 0.1"
            )
        trained = [id(variable) for variable in getattr(run.model, "trainable_variables", ())]
        if self._trained not in (None, trained):
            _LOG.warning("layer.trainable was changed, but the step is traced and trains as before; use a second fit")
        self._trained = trained

    def loop_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        """Keeps the logs of the loop for the end of the epoch."""
        self._loop_logs = self._training_logs(logs)
        self._eval_logs = {}

    def _training_logs(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns logs of training under the names of Keras."""
        # The engine adds the rate to all logs, Keras to none; but a step may return a log of this name.
        returned = getattr(self._run.trainer.task, "train_logs", ())
        return keras_logs(logs, {"learning_rate"} - set(returned))

    def evaluation_begin(self, run: Run) -> None:
        """Calls `on_test_begin`."""
        run.model.stop_evaluating = False
        self._call("on_test_begin", {})

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Keeps the logs of the evaluation for the end of the epoch, and calls `on_test_end`.

        A checkpoint is saved before its evaluation, so a resume repeats what both methods around it change.
        """
        best = getattr(run.trainer.config.trainer, "best_checkpoint_eval_metric", "")
        self._eval_logs = keras_logs(logs, {f"best_{best}"})
        if run.evaluation is not None and run.evaluation.replayed:
            if run.epochs is None or run.epochs.ended(run.step) <= self._ended:
                return
            self._call("on_test_begin", {})
        self._call("on_test_end", dict(self._eval_logs))

    def epoch_end(self, run: Run, epoch: int, logs: Mapping[str, Any]) -> None:
        """Calls `on_epoch_end`, and at the end of the run `on_train_end`."""
        if epoch <= self._ended:
            return
        epoch_logs = dict(self._loop_logs)
        if self._has_evaluation(epoch):
            epoch_logs |= {f"val_{name}": value for name, value in self._eval_logs.items()}
        epoch_logs = dict(sorted(epoch_logs.items()))  # as Keras has them
        for callback in self.callbacks:
            callback.on_epoch_end(epoch - 1, epoch_logs)
            # A History that holds a variable cannot be saved, and would show its last value for each epoch.
            epoch_logs |= keras_logs({name: value for name, value in epoch_logs.items() if hasattr(value, "numpy")})
        self._ended = epoch

        if run.model.stop_training:
            self._stopped = True
            run.stop(f"a Keras callback has set model.stop_training in epoch {epoch}")
        if self._stopped or (run.total is not None and run.step >= run.total):
            self._end_training(run, epoch_logs)

    def _has_evaluation(self, epoch: int) -> bool:
        """Whether the logs of an epoch, counted from 1, have the evaluation at its end."""
        frequency = self._validation_freq
        return epoch % frequency == 0 if isinstance(frequency, int) else epoch in frequency

    def boundary_end(self, run: Run) -> None:
        """Ends an epoch that a callback has stopped in its middle, as Keras does: with all methods of its end."""
        if self.has_begun and run.step > 0 and run.epoch is not None and run.model.stop_training:
            self.epoch_end(run, run.epoch, {})

    def _end_training(self, run: Run, logs: dict[str, Any]) -> None:
        """Ends the training of the callbacks, which may change weights, and saves what they leave behind.

        A History changes nothing, and a resume would repeat its last epoch: without other callbacks the checkpoint
        before the end of the epoch has all.
        """
        optimizer = getattr(run.model, "optimizer", None)
        if isinstance(optimizer, keras.Optimizer):
            optimizer.finalize_variable_values(run.model.trainable_variables)
        self._call("on_train_end", logs)
        if getattr(optimizer, "use_ema", False) or not all(is_stock(one, "History") for one in self.callbacks):
            run.save(again=True)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint has to hold: the last logs, and the attributes that callbacks have changed."""
        return {
            "loop": self._loop_logs,
            "ended": self._ended,
            "stopped": self._stopped,
            "stopping": self.has_begun and bool(self._run.model.stop_training),
            "begun": self._batches.begun,
            "callbacks": [[type(state.owner).__name__, state.changed()] for state in self._states],
            "files": self._files.state(),
        }

    def restore(self, state: Any) -> None:
        """Restores what `state` returned, also when the run goes back to an earlier step."""
        self._loop_logs = dict(state["loop"])
        self._eval_logs = {}
        self._ended = state["ended"]
        self._stopped = bool(state["stopped"])
        saved = list(state["callbacks"])
        for attributes in self._states:  # a callback that was added or removed since changes nothing for the others
            name = type(attributes.owner).__name__
            entry = next((entry for entry in saved if entry[0] == name), None)
            attributes.restore({} if entry is None else entry[1])
            if entry is not None:
                saved.remove(entry)
        if not self.has_begun:  # the run is finished
            return

        self._batches.begun = state.get("begun")
        self._files.restore(state.get("files", {}))
        epoch = self._run.epoch
        if epoch is not None and epoch > self._ended:
            # The bar begins in a process that resumes inside an epoch, or at its end, too.
            for bar in self.callbacks:
                if is_stock(bar, "ProgbarLogger"):
                    bar.on_epoch_begin(epoch - 1, {})
        self._run.model.stop_training = self._stopped or bool(state.get("stopping"))
        if self._run.model.stop_training:
            self._run.stop("a Keras callback ended the run at an earlier start")

    def _call(self, method: str, *arguments: Any) -> None:
        with self._summaries.in_use():
            for callback in self.callbacks:
                getattr(callback, method)(*arguments)


def keras_logs(logs: Mapping[str, Any], left_out: Set[str] = frozenset()) -> dict[str, Any]:
    """Returns logs under the names that Keras gives them, sorted by name: numbers as floats, others as arrays."""
    values: dict[str, Any] = {}
    for name, value in logs.items():
        if name in left_out:
            continue
        if isinstance(value, Mapping):
            values |= {f"{name}/{inner}": part for inner, part in keras_logs(value).items()}
        elif (number := as_scalar(value)) is not None:
            values[_NAMES.get(name, name)] = number
        elif np.asarray(value).dtype.kind in "biuf":
            values[_NAMES.get(name, name)] = np.asarray(value)
    return dict(sorted(values.items()))


def _runs_own_code(callback: Any) -> bool:
    """Whether methods of a callback are the user's and not those of Keras."""
    return is_stock(callback, "LambdaCallback") or not type(callback).__module__.startswith(("keras.", "tf_keras."))


def split_callbacks(callbacks: Any) -> tuple[list[Callback], list[Any]]:
    """Returns the callbacks of trainer_kit and those of Keras, without those whose work the engine does.

    Args:
      callbacks: What `Model.fit` takes: a list of callbacks, one callback, a CallbackList, or None.
    """
    entries = [] if callbacks is None else keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
    native = [entry for entry in entries if isinstance(entry, Callback)]
    others = [entry for entry in entries if not isinstance(entry, Callback)]
    of_keras = [callback for callback in others if not is_stock(callback, "BackupAndRestore")]
    if len(of_keras) < len(others):
        _LOG.warning("the callback BackupAndRestore is left out: checkpoints in model_dir do its work")
    return native, of_keras


def parameters(epochs: int, steps: int | None, verbose: str | int) -> dict[str, Any]:
    """Returns the `params` of callbacks; tf_keras knows no "auto", which means 1."""
    return {"epochs": epochs, "steps": steps, "verbose": 1 if verbose == "auto" else verbose}


def console_of(callbacks: Sequence[Any], verbose: str | int) -> Writer | None:
    """Returns the writer of the lines on the console: none with verbose 0, and where Keras's own bar is shown."""
    has_bar = any(is_stock(callback, "ProgbarLogger") for callback in callbacks)
    return SilentWriter() if has_bar or not verbose else None
