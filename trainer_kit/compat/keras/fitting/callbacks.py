"""The callbacks of a fit: those of its caller, and its History."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.callbacks.keras_callbacks import KerasCallbacks
from trainer_kit.callbacks.keras_hooks import is_stock
from trainer_kit.callbacks.keras_state import AttributeState
from trainer_kit.compat.keras.data.dataset_passes import DatasetPasses
from trainer_kit.compat.keras.data.py_dataset_epochs import PyDatasetEpochs
from trainer_kit.compat.keras.fitting.history import read_history, write_history
from trainer_kit.distribution.keras_internals import of_keras_2
from trainer_kit.telemetry.report import SilentWriter, Writer

_LOG = logging.getLogger(__name__)


class FitCallbacks(KerasCallbacks):
    """The callbacks of a fit, with its History, which is written to the folder of the run.

    Args:
      callbacks: The callbacks of Keras; the last History among them is that of the fit.
      epochs: The number of epochs.
      steps: The number of steps in an epoch.
      verbose: The argument of fit.
      validates: See KerasCallbacks.
      data: The training data.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        epochs: int,
        steps: int,
        verbose: str | int,
        validates: Callable[[int], bool],
        data: Any,
    ) -> None:
        super().__init__(callbacks, parameters(epochs, steps, verbose), validates)
        self._data = data
        self._has_trained = False  # in this start

    def loop_begin(self, run: Run, steps: int) -> None:
        """Says from which epoch a resumed run goes on; see KerasCallbacks."""
        if not self._has_trained and run.step and run.chief and self.params["verbose"]:
            epoch = run.step // self.params["steps"] + 1
            print(f"the run resumes in epoch {epoch} of {self.params['epochs']}, at step {run.step}")
        self._has_trained = True
        super().loop_begin(run, steps)

    def epoch_end(self, run: Run, epoch: int, logs: Mapping[str, Any]) -> None:
        """Ends the epoch for all callbacks and writes the History; see KerasCallbacks."""
        super().epoch_end(run, epoch, logs)
        if run.chief:
            write_history(run.directory, self.history)

    def state(self) -> dict[str, Any]:
        """Returns also the step, and how many passes over the data came before the run; see KerasCallbacks."""
        return {**super().state(), "step": self._run.step, "earlier_passes": getattr(self._data, "earlier", None)}

    def restore(self, state: Any) -> None:
        """Also begins all passes of a run that has ended, since a later fit may read the same data on."""
        super().restore(state)
        if isinstance(self._data, DatasetPasses) and self._data.earlier is None:
            self._data.earlier = state.get("earlier_passes") or 0
        total = self.params["epochs"] * self.params["steps"]
        steps = min(state.get("step", 0), total)
        has_ended = self._stopped or not self.has_begun or steps == total
        if has_ended and isinstance(self._data, DatasetPasses):
            self._data.begin_passes(math.ceil(steps / self._data.batches_per_epoch))
        elif has_ended and isinstance(self._data, PyDatasetEpochs):
            self._data.begin_epochs(math.ceil(steps / self._data.steps_per_epoch))

    @property
    def history(self) -> Any:
        """The History of the fit."""
        return [one for one in self.callbacks if is_stock(one, "History")][-1]

    def finished_history(self, model: Any, model_dir: str) -> Any:
        """Returns the History after the run, which may have been finished before; it is the model's, too."""
        history = self.history
        if not self.has_begun:
            for one in self.callbacks:
                one.set_params(self.params)
                if not is_stock(one, "TensorBoard"):  # which would begin new files
                    one.set_model(model)
            self._states = [AttributeState(one) for one in self.callbacks]
            if self.saved_state is not None:
                self.restore(self.saved_state)
            model.stop_training = self._stopped
            read_history(model_dir, history)
        if not self._has_trained:  # at any verbosity: a program may have taken the folder of another fit
            stopped = self._stopped
            how = "was ended by a callback" if stopped else "ended"
            advice = "" if stopped else ", or more epochs to go on"
            print(
                f"nothing to do: the run in {model_dir} {how} after {len(history.epoch)} epochs; give another "
                f"model_dir to start a new run{advice}"
            )
        model.history = history
        return history


class ExperimentCallbacks(KerasCallbacks):
    """Callbacks of Keras in a run that is started from a config: the run tells the number of epochs and steps.

    Args:
      callbacks: The callbacks of Keras.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        super().__init__(callbacks, {})

    def run_begin(self, run: Run) -> None:
        """Finds out the parameters of callbacks, and has the metrics of training be those of the epoch so far."""
        assert run.epochs is not None  # the epochs of data of Keras are known, and callbacks with epoch_end want them
        steps = math.ceil(run.epochs.steps)
        self.params = {
            "epochs": math.ceil(run.trainer.config.trainer.train_steps / steps),
            "steps": steps,
            "verbose": 1,
        }
        run.trainer.epoch_steps = steps
        super().run_begin(run)


def recorded_history(model: Any, model_dir: str) -> Any:
    """Returns the History that the run in `model_dir` has recorded; it becomes the model's, too."""
    (history,) = with_history((), model)
    history.set_model(model)
    read_history(model_dir, history)
    model.history = history
    return history


def with_history(callbacks: Sequence[Any], model: Any) -> list[Any]:
    """Returns the callbacks, with a new History of the model's Keras if there is none among them."""
    if any(is_stock(one, "History") for one in callbacks):
        return list(callbacks)
    history = (sys.modules["tf_keras"] if of_keras_2(model) else keras).callbacks.History()
    history.epoch = []
    return [*callbacks, history]


def schedule(frequency: int | Sequence[int]) -> tuple[Callable[[int], bool], int]:
    """Returns the evaluations that `validation_freq` asks for.

    Returns:
      A function of the number of an epoch, counted from 0, which returns whether the logs of the epoch have an
      evaluation; and the number of epochs from one evaluation to the next. For a list of epochs that is their greatest
      common divisor, so that epochs between are evaluated, too.
    """
    if isinstance(frequency, int):
        return lambda epoch: (epoch + 1) % frequency == 0, frequency
    return lambda epoch: epoch + 1 in frequency, math.gcd(*frequency)


def split_callbacks(callbacks: Any) -> tuple[list[Callback], list[Any]]:
    """Returns the callbacks of trainer_kit and those of Keras, without those whose work the engine does.

    Args:
      callbacks: What `Model.fit` takes: a list of callbacks, one callback, a CallbackList, or None.
    """
    given = [] if callbacks is None else keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
    native = [one for one in given if isinstance(one, Callback)]
    of_keras = [one for one in given if not isinstance(one, Callback) and not is_stock(one, "BackupAndRestore")]
    if len(native) + len(of_keras) < len(given):
        _LOG.warning("the callback BackupAndRestore is left out: checkpoints in model_dir do its work")
    return native, of_keras


def parameters(epochs: int, steps: int | None, verbose: str | int) -> dict[str, Any]:
    """Returns the `params` of callbacks; tf_keras knows no "auto", which means 1."""
    return {"epochs": epochs, "steps": steps, "verbose": 1 if verbose == "auto" else verbose}


def console_of(callbacks: Sequence[Any], verbose: str | int) -> Writer | None:
    """Returns the writer of the lines on the console: none with verbose 0, and where Keras's own bar is shown.

    Args:
      callbacks: The callbacks of Keras.
      verbose: The argument of fit.
    """
    has_bar = any(is_stock(one, "ProgbarLogger") for one in callbacks)
    return SilentWriter() if has_bar or not verbose else None
