"""KerasBatches: calls the methods of Keras callbacks around batches, in training and in evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.callbacks.base import Run
from trainer_kit.runtime.keras_internals import (
    of_keras_2,
    set_batch_counter,
    steps_per_execution,
    traces_batches,
)
from trainer_kit.runtime.tensorflow_internals import SummaryState
from trainer_kit.training.loops.intervals import next_multiple

TRAIN_BATCHES = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
TEST_BATCHES = ("on_test_batch_begin", "on_test_batch_end")

# Classes of Keras that always have methods of batches, with the condition under which these act.
_CONDITIONS: dict[str, Callable[[Any], bool]] = {
    "ModelCheckpoint": lambda callback: callback.save_freq != "epoch",
    "TensorBoard": lambda callback: callback.update_freq != "epoch" or traces_batches(callback),
    "ProgbarLogger": lambda callback: callback.verbose == 1,
}


class KerasBatches:
    """Calls the methods around batches once for each execution, of `compile(steps_per_execution=n)`.

    Batches count from 0 in each epoch and in each evaluation. An execution begins with the number
    of its first batch and ends with that of its last one. In Keras 3 the last execution of an
    epoch ends as if it were a full one. Loops are split only if a callback has such methods. Runs
    eagerly, on the host.

    Args:
      run: The run, whose model is compiled.
      callbacks: All callbacks of Keras, with their parameters.
      summaries: The state of summaries that callbacks change.
      train_logs: A function of the logs of the epoch so far that returns those of Keras.
      test_logs: The same for the results of an evaluation so far.

    Attributes:
      begun: The step of a training execution that has begun and done nothing yet; None if there is
        none. A run that SIGTERM stops there resumes without beginning it twice.
    """

    def __init__(
        self,
        run: Run,
        callbacks: Sequence[Any],
        summaries: SummaryState,
        train_logs: Callable[[Any], dict[str, Any]],
        test_logs: Callable[[Any], dict[str, Any]],
    ) -> None:
        self.begun: int | None = None
        self._run = run
        self._model = run.model
        self._summaries = summaries
        self._steps = steps_per_execution(run.model)
        self._ends_full = not of_keras_2(run.model)
        self._train_logs = train_logs
        self._test_logs = test_logs
        self._train = [one for one in callbacks if acts_on_batches(one, TRAIN_BATCHES)]
        self._test = [one for one in callbacks if acts_on_batches(one, TEST_BATCHES)]
        if self._train and run.epochs is not None:
            self._epochs = run.epochs
            run.trainer.split_training(self._next_end, self._begin_train, self._end_train)
        if self._test:
            run.trainer.split_evaluations(self._steps, self._begin_test, self._end_test)

    def _next_end(self, step: int) -> int:
        epoch = self._epochs.ended(step)
        begin = self._epochs.end(epoch)
        return min(begin + next_multiple(step - begin, self._steps), self._epochs.end(epoch + 1))

    def _begin_train(self, step: int) -> None:
        batch = step - self._epochs.end(self._epochs.ended(step))
        if batch % self._steps == 0 and self.begun != step:
            self._call(self._train, "on_train_batch_begin", batch, {})
            self.begun = step

    def _end_train(self, step: int, logs: Mapping[str, Any]) -> bool:
        _, done = self._epochs.place(step)
        self.begun = None
        if done % self._steps == 0 or self._epochs.is_end(step):
            set_batch_counter(self._model, step, training=True)
            self._call(self._train, "on_train_batch_end", self._last(done - 1), self._train_logs(logs))
        if self._model.stop_training:
            self._run.stop(f"a Keras callback has set model.stop_training at step {step}")
        return not self._run.requests.stop

    def _begin_test(self, batch: int) -> None:
        self._call(self._test, "on_test_batch_begin", batch, {})

    def _end_test(self, batch: int, results: Mapping[str, Any]) -> bool:
        set_batch_counter(self._model, batch + 1, training=False)
        self._call(self._test, "on_test_batch_end", self._last(batch), self._test_logs(results))
        return not getattr(self._model, "stop_evaluating", False)

    def _last(self, batch: int) -> int:
        """Returns the number with which an execution ends whose last batch has the number `batch`."""
        return batch - batch % self._steps + self._steps - 1 if self._ends_full else batch

    def _call(self, callbacks: Sequence[Any], method: str, batch: int, logs: dict[str, Any]) -> None:
        with self._summaries.in_use():
            for callback in callbacks:
                try:
                    getattr(callback, method)(batch, logs)
                except (StopIteration, tf.errors.OutOfRangeError) as error:
                    # A training loop would take them for the end of its data.
                    raise RuntimeError(f"{type(callback).__name__}.{method} raised {error!r}") from error


def acts_on_batches(callback: Any, methods: Sequence[str]) -> bool:
    """Whether a callback has one of the methods, in its class or as an attribute, and it does something.

    Args:
      callback: The callback; its parameters are set.
      methods: TRAIN_BATCHES or TEST_BATCHES.
    """
    if any(method in vars(callback) for method in methods):  # of a LambdaCallback
        return True
    for kind in type(callback).__mro__:
        of_keras = _is_of_keras(kind)
        if of_keras and kind.__name__ == "Callback":
            return False
        if any(method in vars(kind) for method in methods):
            condition = _CONDITIONS.get(kind.__name__) if of_keras else None
            if condition is None or condition(callback):
                return True
    return False


def is_stock(callback: Any, name: str) -> bool:
    """Whether a callback is of the class of Keras with this name, or of a subclass."""
    return any(kind.__name__ == name and _is_of_keras(kind) for kind in type(callback).__mro__)


def _is_of_keras(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("keras", "tf_keras")
