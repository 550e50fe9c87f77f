"""KerasBatches: calls the methods of Keras callbacks around batches, in training and in evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.callbacks.base import Run
from trainer_kit.callbacks.keras_hooks import TEST_BATCHES, TRAIN_BATCHES, acts_on_batches
from trainer_kit.distribution.keras_internals import of_keras_2, set_batch_counter, steps_per_execution
from trainer_kit.distribution.tensorflow_internals import SummaryState
from trainer_kit.training.loops.intervals import next_multiple
from trainer_kit.training.loops.split_eval_loop import EvaluationHooks
from trainer_kit.training.loops.split_loop import TrainingHooks

Logs = Callable[[Any], dict[str, Any]]


class KerasBatches:
    """Calls the methods around batches once for each execution: `compile(steps_per_execution=n)` makes it n batches.

    Batches count from 0 in each epoch and in each evaluation. An execution begins with the number of its first batch
    and ends with that of its last one; in Keras 3 the last execution of an epoch ends as if it were a full one. Only
    callbacks that have such methods are called. Runs eagerly, on the host.

    Args:
      callbacks: All callbacks of Keras, with their parameters.
      model: The model.
      summaries: The state of summaries that callbacks change.

    Attributes:
      train: The callbacks that have methods around training batches.
      test: The callbacks that have methods around evaluation batches.
      begun: The step of a training execution that was begun and has done nothing yet; None if there is none. A run that
        SIGTERM stops there resumes without beginning it twice.
    """

    def __init__(self, callbacks: Sequence[Any], model: Any, summaries: SummaryState) -> None:
        self.train = [one for one in callbacks if acts_on_batches(one, TRAIN_BATCHES)]
        self.test = [one for one in callbacks if acts_on_batches(one, TEST_BATCHES)]
        self._model, self._steps, self._summaries = model, steps_per_execution(model), summaries
        self._ends_full = not of_keras_2(model)
        self.begun: int | None = None

    def training_hooks(self, run: Run, logs: Logs) -> TrainingHooks | None:
        """Returns the functions to call around the executions of training loops; None if no callback asks for it.

        A callback that stops the training ends the run at that step.

        Args:
          run: The run.
          logs: A function of the results of the epoch so far that returns them as numbers under the names of Keras.
        """
        epochs = run.epochs
        if not self.train or epochs is None:
            return None

        def next_end(step: int) -> int:
            begin = epochs.end(epochs.ended(step))
            return min(begin + next_multiple(step - begin, self._steps), epochs.end(epochs.ended(step) + 1))

        def begin(step: int) -> None:
            batch = step - epochs.end(epochs.ended(step))
            if batch % self._steps == 0 and self.begun != step:
                self._call(self.train, "on_train_batch_begin", batch, {})
                self.begun = step

        def end(step: int, results: Any) -> bool:
            _, done = epochs.place(step)
            self.begun = None
            if done % self._steps == 0 or epochs.is_end(step):
                set_batch_counter(self._model, step, training=True)
                self._call(self.train, "on_train_batch_end", self._last(done - 1), logs(results))
            if self._model.stop_training:
                run.stop(f"a Keras callback has set model.stop_training at step {step}")
            return not run.requests.stop

        return TrainingHooks(next_end, begin, end)

    def evaluation_hooks(self, logs: Logs) -> EvaluationHooks | None:
        """Returns the functions to call around the executions of an evaluation; None if no callback asks for it.

        Args:
          logs: A function of the results so far that returns them as numbers under the names of Keras.
        """
        if not self.test:
            return None

        def end(batch: int, results: Any) -> bool:
            set_batch_counter(self._model, batch + 1, training=False)
            self._call(self.test, "on_test_batch_end", self._last(batch), logs(results))
            return not getattr(self._model, "stop_evaluating", False)

        return EvaluationHooks(self._steps, lambda batch: self._call(self.test, "on_test_batch_begin", batch, {}), end)

    def _last(self, batch: int) -> int:
        """Returns the number with which an execution ends whose last batch has the number `batch`."""
        return batch - batch % self._steps + self._steps - 1 if self._ends_full else batch

    def _call(self, callbacks: Sequence[Any], method: str, batch: int, logs: dict[str, float]) -> None:
        with self._summaries.in_use():
            for one in callbacks:
                try:
                    getattr(one, method)(batch, logs)
                except (StopIteration, tf.errors.OutOfRangeError) as error:  # a loop takes them for the end of its data
                    raise RuntimeError(f"{type(one).__name__}.{method} raised {error!r}") from error
