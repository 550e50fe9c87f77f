"""KerasCallbacks: calls callbacks of Keras 3 or tf_keras at the epochs and batches of a run, and saves their state."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import keras
import numpy as np

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.callbacks.keras_batches import KerasBatches
from trainer_kit.callbacks.keras_files import CsvFiles, write_to_temporary_folders
from trainer_kit.callbacks.keras_hooks import is_stock
from trainer_kit.callbacks.keras_state import AttributeState
from trainer_kit.distribution.keras_internals import compilation
from trainer_kit.distribution.tensorflow_internals import SummaryState
from trainer_kit.errors import UsageError
from trainer_kit.telemetry.scalars import as_scalar

_LOG = logging.getLogger(__name__)
_NAMES = {"training_loss": "loss", "validation_loss": "loss"}


class KerasCallbacks(Callback):
    """Calls callbacks of Keras as `Model.fit` does, with epochs and batches counted from 0.

    All callbacks get the same dict of logs, and each may add keys to it. If a callback stops the run, the run is
    finished, and another start trains nothing. A callback with a method around batches makes training loops or
    evaluations run in parts of one step, or of `steps_per_execution` of the model.

    Args:
      callbacks: The callbacks, in the order in which they are called.
      params: The `params` that each of them gets.
      validates: A function that returns whether the logs of an epoch, counted from 0, have the evaluation at its end.

    Attributes:
      callbacks, params: The arguments.
      has_begun: Whether `on_train_begin` was called.
    """

    chief_only = False

    def __init__(
        self,
        callbacks: Sequence[Any],
        params: Mapping[str, Any],
        validates: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self.callbacks, self.params, self._validates = list(callbacks), dict(params), validates
        self._states: list[AttributeState] = []
        self._files, self._summaries = CsvFiles(self.callbacks), SummaryState()
        self._loop_logs: dict[str, Any] = {}  # of the last training loop
        self._eval_logs: dict[str, Any] = {}  # of the evaluation at the same step
        self._ended, self._stopped, self.has_begun = 0, False, False  # the epochs whose end the callbacks have seen

    def run_begin(self, run: Run) -> None:
        """Hands out the model, and finds out which methods around batches there are."""
        if not run.chief:
            write_to_temporary_folders(self.callbacks)
        self._compilation = compilation(run.model)
        self._trained: list[int] | None = None  # the ids of the variables that are trained
        for one in self.callbacks:
            one.set_params(self.params)
            with self._summaries.in_use():
                one.set_model(run.model)
        self._run = run
        batches = self._batches = KerasBatches(self.callbacks, run.model, self._summaries)
        if hooks := batches.evaluation_hooks(_plain):
            run.trainer.evaluation_hooks = hooks
        run.trainer.loop_parts.hooks = batches.training_hooks(
            run, lambda results: self._of_training(run.trainer.logs_so_far(results))
        )
        if batches.train and run.trainer.trains:
            names = ", ".join(dict.fromkeys(type(one).__name__ for one in batches.train))
            _LOG.info("%s: methods around each batch cost the host about half a millisecond a batch", names)

    def train_begin(self, run: Run) -> None:
        """Calls `on_train_begin`, unless the training had ended; a resumed run keeps the values of its checkpoint."""
        run.model.stop_training = False
        self._states = [AttributeState(one) for one in self.callbacks]
        saved = self.saved_state
        if saved is None or not (saved["stopped"] or saved["ended"] >= self.params["epochs"]):
            # The copy needs as much memory as the state, and callbacks of Keras change none of it.
            changes_state = run.step > 0 and any(_runs_own_code(callback) for callback in self.callbacks)
            restored = run.trainer.state.undisturbed(everything=True) if changes_state else contextlib.nullcontext()
            with self._files.kept(resumes=run.step > 0), restored:
                self._call("on_train_begin", {})
        for one in self._states:
            one.begin()
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
        self._loop_logs = self._of_training(logs)
        self._eval_logs = {}

    def _of_training(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns logs of training under the names of Keras."""
        # The engine adds the rate to all logs, Keras to none; but a step may return a log of this name.
        return _plain(logs, {"learning_rate"} - set(getattr(self._run.trainer.task, "train_logs", ())))

    def evaluation_begin(self, run: Run) -> None:
        """Calls `on_test_begin`."""
        run.model.stop_evaluating = False
        self._call("on_test_begin", {})

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Keeps the logs of the evaluation for the end of the epoch, and calls `on_test_end`.

        A checkpoint is saved before its evaluation, so a resume repeats what both methods around it change.
        """
        best = getattr(run.trainer.config.trainer, "best_checkpoint_eval_metric", "")
        self._eval_logs = _plain(logs, {f"best_{best}"})
        if run.evaluation is not None and run.evaluation.replayed:
            if run.epochs is None or run.epochs.ended(run.step) <= self._ended:
                return
            self._call("on_test_begin", {})
        self._call("on_test_end", dict(self._eval_logs))

    def epoch_end(self, run: Run, epoch: int, logs: Mapping[str, Any]) -> None:
        """Calls `on_epoch_end`, and at the end of the run `on_train_end`."""
        if epoch <= self._ended:
            return
        found = dict(self._loop_logs)
        if self._validates(epoch - 1):
            found |= {f"val_{name}": value for name, value in self._eval_logs.items()}
        found = dict(sorted(found.items()))  # as Keras has them
        for one in self.callbacks:
            one.on_epoch_end(epoch - 1, found)
            # A History that holds a variable cannot be saved, and would show its last value for each epoch.
            found |= _plain({name: value for name, value in found.items() if hasattr(value, "numpy")}, frozenset())
        self._ended = epoch
        if run.model.stop_training:
            self._stopped = True
            run.stop(f"a Keras callback has set model.stop_training in epoch {epoch}")
        if self._stopped or (run.total is not None and run.step >= run.total):
            self._finish(run, found)

    def boundary_end(self, run: Run) -> None:
        """Ends an epoch that a callback has stopped in its middle, as Keras does: with all methods of its end."""
        if self.has_begun and run.step > 0 and run.epoch is not None and run.model.stop_training:
            self.epoch_end(run, run.epoch, {})

    def _finish(self, run: Run, logs: dict[str, Any]) -> None:
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
        changed = [[type(one.owner).__name__, one.changed()] for one in self._states]
        stopping = bool(self._run.model.stop_training) if self.has_begun else False
        return {
            "loop": self._loop_logs,
            "ended": self._ended,
            "stopped": self._stopped,
            "stopping": stopping,
            "begun": self._batches.begun,
            "callbacks": changed,
            "files": self._files.state(),
        }

    def restore(self, state: Any) -> None:
        """Restores what `state` returned, also when the run goes back to an earlier step."""
        self._loop_logs, self._eval_logs, self._ended = dict(state["loop"]), {}, state["ended"]
        saved = list(state["callbacks"])
        for one in self._states:  # a callback that was added or removed since changes nothing for the others
            name = type(one.owner).__name__
            found = next((entry for entry in saved if entry[0] == name), None)
            if found is not None:
                saved.remove(found)
            one.restore({} if found is None else found[1])
        self._stopped = bool(state["stopped"])
        if not self.has_begun:  # the run is finished
            return
        self._batches.begun = state.get("begun")
        self._files.restore(state.get("files", {}))
        self._draw_bars_again()
        self._run.model.stop_training = self._stopped or bool(state.get("stopping"))
        if self._run.model.stop_training:
            self._run.stop("a Keras callback ended the run at an earlier start")

    def _draw_bars_again(self) -> None:
        """Has a ProgbarLogger begin its bar in a process that resumes inside an epoch, or at its end."""
        epoch = self._run.epoch
        if epoch is not None and epoch > self._ended:
            for one in self.callbacks:
                if is_stock(one, "ProgbarLogger"):
                    one.on_epoch_begin(epoch - 1, {})

    def _call(self, method: str, *arguments: Any) -> None:
        with self._summaries.in_use():
            for one in self.callbacks:
                getattr(one, method)(*arguments)


def _plain(logs: Mapping[str, Any], left_out: Set[str] = frozenset()) -> dict[str, Any]:
    """Returns logs under the names that Keras gives them, sorted by name: numbers as floats, others as arrays."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        if name in left_out:
            continue
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": one for inner, one in _plain(value).items()}
        elif (number := as_scalar(value)) is not None:
            found[_NAMES.get(name, name)] = number
        elif np.asarray(value).dtype.kind in "biuf":
            found[_NAMES.get(name, name)] = np.asarray(value)
    return dict(sorted(found.items()))


def _runs_own_code(callback: Any) -> bool:
    """Whether methods of a callback are the user's and not those of Keras."""
    return is_stock(callback, "LambdaCallback") or not type(callback).__module__.startswith(("keras.", "tf_keras."))
