"""Evaluator: the evaluation half of a Trainer, Orbit's eval step functions for a Task, under any strategy."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.config.schema.optimization import WEIGHTS
from trainer_kit.errors import TrainerKitError, UsageError, suggest_names
from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
from trainer_kit.evals.best.exporter import BestWeightsExporter
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.inputs.sources.tfrecords import explain_read_errors
from trainer_kit.runtime.collectives import resolve_strategy, worker_count
from trainer_kit.runtime.datasets import distribute_dataset
from trainer_kit.runtime.executor import SINGLE_THREADED, use_executor
from trainer_kit.runtime.replica_values import local_tensors
from trainer_kit.runtime.tensorflow_internals import stateless_random_operations
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.checks.batch_spec import explain_batch_errors
from trainer_kit.training.loops.eval_loop import (
    EagerEvalLoop,
    EvalLoop,
    EvaluationHooks,
    SplitEvalLoop,
    StatefulEvalLoop,
    check_evaluated_batches,
    explain_end_of_data,
)
from trainer_kit.training.loops.iterators import StopFlag, batch_counter, is_stopping
from trainer_kit.training.loops.loop_function import control_dependencies_for_writes
from trainer_kit.training.loops.train_loop import TrainLoop
from trainer_kit.training.metric_set import MetricSet, create_validation_metrics, to_numpy
from trainer_kit.training.step_tensors import StepTensors
from trainer_kit.training.task import preserve_task_states
from trainer_kit.training.task_inputs import ValidationSet, ValidationSets

_LOG = logging.getLogger(__name__)


class AsyncWorkers:
    """The workers of asynchronous training, if the strategy uses parameter servers.

    Args:
      strategy: The trainer's strategy.

    Attributes:
      uses_parameter_servers: Whether the strategy uses parameter servers.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self.uses_parameter_servers = isinstance(
            strategy, tf.distribute.experimental.ParameterServerStrategy
        )
        make = tf.distribute.experimental.coordinator.ClusterCoordinator
        self._coordinator = make(strategy) if self.uses_parameter_servers else None

    @property
    def coordinator(self) -> Any:
        """The coordinator of asynchronous training.

        Raises:
          UsageError: when the strategy is synchronous.
        """
        if self._coordinator is None:
            raise UsageError(
                "asynchronous training needs a parameter-server strategy; this trainer was made"
                f" under {type(self._strategy).__name__}; create it in the scope of a"
                " tf.distribute.ParameterServerStrategy"
            )
        return self._coordinator

    def join(self) -> None:
        """Waits for all scheduled steps; returns at once in synchronous training."""
        if self._coordinator is not None:
            self._coordinator.join()

    def create_scheduled_loop(self, loop: TrainLoop) -> Callable[[Any, Any], Any]:
        """Returns `loop_fn(iterator, num_steps)`, which schedules a training loop on a worker.

        Args:
          loop: The loop.

        Raises:
          UsageError: when only single steps are compiled.
        """
        function = (
            loop.loop_function.function
            if loop.is_loop_compiled and loop.loop_function is not None
            else None
        )
        if function is None:
            raise UsageError(
                "asynchronous training needs trainer.train_tf_while_loop=true: workers run whole"
                " loops"
            )
        return lambda iterator, num_steps: self.coordinator.schedule(
            function, args=(iterator, num_steps, tf.constant(True))
        )


class WeightSelector:
    """Replaces the weights by a moving average for an evaluation, and restores the state after it.

    Runs eagerly, on the host.

    Args:
      state: The TrainState of the run.
      average: A MovingAverage, or an object with `swap`, `active_average`, `names` and `evaluated`;
        None: the weights themselves are evaluated.

    Attributes:
      main: What evaluations use: the name of an average, or "weights".
      others: What is evaluated in addition, in order.
    """

    def __init__(self, state: TrainState, average: Any) -> None:
        self._state = state
        self._average = average
        evaluated: tuple[str, ...] = (
            average.weights_to_evaluate if average is not None else (WEIGHTS,)
        )
        self.main = evaluated[0]
        self.others = evaluated[1:]
        self._selected_name = self.main

    @property
    def average_names(self) -> list[str]:
        """The names of all averages."""
        return [] if self._average is None else list(self._average.names)

    def apply_selected_weights(self) -> None:
        """Replaces the weights by the selected average, if it is one."""
        with self._state.variables_lock:
            self._swap_weights(self._selected_name)

    def restore_trained_weights(self) -> None:
        """Restores the weights, and the states that the random generators had before the evaluation."""
        with self._state.variables_lock:
            self._state.restore_generators()
            self._swap_weights(WEIGHTS)

    @contextlib.contextmanager
    def select_weights(self, name: str) -> Iterator[None]:
        """Selects what `apply_selected_weights` uses inside this context; the weights are back after it."""
        self._selected_name = name
        try:
            yield
        finally:
            self._selected_name = self.main
            self.restore_trained_weights()

    @contextlib.contextmanager
    def use_weights(self, name: str = "") -> Iterator[None]:
        """Replaces the weights by an average inside this context; a late save waits meanwhile.

        Args:
          name: The name of an average, or "weights"; "": what evaluations use.

        Raises:
          UsageError: when there is no such average.
        """
        names = [WEIGHTS, *self.average_names]
        if name and name not in names:
            raise UsageError(
                f"the run keeps no average {name!r} of the weights; {suggest_names(name, names)}"
            )
        with self._state.variables_lock:
            self._swap_weights(name or self._selected_name)
            try:
                yield
            finally:
                self.restore_trained_weights()

    def split_metric_name(self, metric: str, sets: Collection[str]) -> tuple[str, str]:
        """Returns the weights of a metric of an evaluation, and its name without theirs.

        Args:
          metric: The metric's name in the logs; nested names are joined by `|`.
          sets: The names of the validation sets; empty for a single one.
        """
        own, bar, rest = (
            metric.partition("|") if metric.partition("|")[0] in sets else ("", "", metric)
        )
        name, _, inner = rest.partition("|")
        return (name, f"{own}{bar}{inner}") if name in self.others else (self.main, metric)

    def _swap_weights(self, name: str) -> None:
        """Gives the model the average of this name, or the weights; each replica has its own values then."""
        self._state.model_replicas.unshare_values()
        held = "" if self._average is None else self._average.active_average
        if self._average is None or held == ("" if name == WEIGHTS else name):
            return
        if held:
            self._average.swap(held)
        if name != WEIGHTS:
            self._average.swap(name)


class EvaluationSteps:
    """The steps of an evaluator over one validation set, as its loops run them; see LoopSteps.

    Args:
      evaluator: The evaluator.
      metrics: The metrics of the validation set.

    Attributes:
      step: The method `eval_step` of the evaluator.
      metrics: The argument of this name.
    """

    def __init__(self, evaluator: Evaluator, metrics: MetricSet) -> None:
        self._evaluator = evaluator
        self.step = evaluator.eval_step
        self.metrics = metrics

    def reset(self) -> None:
        """Resets the metrics; runs eagerly or in graph, in cross-replica context."""
        self.metrics.reset()

    def after_step(self) -> None:
        """Stops all workers at the same batch if one of them was asked to stop."""
        self._evaluator.stop_flag.sync_workers(self._evaluator.evaluated_batches)

    def results(self) -> dict[str, Any]:
        """Returns the results of the metrics; called in cross-replica context."""
        return self.metrics.results()


class Evaluator(BaseTrainer):
    """Evaluates a task over its validation sets. Created in the scope of the strategy.

    Args:
      config: The experiment's config.
      task: The task to evaluate.
      model: The task's model.
      global_step: The global step, an int64 scalar.
      state: The TrainState of the run.
      average: The moving average of the weights, which is evaluated instead of them; None: there is
        none.
      sets: The validation sets.
      metrics: The metrics of evaluations, with the loss; each evaluation resets them first.
      checkpoint_exporter: Exports the best of all evaluations; None: `evaluate` exports nothing.

    Attributes:
      best_checkpoint_class: The class that keeps the best checkpoint of a run.
      validation: The validation sets.
      can_evaluate: Whether the trainer was created to evaluate, or has received validation sets
        since.
      evaluated_batches: An int64 scalar on the host: the batches that this process has evaluated.
      eval_seconds: The seconds of each validation set in the last evaluation, by name.
    """

    best_checkpoint_class: Any = BestWeightsExporter
    _evaluation_hooks: EvaluationHooks | None = None  # None: an evaluation has no parts
    stop_flag: StopFlag

    def __init__(
        self,
        config: Any,
        task: Any,
        model: Any,
        *,
        global_step: tf.Variable,
        state: TrainState,
        average: Any,
        sets: ValidationSets,
        metrics: MetricSet,
        checkpoint_exporter: Any,
    ) -> None:
        self._strategy = tf.distribute.get_strategy()
        self._config = config
        self._task = task
        self._model = model
        self._global_step = global_step
        self.state = state
        self._weights = WeightSelector(state, average)
        self._checkpoint_exporter = checkpoint_exporter
        self.stop_flag = StopFlag(self._strategy)
        self._workers = AsyncWorkers(self._strategy)
        self.evaluated_batches = batch_counter()
        self._validation_metric_set = metrics
        self.eval_tensors = StepTensors("evaluation", config, metrics)
        self.set_validation_sets(sets)

    def set_validation_sets(self, sets: ValidationSets) -> None:
        """Replaces the validation sets; takes effect with the next evaluation."""
        self.validation = sets
        self.can_evaluate = True
        self._results: dict[
            str, Any
        ] = {}  # of the metrics in the last evaluation, by set, as NumPy values
        self._other_logs: dict[
            str, dict[str, Any]
        ] = {}  # by set: those of other weights than the main ones, by name
        self._eval_loops: dict[
            tuple[str, bool], Any
        ] = {}  # one per set, traced with the set's task and metrics
        self.eval_seconds: dict[str, float] = {}

    def set_evaluation_hooks(self, hooks: EvaluationHooks) -> None:
        """Has evaluations run batch by batch, with work on the host between two; called before the first evaluation.

        Args:
          hooks: The object whose methods are called before and after each batch.
        """
        self._evaluation_hooks = hooks

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """The tf.train.Checkpoint with all state of the run."""
        return self.state.checkpoint

    def get_metric_weights_name(self, metric: str) -> str:
        """Returns which weights a metric of an evaluation is of: the name of an average, or "weights"."""
        return self._weights.split_metric_name(
            metric, [name for name in self.validation_set_names if name]
        )[0]

    def use_weights(self, name: str = "") -> AbstractContextManager[None]:
        """Replaces the weights by a moving average, if any, and makes late saves wait; runs eagerly, on the host.

        Args:
          name: "average", "weights" or one of `ema.more_decays`; "": what evaluations use, the
            first of `ema.evaluate`.

        Raises:
          UsageError: when the run keeps no such average.
        """
        return self._weights.use_weights(name)

    @property
    def average_names(self) -> list[str]:
        """The names of the moving averages that the run keeps."""
        return self._weights.average_names

    def write_weights(self, prefix: str, name: str = "") -> None:
        """Writes a checkpoint of weights alone, as the best checkpoint is one.

        Runs eagerly, on the host, on every worker.

        Args:
          prefix: The path of the checkpoint, without suffixes.
          name: Which weights; see `use_weights`.
        """
        if self.can_train:
            self.state.track_attributes(self._get_transient_variables())
        with self.use_weights(name):
            self.state.weights_checkpoint.write(prefix)

    @contextlib.contextmanager
    def use_metric_weights(self, metric: str) -> Iterator[tf.train.Checkpoint]:
        """Gives the checkpoint of the weights that a metric of an evaluation is of, for an exporter of the best ones.

        Runs eagerly, on the host, on every worker. A late save, in another thread, waits meanwhile.
        """
        if self.can_train:
            self.state.track_attributes(self._get_transient_variables())
        with self.use_weights(self.get_metric_weights_name(metric)):
            yield self.state.weights_checkpoint

    def restore_trained_weights(self) -> None:
        """Restores the weights and the states of random generators after an evaluation; any thread may call it."""
        self._weights.restore_trained_weights()

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy in whose scope this trainer was created."""
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
    def global_step(self) -> tf.Variable:
        """The number of training iterations done, an int64 scalar; it does not depend on the number of optimizers."""
        return self._global_step

    def _read_step(self) -> int:
        return int(self.global_step.numpy())

    @property
    def validation_loss(self) -> Any:
        """The metric of the validation loss, a mean over examples."""
        return self._get_metrics(self.validation.current).loss

    @property
    def validation_metrics(self) -> list[Any]:
        """All validation metrics but the loss."""
        return self._get_metrics(self.validation.current).metrics

    @property
    def checkpoint_exporter(self) -> Any:
        """Exports the best of all evaluations; None: `evaluate` exports nothing; the run may do so itself."""
        return self._checkpoint_exporter

    @checkpoint_exporter.setter
    def checkpoint_exporter(self, exporter: Any) -> None:
        self._checkpoint_exporter = exporter

    @property
    def validation_set_names(self) -> tuple[str, ...]:
        """The names of the validation sets; a single set has the name ""."""
        return self.validation.names

    @property
    def eval_dataset(self) -> Any:
        """The validation dataset, created when first needed; with several sets, a dict of datasets by name.

        Setting it, or some of the sets by name, takes effect with the next evaluation.
        """
        return self.validation.dataset

    @eval_dataset.setter
    def eval_dataset(self, dataset: Any) -> None:
        self.validation.replace(dataset)

    def register_state(
        self, name: str, get_state: Callable[[], Any], restore_state: Callable[[Any], None]
    ) -> None:
        """Adds what `get_state` returns, in JSON types, to checkpoints; `restore_state` gets it after a restore."""
        self.state.python_state.add(name, get_state, restore_state)

    def distribute_dataset(self, dataset_or_fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns a dataset distributed over the replicas.

        Args:
          dataset_or_fn: A tf.data.Dataset in global batches, or a function that returns one in
            batches for one replica; the function may have an argument `input_context`.
          *args: Arguments of the function.
          **kwargs: Keyword arguments of the function.
        """
        return distribute_dataset(self._strategy, dataset_or_fn, *args, **kwargs)

    def init_async(self) -> None:
        """Does nothing, as Model Garden's method without parameter servers; raises UsageError with them."""
        resolve_strategy(self._strategy)

    def coordinator_for_async(self) -> Any:
        """Returns the coordinator of asynchronous training.

        Raises:
          UsageError: when the strategy is synchronous.
        """
        return self._workers.coordinator

    def join(self) -> None:
        """Waits for all scheduled steps; returns at once in synchronous training."""
        self._workers.join()

    def validation_intervals(self, default: int | None) -> dict[str, int | None]:
        """Returns the steps between evaluations, by validation set; `default` for sets without an interval."""
        return {one.name: one.interval(default) for one in self.validation}

    def evaluation_batches(self) -> int | None:
        """Returns the number of batches that this process evaluates; None if not known. Safe from any thread."""
        replicas = self._strategy.num_replicas_in_sync // worker_count(self._strategy)
        batches = self.validation.batches(self.config.trainer.validation_steps, replicas)
        return None if batches is None else batches * (1 + len(self._weights.others))

    def validation_metric_names(self) -> list[str] | None:
        """Returns the names of the metrics that `eval_end` returns, nested names joined by `|`.

        It returns None if they are known only after an evaluation: a task aggregates logs by its
        own functions, the metrics have no names yet, or a subclass overrides `eval_end`.
        """
        names: list[str] = []
        for validation_set in self.validation:
            metrics = None
            if not self._aggregates(self._get_task(validation_set)):
                metrics = self._get_metrics(validation_set).names()
            if metrics is None or type(self).eval_end is not Evaluator.eval_end:
                return None
            for weights in ("", *self._weights.others):  # the main ones add no part to a name
                names += [
                    "|".join(filter(None, (validation_set.name, weights, metric)))
                    for metric in metrics
                ]
        return names

    def evaluate(self, num_steps: Any, sets: Sequence[str] | None = None) -> dict[str, Any]:
        """Evaluates and returns the logs of `eval_end`. Runs eagerly, on the host.

        With a `checkpoint_exporter` it exports the best weights, unless a stop was asked for.

        Several validation sets are evaluated one after the other; `trainer.validation_sets` may
        give each its number of batches. If `ema.evaluate` names several weights, each set is
        evaluated with all of them, with the first one last. The trained weights are always put back
        after a moving average has replaced them.

        Args:
          num_steps: The number of batches; -1 for all.
          sets: The names of the validation sets to evaluate; None: all.

        Raises:
          DataError: when there is no data at all.
        """
        self.eval_seconds = {}
        self.eval_tensors.values = {}
        try:
            self.validation.evaluated_names = self.validation.names if sets is None else tuple(sets)
            self._other_logs = (
                self._evaluate_other_weights(num_steps) if self._weights.others else {}
            )
            states = self._evaluate_sets(num_steps)
            logs = dict(self.eval_end(states if self.validation.has_names else states[""]) or {})
            if self._checkpoint_exporter is not None:
                best = BestCheckpoints.from_exporter(self._checkpoint_exporter)
                if not is_stopping(self, lambda: False):  # else it may have been cut short
                    best.export(self, logs, self.validation.evaluated_names)
                best.add_best(self, logs)
            return logs
        finally:
            self.restore_trained_weights()
            for one in self.validation:
                one.data.end_pass()

    def _evaluate_sets(self, num_steps: Any) -> dict[str, Any]:
        """Evaluates each validation set with the selected weights; returns the states by the names of the sets."""
        states = {}
        self._results = {}
        for name in self.validation.evaluated_names:
            start = time.perf_counter()
            validation_set = self.select_validation_set(name)
            state = self.eval_begin()
            with self.state.variables_lock:
                self.state.model_replicas.share_values()
            states[name] = self._evaluate_set(validation_set, num_steps, state)
            self.eval_seconds[name] = self.eval_seconds.get(name, 0.0) + time.perf_counter() - start
        return states

    def _evaluate_other_weights(self, num_steps: Any) -> dict[str, dict[str, Any]]:
        """Evaluates with the weights that `ema.evaluate` names after the first; returns logs by set and by weights.

        The state of the task and of all random generators is then as before. Summaries that
        `reduce_aggregated_logs` writes are left out, since those of the main weights have the same
        names.
        """
        found: dict[str, dict[str, Any]] = {}
        with (
            self.state.preserve_variables(),
            preserve_task_states(map(self._get_task, self.validation)),
        ):
            for weights in self._weights.others:
                with self._weights.select_weights(weights):
                    states = self._evaluate_sets(num_steps)
                    with tf.summary.record_if(
                        False
                    ):  # not around the loops: their graphs are used for all weights
                        for name, state in states.items():
                            found.setdefault(name, {})[weights] = self._compute_set_logs(
                                name, state
                            )
        return found

    def _evaluate_set(self, validation_set: ValidationSet, num_steps: Any, state: Any) -> Any:
        if validation_set.has_own_steps:
            num_steps = tf.constant(validation_set.steps(-1), tf.int32)
        task, metrics = self._get_task(validation_set), self._get_metrics(validation_set)
        validation_set.check_ends(int(num_steps))
        iterator = validation_set.data.iterator(fresh=self.config.trainer.eval_recreate_iterator)
        has_state = state is not None or self._aggregates(task)
        if (validation_set.name, has_state) not in self._eval_loops:
            self._eval_loops[validation_set.name, has_state] = self.create_eval_loop_fn(has_state)
        loop = self._eval_loops[validation_set.name, has_state]
        section = f"task.{validation_set.data.name}"
        described = explain_batch_errors(
            section, lambda: iterator.element_spec, task, self._get_model(validation_set)
        )
        self.state.remember_generators()
        chosen = use_executor(getattr(self.config.runtime, "executor", "default"))
        with (
            explain_end_of_data(section),
            chosen,
            described,
            explain_read_errors(lambda: [validation_set.data.dataset]),
        ):
            if has_state:
                state = loop(iterator, num_steps, state, self.eval_reduce)
            else:
                loop(iterator, num_steps)
        self._workers.join()
        with self.state.variables_lock:
            self.state.restore_generators()
        if validation_set.name not in self._results:  # the loop has not read them
            self._results[validation_set.name] = to_numpy(metrics.results())
        self.eval_tensors.read_values(validation_set.name)
        metrics.reset_returned_metrics()
        return state

    def create_eval_loop_fn(self, has_state: bool) -> Any:
        """Returns the evaluation loop of the current validation set.

        Args:
          has_state: Whether the outputs of the steps are reduced to a state. If so, the loop is
            `loop_fn(iterator, num_steps, state, reduce_fn) -> state`, else `loop_fn(iterator,
            num_steps)`.

        Raises:
          UsageError: when asynchronous training asks for a state.
        """
        if self._workers.uses_parameter_servers and has_state:
            raise UsageError(
                "an evaluation that aggregates logs cannot be asynchronous; use Keras metrics"
                " instead"
            )
        validation_set = self.validation.current
        assert validation_set is not None
        steps = EvaluationSteps(self, self._get_metrics(validation_set))
        stop = self.stop_flag.variable
        options = self.config.trainer
        hooks = self._evaluation_hooks

        if has_state:
            if hooks is not None:
                _LOG.warning(
                    "methods of evaluation batches are not called: the task aggregates the logs of"
                    " an evaluation"
                )
            stateful_loop = StatefulEvalLoop(
                steps,
                stop,
                use_tf_function=options.eval_tf_function,
                use_tf_while_loop=options.eval_tf_while_loop,
                watched=(self, self._get_task(validation_set)),
            )

            def stateful_loop_fn(iterator: Any, num_steps: Any, state: Any, reduce_fn: Any) -> Any:
                done, state = stateful_loop(iterator, num_steps, state, reduce_fn)
                self._check_evaluation_loop(
                    done, num_steps, stateful_loop.newest_graph, steps.metrics
                )
                return state

            return stateful_loop_fn

        loop: EvalLoop | EagerEvalLoop | SplitEvalLoop
        if options.eval_tf_function:
            one_thread = getattr(self.config.runtime, "executor", "default") == SINGLE_THREADED
            loop = EvalLoop(steps, stop, reset_metrics=hooks is None, one_thread=one_thread)
        else:
            loop = EagerEvalLoop(steps, stop, reset_metrics=hooks is None)
        if hooks is not None:
            loop = SplitEvalLoop(loop, hooks, validation_set.data)

        def loop_fn(iterator: Any, num_steps: Any) -> None:
            done, results = loop(iterator, num_steps)
            self._results[validation_set.name] = results
            self._check_evaluation_loop(done, num_steps, loop.newest_graph, steps.metrics)

        return loop_fn

    def _check_evaluation_loop(
        self, done: int, num_steps: Any, graph: tf.Graph | None, metrics: MetricSet
    ) -> None:
        check_evaluated_batches(done, int(num_steps), self.is_stop_requested)
        self.state.check_evaluation(
            graph, [*self._get_transient_variables(), *metrics.returned_variables]
        )

    def eval_begin(self) -> Any:
        """Replaces the weights by the moving average, if there is one; called before each validation set.

        An override may return an initial state, a new one each time.
        """
        self._weights.apply_selected_weights()

    @tf.autograph.experimental.do_not_convert
    def next_eval_inputs(self, iterator: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the next batch for the model, and logs that do not go through the model; runs in graph.

        These logs stay on the host, and are merged with the logs of validation_step for
        `aggregate_logs`.
        """
        return next(iterator), {}

    @tf.autograph.experimental.do_not_convert
    def eval_step(self, iterator: Any) -> dict[str, Any]:
        """Evaluates one element of the iterator on every replica; returns logs as tuples over replicas.

        Runs in graph.
        """
        inputs, passthrough = apply_autograph(self.next_eval_inputs)(iterator)
        # Else, where the size of a batch is known beforehand, metrics may count one more when the
        # data has ended.
        random = stateless_random_operations(
            self.state.random_generator
        )  # put back after the evaluation
        with control_dependencies_for_writes(local_tensors(inputs, self._strategy)), random:
            self.evaluated_batches.assign_add(1)
            outputs = self._strategy.run(self._replica_eval_step, args=(inputs,))
        logs = tf.nest.map_structure(self._strategy.experimental_local_results, outputs)
        if conflicts := ", ".join(sorted(passthrough.keys() & logs.keys())):
            _LOG.warning(
                "the task's logs replace the passed-through logs of the same names: %s", conflicts
            )
        return {**passthrough, **logs}

    @tf.autograph.experimental.do_not_convert
    def _replica_eval_step(self, inputs: Any) -> Mapping[str, Any]:
        one = self.validation.current
        task, model, metrics = self._get_task(one), self._get_model(one), self._get_metrics(one)
        # A subclass may have metrics of its own in place of those that it was made with.
        updated = (
            self.validation_metrics if metrics is self._validation_metric_set else metrics.metrics
        )
        with self.eval_tensors.capture_tensors(model) as tensors:
            logs = apply_autograph(task.validation_step)(inputs, model=model, metrics=updated)
        logs = metrics.extract_metrics(task, logs, model)
        self.eval_tensors.update_metrics(tensors, "" if one is None else one.name)
        if not isinstance(logs, Mapping):
            raise TrainerKitError(
                f"{type(task).__name__}.validation_step has to return a dict of logs; it returned"
                f" {logs!r}"
            )
        reported = logs
        if self._aggregates(task):  # the task reduces the other values itself
            reported = {name: value for name, value in logs.items() if name == task.loss}
        metrics.update(task, reported, inputs)
        return logs

    @tf.autograph.experimental.do_not_convert
    def eval_reduce(self, state: Any = None, step_outputs: Any = None) -> Any:
        """Returns the state of the evaluation with one step's outputs added; state is None for the first step."""
        return apply_autograph(self._get_task(self.validation.current).aggregate_logs)(
            state, step_outputs
        )

    def eval_end(self, aggregated_logs: Any = None) -> dict[str, Any]:
        """Returns the logs of the evaluation. Runs eagerly, on the host.

        Args:
          aggregated_logs: The state that `eval_reduce` returned, if any; with several validation
            sets, a dict by name.
        """
        if self.validation.has_names:
            states = dict(aggregated_logs or {})
            logs = {name: self._with_others(name, states.get(name)) for name in self._results}
        else:
            logs = self._with_others("", aggregated_logs)
        self.restore_trained_weights()
        return logs

    def locate_metric(self, metric: str) -> tuple[list[str], str]:
        """Returns where the logs of an evaluation have a metric: the names of validation set and weights; its own."""
        sets = self.validation.names if self.validation.has_names else ()
        weights, name = self._weights.split_metric_name(metric, sets)
        groups = []
        if sets:
            own, _, name = name.partition("|")
            groups.append(own)
        if weights != self._weights.main:
            groups.append(weights)
        return groups, name

    def _with_others(self, name: str, state: Any) -> dict[str, Any]:
        """Returns the logs of a validation set, with those of other weights than the main ones under their names.

        Raises:
          UsageError: when a metric has the name of weights.
        """
        logs = self._compute_set_logs(name, state)
        others = self._other_logs.get(name, {})
        if taken := ", ".join(sorted(logs.keys() & others.keys())):
            raise UsageError(
                f"the evaluation reports a metric called {taken}, and ema.evaluate has weights of"
                " this name; give the metric, or the average in ema.more_decays, another name"
            )
        return {**logs, **others}

    def _compute_set_logs(self, name: str, state: Any) -> dict[str, Any]:
        """Returns the logs of a validation set: the results of its loop, and the task's metrics of its state."""
        one, results = self.select_validation_set(name), self._results.get(name)
        logs = to_numpy(self._get_metrics(one).results()) if results is None else dict(results)
        if state is not None:
            logs.update(
                self._get_task(one).reduce_aggregated_logs(state, global_step=self.global_step)
            )
        return logs

    def _get_transient_variables(self) -> list[Any]:
        """Returns the variables that steps write and no checkpoint needs, such as those of metrics, which are reset."""
        of_model = [
            variable
            for metric in getattr(self.model, "metrics", None) or []
            for variable in metric.variables
        ]
        metrics = [
            *of_model,
            *self._validation_metric_set.variables(),
            *self.validation.metric_variables(),
        ]
        counters = [*self.stop_flag.variables, self.evaluated_batches]
        return [*metrics, *counters, *self.eval_tensors.value_variables]

    def _evaluation_metrics(self, config: Any, task: Any, model: Any, enabled: bool) -> Any:
        return create_validation_metrics(task, model, config, enabled=enabled)

    def select_validation_set(self, name: str) -> ValidationSet:
        """Makes a validation set the current one, and sets the attribute `validation_set` of its task."""
        one = self.validation.select(name)
        self._get_task(one).validation_set = name
        return one

    def _get_task(self, validation_set: ValidationSet | None) -> Any:
        return (
            self.task
            if validation_set is None or validation_set.task is None
            else validation_set.task
        )

    def _get_model(self, validation_set: ValidationSet | None) -> Any:
        return (
            self.model
            if validation_set is None or validation_set.model is None
            else validation_set.model
        )

    def _get_metrics(self, validation_set: ValidationSet | None) -> MetricSet:
        return (
            self._validation_metric_set
            if validation_set is None or validation_set.metrics is None
            else validation_set.metrics
        )

    def check_aggregation(self) -> None:
        """Raises UsageError when logs are aggregated on several workers: each has those of its own replicas only."""
        for one in self.validation:
            if self._aggregates(task := self._get_task(one)) and worker_count(self._strategy) > 1:
                raise UsageError(
                    f"{type(task).__name__}.aggregate_logs gets only the logs of one worker's"
                    " replicas; on several workers use Keras metrics in build_metrics, which count"
                    " the examples of all workers"
                )

    def _aggregates(self, task: Any) -> bool:
        """Whether the outputs of the steps of a task are reduced to a state."""
        return task.aggregates() or type(self).eval_reduce is not Evaluator.eval_reduce
