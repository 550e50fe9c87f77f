"""Evaluator: the evaluation half of a Trainer, Orbit's eval step functions for a Task, under any strategy."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.distribution.executor import executor
from trainer_kit.distribution.replicas import local_tensors
from trainer_kit.distribution.workers import worker_count
from trainer_kit.errors import TrainerKitError, UsageError
from trainer_kit.evals.best.exporter import BestCheckpoint
from trainer_kit.inputs.autograph import converted
from trainer_kit.inputs.dataset_iterator import DatasetIterator
from trainer_kit.inputs.records import damage_told
from trainer_kit.training.async_workers import AsyncWorkers
from trainer_kit.training.driven_trainer import DrivenTrainer
from trainer_kit.training.first_batch import batch_described
from trainer_kit.training.loops.batch_first import writes_after
from trainer_kit.training.loops.eval_loop import EvalLoop, StatefulEvalLoop, check_evaluated
from trainer_kit.training.loops.host_variables import batch_counter
from trainer_kit.training.metrics import MetricSet, to_numpy
from trainer_kit.training.stop_flag import StopFlag

_LOG = logging.getLogger(__name__)


class Evaluator(DrivenTrainer):
    """What a Trainer evaluates with; to be inherited from, with the attributes below.

    Attributes:
      state: the TrainState.
      evaluated_batches: int64 scalar, on the host: batches evaluated by this process.
      best_checkpoint: the class that keeps the best of a run.
    """

    best_checkpoint: Any = BestCheckpoint
    config: Any
    task: Any
    model: Any
    state: TrainState
    _strategy: tf.distribute.Strategy
    _global_step: tf.Variable
    _average: Any  # a MovingAverage, or what is used like one; None
    _checkpoint_exporter: Any
    stop_flag: StopFlag
    _workers: AsyncWorkers
    _results: SimpleNamespace

    def init_evaluation(self, metrics: Sequence[Any], feeds: Mapping[str, DatasetIterator]) -> None:
        """Sets what evaluations are made of; in scope.

        Args:
          metrics: beside the loss.
          feeds: of the validation sets by name; a single one is called "".
        """
        self._eval_set, self._eval_feeds = MetricSet("validation_loss", metrics, exact=True), dict(feeds)
        self._eval_loops: dict[tuple[str, bool], Any] = {}  # each set has its own, traced with the set's name
        self._set_results: dict[str, Any] = {}
        # Of the last loops. No dict: TensorFlow would track what is put into one, at half a millisecond for each loop.
        self._results = SimpleNamespace(train=None, validation=None)
        self._evaluated_sets = tuple(feeds)  # by the last evaluation, or the one under way
        self.eval_seconds: dict[str, float] = {}
        self.evaluated_batches = batch_counter()
        self._weights_in_use = threading.RLock()  # a late save, in another thread, puts them back too

    @property
    def validation_loss(self) -> Any:
        """The metric of the validation loss, a mean over examples."""
        return self._eval_set.loss

    @property
    def validation_metrics(self) -> list[Any]:
        """All validation metrics but the loss."""
        return self._eval_set.metrics

    @property
    def evaluated_task(self) -> Any:
        """The task whose steps evaluate the validation set that is looked at."""
        return self.task

    @property
    def evaluated_model(self) -> Any:
        """The model, or the part of it, that they evaluate."""
        return self.model

    @property
    def evaluated_metrics(self) -> list[Any]:
        """The metrics that they update."""
        return self.validation_metrics

    @property
    def checkpoint_exporter(self) -> Any:
        """Keeps the best checkpoint; None if there is none to keep."""
        return self._checkpoint_exporter

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """The names of the validation sets; a single one is called ""."""
        return tuple(self._eval_feeds)

    @property
    def eval_dataset(self) -> Any:
        """The validation data, made when first needed, or a dict of it by name, if there are several sets.

        Setting it, or some sets of it by name, takes effect with the next evaluation.
        """
        datasets = {name: feed.dataset for name, feed in self._eval_feeds.items()}
        return datasets if self.has_validation_sets else datasets[""]

    @eval_dataset.setter
    def eval_dataset(self, dataset: Any) -> None:
        for name, one in dataset.items() if self.has_validation_sets else [("", dataset)]:
            self._eval_feeds[name].replace(one)

    def validation_intervals(self, default: int | None) -> dict[str, int | None]:
        """Returns the steps between evaluations of each validation set; `default` where the config names none."""
        own = {name: self._own_options(name) for name in self.validation_sets}
        return {name: default if one is None or one.interval is None else one.interval for name, one in own.items()}

    @property
    def has_validation_sets(self) -> bool:
        """Whether validation sets have names; logs are nested by them then."""
        return "" not in self._eval_feeds

    def evaluate(self, num_steps: Any, sets: Sequence[str] | None = None) -> dict[str, Any]:
        """Runs an evaluation over `num_steps` batches, -1 for all, and returns what `eval_end` returns.

        Several validation sets are evaluated in turn, each over as many batches as `trainer.validation_sets` says of
        it, if it does. Weights that a moving average replaced come back in any case. Eager, on the host.

        Args:
          num_steps: batches.
          sets: names of the validation sets to evaluate; None: all.

        Raises:
          DataError: when there is no data at all.
        """
        self.eval_seconds, self._set_results = {}, {}
        self.before_evaluation()
        try:
            states = {}
            self._evaluated_sets = self.validation_sets if sets is None else tuple(sets)
            for name in self._evaluated_sets:
                start = time.perf_counter()
                states[name] = self._evaluate_set(name, num_steps, self.eval_begin())
                self.eval_seconds[name] = time.perf_counter() - start
            logs = self.eval_end(states if self.has_validation_sets else states[""])
            self.report_evaluated_state()
            return logs
        finally:
            self.end_averaging()
            self.forget_python_state()
            for feed in self._eval_feeds.values():
                feed.end_pass()

    def _evaluate_set(self, name: str, num_steps: Any, state: Any) -> Any:
        self._turn_to(name)
        if (own := self._own_options(name)) is not None and own.steps is not None:
            num_steps = tf.constant(own.steps, tf.int32)
        self.check_validation_ends(name, int(num_steps))
        iterator = self._eval_feeds[name].iterator(fresh=self.config.trainer.eval_recreate_iterator)
        has_state = state is not None or self._aggregates()
        if (name, has_state) not in self._eval_loops:
            self._eval_loops[name, has_state] = self.create_eval_loop_fn(has_state)
        loop = self._eval_loops[name, has_state]
        section, of_task = f"task.validation_data.{name}".rstrip("."), (self.evaluated_task, self.evaluated_model)
        described = batch_described(section, lambda: iterator.element_spec, *of_task)
        self.state.remember_generators()
        with executor(self.config.runtime), described, damage_told(lambda: [self._eval_feeds[name].dataset]):
            if has_state:
                state = loop(iterator, num_steps, state, self.eval_reduce)
            else:
                loop(iterator, num_steps)
        self._workers.join()
        with self._weights_in_use:
            self.state.put_generators_back()
        results, self._results.validation = self._results.validation, None
        self._set_results[name] = to_numpy(self._eval_set.results()) if results is None else results
        return state

    def check_validation_data(self) -> None:
        """Raises DataError when a validation set is known to be empty, or not to end where all of it is evaluated."""
        for name, feed in self._eval_feeds.items():
            feed.check_not_empty()
            self.check_validation_ends(name, self.config.trainer.validation_steps)

    def check_validation_ends(self, name: str, num_steps: int) -> None:
        """Raises DataError when all of a validation set is to be evaluated, and it is known to be endless.

        Args:
          name: of the set.
          num_steps: batches that are to be evaluated where the set has no number of its own; -1: all.
        """
        own = self._own_options(name)
        has_own = own is not None and own.steps is not None
        if (own.steps if has_own else num_steps) < 0:
            field = f"validation_sets.{name}.steps" if has_own else "validation_steps"
            self._eval_feeds[name].check_ends(f"trainer.{field}")

    def evaluation_batches(self) -> int | None:
        """Returns how many batches this process has in an evaluation, if that is known; from any thread, any time."""
        found = [self._batches_of(name) for name in self._evaluated_sets]
        return None if None in found else sum(batches for batches in found if batches is not None)

    def _batches_of(self, name: str) -> int | None:
        own, known = self._own_options(name), self._eval_feeds[name].cardinality()
        steps = self.config.trainer.validation_steps if own is None or own.steps is None else own.steps
        if known is None:
            return steps if steps > 0 else None
        here = self._strategy.num_replicas_in_sync // worker_count(self._strategy)
        batches = -(-known // here)
        return min(steps, batches) if steps > 0 else batches

    def create_eval_loop_fn(self, has_state: bool) -> Any:
        """Returns the evaluation loop.

        Args:
          has_state: whether outputs of the steps are reduced to a state: then it is
            `loop_fn(iterator, num_steps, state, reduce_fn) -> state`, else `loop_fn(iterator, num_steps)`.

        Raises:
          UsageError: for a state in asynchronous training.
        """
        if self._workers.are_there and has_state:
            raise UsageError("an evaluation that aggregates logs cannot be asynchronous; use Keras metrics instead")
        options = self.config.trainer

        @tf.autograph.experimental.do_not_convert
        def step(iterator: Any) -> Any:
            logs = converted(self.eval_step)(iterator)
            self.stop_flag.agree(self.evaluated_batches)
            return logs

        by_step = StatefulEvalLoop(
            self._eval_set.reset,
            step,
            self.stop_flag.variable,
            use_tf_function=options.eval_tf_function,
            in_graph=options.eval_tf_while_loop and has_state,
            watched=(self, self.evaluated_task),
        )
        whole = EvalLoop(self._eval_set.reset, step, self._eval_set.results, self.stop_flag.variable)

        def stateful_loop_fn(iterator: Any, num_steps: Any, state: Any, reduce_fn: Any) -> Any:
            done, state = by_step(iterator, num_steps, state, reduce_fn)
            check_evaluated(done, int(num_steps), self.stop_requested)
            self.look_into_evaluation(by_step.newest_graph)
            return state

        def loop_fn(iterator: Any, num_steps: Any) -> None:
            if options.eval_tf_function:
                done, self._results.validation = whole(iterator, num_steps)
            else:
                done, _ = by_step(iterator, num_steps, None, lambda state, outputs: None)
            check_evaluated(done, int(num_steps), self.stop_requested)
            self.look_into_evaluation((whole if options.eval_tf_function else by_step).newest_graph)

        return stateful_loop_fn if has_state else loop_fn

    def eval_begin(self) -> Any:
        """Called before each validation set: swaps in the moving average, if there is one.

        May return an initial state, a new one each time.
        """
        with self._weights_in_use:
            if self._average is not None and not self._average.swapped:
                self._average.swap()

    @tf.autograph.experimental.do_not_convert
    def next_eval_inputs(self, iterator: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the next batch for the model and logs that stay on the host, beside the model's; in graph.

        The logs do not reach the model; they are merged with its outputs for `aggregate_logs`.
        """
        return next(iterator), {}

    @tf.autograph.experimental.do_not_convert
    def eval_step(self, iterator: Any) -> dict[str, Any]:
        """Evaluates one element of the iterator on every replica; returns tuples of each replica's logs; in graph."""
        inputs, passthrough = converted(self.next_eval_inputs)(iterator)
        # Else, where the size of a batch is known beforehand, metrics may count one more when the data has ended.
        with writes_after(local_tensors(inputs, self._strategy)):
            self.evaluated_batches.assign_add(1)
            outputs = self._strategy.run(self._replica_eval_step, args=(inputs,))
        logs = tf.nest.map_structure(self._strategy.experimental_local_results, outputs)
        if conflicts := ", ".join(sorted(passthrough.keys() & logs.keys())):
            _LOG.warning("the task's logs replace the passed-through logs of the same names: %s", conflicts)
        return {**passthrough, **logs}

    @tf.autograph.experimental.do_not_convert
    def _replica_eval_step(self, inputs: Any) -> Mapping[str, Any]:
        task = self.evaluated_task
        logs = converted(task.validation_step)(inputs, model=self.evaluated_model, metrics=self.evaluated_metrics)
        if not isinstance(logs, Mapping):
            raise TrainerKitError(
                f"{type(task).__name__}.validation_step has to return a dict of logs; it returned {logs!r}"
            )
        if task.loss in logs:
            self._eval_set.update_loss(logs[task.loss], inputs)
        return logs

    @tf.autograph.experimental.do_not_convert
    def eval_reduce(self, state: Any = None, step_outputs: Any = None) -> Any:
        """Returns the state of the evaluation with one step's outputs added; state is None at the first."""
        return converted(self.evaluated_task.aggregate_logs)(state, step_outputs)

    def eval_end(self, aggregated_logs: Any = None) -> dict[str, Any]:
        """Returns the logs of the evaluation; keeps the best checkpoint unless the run does. Eager, on the host.

        Args:
          aggregated_logs: the state that `eval_reduce` made, if any; of several validation sets, by their names.
        """
        if self.has_validation_sets:
            states = dict(aggregated_logs or {})
            logs = {name: self._logs_of(name, states.get(name)) for name in self._set_results}
        else:
            logs = self._logs_of("", aggregated_logs)
        if self.stop_requested and not self.best_is_kept_by_run:  # the evaluation may have been cut
            self.add_best(logs)
        elif not self.best_is_kept_by_run:
            self.keep_best(logs)
        self.end_averaging()
        return logs

    def keep_best(self, logs: dict[str, Any]) -> None:
        """Exports the weights that were evaluated if they are among the best; adds the best so far to the logs.

        Eager, on the host, on every worker. A late save, in another thread, waits meanwhile.

        Args:
          logs: of this step's evaluation; of several validation sets by their names, those that were evaluated.
        """
        if not self._checkpoint_exporter:
            return
        self.keep_what_changed()
        with self.averaged_weights():
            step = int(self.global_step.numpy())
            left_out = {name for name in self.validation_sets if self.has_validation_sets and name not in logs}
            options = {"not_evaluated": left_out} if left_out else {}
            self._checkpoint_exporter.maybe_export_checkpoint(self.state.weights, logs, step, **options)
        self.add_best(logs)

    def validation_metric_names(self) -> list[str] | None:
        """Returns the names that `eval_end` will report, nested ones joined by `|`; None if only a run can tell."""
        if type(self).eval_end is not Evaluator.eval_end or self._aggregates():
            return None
        if (names := self._eval_set.names()) is None:
            return None
        return [f"{name}|{metric}".lstrip("|") for name in self.validation_sets for metric in names]

    def keep_what_changed(self) -> None:
        """Has the best weights hold what has changed without a training step."""

    def before_evaluation(self) -> None:
        """Says which values of the task have changed in training and are not saved."""

    def report_evaluated_state(self) -> None:
        """Says whether the evaluation has changed the task's own state."""

    def forget_python_state(self) -> None:
        """Takes the task's values as they are now."""

    def look_into_evaluation(self, graph: tf.Graph | None) -> None:
        """Says what the graph of an evaluation changes that training uses."""

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Has the moving average, if any, in place of the weights, and a late save wait; eager, on the host."""
        with self._weights_in_use:
            Evaluator.eval_begin(self)
            try:
                yield
            finally:
                self.end_averaging()

    def end_averaging(self) -> None:
        """Swaps the weights back if the moving average stands in their place; from any thread.

        Random generators, too, get the states that they had before the evaluation: a late save comes in the middle.
        """
        with self._weights_in_use:
            self.state.put_generators_back()
            if self._average is not None and self._average.swapped:
                self._average.swap()

    def add_best(self, logs: dict[str, Any]) -> None:
        """Adds the best so far to the logs of the validation set that it is of, if that was evaluated."""
        if not self._checkpoint_exporter:
            return
        exporter, options = self._checkpoint_exporter, self.config.trainer
        best, metric = exporter.best_ckpt_logs, getattr(exporter, "metric_name", options.best_checkpoint_eval_metric)
        own, _, name = metric.partition("|") if self.has_validation_sets else ("", "", metric)
        place = logs.get(own) if own else logs
        if best is not None and place is not None:
            place[f"best_{name}"] = best[metric]

    def _turn_to(self, name: str) -> None:
        """Has steps, metrics and logs be those of this validation set from now on; eager."""
        self.task.validation_set = name

    def _own_options(self, name: str) -> Any:
        return getattr(self.config.trainer, "validation_sets", {}).get(name)

    def _logs_of(self, name: str, state: Any) -> dict[str, Any]:
        """The logs of one validation set: what its loop read back, and what follows from the logs it aggregated."""
        self._turn_to(name)
        results = self._set_results.get(name)
        logs = to_numpy(self._eval_set.results()) if results is None else dict(results)
        if state is not None:
            logs.update(self.evaluated_task.reduce_aggregated_logs(state, global_step=self.global_step))
        return logs

    def _aggregates(self) -> bool:
        return self.evaluated_task.aggregates() or type(self).eval_reduce is not Evaluator.eval_reduce
