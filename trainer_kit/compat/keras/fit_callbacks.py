"""FitCallbacks: the callbacks of a fit, with its History, which is a file in the folder of the run, too."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from trainer_kit import files
from trainer_kit.callbacks.base import Run
from trainer_kit.compat.keras.callback_state import AttributeState
from trainer_kit.compat.keras.dataset_passes import DatasetPasses
from trainer_kit.compat.keras.keras_batches import is_stock
from trainer_kit.compat.keras.keras_callbacks import KerasCallbacks, parameters
from trainer_kit.compat.keras.py_dataset_epochs import PyDatasetEpochs
from trainer_kit.runtime.keras_internals import of_keras_2
from trainer_kit.telemetry.scalars import as_scalar

_FILE = "history.json"


class FitCallbacks(KerasCallbacks):
    """The callbacks of a fit, with its History, which is written to the folder of the run.

    Args:
      callbacks: The callbacks of Keras. The last History among them is that of the fit; without
        one the fit has a new one.
      model: The model.
      epochs: The number of epochs.
      steps: The number of steps in an epoch.
      verbose: The argument of fit.
      validation_freq: The argument of fit.
      data: The training data.

    Attributes:
      history: The History of the fit.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        model: Any,
        epochs: int,
        steps: int,
        verbose: str | int,
        validation_freq: int | Sequence[int],
        data: Any,
    ) -> None:
        histories = [callback for callback in callbacks if is_stock(callback, "History")]
        if not histories:
            library = sys.modules["tf_keras"] if of_keras_2(model) else keras
            histories = [library.callbacks.History()]
            histories[0].epoch = []
            callbacks = [*callbacks, *histories]
        super().__init__(callbacks, parameters(epochs, steps, verbose), validation_freq)
        self.history = histories[-1]
        self._data = data
        self._has_trained = False  # in this start

    def loop_begin(self, run: Run, steps: int) -> None:
        """Says from which epoch a resumed run goes on; see KerasCallbacks."""
        if not self._has_trained and run.step and run.chief and self.params["verbose"]:
            epoch = run.step // self.params["steps"] + 1
            print(f"the run resumes in epoch {epoch} of {self.params['epochs']}, at step {run.step}")
        self._has_trained = True

    def epoch_end(self, run: Run, epoch: int, logs: Mapping[str, Any]) -> None:
        """Ends the epoch for all callbacks and writes the History; see KerasCallbacks."""
        super().epoch_end(run, epoch, logs)
        if run.chief:
            _write_history(run.directory, self.history)

    def state(self) -> dict[str, Any]:
        """Returns also the step, and how many passes over the data came before the run; see KerasCallbacks."""
        earlier = getattr(self._data, "earlier", None)
        return {**super().state(), "step": self._run.step, "earlier_passes": earlier}

    def restore(self, state: Any) -> None:
        """Also begins all passes of a run that has ended, since a later fit may read the same data on."""
        super().restore(state)
        data = self._data
        if isinstance(data, DatasetPasses) and data.earlier is None:
            data.earlier = state.get("earlier_passes") or 0
        total = self.params["epochs"] * self.params["steps"]
        steps = min(state.get("step", 0), total)
        if self.has_begun and not self._stopped and steps < total:
            return
        if isinstance(data, DatasetPasses):
            data.begin_passes(math.ceil(steps / data.batches_per_epoch))
        elif isinstance(data, PyDatasetEpochs):
            data.begin_epochs(math.ceil(steps / data.steps_per_epoch))

    def finish(self, model: Any, model_dir: str) -> Any:
        """Returns the History after the run, which may have been finished before; it is the model's, too."""
        if not self.has_begun:
            for callback in self.callbacks:
                callback.set_params(self.params)
                if not is_stock(callback, "TensorBoard"):  # which would begin new files
                    callback.set_model(model)
            self._states = [AttributeState(callback) for callback in self.callbacks]
            if self.saved_state is not None:
                self.restore(self.saved_state)
            model.stop_training = self._stopped
            read_history(model_dir, self.history)
        if not self._has_trained:  # at any verbosity: a program may have taken the folder of another fit
            how = "was ended by a callback" if self._stopped else "ended"
            advice = "" if self._stopped else ", or more epochs to go on"
            print(
                f"nothing to do: the run in {model_dir} {how} after {len(self.history.epoch)} epochs; give another "
                f"model_dir to start a new run{advice}"
            )
        model.history = self.history
        return self.history


def _write_history(model_dir: str, history: Any) -> None:
    """Writes a History's epochs, counted from 0, and its values by name.

    An array is written as nested lists. Of what a callback has added, JSON may have no form: its text is written then.
    """

    def plain(value: Any) -> Any:
        number = as_scalar(value)
        if number is not None:
            return number
        array = np.asarray(value)
        return array.tolist() if array.dtype.kind in "biuf" else str(value)

    values = {name: [plain(value) for value in epochs] for name, epochs in history.history.items()}
    files.write_json(os.path.join(model_dir, _FILE), {"epoch": list(history.epoch), "history": values})


def read_history(model_dir: str, history: Any) -> None:
    """Puts the epochs and values that a run has recorded into a History; does nothing if there are none."""
    record = files.read_json(os.path.join(model_dir, _FILE))
    if record is None:
        return
    history.epoch = list(record["epoch"])
    history.history = {
        name: [np.asarray(value) if isinstance(value, list) else value for value in values]
        for name, values in record["history"].items()
    }
