"""Trainer: Orbit's train and eval step functions for a Task, under any strategy; the only caller of strategy.run.

The methods keep the names and meanings of TF Model Garden's Trainer. A training loop is one call of
one tf.function: it resets the metrics, runs the steps, and returns the results in one transfer.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orbit
import tensorflow as tf

from trainer_kit.checkpoint_names import ITERATOR
from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.config.schema.evaluation import training_sets
from trainer_kit.errors import DataError, add_note
from trainer_kit.inputs.autograph import converted
from trainer_kit.inputs.dataset_iterator import no_batch
from trainer_kit.inputs.sources.base import identity_of
from trainer_kit.optimizers.gradient_processors import refused_gradient
from trainer_kit.optimizers.learning_rate import ConfiguredRates, current_learning_rate
from trainer_kit.runtime.collectives import worker_count
from trainer_kit.runtime.executor import ONE_THREAD, executor
from trainer_kit.runtime.replica_values import (
    local_tensors,
    put_replica_values,
    replica_values,
    run_options,
)
from trainer_kit.runtime.tensorflow_internals import stateless_random_operations
from trainer_kit.training.accumulation import (
    Accumulation,
    check_accumulating,
    less_memory_advice,
    warn_of_batch_normalization,
)
from trainer_kit.training.base_trainer import OwnParts
from trainer_kit.training.checks.batch_spec import (
    batch_described,
    build_metrics,
    build_model,
    new_model,
)
from trainer_kit.training.checks.failed_step import reporting_gradients
from trainer_kit.training.checks.model_and_config import (
    check_deterministic_kernels,
    check_exact_resume,
    check_methods,
    check_model,
    check_sections,
    tell_dropped_assertions,
    tell_slow_convolutions,
)
from trainer_kit.training.evaluator import Evaluator
from trainer_kit.training.gradient_reports import GradientReports
from trainer_kit.training.hyper_parameters import HyperParameters
from trainer_kit.training.loops.fused_loop import (
    FusedLoop,
    Stack,
    check_fusing,
    problem_of_fusing,
    reporting_refusal,
)
from trainer_kit.training.loops.iterators import StopFlag
from trainer_kit.training.loops.tracing import check_one_thread, writes_after
from trainer_kit.training.loops.train_loop import (
    FiniteWeights,
    LoopParts,
    TrainingHooks,
    TrainLoop,
    pop_finite,
)
from trainer_kit.training.metrics import reported_values, to_numpy, training_metrics
from trainer_kit.training.named_tensors import StepTensors
from trainer_kit.training.task import has_own_state
from trainer_kit.training.task_inputs import TaskInputs, shared_sets
from trainer_kit.training.trained_variables import (
    built_optimizers,
    create_optimizers,
    freeze,
    moving_average,
)

_LOG = logging.getLogger(__name__)
_UNNAMED = (
    "on one thread TensorFlow does not say which operation of the loop has failed; start the run"
    " again in a new model_dir with runtime.executor=default to see it"
)
# The key of the global step in a loop's results; reading the variable after the loop costs 2 % of a
# loop of 10 ms.
_REACHED = "trainer_kit/global_step"


class TrainingSteps:
    """The training steps of a trainer, as its loops run them; see LoopSteps.

    Args:
      trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def step(self) -> Callable[[Any], Any]:
        """The method `train_step` of the trainer, which a subclass may replace after it has called this constructor."""
        return self._trainer.train_step

    def reset(self) -> None:
        """Resets the metrics; runs eagerly or in graph, in cross-replica context."""
        self._trainer._train_set.reset()

    def after_step(self) -> None:
        """Stops all workers at the same step if one of them was asked to stop."""
        self._trainer.stop_flag.agree(self._trainer.global_step)

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns the results of a loop, and what the trainer reads after it; called in cross-replica context."""
        trainer = self._trainer
        results = trainer._train_set.results()
        results["learning_rate"] = current_learning_rate(trainer.optimizer)
        # Exact up to 2**53; an int64 has a transfer of its own.
        results[_REACHED] = tf.cast(trainer.global_step, tf.float64)
        if trainer._finite_weights is not None:
            results |= trainer._finite_weights.result(in_parts=trainer.loop_parts.hooks is not None)
        return results


class LoopFactory:
    """Creates training loops, and runs them. Created in the scope of the strategy.

    Args:
      config: The experiment's config.
      stop_flag: The StopFlag, which ends a loop before its next step.
      fuse_steps: The number of steps in one XLA program; 1: steps are not fused.

    Attributes:
      fuse_steps: The argument of this name.
      stack: The batches of fused steps that a loop has not used, for the next loop.
    """

    def __init__(self, config: Any, stop_flag: StopFlag, fuse_steps: int) -> None:
        self._config = config
        self._stop_flag = stop_flag
        self._executor: str = getattr(config.runtime, "executor", "default")
        self.fuse_steps = fuse_steps
        self.stack = Stack()

    def create_loop(self, steps: TrainingSteps) -> TrainLoop | FusedLoop:
        """Returns a new loop of these steps that is not traced yet."""
        stop = self._stop_flag.variable
        if self.fuse_steps > 1:
            return FusedLoop(steps, stop, self.stack, self.fuse_steps)
        return TrainLoop(
            steps,
            stop,
            use_tf_function=self._config.trainer.train_tf_function,
            use_tf_while_loop=self._config.trainer.train_tf_while_loop,
            exact_waits=self._executor == ONE_THREAD,
        )

    def check(self, graph: tf.Graph | None) -> None:
        """Checks the graph of a new loop before the first step, and warns of what it leaves out or cannot use well.

        Runs eagerly, on the host.

        Args:
          graph: The graph of the loop; None: it is not compiled.

        Raises:
          UsageError: when the executor is single_threaded, and would wait forever.
        """
        if self.fuse_steps > 1:
            tell_dropped_assertions(graph)
            tell_slow_convolutions(graph)
            steps_per_loop = self._config.trainer.steps_per_loop
            if steps_per_loop % self.fuse_steps:
                _LOG.warning(
                    "trainer.fuse_steps=%d: loops of %d steps end inside a stack of batches, so the"
                    " last program of a loop runs fewer steps; make trainer.steps_per_loop a"
                    " multiple of fuse_steps",
                    self.fuse_steps,
                    steps_per_loop,
                )

        if self._executor == ONE_THREAD and graph is not None:
            check_one_thread(graph)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which a loop is traced or runs on the executor of the config, and errors name their cause.

        Runs eagerly, on the host.
        """
        with (
            reporting_refusal(self.fuse_steps),
            reporting_gradients(),
            self._explained_errors(),
            executor(self._executor),
        ):
            yield

    @contextlib.contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Adds notes to errors: the setting that needs less memory, and how to see which operation has failed."""
        try:
            yield
        except tf.errors.OutOfRangeError:
            raise
        except tf.errors.OpError as error:
            if isinstance(error, tf.errors.ResourceExhaustedError):
                sets = training_sets(self._config.task).values()
                batch_size = max(int(getattr(data, "global_batch_size", 0)) for data in sets)
                examples = batch_size // tf.distribute.get_strategy().num_replicas_in_sync
                add_note(error, less_memory_advice(self._config.trainer.accumulate_steps, examples))
            if self._executor == ONE_THREAD and not refused_gradient(
                error
            ):  # which has the variable and the step
                add_note(error, _UNNAMED)
            raise


class Trainer(Evaluator):
    """Trains and evaluates a task. Create it in the scope of its strategy.

    Args:
      config: An ExperimentConfig, or any object with the same sections.
      task: The task to train and evaluate.
      model: The model of `task.build_model`; a model without variables is built from the specs of a
        batch.
      optimizer: The optimizer of `task.create_optimizer`, or a dict of them by name; None if train
        is False.
      train: Whether this trainer will train.
      evaluate: Whether this trainer will evaluate.
      train_dataset: A dataset to use instead of the task's; with several replicas, a distributed
        dataset.
      validation_dataset: The same for evaluation, or a dict of datasets by name; each evaluation
        starts it again.
      checkpoint_exporter: Keeps the best checkpoint; has `maybe_export_checkpoint` and
        `best_ckpt_logs`.

    Attributes:
      inputs_class: The class that opens the data of the task.
      inputs: The object of that class.
      data: The training data.
      hyper_parameters: The values that can be changed between loops, by name.
      loop_factory: Creates the training loops.
      loop_parts: Runs the loops, and splits them where work has to be done between two steps.
      accumulation: Splits batches into micro-batches, if trainer.accumulate_steps asks for it.

    Raises:
      AttributeError: when the config lacks a section that is needed.
      UsageError: when the model has no variables, or the config asks for XLA where it cannot be
        used.
      TrainerKitError: when a method of the task does not accept the arguments that it is called
        with.
    """

    inputs_class: Any = TaskInputs
    between_steps = (
        True  # False while a loop runs: an error may then come from the middle of a step
    )

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
        check_sections(
            config, train and train_dataset is None, evaluate and validation_dataset is None
        )
        check_methods(task, train, evaluate)
        build_model(config.task, task, model, train, train_dataset if train else validation_dataset)
        check_model(model, config.runtime, tf.distribute.get_strategy())

        options = config.trainer
        self.own = own_parts(type(self))
        self.trains = train
        self._trainable = freeze(model, getattr(options, "freeze", ()))
        self._global_step = self._new_global_step()
        self._optimizer = self._built_optimizers(config, task, model, optimizer)
        self._average = self._moving_average(config, task, model)
        self._requires_exact_resume: bool = getattr(options, "require_exact_resume", False)
        state = TrainState(
            self._global_step,
            model,
            self._optimizer,
            self._average,
            task,
            getattr(config.runtime, "random_seed", 0),
            trainable=self._trainable,
            require_exact=self._requires_exact_resume,
        )
        state.add_root("trainer", self)

        # What steps report, and the data of evaluations.
        self._train_set = self._training_metrics(config, task, model)
        self._gradient_reports = GradientReports(
            options, self._optimizer, self._global_step, self._train_set, task
        )
        self.train_tensors = StepTensors("training", config, self._train_set)
        self.inputs = self.inputs_class(config, task)
        super().__init__(
            config,
            task,
            model,
            global_step=self._global_step,
            state=state,
            average=self._average,
            sets=shared_sets(self.inputs.validation_feeds(validation_dataset), options),
            metrics=self._evaluation_metrics(config, task, model, evaluate),
            checkpoint_exporter=checkpoint_exporter,
        )
        self.evaluates = evaluate
        build_metrics(config.task, task, model, self._train_set.metrics, True, train_dataset)
        build_metrics(
            config.task, task, model, self._validation_set.metrics, False, validation_dataset
        )

        # The training data, and the state that is not in variables.
        self.data = self.inputs.train_data(self._global_step, train_dataset)
        self._keep_python_state()
        self.hyper_parameters = HyperParameters(task, self._optimizer, state.python_state)

        # The training loop.
        fuse_steps = getattr(options, "fuse_steps", 1) if train else 1
        check_fusing(fuse_steps, self.problem_of_fusing())
        self.data.put_in_stacks(fuse_steps)
        accumulate_steps = getattr(options, "accumulate_steps", 1) if train else 1
        if accumulate_steps > 1:
            check_accumulating(self.class_name, self.own, self._optimizer, accumulate_steps)
            warn_of_batch_normalization(model, accumulate_steps)
        self.accumulation = Accumulation(
            accumulate_steps, self.class_name, task, self._train_set, fused=fuse_steps > 1
        )
        self.loop_factory = LoopFactory(config, self.stop_flag, fuse_steps)
        self.loop_parts = LoopParts(
            self._global_step, [self.accumulation, self._gradient_reports, state]
        )
        checks_weights = train and getattr(options, "recovery_max_trials", 0) >= 0
        self._finite_weights = (
            FiniteWeights(state, self._global_step, options) if checks_weights else None
        )
        self._train_steps = TrainingSteps(self)
        self._run_options = run_options(config.runtime)
        self._train_loop: Any = None

    @classmethod
    def create(
        cls, config: Any, task: Any, train: bool, evaluate: bool, checkpoint_exporter: Any = None
    ) -> Any:
        """Returns a trainer with the task's model and, to train, its optimizer. Called in strategy scope."""
        model = new_model(task)
        optimizer = create_optimizers(task, config.trainer, config.runtime) if train else None
        return cls(
            config, task, model, optimizer, train, evaluate, checkpoint_exporter=checkpoint_exporter
        )

    # ---- what it is made of

    @property
    def optimizer(self) -> Any:
        """The optimizer, a dict of optimizers by name, or None."""
        return self._optimizer

    @property
    def train_loss(self) -> Any:
        """The metric of the training loss, a mean over the loop."""
        return self._train_set.loss

    @property
    def train_metrics(self) -> list[Any]:
        """All training metrics but the loss."""
        return self._train_set.metrics

    @property
    def train_dataset(self) -> Any:
        """The training dataset, created when first needed; setting it takes effect with the next loop.

        With fused steps, an element is (number of batches, stacked batches); see
        inputs.fused_batches. A dataset that is set holds single batches.
        """
        return self.data.dataset

    @train_dataset.setter
    def train_dataset(self, dataset: Any) -> None:
        self.data.replace(dataset)
        check_fusing(self.fuse_steps, self.problem_of_fusing())

    @property
    def fuse_steps(self) -> int:
        """The number of training steps in one XLA program; 1: steps are not fused."""
        return self.loop_factory.fuse_steps

    @property
    def current_loop(self) -> TrainLoop | FusedLoop | None:
        """The training loop that runs now or ran last; None if it is not a TrainLoop or FusedLoop."""
        return self._train_loop if isinstance(self._train_loop, (TrainLoop, FusedLoop)) else None

    @property
    def first_step_at(self) -> float:
        """The time.perf_counter() at the end of the first step of the newest loop function; 0 before that."""
        return self.loop_parts.ready_at

    def check_data(self) -> None:
        """Raises DataError when a dataset is known to be empty, or endless where it must end; after the restore."""
        if self.trains:
            self.data.check_not_empty()
        if self.evaluates:
            self.check_aggregation()
            self.validation.check(self.config.trainer.validation_steps)

    def data_identities(self) -> dict[str, Any]:
        """Returns what describes the data that `check_data` has opened, by the path of its section; see Source."""
        replicas = self._strategy.num_replicas_in_sync
        key_suffix = f" for one of {replicas} replicas on {worker_count(self._strategy)} workers"
        made = {"train_data": self.data.made, **self.inputs.validation_data}
        return {f"task.{section}": identity_of(data, key_suffix) for section, data in made.items()}

    def initialize(self) -> None:
        """Lets the task load its initial weights; called when there is no checkpoint to restore.

        Runs eagerly, in scope.
        """
        self.task.initialize(self.model)
        self.after_restore()

    def before_save(self, prefix: str) -> None:
        """Prepares the state that is not in variables for the checkpoint to be saved at `prefix`; runs eagerly."""
        self.trace_training()
        if self.own.train and not self.state.step_is_known:
            # An overriding `train` may not run our loop, which would end it
            self.state.end_restore()
        self.state.before_save(self._without_state())
        patience = getattr(self.config.trainer, "preemption_grace_seconds", 25) / 4
        begin = time.monotonic()

        def give_up() -> bool:
            return min(self.stopping_for, time.monotonic() - begin) > patience

        self.data.save_iterator(
            f"{prefix}{ITERATOR}", at_place=self.loop_factory.stack.empty, give_up=give_up
        )

    def after_restore(self, path: str | None = None) -> None:
        """Sets data, metrics and moving average to match the restored variables. Called after every restore.

        Args:
          path: The path of the restored checkpoint; None when there was none.
        """
        self.data.restored(f"{path}{ITERATOR}" if path else None)
        self.state.restored(path)
        if self.trains:
            self.state.keep_attributes(self._without_state())
            if self.own.loop:
                self._keep_written(None)
        if self.state.step_is_known:
            self.state.end_restore()
        self.weights_finite = None
        self.data_ended = False

    # ---- training

    def train(self, num_steps: Any) -> dict[str, Any]:
        """Runs `num_steps` training steps and returns what `train_loop_end` returns. Runs eagerly, on the host.

        The attribute `loop_steps` is the number of steps done: fewer after a stop request or at the
        end of the data, and None if a subclass has created the loop.

        Raises:
          DataError: when there is no data at all.
        """
        self.train_loop_begin()
        iterator = self.data.iterator()
        loop = self._newest_loop()
        self.loop_steps = self.input_seconds = self.reached = None
        with self._ended_with_data():
            if isinstance(loop, (TrainLoop, FusedLoop)):
                if not self.state.step_is_known:
                    with self._in_loop(iterator):
                        graph = None if loop.compiled is None else loop.compiled.graph(iterator)
                    self._keep_written(graph)
                self.between_steps = True
                context = functools.partial(self._in_loop, iterator)
                self.loop_steps = self.loop_parts.run(
                    loop, iterator, num_steps, not self.metrics_continue, context
                )
                self.input_seconds = self.loop_parts.waited
                self.metrics_continue = (
                    0 < self.loop_steps < int(num_steps) or self._is_inside_epoch()
                )
            else:
                if self.own.loop:
                    self._train_set.reset()  # our own loops do so inside the graph
                with self._in_loop(iterator):
                    loop(iterator, num_steps)
        return self.train_loop_end()

    def trace_training(self) -> None:
        """Traces the training loop before the first step, so that all that it writes is restored and saved.

        An evaluation or a save before the first step needs it. It does nothing if the loop is
        traced, or is the trainer's own, or if `train_loop_begin` is overridden, which may change
        the data. Runs eagerly, on the host.
        """
        has_own_train = self.own.train and type(self).trace_training is Trainer.trace_training
        if not self.trains or self.state.step_is_known or has_own_train or self.own.loop_begin:
            return
        iterator = self.data.iterator()
        loop = self._newest_loop()
        if isinstance(loop, (TrainLoop, FusedLoop)):
            with self._in_loop(iterator):
                graph = None if loop.compiled is None else loop.compiled.graph(iterator)
            self._keep_written(graph)

    def evaluate(self, num_steps: Any, sets: Sequence[str] | None = None) -> dict[str, Any]:
        """Evaluates and returns the logs; see Evaluator. Runs eagerly, on the host."""
        if self.state.step_state.lacks_written:
            self.trace_training()
        return super().evaluate(num_steps, sets)

    def _keep_written(self, graph: tf.Graph | None) -> None:
        """Adds all state of the training step to checkpoints and checks its graph, once, before the first step.

        See TrainState. The graph is None where the loop is not compiled.
        """
        if self.state.step_is_known:
            return
        check_deterministic_kernels(self._strategy, self._requires_exact_resume)
        if graph is not None:
            check_exact_resume(graph, self._requires_exact_resume)
        self.state.keep_written(graph, self._without_state())
        self.loop_factory.check(graph)

    @contextlib.contextmanager
    def _in_loop(self, iterator: Any) -> Iterator[None]:
        """A context in which a loop is traced, or runs: an error may then come from the middle of a step."""
        self.between_steps = False

        def batch_spec() -> Any:
            return self.batch_spec or iterator.element_spec  # of fused steps an element is a stack

        described = batch_described("task.train_data", batch_spec, self.task, self.model)
        with described, self.data.reporting_damage(), self.loop_factory.running():
            yield
        self.between_steps = True

    @contextlib.contextmanager
    def _ended_with_data(self) -> Iterator[None]:
        """Handles the end of the data inside a loop: the finished steps count, and global_step shows their number."""
        try:
            yield
        except (tf.errors.OutOfRangeError, StopIteration):
            self.loop_steps = None
            self.data_ended = True
            self.between_steps = True
            self.data.forget()
            if self._read_step() == 0:
                raise DataError(no_batch("train_data")) from None

    def create_train_loop_fn(self) -> Any:
        """Returns `loop_fn(iterator, num_steps)`, which runs the steps; asynchronous training schedules it on a worker.

        Override it to run a different training loop.
        """
        loop = self.loop_factory.create_loop(self._train_steps)
        if self._workers.are_there and isinstance(
            loop, TrainLoop
        ):  # asynchronous steps are never fused
            return self._workers.scheduled(loop)
        return loop

    def _newest_loop(self) -> Any:
        """Returns the training loop: a new one where there is none, or where it lacks a factor of a learning rate."""
        if self._train_loop is None or self.hyper_parameters.has_new_factor:
            self._train_loop = self.create_train_loop_fn()
            self.hyper_parameters.has_new_factor = False
        return self._train_loop

    def forget_train_loop(self) -> None:
        """Discards the training loop, so that the next one is traced again with changed values."""
        self._train_loop = None

    def train_loop_begin(self) -> None:
        """Called eagerly before each loop, before the iterator is created. Metrics are reset inside the loop."""

    def split_training(self, hooks: TrainingHooks) -> None:
        """Has training loops run step by step from now on, with work on the host between two.

        Args:
          hooks: The object whose methods are called before and after each step.
        """
        self.loop_parts.hooks = hooks

    def reported(self, results: dict[str, Any]) -> dict[str, Any]:
        """Returns the logs of a training loop by name, of the results that it returns or that hooks get."""
        return dict(self._train_set.reported(reported_values(results)))

    def train_loop_end(self) -> dict[str, Any]:
        """Returns the logs of the loop: metrics, training_loss, learning_rate. Runs eagerly, on the host."""
        self.join()
        results = self.loop_parts.take_results()
        if results is None:
            results = to_numpy(self._train_steps.results())
        if not self.metrics_continue:
            self._train_set.reset_returned()
        self.weights_finite = pop_finite(results)
        reached = int(results.pop(_REACHED))
        self._gradient_reports.read(results)
        self.train_tensors.read()
        self.reached = (
            None if self.own.train or self.own.loop_end else reached
        )  # it may take more steps
        return self.reported(results)

    @tf.autograph.experimental.do_not_convert
    def next_train_inputs(self, iterator: Any) -> Any:
        """Returns the next batch for the model; runs in graph, on the host. Override it to change the model's input."""
        return next(iterator)

    @tf.autograph.experimental.do_not_convert
    def train_step(self, iterator: Any) -> None:
        """Runs one training step on every replica with the next element of the iterator, in graph."""
        inputs = converted(self.next_train_inputs)(iterator)
        random = stateless_random_operations(self.state.random_generator)
        with writes_after(local_tensors(inputs, self._strategy)), random:
            if self.accumulation.steps == 1:
                self._strategy.run(
                    self._replica_train_step, args=(inputs,), options=self._run_options
                )
            else:
                self.accumulation.train(
                    self._replica_train_step, self.optimizer, inputs, self._run_options
                )
            self._global_step.assign_add(1)
            if self._average is not None:
                self._average.update(self._global_step)

    @tf.autograph.experimental.do_not_convert
    def _replica_train_step(
        self, inputs: Any, optimizer: Any = None, share: float | tf.Tensor = 1.0
    ) -> None:
        self.batch_spec = tf.nest.map_structure(tf.type_spec_from_value, inputs)

        def step(
            batch: Any,
        ) -> tuple[Any, Any]:  # a tf.function would copy mappings in its arguments
            with self.train_tensors.captured(self.model) as tensors:
                logs = converted(self.task.train_step)(
                    batch,
                    model=self.model,
                    optimizer=optimizer or self.optimizer,
                    metrics=self.train_metrics,
                )
            return self._train_set.take_metrics(self.task, logs, self.model), tensors

        if self.config.runtime.enable_xla:
            step = tf.function(step, jit_compile=True, autograph=False)
        logs, tensors = step(inputs)
        self.train_tensors.update_metrics(tensors)
        self._train_set.update_with_step(self.task, logs, inputs, share)

    def next_batch(self) -> Any:
        """Takes the next batch from the training data and returns it; runs eagerly, on the host."""
        iterator = self.data.iterator()
        return (
            self.loop_factory.stack.next_batch(iterator) if self.fuse_steps > 1 else next(iterator)
        )

    def is_out_of_data(self) -> bool:
        """Whether the training data has ended, even if the loop did not report it; takes a batch if it has not.

        Raises:
          DataError: when there is no data at all.
        """
        with self._ended_with_data():
            next(self.data.iterator())
        return self.data_ended

    def problem_of_fusing(self) -> str:
        """Returns why training steps cannot be fused in one XLA program, as far as known before a try; "" if none."""
        own = type(self).__name__ if self.own.loop else ""
        return problem_of_fusing(self.config, self._strategy, self.data.given, own)

    # ---- what it is made from; a subclass may have other parts

    def _new_global_step(self) -> Any:
        return orbit.utils.create_global_step()

    def _built_optimizers(self, config: Any, task: Any, model: Any, optimizer: Any) -> Any:
        return built_optimizers(optimizer, config.trainer, task, model)

    def _moving_average(self, config: Any, task: Any, model: Any) -> Any:
        return moving_average(config.trainer, task, model, self._trainable)

    def _training_metrics(self, config: Any, task: Any, model: Any) -> Any:
        return training_metrics(task, model, config, wanted=self.trains)

    # ---- how it is done

    def _keep_python_state(self) -> None:
        """Adds the state that is not in variables to every checkpoint."""
        rates = ConfiguredRates(self.optimizer)
        parts = self.state.python_state
        parts.add("data", self.data.state, self.data.put_state)
        parts.add("metrics", self._interrupted_metrics, self._restore_metrics)
        parts.add("learning rates", rates.state, rates.restore)
        self.state.keep_replicas()
        if has_own_state(self.task):
            restore = self.task.restore
            parts.add(
                "task", self.task.state, lambda state: None if state is None else restore(state)
            )

    def _interrupted_metrics(self) -> Any:
        """Returns the training metrics on each replica, for a checkpoint; None if no loop was interrupted."""
        return (
            replica_values(self._train_set.variables(), self._strategy)
            if self.metrics_continue
            else None
        )

    def _restore_metrics(self, state: Any) -> None:
        """Restores the metrics of an interrupted loop; warns and begins them again if the run has other metrics now."""
        fits = state is not None and put_replica_values(
            self._train_set.variables(), self._strategy, state
        )
        self.metrics_continue = fits
        if state is not None and not fits:
            _LOG.warning(
                "the checkpoint holds the state of other metrics than this run has, so the first"
                " training metrics leave out a few steps"
            )

    def _without_state(self) -> list[Any]:
        """Returns the variables that steps write and no checkpoint needs; see Evaluator."""
        of_training = [*self._train_set.variables(), *self.train_tensors.value_variables]
        of_training += [*self.hyper_parameters.factors, *self.accumulation.variables]
        return [*super()._without_state(), *of_training]


def own_parts(kind: type[Trainer]) -> OwnParts:
    """Returns what a class of trainers has of its own: the methods that it overrides."""
    return OwnParts(
        loop=kind.create_train_loop_fn is not Trainer.create_train_loop_fn,
        train=kind.train is not Trainer.train,
        loop_begin=kind.train_loop_begin is not Trainer.train_loop_begin,
        loop_end=kind.train_loop_end is not Trainer.train_loop_end,
        replica_step=kind._replica_train_step is not Trainer._replica_train_step,
    )
