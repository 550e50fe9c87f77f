"""Trainer: Orbit's train and eval step functions for a Task, under any strategy; the only caller of strategy.run.

The methods keep the names and meanings of TF Model Garden's Trainer. A training loop is one call of one tf.function:
metrics are reset, the steps run, and the results come back in one transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import keras
import orbit
import tensorflow as tf
from orbit.utils import loop_fns

from trainer_kit.async_training import AsyncTraining
from trainer_kit.checkpoints.state import holds_average, training_checkpoint, weights_checkpoint
from trainer_kit.distribution.datasets import distribute_dataset, with_threads
from trainer_kit.distribution.replicas import local_tensors, run_options
from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.feed import Feed, no_batch
from trainer_kit.inputs.source import dataset_at
from trainer_kit.loops import EvalLoop, StatefulEvalLoop, TrainLoop, check_evaluated, stop_variable
from trainer_kit.metrics import MetricSet, model_metrics, to_numpy
from trainer_kit.optimizers.learning_rate import current_learning_rate
from trainer_kit.optimizers.moving_average import MovingAverage, averaged_variables
from trainer_kit.requirements import check_model, check_sections

_LOG = logging.getLogger(__name__)


class Trainer(AsyncTraining, orbit.AbstractTrainer, orbit.AbstractEvaluator):
    """Trains and evaluates a task. To be made in the scope of its strategy.

    Args:
      config: an ExperimentConfig, or anything with the same sections.
      task: what is learned.
      model: of `task.build_model`, its variables built.
      optimizer: of `task.create_optimizer`; a dict of them by name; None if train is False.
      train: whether this trainer will train.
      evaluate: whether this trainer will evaluate.
      train_dataset: used in place of the task's; with replicas, a distributed dataset.
      validation_dataset: the same for evaluation; each evaluation starts it anew.
      checkpoint_exporter: keeps the best checkpoint; has `maybe_export_checkpoint` and `best_ckpt_logs`.

    Raises:
      AttributeError: when the config lacks a section that is needed.
      UsageError: when the model has no variables yet, or XLA is asked for with several replicas.
    """

    def __init__(
        self,
        config: Any,
        task: Any,
        model: Any,
        optimizer: Any,
        train: bool = True,
        evaluate: bool = True,
        train_dataset: Any = None,
        validation_dataset: Any = None,
        checkpoint_exporter: Any = None,
    ) -> None:
        check_sections(config, train and train_dataset is None, evaluate and validation_dataset is None)
        self._strategy = tf.distribute.get_strategy()
        self._config, self._task, self._model, self._optimizer = config, task, model, optimizer
        self._checkpoint_exporter, self._trains, self._evaluates = checkpoint_exporter, train, evaluate
        self._global_step = orbit.utils.create_global_step()
        check_model(model, config.runtime.enable_xla, self._strategy)
        self._build_optimizers()
        self._average = self._moving_average()
        self._checkpoint = training_checkpoint(
            global_step=self._global_step,
            model=model,
            optimizer=optimizer,
            average=self._average.variables if self._average else None,
        )
        self._weights_checkpoint = weights_checkpoint(global_step=self._global_step, model=model)
        own = model_metrics(model)
        self._train_set = MetricSet("training_loss", task.build_metrics(training=True) + own if train else [])
        self._eval_set = MetricSet("validation_loss", task.build_metrics(training=False) + own if evaluate else [])
        self._train_feed = Feed("train_data", self._train_data, train_dataset)
        self._eval_feed = Feed("validation_data", self._validation_data, validation_dataset)
        self._stop = stop_variable()
        self._train_loop: Any = None
        self._eval_loops: dict[bool, Any] = {}
        self._run_options = run_options(config.runtime)
        self._results: dict[str, Any] = {}
        self.data_ended, self.batch_spec = False, None  # the spec of what a replica is trained on, once it was traced
        self.loop_steps: int | None = 0  # done in the last loop; None when only global_step can tell
        self.init_async()

    # ---- what it is made of

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy in whose scope this trainer was made."""
        return self._strategy

    @property
    def config(self) -> Any:
        """The experiment's config."""
        return self._config

    @property
    def task(self) -> Any:
        """The task."""
        return self._task

    @property
    def model(self) -> Any:
        """The model."""
        return self._model

    @property
    def optimizer(self) -> Any:
        """The optimizer, a dict of them, or None."""
        return self._optimizer

    @property
    def global_step(self) -> tf.Variable:
        """int64 scalar: training iterations done, whatever the number of optimizers."""
        return self._global_step

    @property
    def train_loss(self) -> Any:
        """The metric of the training loss, a mean over the loop."""
        return self._train_set.loss

    @property
    def validation_loss(self) -> Any:
        """The metric of the validation loss, a mean over examples."""
        return self._eval_set.loss

    @property
    def train_metrics(self) -> list[Any]:
        """All training metrics but the loss."""
        return self._train_set.metrics

    @property
    def validation_metrics(self) -> list[Any]:
        """All validation metrics but the loss."""
        return self._eval_set.metrics

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """All that a checkpoint of the run holds."""
        return self._checkpoint

    @property
    def checkpoint_exporter(self) -> Any:
        """Keeps the best checkpoint; None if there is none to keep."""
        return self._checkpoint_exporter

    @property
    def train_dataset(self) -> Any:
        """The training data, made when first needed; setting it takes effect with the next loop."""
        return self._train_feed.dataset

    @train_dataset.setter
    def train_dataset(self, dataset: Any) -> None:
        self._train_feed.replace(dataset)

    @property
    def eval_dataset(self) -> Any:
        """The validation data, made when first needed; setting it takes effect with the next evaluation."""
        return self._eval_feed.dataset

    @eval_dataset.setter
    def eval_dataset(self, dataset: Any) -> None:
        self._eval_feed.replace(dataset)

    def check_data(self) -> None:
        """Raises DataError when a dataset that will be used is known to be empty; to be called after the restore."""
        for feed, needed in ((self._train_feed, self._trains), (self._eval_feed, self._evaluates)):
            if needed:
                feed.check_not_empty()

    def initialize(self) -> None:
        """Called when there is no checkpoint to restore: lets the task load its initial weights. Eager, in scope."""
        self.task.initialize(self.model)
        self.after_restore()

    def after_restore(self, path: str | None = None) -> None:
        """Forgets the training iterator, which stands at the position of another step. Called after every restore.

        Args:
          path: of the checkpoint that was restored; when it holds no moving average, that starts from the weights.
        """
        self._train_feed.forget()
        if self._average is not None and (path is None or not holds_average(path)):
            self._average.reset()

    # ---- training

    def distribute_dataset(self, dataset_or_fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns a dataset distributed over the replicas.

        Args:
          dataset_or_fn: a tf.data.Dataset in global batches, or a function that returns one in batches for one
            replica; the function may have an argument `input_context`.
          *args: for the function.
          **kwargs: for the function.
        """
        return self.per_worker(distribute_dataset, dataset_or_fn, *args, **kwargs)

    def train(self, num_steps: Any) -> dict[str, Any]:
        """Runs `num_steps` training steps and returns what `train_loop_end` returns. Eager, on the host.

        `loop_steps` tells how many were done: fewer when a stop was asked for, or the data ended.

        Raises:
          DataError: when there is no data at all.
        """
        self.train_loop_begin()
        iterator = self._train_feed.iterator()
        self._train_loop = self._train_loop or self.create_train_loop_fn()
        self._train_loop(iterator, num_steps)
        return self.train_loop_end()

    def create_train_loop_fn(self) -> Any:
        """Returns `loop_fn(iterator, num_steps)`, which runs the steps; scheduled on a worker if asynchronous."""
        options = self.config.trainer
        loop = TrainLoop(
            self._train_set.reset,
            self.train_step,
            self._train_results,
            self._stop,
            use_tf_function=options.train_tf_function,
            use_tf_while_loop=options.train_tf_while_loop,
        )

        def loop_fn(iterator: Any, num_steps: Any) -> None:
            try:
                self.loop_steps, self._results["train"] = loop(iterator, num_steps)
            except (tf.errors.OutOfRangeError, StopIteration):
                self._end_of_data()

        if self._is_async and loop.whole is None:
            raise UsageError("asynchronous training needs trainer.train_tf_while_loop=true: workers run whole loops")

        def schedule(iterator: Any, num_steps: Any) -> None:
            self.coordinator_for_async().schedule(loop.whole, args=(iterator, num_steps))
            self.loop_steps = None

        return schedule if self._is_async else loop_fn

    def train_loop_begin(self) -> None:
        """Called before each loop, eagerly, and before the iterator is made. Metrics are reset inside the loop."""

    def train_loop_end(self) -> dict[str, Any]:
        """Returns the logs of the loop: metrics, training_loss, learning_rate. Eager, on the host."""
        self.join()
        if "train" not in self._results:
            return dict(to_numpy(self._train_results()))
        return dict(self._results.pop("train"))

    def next_train_inputs(self, iterator: Any) -> Any:
        """Returns the next batch for the model; in graph, on the host. Override to change what the model is fed."""
        return next(iterator)

    def train_step(self, iterator: Any) -> None:
        """Uses one element of the iterator for one step on every replica; in graph."""
        inputs = self.next_train_inputs(iterator)
        with tf.control_dependencies(local_tensors(inputs, self._strategy)):  # no count moves when the data has ended
            self._strategy.run(self._replica_train_step, args=(inputs,), options=self._run_options)
            self._global_step.assign_add(1)
            if self._average is not None:
                self._average.update(self._global_step)

    def _replica_train_step(self, inputs: Any) -> None:
        self.batch_spec = tf.nest.map_structure(tf.type_spec_from_value, inputs)
        step = self.task.train_step
        if self.config.runtime.enable_xla:
            step = tf.function(step, jit_compile=True)
        logs = step(inputs, model=self.model, optimizer=self.optimizer, metrics=self.train_metrics)
        self._train_set.update_loss(logs[self.task.loss])

    # ---- evaluation

    def evaluate(self, num_steps: Any) -> dict[str, Any]:
        """Runs an evaluation over `num_steps` batches, -1 for all, and returns what `eval_end` returns.

        Weights that a moving average replaced come back in any case. Eager, on the host.

        Raises:
          DataError: when there is no data at all.
        """
        try:
            state = self.eval_begin()
            iterator = self._eval_feed.iterator(fresh=self.config.trainer.eval_recreate_iterator)
            has_state = state is not None or self._aggregates()
            if has_state not in self._eval_loops:
                self._eval_loops[has_state] = self.create_eval_loop_fn(has_state)
            loop = self._eval_loops[has_state]
            state = loop(iterator, num_steps, state, self.eval_reduce) if has_state else loop(iterator, num_steps)
            return self.eval_end(state)
        finally:
            self._swap_back()
            self._eval_feed.end_pass()

    def create_eval_loop_fn(self, has_state: bool) -> Any:
        """Returns the evaluation loop.

        Args:
          has_state: whether outputs of the steps are reduced to a state: then it is
            `loop_fn(iterator, num_steps, state, reduce_fn) -> state`, else `loop_fn(iterator, num_steps)`.

        Raises:
          UsageError: for a state in asynchronous training.
        """
        if self._is_async and has_state:
            raise UsageError("an evaluation that aggregates logs cannot be asynchronous; use Keras metrics instead")
        options = self.config.trainer
        in_graph = None
        if options.eval_tf_while_loop and has_state:
            in_graph = loop_fns.create_tf_while_loop_fn_with_state
        by_step = StatefulEvalLoop(
            self._eval_set.reset,
            self.eval_step,
            self._stop,
            use_tf_function=options.eval_tf_function,
            in_graph=in_graph,
        )
        whole = EvalLoop(self._eval_set.reset, self.eval_step, self._eval_set.results, self._stop)

        def stateful_loop_fn(iterator: Any, num_steps: Any, state: Any, reduce_fn: Any) -> Any:
            done, state = by_step(iterator, num_steps, state, reduce_fn)
            check_evaluated(done, int(num_steps), self.stop_requested)
            return state

        def loop_fn(iterator: Any, num_steps: Any) -> None:
            if options.eval_tf_function:
                done, self._results["validation"] = whole(iterator, num_steps)
            else:
                done, _ = by_step(iterator, num_steps, None, lambda state, outputs: None)
            check_evaluated(done, int(num_steps), self.stop_requested)

        return stateful_loop_fn if has_state else loop_fn

    def eval_begin(self) -> Any:
        """Called before an evaluation: swaps in the moving average, if there is one; may return an initial state."""
        if self._average is not None and not self._average.swapped:
            self._average.swap()

    def next_eval_inputs(self, iterator: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the next batch for the model and logs that stay on the host, beside the model's; in graph.

        The logs do not reach the model; they are merged with its outputs for `aggregate_logs`.
        """
        return next(iterator), {}

    def eval_step(self, iterator: Any) -> dict[str, Any]:
        """Evaluates one element of the iterator on every replica; returns tuples of each replica's logs; in graph."""
        inputs, passthrough = self.next_eval_inputs(iterator)
        outputs = self._strategy.run(self._replica_eval_step, args=(inputs,))
        logs = tf.nest.map_structure(self._strategy.experimental_local_results, outputs)
        if conflicts := ", ".join(sorted(passthrough.keys() & logs.keys())):
            _LOG.warning("the task's logs replace the passed-through logs of the same names: %s", conflicts)
        return {**passthrough, **logs}

    def _replica_eval_step(self, inputs: Any) -> dict[str, Any]:
        logs = self.task.validation_step(inputs, model=self.model, metrics=self.validation_metrics)
        if self.task.loss in logs:
            self._eval_set.update_loss(logs[self.task.loss], inputs)
        return logs

    def eval_reduce(self, state: Any = None, step_outputs: Any = None) -> Any:
        """Returns the state of the evaluation with one step's outputs added; state is None at the first."""
        return self.task.aggregate_logs(state, step_outputs)

    def eval_end(self, aggregated_logs: Any = None) -> dict[str, Any]:
        """Returns the logs of the evaluation and keeps the best checkpoint. Eager, on the host.

        Args:
          aggregated_logs: the state that `eval_reduce` made, if any.
        """
        self.join()
        results = self._results.pop("validation", None)
        logs = to_numpy(self._eval_set.results()) if results is None else results
        if aggregated_logs is not None:
            logs.update(self.task.reduce_aggregated_logs(aggregated_logs, global_step=self.global_step))
        if self._checkpoint_exporter and not self.stop_requested:
            self._checkpoint_exporter.maybe_export_checkpoint(
                self._weights_checkpoint, logs, int(self.global_step.numpy())
            )
            best = self._checkpoint_exporter.best_ckpt_logs
            name = self.config.trainer.best_checkpoint_eval_metric
            if best is not None:
                logs[f"best_{name}"] = best[name]
        self._swap_back()
        return logs

    def validation_metric_names(self) -> list[str] | None:
        """Returns the names that `eval_end` will report, nested ones joined by `|`; None if only a run can tell."""
        if type(self).eval_end is not Trainer.eval_end or self._aggregates():
            return None
        return self._eval_set.names()

    # ---- stopping

    def request_stop(self) -> None:
        """Ends the running loop before its next step; safe from another thread."""
        self._stop.assign(True)

    def clear_stop(self) -> None:
        """Lets loops run again after `request_stop`."""
        self._stop.assign(False)

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was asked for."""
        return bool(self._stop.numpy())

    # ---- how it is done

    def _build_optimizers(self) -> None:
        optimizers = self._optimizer.values() if isinstance(self._optimizer, Mapping) else [self._optimizer]
        for optimizer in optimizers:
            if isinstance(optimizer, keras.Optimizer) and not optimizer.built:
                optimizer.build(self._model.trainable_variables)

    def _moving_average(self) -> MovingAverage | None:
        config = self._config.trainer.optimizer_config.ema
        return MovingAverage(averaged_variables(self._model, config), config) if config is not None else None

    def _train_data(self) -> Any:
        """Returns the task's training data, distributed, from the run's position on."""
        return self._task_data(self.config.task.train_data, int(self._global_step.numpy()))

    def _validation_data(self) -> Any:
        return self._task_data(self.config.task.validation_data, 0)

    def _task_data(self, params: Any, position: int) -> Any:
        def dataset_fn(input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
            dataset = dataset_at(self.task.build_inputs, params, position, input_context)
            return with_threads(dataset, self.config.runtime)

        return self.distribute_dataset(dataset_fn)

    def _train_results(self) -> dict[str, Any]:
        return {**self._train_set.results(), "learning_rate": current_learning_rate(self._optimizer)}

    def _end_of_data(self) -> None:
        """The data ended inside a loop: what was done is done, and only global_step tells how much."""
        self.loop_steps, self.data_ended = None, True
        self._train_feed.forget()
        if int(self._global_step.numpy()) == 0:
            raise DataError(no_batch("train_data"))

    def _aggregates(self) -> bool:
        return self.task.aggregates() or type(self).eval_reduce is not Trainer.eval_reduce

    def _swap_back(self) -> None:
        if self._average is not None and self._average.swapped:
            self._average.swap()
