"""Callbacks of Keras 3 and tf_keras, called at the epochs and batches of a run."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.compat.keras.callback_state import (
    AttributeState,
    csv_lengths,
    is_defined_in_keras,
    is_keras_callback,
    load_history,
    redirect_to_temporary_folders,
    truncate_csv_files,
    write_history,
)
from trainer_kit.compat.keras.dataset_passes import DatasetPasses
from trainer_kit.compat.keras.keras_types import (
    Callbacks,
    CompiledModel,
    History,
    KerasCallback,
)
from trainer_kit.compat.keras.py_dataset_epochs import PyDatasetEpochs
from trainer_kit.errors import UsageError
from trainer_kit.inputs.sources.source_protocol import Source
from trainer_kit.runtime.keras_internals import (
    get_compilation_token,
    is_keras_2_model,
    set_batch_counter,
    should_trace_batches,
)
from trainer_kit.runtime.tensorflow_internals import SummaryState
from trainer_kit.telemetry.report import SilentWriter, Writer
from trainer_kit.telemetry.scalars import as_scalar

_LOG = logging.getLogger(__name__)
_KERAS_LOG_NAMES = {"training_loss": "loss", "validation_loss": "loss"}

# The older names without "train" are methods of callbacks, too.
TRAIN_BATCH_METHODS = (
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_batch_begin",
    "on_batch_end",
)
TEST_BATCH_METHODS = ("on_test_batch_begin", "on_test_batch_end")

# Classes of Keras that always have methods of batches, with the condition under which these act.
_CONDITIONS: dict[str, Callable[[Any], bool]] = {
    "ModelCheckpoint": lambda callback: callback.save_freq != "epoch",
    "TensorBoard": lambda callback: (
        callback.update_freq != "epoch" or should_trace_batches(callback)
    ),
    "ProgbarLogger": lambda callback: callback.verbose == 1,
}


class KerasCallbacks(Callback):
    """Calls callbacks of Keras as `Model.fit` does, with epochs and batches counted from 0.

    All callbacks get the same dict of logs, and each may add keys to it. If a callback stops the
    run, the run is finished, and another start trains nothing. A callback with a method around
    batches makes training loops or evaluations run in parts. See TrainBatchHooks and
    TestBatchHooks.

    All methods run eagerly, on the host.

    Args:
      callbacks: The callbacks, in the order in which they are called.
      params: The `params` that each of them gets. None: the numbers of epochs and steps are those
        of the run, and metrics of training are those of the epoch so far.
      validation_freq: The argument of `Model.fit`: which epochs have the evaluation in their logs.

    Attributes:
      callbacks, params: The arguments.
      console: The writer of the lines on the console. It is silent with verbose 0, and where
        Keras's own bar is shown. None is the default writer.
      has_begun: Whether `on_train_begin` was called.
    """

    chief_only = False

    def __init__(
        self,
        callbacks: Sequence[KerasCallback],
        params: Mapping[str, Any] | None = None,
        validation_freq: int | Sequence[int] = 1,
    ) -> None:
        self.callbacks = list(callbacks)
        self.params = dict(params or {})
        verbose = self.params.get("verbose", 1)
        if verbose == "auto":
            # tf_keras knows no "auto".
            self.params["verbose"] = 1

        has_bar = any(is_keras_callback(callback, "ProgbarLogger") for callback in callbacks)
        self.console: Writer | None = None
        if has_bar or not verbose:
            self.console = SilentWriter()
        self.has_begun = False
        self._validation_freq = validation_freq
        self._attribute_states: list[AttributeState] = []
        self._summaries = SummaryState()

        # The logs of the last training loop, and of the evaluation at the same step.
        self._loop_logs: dict[str, Any] = {}
        self._eval_logs: dict[str, Any] = {}

        # The number of epochs whose end the callbacks were called for.
        self._ended_epochs = 0
        self._was_stopped = False
        self._trained_variable_ids: list[int] | None = None

    def run_begin(self, run: Run) -> None:
        """Sets the model of the callbacks, and splits loops if a callback acts on batches."""
        self._run = run
        if not self.params and run.epochs is not None:
            steps = math.ceil(run.epochs.steps)
            # The trainer of a native task lacks the method: its metrics are those of each loop.
            if hasattr(run.trainer, "accumulate_epoch_metrics"):
                run.trainer.accumulate_epoch_metrics(steps)
            train_steps = run.trainer.config.trainer.train_steps
            epochs = math.ceil(train_steps / steps)
            self.params = {"epochs": epochs, "steps": steps, "verbose": 1}

        self._compilation = get_compilation_token(run.model)
        if not run.is_chief:
            redirect_to_temporary_folders(self.callbacks)
        for callback in self.callbacks:
            callback.set_params(self.params)
            with self._summaries.activate():
                callback.set_model(run.model)

        self._train_batch_hooks = TrainBatchHooks(self, run)
        acts_on_training = run.epochs is not None and any(
            acts_on_batches(callback, TRAIN_BATCH_METHODS) for callback in self.callbacks
        )
        if acts_on_training:
            run.trainer.set_training_hooks(self._train_batch_hooks)
        acts_on_evaluation = any(
            acts_on_batches(callback, TEST_BATCH_METHODS) for callback in self.callbacks
        )
        if acts_on_evaluation:
            test_batch_hooks = TestBatchHooks(self, run.model)
            run.trainer.set_evaluation_hooks(test_batch_hooks)

    def train_begin(self, run: Run) -> None:
        """Calls `on_train_begin`, unless the training has ended before.

        A resumed run keeps the values of its checkpoint.
        """
        run.model.stop_training = False
        self._attribute_states = [AttributeState(callback) for callback in self.callbacks]
        saved = self.saved_state
        has_ended = saved is not None and (
            saved["stopped"] or saved["ended"] >= self.params["epochs"]
        )
        if not has_ended:
            # The methods of a LambdaCallback are the user's, those of other callbacks of Keras are
            # not.
            has_user_code = False
            for callback in self.callbacks:
                module = type(callback).__module__
                is_of_keras = module.startswith(("keras.", "tf_keras."))
                if is_keras_callback(callback, "LambdaCallback") or not is_of_keras:
                    has_user_code = True

            # The copy needs as much memory as the state, and callbacks of Keras change none of it.
            preservation = contextlib.nullcontext()
            if run.step > 0 and has_user_code:
                preservation = run.trainer.state.preserve_variables(everything=True)
            if saved is not None:
                lengths = saved.get("files", {})
                truncate_csv_files(self.callbacks, lengths)
            with preservation:
                self.call_method("on_train_begin", {})
        self.has_begun = True

    def epoch_begin(self, run: Run, epoch: int) -> None:
        """Calls `on_epoch_begin`, and checks what callbacks may not change.

        The training step is traced with the compilation and the trained variables of its model.

        Raises:
          UsageError: When a callback has compiled the model again.
        """
        self.call_method("on_epoch_begin", epoch - 1, {})
        if get_compilation_token(run.model) is not self._compilation:
            raise UsageError(
                "a callback called model.compile, which has no effect on a run that has begun;"
                " compile the model after this fit and call fit again with another model_dir, or"
                " change the rate: optimizer.learning_rate = 0.1"
            )

        variables = getattr(run.model, "trainable_variables", ())
        variable_ids = [id(variable) for variable in variables]
        if self._trained_variable_ids not in (None, variable_ids):
            _LOG.warning(
                "layer.trainable was changed, but the step is traced and trains as before; use a"
                " second fit"
            )
        self._trained_variable_ids = variable_ids

    def loop_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Keeps the logs of the loop for the end of the epoch."""
        self._loop_logs = self.convert_training_logs(logs)
        self._eval_logs = {}

    def convert_training_logs(self, logs: Mapping[str, object]) -> dict[str, Any]:
        """Returns logs of training under the names of Keras."""
        # The engine adds the rate to all logs, Keras to none. But a step may return a log of this
        # name.
        task = self._run.trainer.task
        step_logs = getattr(task, "train_log_specs", ())
        exclude = {"learning_rate"} - set(step_logs)
        return convert_logs(logs, exclude)

    def evaluation_begin(self, run: Run) -> None:
        """Calls `on_test_begin`."""
        run.model.stop_evaluating = False
        self.call_method("on_test_begin", {})

    def evaluation_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Keeps the logs of the evaluation for the end of the epoch, and calls `on_test_end`.

        A checkpoint is saved before its evaluation, so a resume repeats what both methods around it
        change.
        """
        options = run.trainer.config.trainer
        best_metric = getattr(options, "best_checkpoint_eval_metric", "")
        self._eval_logs = convert_logs(logs, {f"best_{best_metric}"})

        if run.evaluation is not None and run.evaluation.is_replayed:
            if run.epochs is None:
                return
            # The callbacks have seen the end of the epoch, and so this evaluation.
            completed_epochs = run.epochs.count_completed(run.step)
            if completed_epochs <= self._ended_epochs:
                return
            self.call_method("on_test_begin", {})
        self.call_method("on_test_end", dict(self._eval_logs))

    def epoch_end(self, run: Run, epoch: int, logs: Mapping[str, object]) -> None:
        """Calls `on_epoch_end`, and at the end of the run `on_train_end`."""
        if epoch <= self._ended_epochs:
            return

        frequency = self._validation_freq
        if isinstance(frequency, int):
            has_evaluation = epoch % frequency == 0
        else:
            has_evaluation = epoch in frequency
        epoch_logs = dict(self._loop_logs)
        if has_evaluation:
            for name, value in self._eval_logs.items():
                epoch_logs[f"val_{name}"] = value
        # Keras sorts its logs by name, too.
        epoch_logs = dict(sorted(epoch_logs.items()))

        for callback in self.callbacks:
            callback.on_epoch_end(epoch - 1, epoch_logs)
            # A History that contains a variable cannot be saved, and would show its last value for
            # each epoch.
            variable_logs = {}
            for name, value in epoch_logs.items():
                if hasattr(value, "numpy"):
                    variable_logs[name] = value
            epoch_logs |= convert_logs(variable_logs)
        self._ended_epochs = epoch

        if run.model.stop_training:
            self._was_stopped = True
            run.stop(f"a Keras callback has set model.stop_training in epoch {epoch}")
        total_steps = run.total_steps
        is_last_step = total_steps is not None and run.step >= total_steps
        if self._was_stopped or is_last_step:
            self._end_training(run, epoch_logs)

    def boundary_end(self, run: Run) -> None:
        """Ends an epoch that a callback has stopped in its middle.

        All methods of its end are called, as in Keras.
        """
        has_trained = self.has_begun and run.step > 0
        if has_trained and run.epoch is not None and run.model.stop_training:
            self.epoch_end(run, run.epoch, {})

    def _end_training(self, run: Run, logs: dict[str, Any]) -> None:
        """Ends the training of the callbacks and saves the weights, which they may change.

        A History changes nothing. Without other callbacks the checkpoint before the end of the
        epoch contains everything: a resume repeats the last epoch of the History.
        """
        optimizer = getattr(run.model, "optimizer", None)
        if isinstance(optimizer, keras.Optimizer):
            optimizer.finalize_variable_values(run.model.trainable_variables)
        self.call_method("on_train_end", logs)

        only_history = all(is_keras_callback(callback, "History") for callback in self.callbacks)
        has_average = getattr(optimizer, "use_ema", False)
        if has_average or not only_history:
            run.save(overwrite=True)

    def state(self) -> dict[str, Any]:
        """Returns the last logs, and the attributes that callbacks have changed."""
        callback_states = []
        for attributes in self._attribute_states:
            name = type(attributes.callback).__name__
            changes = attributes.get_changes()
            callback_states.append([name, changes])
        return {
            "loop": self._loop_logs,
            "ended": self._ended_epochs,
            "stopped": self._was_stopped,
            "stopping": self.has_begun and bool(self._run.model.stop_training),
            "begun": self._train_batch_hooks.begun_step,
            "callbacks": callback_states,
            "files": csv_lengths(self.callbacks),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned, also when the run goes back to an earlier step."""
        self._loop_logs = dict(state["loop"])
        self._eval_logs = {}
        self._ended_epochs = state["ended"]
        self._was_stopped = bool(state["stopped"])

        # Callbacks are matched by class and order, so that one that was added or removed since
        # changes nothing for the others.
        remaining = list(state["callbacks"])
        for attributes in self._attribute_states:
            name = type(attributes.callback).__name__
            for entry in remaining:
                if entry[0] == name:
                    remaining.remove(entry)
                    attributes.restore(entry[1])
                    break

        # The training of a finished run does not begin.
        if not self.has_begun:
            return

        self._train_batch_hooks.begun_step = state.get("begun")
        lengths = state.get("files", {})
        truncate_csv_files(self.callbacks, lengths)
        epoch = self._run.epoch
        if epoch is not None and epoch > self._ended_epochs:
            # The bar begins in a process that resumes inside an epoch, or at its end, too.
            for bar in self.callbacks:
                if is_keras_callback(bar, "ProgbarLogger"):
                    bar.on_epoch_begin(epoch - 1, {})

        model = self._run.model
        model.stop_training = self._was_stopped or bool(state.get("stopping"))
        if model.stop_training:
            self._run.stop("a Keras callback ended the run at an earlier start")

    def call_method(self, method: str, *arguments: Any) -> None:
        """Calls a method of all callbacks, with separate summaries.

        Raises:
          RuntimeError: When a callback raises StopIteration or OutOfRangeError.
        """
        with self._summaries.activate():
            for callback in self.callbacks:
                try:
                    function = getattr(callback, method)
                    function(*arguments)
                except (StopIteration, tf.errors.OutOfRangeError) as error:
                    # A training loop would take such an error for the end of its data.
                    raise RuntimeError(
                        f"{type(callback).__name__}.{method} raised {error!r}"
                    ) from error


class TrainBatchHooks:
    """The TrainingHooks that call the methods of callbacks around training batches.

    Batches count from 0 in each epoch. Runs eagerly, on the host.

    Args:
      keras_callbacks: All callbacks of Keras, with their parameters.
      run: The run, whose model is compiled.

    Attributes:
      begun_step: The step of a batch that has begun and is not trained yet. None if there is none.
        A run that SIGTERM stops there resumes without a second begin of the batch.
    """

    def __init__(self, keras_callbacks: KerasCallbacks, run: Run) -> None:
        self.begun_step: int | None = None
        self._keras_callbacks = keras_callbacks
        self._run = run
        # Not None wherever loops are split.
        self._epochs: Any = run.epochs

    def begin(self, step: int) -> None:
        """Calls the methods before a batch."""
        if self.begun_step == step:
            return
        _, number = self._epochs.locate_step(step + 1)
        self._keras_callbacks.call_method("on_train_batch_begin", number - 1, {})
        self.begun_step = step

    def end(self, step: int, results: Mapping[str, object]) -> bool:
        """Calls the methods after a batch. Returns whether the loop continues."""
        model = self._run.model
        _, number = self._epochs.locate_step(step)
        self.begun_step = None
        set_batch_counter(model, step, training=True)

        engine_logs = self._run.trainer.convert_to_logs(results)
        logs = self._keras_callbacks.convert_training_logs(engine_logs)
        self._keras_callbacks.call_method("on_train_batch_end", number - 1, logs)

        if model.stop_training:
            self._run.stop(f"a Keras callback has set model.stop_training at step {step}")
        return not self._run.requests.stop_reason


class TestBatchHooks:
    """The EvaluationHooks that call the methods of callbacks around evaluation batches.

    Batches count from 0 in each evaluation. Runs eagerly, on the host.

    Args:
      keras_callbacks: All callbacks of Keras.
      model: The model.
    """

    # pytest would take a class of this name for tests.
    __test__ = False

    def __init__(self, keras_callbacks: KerasCallbacks, model: CompiledModel) -> None:
        self._keras_callbacks = keras_callbacks
        self._model = model

    def begin(self, batch: int) -> None:
        """Calls the methods before a batch."""
        self._keras_callbacks.call_method("on_test_batch_begin", batch, {})

    def end(self, batch: int, results: Mapping[str, object]) -> bool:
        """Calls the methods after a batch. Returns whether the evaluation continues."""
        set_batch_counter(self._model, batch + 1, training=False)
        logs = convert_logs(results)
        self._keras_callbacks.call_method("on_test_batch_end", batch, logs)
        return not getattr(self._model, "stop_evaluating", False)


class FitCallbacks(KerasCallbacks):
    """The callbacks of a fit, with its History, which is written to the folder of the run.

    Args:
      callbacks: The callbacks of Keras. The last History among them is that of the fit. Without
        one the fit has a new one.
      model: The model.
      params: The `params` of callbacks.
      validation_freq: The argument of fit.
      data: The training data.

    Attributes:
      history: The History of the fit.
    """

    def __init__(
        self,
        callbacks: Sequence[KerasCallback],
        model: CompiledModel,
        params: Mapping[str, Any],
        validation_freq: int | Sequence[int],
        data: tf.data.Dataset | Source,
    ) -> None:
        histories: list[Any] = [
            callback for callback in callbacks if is_keras_callback(callback, "History")
        ]
        if not histories:
            library = keras
            if is_keras_2_model(model):
                library = sys.modules["tf_keras"]
            history = library.callbacks.History()
            # Keras sets it when the training begins, which a finished run does not do.
            history.epoch = []
            histories.append(history)
            callbacks = [*callbacks, history]
        super().__init__(callbacks, params, validation_freq)
        self.history: History = histories[-1]
        self._data = data
        # Whether this process has run a training loop.
        self._has_trained = False

    def loop_begin(self, run: Run, steps: int) -> None:
        """Prints the epoch in which a resumed run continues."""
        resumes = not self._has_trained and run.step > 0
        if resumes and run.is_chief and self.params["verbose"]:
            epoch = run.step // self.params["steps"] + 1
            _print_line(
                f"the run resumes in epoch {epoch} of {self.params['epochs']}, at step {run.step}"
            )
        self._has_trained = True

    def epoch_end(self, run: Run, epoch: int, logs: Mapping[str, object]) -> None:
        """Ends the epoch for all callbacks and writes the History. See KerasCallbacks."""
        super().epoch_end(run, epoch, logs)
        if run.is_chief:
            write_history(run.directory, self.history)

    def state(self) -> dict[str, Any]:
        """Returns also the step. See KerasCallbacks."""
        state = super().state()
        return {**state, "step": self._run.step}

    def finish(self, model: CompiledModel, model_dir: str) -> History:
        """Returns the History after the run, and makes it that of the model.

        Runs eagerly, on the host. The run may have been finished before this start.

        Args:
          model: The model.
          model_dir: The folder of the run.
        """
        if not self.has_begun:
            for callback in self.callbacks:
                callback.set_params(self.params)
                # With a model a TensorBoard would begin new files.
                if not is_keras_callback(callback, "TensorBoard"):
                    callback.set_model(model)
            self._attribute_states = [AttributeState(callback) for callback in self.callbacks]
            if self.saved_state is not None:
                self.restore(self.saved_state)
            model.stop_training = self._was_stopped
            load_history(model_dir, self.history)

        if not self._has_trained:
            data = self._data
            if self.saved_state is not None and isinstance(data, (DatasetPasses, PyDatasetEpochs)):
                # A later fit of the program may continue to read the same data.
                saved_step = self.saved_state.get("step", 0)
                total_steps = self.params["epochs"] * self.params["steps"]
                steps = min(saved_step, total_steps)
                passes = math.ceil(steps / data.steps_per_pass)
                data.begin_passes(passes)
            # At any verbosity: a program may have taken the folder of another fit.
            how = "was ended by a callback" if self._was_stopped else "ended"
            advice = "" if self._was_stopped else ", or more epochs to go on"
            epoch_count = len(self.history.epoch)
            _print_line(
                f"nothing to do: the run in {model_dir} {how} after {epoch_count}"
                f" epochs; give another model_dir to start a new run{advice}"
            )
        elif self.params["verbose"] and self._run.is_chief:
            how = "was ended by a callback" if self._was_stopped else "finished"
            _print_line(
                f"the run {how} at step {self._run.step}; checkpoints, reports and history.json are"
                f" in {model_dir}"
            )

        model.history = self.history
        return self.history


def _print_line(text: str) -> None:
    """Prints a line. A closed output, as of `| head`, ends no training."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def split_callbacks(callbacks: Callbacks) -> tuple[list[Callback], list[KerasCallback]]:
    """Returns the callbacks of trainer_kit and those of Keras.

    Those whose work the engine does are left out.

    Args:
      callbacks: What `Model.fit` takes: a list of callbacks, one callback, a CallbackList, or None.
    """
    native_callbacks: list[Callback] = []
    others: list[KerasCallback] = []
    if callbacks is not None:
        # A CallbackList has its callbacks in an attribute. Lists may be nested.
        nested_callbacks = getattr(callbacks, "callbacks", callbacks)
        for entry in keras.tree.flatten(nested_callbacks):
            if isinstance(entry, Callback):
                native_callbacks.append(entry)
            else:
                others.append(entry)

    keras_callbacks = [
        callback for callback in others if not is_keras_callback(callback, "BackupAndRestore")
    ]
    if len(keras_callbacks) < len(others):
        _LOG.warning(
            "the callback BackupAndRestore is left out: checkpoints in model_dir do its work"
        )
    return native_callbacks, keras_callbacks


def convert_logs(logs: Mapping[str, object], exclude: Set[str] = frozenset()) -> dict[str, Any]:
    """Returns logs under the names that Keras gives them, sorted by name.

    Single numbers are floats, others are arrays. Nested logs have names with a slash. Values that
    are no numbers are left out.

    Args:
      logs: The logs by the names of the engine.
      exclude: The names to leave out.
    """
    values: dict[str, Any] = {}
    for name, value in logs.items():
        if name in exclude:
            continue
        if isinstance(value, Mapping):
            inner_values = convert_logs(value)
            for inner_name, part in inner_values.items():
                values[f"{name}/{inner_name}"] = part
            continue

        keras_name = _KERAS_LOG_NAMES.get(name, name)
        number = as_scalar(value)
        if number is not None:
            values[keras_name] = number
            continue
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            values[keras_name] = array
    sorted_items = sorted(values.items())
    return dict(sorted_items)


def acts_on_batches(callback: KerasCallback, methods: Sequence[str]) -> bool:
    """Whether a callback has one of the methods and the method does something.

    Args:
      callback: The callback. Its parameters are set.
      methods: TRAIN_BATCH_METHODS or TEST_BATCH_METHODS.
    """
    # A LambdaCallback has them as attributes of the object.
    if any(method in vars(callback) for method in methods):
        return True

    for cls in type(callback).__mro__:
        is_of_keras = is_defined_in_keras(cls)
        if is_of_keras and cls.__name__ == "Callback":
            return False
        if any(method in vars(cls) for method in methods):
            condition = None
            if is_of_keras:
                condition = _CONDITIONS.get(cls.__name__)
            if condition is None or condition(callback):
                return True
    return False
