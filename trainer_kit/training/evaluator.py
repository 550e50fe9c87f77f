"""Evaluator: the evaluation half of a Trainer.

It has Orbit's eval step functions for a Task, under any strategy. This is the order of the calls in
`Evaluator.evaluate`:

  for each of the weights that `ema.evaluate` names, the first of them last:
    for each validation set:
      eval_begin()                      eagerly; the weights are replaced by their average
      create_eval_loop_fn(has_state)    eagerly, for a new loop function
      loop(iterator, num_steps)         in graph, in cross-replica context
        reset the metrics
        for each step until num_steps, a stop or the end of the data:
          eval_step(iterator)
            next_eval_inputs(iterator)
            task.validation_step(batch) on each replica
          eval_reduce(state, outputs)   only for a task that aggregates logs
        read the results of the metrics
  eval_end(states)                      eagerly; it returns the logs and restores the weights
  export the best weights               if there is a checkpoint_exporter
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState, WeightsAverage
from trainer_kit.config.schema.optimization import WEIGHTS
from trainer_kit.errors import TrainerKitError, UsageError, suggest_names
from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
from trainer_kit.evals.best.exporter import BestWeightsExporter
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.inputs.sources.tfrecords import explain_read_errors
from trainer_kit.runtime import datasets
from trainer_kit.runtime.collectives import resolve_strategy, worker_count
from trainer_kit.runtime.executor import SINGLE_THREADED, use_executor
from trainer_kit.runtime.replica_values import local_tensors
from trainer_kit.runtime.tensorflow_internals import stateless_random_operations
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.checks.batch_spec import explain_batch_errors
from trainer_kit.training.engine_options import EngineOptions
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
from trainer_kit.training.metric_set import MetricSet, to_numpy
from trainer_kit.training.step_tensors import StepTensors
from trainer_kit.training.task import Task, preserve_task_states
from trainer_kit.training.task_inputs import ValidationSet, ValidationSets
from trainer_kit.typing import (
    CheckpointExporter,
    DataIterator,
    Dataset,
    ExperimentLike,
    IntLike,
    Metric,
    Model,
    TaskLike,
    Variable,
)

_LOG = logging.getLogger(__name__)


class Average(WeightsAverage, Protocol):
    """The moving average of the weights: a MovingAverage, or one of another framework.

    Training updates it, evaluations swap it with the weights, and TrainState saves it.
    """

    @property
    def names(self) -> Collection[str]:
        """The names of all averages."""

    @property
    def active_average(self) -> str:
        """The name of the average that the model has instead of the weights. "" if none."""

    @property
    def weights_to_evaluate(self) -> tuple[str, ...]:
        """What evaluations use: names of averages, or "weights". The first are the main ones."""

    def update(self, step: tf.Variable) -> None:
        """Updates the averages after a step. Runs in graph, in cross-replica context.

        Args:
          step: The global step, an int64 scalar.
        """

    def swap(self, name: str) -> None:
        """Exchanges the weights and the average of this name. Runs eagerly, on the host."""


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
        self._coordinator: Any = None
        if self.uses_parameter_servers:
            self._coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)

    @property
    def coordinator(self) -> Any:
        """The coordinator of asynchronous training.

        Raises:
          UsageError: when the strategy is synchronous.
        """
        if self._coordinator is None:
            raise UsageError(
                "asynchronous training needs a parameter-server strategy; "
                f"this trainer was made under {type(self._strategy).__name__}; "
                "create it in the scope of a tf.distribute.ParameterServerStrategy"
            )
        return self._coordinator

    def join(self) -> None:
        """Waits for all scheduled steps. Returns at once in synchronous training."""
        if self._coordinator is not None:
            self._coordinator.join()

    def create_scheduled_loop(self, loop: TrainLoop) -> Callable[[DataIterator, IntLike], Any]:
        """Returns `loop_fn(iterator, num_steps)`, which schedules a training loop on a worker.

        Args:
          loop: The loop.

        Raises:
          UsageError: when only single steps are compiled.
        """
        function = None
        if loop.is_loop_compiled and loop.loop_function is not None:
            function = loop.loop_function.function
        if function is None:
            raise UsageError(
                "asynchronous training needs trainer.train_tf_while_loop=true: "
                "workers run whole loops"
            )

        def schedule(iterator: DataIterator, num_steps: IntLike) -> Any:
            reset_metrics = tf.constant(True)
            return self.coordinator.schedule(function, args=(iterator, num_steps, reset_metrics))

        return schedule


class WeightSelector:
    """Replaces the weights by a moving average for an evaluation, and restores the state after it.

    Runs eagerly, on the host.

    Args:
      state: The TrainState of the run.
      average: The moving average. None: the weights themselves are evaluated.

    Attributes:
      main: What evaluations use: the name of an average, or "weights".
      others: What is evaluated in addition, in order.
    """

    def __init__(self, state: TrainState, average: Average | None) -> None:
        self._state = state
        self._average = average
        evaluated: tuple[str, ...] = (WEIGHTS,)
        if average is not None:
            evaluated = average.weights_to_evaluate
        self.main = evaluated[0]
        self.others = evaluated[1:]
        self._selected_name = self.main

    @property
    def average_names(self) -> list[str]:
        """The names of all averages."""
        if self._average is None:
            return []
        return list(self._average.names)

    def apply_selected_weights(self) -> None:
        """Replaces the weights by the selected average, if it is one."""
        with self._state.variables_lock:
            self._swap_weights(self._selected_name)

    def restore_trained_weights(self) -> None:
        """Restores the weights, and the states of random generators before the evaluation."""
        with self._state.variables_lock:
            self._state.restore_generators()
            self._swap_weights(WEIGHTS)

    @contextlib.contextmanager
    def select_weights(self, name: str) -> Iterator[None]:
        """Selects what `apply_selected_weights` uses inside this context.

        The trained weights are restored at its end.

        Args:
          name: The name of an average, or "weights".
        """
        self._selected_name = name
        try:
            yield
        finally:
            self._selected_name = self.main
            self.restore_trained_weights()

    @contextlib.contextmanager
    def use_weights(self, name: str = "") -> Iterator[None]:
        """Replaces the weights by an average inside this context. A late save waits meanwhile.

        Args:
          name: The name of an average, or "weights". "" means what evaluations use.

        Raises:
          UsageError: when no such average exists.
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
        """Returns the weights of a metric of an evaluation, and its name without the weights.

        Args:
          metric: The metric's name in the logs. Nested names are joined by `|`.
          sets: The names of the validation sets. Empty for a single set.
        """
        first_name, bar, remainder = metric.partition("|")
        if first_name in sets:
            set_prefix = f"{first_name}{bar}"
        else:
            set_prefix = ""
            remainder = metric

        weights_name, _, metric_name = remainder.partition("|")
        if weights_name in self.others:
            return weights_name, f"{set_prefix}{metric_name}"
        return self.main, metric

    def _swap_weights(self, name: str) -> None:
        """Gives the model the average of this name, or the trained weights.

        Each replica has its own values afterwards.
        """
        self._state.model_replicas.unshare_values()
        if self._average is None:
            return

        # No active average: the model has the trained weights.
        active_name = self._average.active_average
        wanted_name = "" if name == WEIGHTS else name
        if active_name == wanted_name:
            return

        # A second swap of the active average restores the trained weights.
        if active_name:
            self._average.swap(active_name)
        if name != WEIGHTS:
            self._average.swap(name)


class EvaluationSteps:
    """The steps of an evaluator over one validation set, as its loops run them.

    It has the methods of LoopSteps.

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
        """Resets the metrics. Runs eagerly or in graph, in cross-replica context."""
        self.metrics.reset()

    def after_step(self) -> None:
        """Stops all workers at the same batch if one of them was asked to stop."""
        self._evaluator.stop_flag.sync_workers(self._evaluator.evaluated_batches)

    def results(self) -> dict[str, Any]:
        """Returns the results of the metrics. Called in cross-replica context."""
        return self.metrics.results()


class Evaluator(BaseTrainer):
    """Evaluates a task over its validation sets. Created in the scope of the strategy.

    The constructor stores its arguments. The subclass then creates the state of the run, and calls
    `_prepare_evaluations` before the first use.

    Args:
      config: The experiment's config.
      task: The task to evaluate.
      model: The task's model.
      checkpoint_exporter: Exports the best of all evaluations. None: `evaluate` exports nothing.

    Attributes:
      best_checkpoint_class: The class that keeps the best checkpoint of a run.
      state: The TrainState of the run. The subclass creates it.
      stop_flag: The StopFlag that training and evaluation loops check before each step.
      validation: The validation sets.
      can_evaluate: Whether the trainer was created to evaluate, or has received validation sets
        since.
      evaluated_batches: An int64 scalar on the host: the batches that this process has evaluated.
      eval_seconds: The seconds of each validation set in the last evaluation, by name.
      eval_tensors: The tensors of evaluation steps that the config asks for by name.
    """

    best_checkpoint_class: Any = BestWeightsExporter
    # None: an evaluation is not split into batches.
    _evaluation_hooks: EvaluationHooks | None = None
    stop_flag: StopFlag

    # The subclass creates these. The step is an int64 scalar. The average is evaluated instead of
    # the weights, if the run keeps one.
    state: TrainState
    _global_step: tf.Variable
    _average: Average | None

    def __init__(
        self,
        config: ExperimentLike,
        task: TaskLike,
        model: Model,
        checkpoint_exporter: CheckpointExporter | None,
    ) -> None:
        self._strategy = tf.distribute.get_strategy()
        self._config = config
        self._options = EngineOptions.from_config(config)
        self._task = task
        self._model = model
        self._checkpoint_exporter = checkpoint_exporter

    def _prepare_evaluations(
        self, sets: ValidationSets, metrics: MetricSet, *, can_evaluate: bool
    ) -> None:
        """Creates the stop flag, the asynchronous workers, and what evaluations use.

        Called once by the constructor of the subclass, when the state of the run exists.

        Args:
          sets: The validation sets.
          metrics: The metrics of evaluations, with the loss. Each evaluation resets them first.
          can_evaluate: Whether the trainer was created to evaluate. If not, it still can after
            `set_validation_sets`.
        """
        self._weights = WeightSelector(self.state, self._average)
        self.stop_flag = StopFlag(self._strategy)
        self._workers = AsyncWorkers(self._strategy)
        self.evaluated_batches = batch_counter()
        self._validation_metric_set = metrics
        self.eval_tensors = StepTensors("evaluation", self._config, metrics)
        self.can_evaluate = can_evaluate
        self._replace_validation_sets(sets)

    def set_validation_sets(self, sets: ValidationSets) -> None:
        """Replaces the validation sets. Takes effect with the next evaluation."""
        self.can_evaluate = True
        self._replace_validation_sets(sets)

    def _replace_validation_sets(self, sets: ValidationSets) -> None:
        """Replaces the validation sets, and drops the loops and results of the earlier ones."""
        self.validation = sets

        # The results of the metrics in the last evaluation, by set, as NumPy values.
        self._results: dict[str, Any] = {}
        # The logs of other weights than the main ones, by set and by name of the weights.
        self._other_logs: dict[str, dict[str, Any]] = {}
        # One loop for each set, traced with the set's task and metrics.
        self._eval_loops: dict[tuple[str, bool], Any] = {}
        self.eval_seconds: dict[str, float] = {}

    def set_evaluation_hooks(self, hooks: EvaluationHooks) -> None:
        """Has evaluations run batch by batch, with work on the host between two batches.

        Called before the first evaluation.

        Args:
          hooks: The object whose methods are called before and after each batch.
        """
        self._evaluation_hooks = hooks

    # ---- Evaluation, in the order of the calls.

    def evaluate(self, num_steps: IntLike, sets: Sequence[str] | None = None) -> dict[str, Any]:
        """Evaluates and returns the logs of `eval_end`. Runs eagerly, on the host.

        With a `checkpoint_exporter` it exports the best weights, unless a stop was requested.

        Several validation sets are evaluated one after the other. `trainer.validation_sets` may
        give each its number of batches. If `ema.evaluate` names several weights, each set is
        evaluated with all of them, with the first one last. The trained weights are always restored
        after a moving average has replaced them.

        Args:
          num_steps: The number of batches. -1 means all.
          sets: The names of the validation sets to evaluate. None means all.

        Raises:
          DataError: when there is no data at all.
        """
        self.eval_seconds = {}
        self.eval_tensors.values = {}
        try:
            evaluated_names = self.validation.names if sets is None else tuple(sets)
            self.validation.evaluated_names = evaluated_names
            self._other_logs = {}
            if self._weights.others:
                self._other_logs = self._evaluate_other_weights(num_steps)

            states = self._evaluate_sets(num_steps)
            aggregated_logs = states if self.validation.has_names else states[""]
            logs = dict(self.eval_end(aggregated_logs) or {})

            if self._checkpoint_exporter is not None:
                best_checkpoints = BestCheckpoints.from_exporter(self._checkpoint_exporter)
                # A stop request may have ended the evaluation before its last batch.
                if not is_stopping(self, lambda: False):
                    best_checkpoints.export(self, logs, self.validation.evaluated_names)
                best_checkpoints.add_best(self, logs)
            return logs
        finally:
            self.restore_trained_weights()
            for validation_set in self.validation:
                validation_set.data.end_pass()

    def _evaluate_sets(self, num_steps: IntLike) -> dict[str, Any]:
        """Evaluates each validation set with the selected weights.

        Returns:
          The states of the evaluations, by the names of the sets.
        """
        states = {}
        self._results = {}

        for name in self.validation.evaluated_names:
            start = time.perf_counter()
            validation_set = self.select_validation_set(name)
            state = self.eval_begin()

            # All replicas evaluate the averages of batch normalization that a checkpoint contains.
            with self.state.variables_lock:
                self.state.model_replicas.share_values()
            states[name] = self._evaluate_set(validation_set, num_steps, state)

            # With several weights, the seconds of a set are those of all its evaluations.
            seconds = time.perf_counter() - start
            self.eval_seconds[name] = self.eval_seconds.get(name, 0.0) + seconds

        return states

    def _evaluate_other_weights(self, num_steps: IntLike) -> dict[str, dict[str, Any]]:
        """Evaluates with the weights that `ema.evaluate` names after the first.

        The state of the task and of all random generators is then as before. Summaries that
        `reduce_aggregated_logs` writes are left out, since those of the main weights have the same
        names.

        Returns:
          The logs by set and by weights.
        """
        logs_by_set: dict[str, dict[str, Any]] = {}
        tasks = map(self._get_task, self.validation)
        with self.state.preserve_variables(), preserve_task_states(tasks):
            for weights in self._weights.others:
                with self._weights.select_weights(weights):
                    states = self._evaluate_sets(num_steps)

                    # Not around the loops: their graphs are used for all weights.
                    with tf.summary.record_if(False):
                        for name, state in states.items():
                            logs = self._compute_set_logs(name, state)
                            logs_by_set.setdefault(name, {})[weights] = logs
        return logs_by_set

    def eval_begin(self) -> Any:
        """Replaces the weights by the moving average, if there is one.

        Called before each validation set. An override may return an initial state, which has to be
        a new one each time.
        """
        self._weights.apply_selected_weights()

    def _evaluate_set(self, validation_set: ValidationSet, num_steps: IntLike, state: Any) -> Any:
        """Runs the loop of a validation set.

        Args:
          validation_set: The set, which is the current one.
          num_steps: The number of batches, unless the set has its own number.
          state: What `eval_begin` returned.

        Returns:
          The state of the evaluation. It is the argument if the outputs of steps are not reduced.
        """
        if validation_set.has_own_steps:
            num_steps = tf.constant(validation_set.steps(-1), tf.int32)
        task = self._get_task(validation_set)
        metrics = self._get_metrics(validation_set)
        validation_set.check_ends(int(num_steps))
        iterator = validation_set.data.iterator(fresh=self.config.trainer.eval_recreate_iterator)

        has_state = state is not None or self._aggregates(task)
        loop_key = (validation_set.name, has_state)
        if loop_key not in self._eval_loops:
            self._eval_loops[loop_key] = self.create_eval_loop_fn(has_state)
        loop = self._eval_loops[loop_key]

        # An evaluation that draws random numbers would change those of later training.
        self.state.remember_generators()
        section = f"task.{validation_set.data.name}"
        model = self._get_model(validation_set)
        with (
            explain_end_of_data(section),
            use_executor(self._options.executor),
            explain_batch_errors(section, lambda: iterator.element_spec, task, model),
            explain_read_errors(lambda: [validation_set.data.dataset]),
        ):
            if has_state:
                state = loop(iterator, num_steps, state, self.eval_reduce)
            else:
                loop(iterator, num_steps)

        # Asynchronous workers may still run steps.
        self._workers.join()
        with self.state.variables_lock:
            self.state.restore_generators()

        # A loop with a state, or one of a subclass, has not read the results.
        if validation_set.name not in self._results:
            self._results[validation_set.name] = to_numpy(metrics.results())
        self.eval_tensors.read_values(validation_set.name)
        # The loop resets its metrics before it knows those that steps return.
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
                "an evaluation that aggregates logs cannot be asynchronous; "
                "use Keras metrics instead"
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
                    "methods of evaluation batches are not called: "
                    "the task aggregates the logs of an evaluation"
                )
            stateful_loop = StatefulEvalLoop(
                steps,
                stop,
                use_tf_function=options.eval_tf_function,
                use_tf_while_loop=options.eval_tf_while_loop,
                watched=(self, self._get_task(validation_set)),
            )

            def stateful_loop_fn(
                iterator: DataIterator,
                num_steps: IntLike,
                state: Any,
                reduce_fn: Callable[[Any, Any], Any],
            ) -> Any:
                done, state = stateful_loop(iterator, num_steps, state, reduce_fn)
                graph = stateful_loop.newest_graph
                self._check_evaluation_loop(done, num_steps, graph, steps.metrics)
                return state

            return stateful_loop_fn

        # With hooks, the split loop calls this loop for each batch, so it may not reset metrics.
        loop: EvalLoop | EagerEvalLoop | SplitEvalLoop
        resets_metrics = hooks is None
        if options.eval_tf_function:
            one_thread = self._options.executor == SINGLE_THREADED
            loop = EvalLoop(steps, stop, reset_metrics=resets_metrics, one_thread=one_thread)
        else:
            loop = EagerEvalLoop(steps, stop, reset_metrics=resets_metrics)
        if hooks is not None:
            loop = SplitEvalLoop(loop, hooks, validation_set.data)

        def loop_fn(iterator: DataIterator, num_steps: IntLike) -> None:
            done, results = loop(iterator, num_steps)
            self._results[validation_set.name] = results
            self._check_evaluation_loop(done, num_steps, loop.newest_graph, steps.metrics)

        return loop_fn

    @tf.autograph.experimental.do_not_convert
    def eval_step(self, iterator: DataIterator) -> dict[str, Any]:
        """Evaluates one element of the iterator on every replica.

        Runs in graph, in cross-replica context.

        Returns:
          The logs, as tuples over replicas.
        """
        inputs, passthrough = apply_autograph(self.next_eval_inputs)(iterator)
        # The generator's state is restored after the evaluation.
        with self._enter_step(inputs):
            self.evaluated_batches.assign_add(1)
            outputs = self._strategy.run(self._replica_eval_step, args=(inputs,))

        logs = tf.nest.map_structure(self._strategy.experimental_local_results, outputs)
        common_names = passthrough.keys() & logs.keys()
        if conflicts := ", ".join(sorted(common_names)):
            _LOG.warning(
                "the task's logs replace the passed-through logs of the same names: %s", conflicts
            )
        return {**passthrough, **logs}

    @tf.autograph.experimental.do_not_convert
    def next_eval_inputs(self, iterator: DataIterator) -> tuple[Any, dict[str, Any]]:
        """Returns the next batch for the model, and logs that do not go through the model.

        Runs in graph. These logs stay on the host, and are merged with the logs of validation_step
        for `aggregate_logs`.
        """
        return next(iterator), {}

    @tf.autograph.experimental.do_not_convert
    def _replica_eval_step(self, inputs: Any) -> Mapping[str, Any]:
        validation_set = self.validation.current
        task = self._get_task(validation_set)
        model = self._get_model(validation_set)
        metrics = self._get_metrics(validation_set)

        # A subclass may have its own metrics in place of those that it was created with.
        task_metrics = metrics.metrics
        if metrics is self._validation_metric_set:
            task_metrics = self.validation_metrics

        with self.eval_tensors.capture_tensors(model) as tensors:
            logs = apply_autograph(task.validation_step)(inputs, model=model, metrics=task_metrics)

        logs = metrics.extract_metrics(task, logs, model)
        set_name = "" if validation_set is None else validation_set.name
        self.eval_tensors.update_metrics(tensors, set_name)
        if not isinstance(logs, Mapping):
            raise TrainerKitError(
                f"{type(task).__name__}.validation_step has to return a dict of logs; "
                f"it returned {logs!r}"
            )

        reported_logs = logs
        if self._aggregates(task):
            # The task reduces the other values itself.
            reported_logs = {name: value for name, value in logs.items() if name == task.loss}
        metrics.update(task, reported_logs, inputs)
        return logs

    @tf.autograph.experimental.do_not_convert
    def eval_reduce(self, state: Any = None, step_outputs: Any = None) -> Any:
        """Returns the state of the evaluation with one step's outputs added.

        Args:
          state: The state before the step. None for the first step.
          step_outputs: What `eval_step` returned.
        """
        task = self._get_task(self.validation.current)
        return apply_autograph(task.aggregate_logs)(state, step_outputs)

    def _check_evaluation_loop(
        self, done: int, num_steps: IntLike, graph: tf.Graph | None, metrics: MetricSet
    ) -> None:
        """Checks after a loop the number of its batches, and what its graph writes."""
        check_evaluated_batches(done, int(num_steps), self.is_stop_requested)
        transient_variables = [*self._get_transient_variables(), *metrics.returned_variables]
        self.state.check_evaluation(graph, transient_variables)

    def eval_end(self, aggregated_logs: Any = None) -> dict[str, Any]:
        """Returns the logs of the evaluation. Runs eagerly, on the host.

        Args:
          aggregated_logs: The state that `eval_reduce` returned, if any. With several validation
            sets, a dict of states by name.

        Raises:
          UsageError: when a metric has the name of weights in ema.evaluate.
        """
        # A single validation set has the name "", and its logs are not nested.
        has_names = self.validation.has_names
        states = {"": aggregated_logs}
        evaluated_names = [""]
        if has_names:
            states = dict(aggregated_logs or {})
            evaluated_names = list(self._results)

        logs_by_set: dict[str, Any] = {}
        for name in evaluated_names:
            logs = self._compute_set_logs(name, states.get(name))
            # The logs of other weights are nested under the names of these weights.
            other_logs = self._other_logs.get(name, {})
            common_names = logs.keys() & other_logs.keys()
            if conflicts := ", ".join(sorted(common_names)):
                raise UsageError(
                    f"the evaluation reports a metric called {conflicts}, "
                    "and ema.evaluate has weights of this name; "
                    "give the metric, or the average in ema.more_decays, another name"
                )
            logs_by_set[name] = {**logs, **other_logs}

        self.restore_trained_weights()
        return logs_by_set if has_names else logs_by_set[""]

    def _compute_set_logs(self, name: str, state: Any) -> dict[str, Any]:
        """Returns the logs of a validation set with one kind of weights.

        They are the results of the set's loop, and the metrics that the task computes from the
        state.
        """
        validation_set = self.select_validation_set(name)
        results = self._results.get(name)
        if results is None:
            results = to_numpy(self._get_metrics(validation_set).results())
        logs = dict(results)

        if state is not None:
            task = self._get_task(validation_set)
            logs.update(task.reduce_aggregated_logs(state, global_step=self.global_step))
        return logs

    # ---- What training and evaluation share.

    @contextlib.contextmanager
    def _enter_step(self, inputs: Any) -> Iterator[None]:
        """A context for a training or evaluation step. Entered in graph, in cross-replica context.

        The step writes variables only after its inputs were read. Without this, where the size of a
        batch is known beforehand, metrics may count one more batch when the data has ended. Random
        operations of the step draw from the generator of the run.
        """
        random = stateless_random_operations(self.state.random_generator)
        with control_dependencies_for_writes(local_tensors(inputs, self._strategy)), random:
            yield

    def _read_step(self) -> int:
        return int(self.global_step.numpy())

    def _get_transient_variables(self) -> list[Variable]:
        """Returns the variables that steps write and no checkpoint needs.

        Those of metrics are an example: each evaluation resets them.
        """
        variables: list[Variable] = []
        for metric in getattr(self.model, "metrics", None) or []:
            variables += metric.variables
        variables += self._validation_metric_set.variables()
        variables += self.validation.metric_variables()
        variables += [*self.stop_flag.variables, self.evaluated_batches]
        variables += self.eval_tensors.value_variables
        return variables

    # ---- The validation sets.

    def select_validation_set(self, name: str) -> ValidationSet:
        """Makes a validation set the current one.

        Sets the attribute `validation_set` of its task to the set's name.
        """
        validation_set = self.validation.select(name)
        self._get_task(validation_set).validation_set = name
        return validation_set

    def _get_task(self, validation_set: ValidationSet | None) -> Any:
        if validation_set is None or validation_set.task is None:
            return self.task
        return validation_set.task

    def _get_model(self, validation_set: ValidationSet | None) -> Any:
        if validation_set is None or validation_set.model is None:
            return self.model
        return validation_set.model

    def _get_metrics(self, validation_set: ValidationSet | None) -> MetricSet:
        if validation_set is None or validation_set.metrics is None:
            return self._validation_metric_set
        return validation_set.metrics

    def _aggregates(self, task: Task) -> bool:
        """Whether the outputs of the steps of a task are reduced to a state."""
        return task.aggregates() or self.custom_parts.overrides_eval_reduce

    def check_aggregation(self) -> None:
        """Checks that no logs are aggregated on several workers.

        Raises:
          UsageError: when logs are aggregated on several workers, because each worker has only the
            logs of its own replicas.
        """
        for validation_set in self.validation:
            task = self._get_task(validation_set)
            if self._aggregates(task) and worker_count(self._strategy) > 1:
                raise UsageError(
                    f"{type(task).__name__}.aggregate_logs gets only the logs of one worker's "
                    "replicas; on several workers use Keras metrics in build_metrics, "
                    "which count the examples of all workers"
                )

    @property
    def validation_set_names(self) -> tuple[str, ...]:
        """The names of the validation sets. A single set has the name ""."""
        return self.validation.names

    @property
    def eval_dataset(self) -> Dataset | dict[str, Dataset]:
        """The validation dataset, created when it is first needed.

        With several sets, it is a dict of datasets by name. Setting it, or some of the sets by
        name, takes effect with the next evaluation.
        """
        return self.validation.dataset

    @eval_dataset.setter
    def eval_dataset(self, dataset: Dataset | Mapping[str, Dataset]) -> None:
        self.validation.replace(dataset)

    def validation_intervals(self, default: int | None) -> dict[str, int | None]:
        """Returns the steps between evaluations, by validation set.

        Args:
          default: The interval of sets without their own.
        """
        intervals = {}
        for validation_set in self.validation:
            intervals[validation_set.name] = validation_set.interval(default)
        return intervals

    def evaluation_batches(self) -> int | None:
        """Returns the number of batches that this process evaluates. None if it is not known.

        Safe from any thread.
        """
        replicas = self._strategy.num_replicas_in_sync // worker_count(self._strategy)
        batches = self.validation.batches(self.config.trainer.validation_steps, replicas)
        if batches is None:
            return None

        # Each set is evaluated once with each of the weights.
        return batches * (1 + len(self._weights.others))

    # ---- The names of metrics.

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
            if metrics is None or self.custom_parts.overrides_eval_end:
                return None

            # A single set and the main weights add no part to a name.
            for weights in ("", *self._weights.others):
                for metric in metrics:
                    parts = filter(None, (validation_set.name, weights, metric))
                    names.append("|".join(parts))
        return names

    def locate_metric(self, metric: str) -> tuple[list[str], str]:
        """Returns where the logs of an evaluation have a metric.

        Args:
          metric: The metric's name in the logs. Nested names are joined by `|`.

        Returns:
          The names of the nested logs, of validation set and weights, and the metric's own name.
        """
        sets = self.validation.names if self.validation.has_names else ()
        weights, name = self._weights.split_metric_name(metric, sets)

        # The logs of the main weights are next to the names of the others, not under a name.
        groups = []
        if sets:
            set_name, _, name = name.partition("|")
            groups.append(set_name)
        if weights != self._weights.main:
            groups.append(weights)
        return groups, name

    def get_metric_weights_name(self, metric: str) -> str:
        """Returns the name of the weights that a metric of an evaluation belongs to.

        It is the name of an average, or "weights".
        """
        set_names = [name for name in self.validation_set_names if name]
        weights_name, _ = self._weights.split_metric_name(metric, set_names)
        return weights_name

    # ---- The weights and their averages.

    @property
    def average_names(self) -> list[str]:
        """The names of the moving averages that the run keeps."""
        return self._weights.average_names

    def use_weights(self, name: str = "") -> AbstractContextManager[None]:
        """Replaces the weights by a moving average, if any, inside this context.

        Late saves wait meanwhile. Runs eagerly, on the host.

        Args:
          name: "average", "weights" or one of `ema.more_decays`. "" means what evaluations use, the
            first of `ema.evaluate`.

        Raises:
          UsageError: when the run keeps no such average.
        """
        return self._weights.use_weights(name)

    @contextlib.contextmanager
    def use_metric_weights(self, metric: str) -> Iterator[tf.train.Checkpoint]:
        """A context with the checkpoint of the weights that a metric of an evaluation belongs to.

        It is for an exporter of the best weights. Runs eagerly, on the host, on every worker. A
        late save, in another thread, waits meanwhile.

        Args:
          metric: The metric's name in the logs. Nested names are joined by `|`.
        """
        if self.can_train:
            self.state.track_attributes(self._get_transient_variables())
        with self.use_weights(self.get_metric_weights_name(metric)):
            yield self.state.weights_checkpoint

    def write_weights(self, prefix: str, name: str = "") -> None:
        """Writes a checkpoint of weights alone, in the form of the best checkpoint.

        Runs eagerly, on the host, on every worker.

        Args:
          prefix: The path of the checkpoint, without suffixes.
          name: Which weights. See `use_weights`.
        """
        if self.can_train:
            self.state.track_attributes(self._get_transient_variables())
        with self.use_weights(name):
            self.state.weights_checkpoint.write(prefix)

    def restore_trained_weights(self) -> None:
        """Restores the weights and the states of random generators after an evaluation.

        Any thread may call it.
        """
        self._weights.restore_trained_weights()

    # ---- What an evaluator consists of.

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
        """The number of training iterations done, an int64 scalar.

        It does not depend on the number of optimizers.
        """
        return self._global_step

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """The tf.train.Checkpoint with all state of the run."""
        return self.state.checkpoint

    @property
    def validation_loss(self) -> Metric:
        """The metric of the validation loss, a mean over examples."""
        return self._get_metrics(self.validation.current).loss

    @property
    def validation_metrics(self) -> list[Metric]:
        """All validation metrics but the loss."""
        return self._get_metrics(self.validation.current).metrics

    @property
    def checkpoint_exporter(self) -> CheckpointExporter | None:
        """Exports the best of all evaluations.

        None: `evaluate` exports nothing. The run may do so itself.
        """
        return self._checkpoint_exporter

    @checkpoint_exporter.setter
    def checkpoint_exporter(self, exporter: CheckpointExporter | None) -> None:
        self._checkpoint_exporter = exporter

    def register_state(
        self, name: str, get_state: Callable[[], object], restore_state: Callable[[Any], None]
    ) -> None:
        """Adds what `get_state` returns to checkpoints.

        Args:
          name: The name of the state.
          get_state: Returns the state, in JSON types.
          restore_state: Called with the state after a restore.
        """
        self.state.python_state.add(name, get_state, restore_state)

    def distribute_dataset(
        self,
        dataset_or_fn: tf.data.Dataset | Callable[..., tf.data.Dataset],
        *args: Any,
        **kwargs: Any,
    ) -> Dataset:
        """Returns a dataset distributed over the replicas.

        Args:
          dataset_or_fn: A tf.data.Dataset in global batches, or a function that returns one in
            batches for one replica. The function may have an argument `input_context`.
          *args: Arguments of the function.
          **kwargs: Keyword arguments of the function.
        """
        return datasets.distribute_dataset(self._strategy, dataset_or_fn, *args, **kwargs)

    # ---- Asynchronous training.

    def init_async(self) -> None:
        """Does nothing, like Model Garden's method without parameter servers.

        Raises:
          UsageError: when the strategy uses parameter servers.
        """
        resolve_strategy(self._strategy)

    def coordinator_for_async(self) -> Any:
        """Returns the coordinator of asynchronous training.

        Raises:
          UsageError: when the strategy is synchronous.
        """
        return self._workers.coordinator

    def join(self) -> None:
        """Waits for all scheduled steps. Returns at once in synchronous training."""
        self._workers.join()
