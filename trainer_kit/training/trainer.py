"""Trainer: Orbit's train and eval step functions for a Task, under any strategy.

The methods keep the names and meanings of TF Model Garden's Trainer. A training loop is one call of
one tf.function, which runs many steps. This is the order of the calls in `Trainer.train`:

  train_loop_begin()                  eagerly
  create_train_loop_fn()              eagerly, for a new loop function
  loop(iterator, num_steps)           in graph, in cross-replica context
    reset the training metrics
    for each step until num_steps, a stop or the end of the data:
      train_step(iterator)
        next_train_inputs(iterator)
        task.train_step(batch)        on each replica
        add 1 to the global step, and update the moving average
    read the results of the metrics   in one transfer
  train_loop_end()                    eagerly; it returns the logs

The end of the data leaves the loop as an error, which `train` handles. Why a loop is traced before
its first step is explained in the section "Restores and saves". A subclass may override most of
these methods. CustomParts says what then changes.

Evaluations are in evaluator.py. Steps run in strategy.run only here, there and in micro_batches.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoint_names import ITERATOR_SUFFIX
from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.optimizers.learning_rate import ConfiguredRates, current_learning_rate
from trainer_kit.runtime.replica_values import (
    build_run_options,
    read_replica_values,
    restore_replica_values,
)
from trainer_kit.training.base_trainer import CustomParts
from trainer_kit.training.checks.batch_spec import (
    build_metrics,
    build_model,
    create_model,
    explain_batch_errors,
)
from trainer_kit.training.checks.model_and_config import (
    check_deterministic_kernels,
    check_exact_resume,
    check_methods,
    check_model,
    check_sections,
)
from trainer_kit.training.evaluator import Average, Evaluator
from trainer_kit.training.gradient_reports import GradientReports
from trainer_kit.training.hyper_parameters import HyperParameters
from trainer_kit.training.loop_factory import FactoryLoop, LoopFactory
from trainer_kit.training.loops.train_loop import (
    FiniteWeightsCheck,
    SegmentedLoop,
    TrainingHooks,
    TrainLoop,
    pop_finite,
)
from trainer_kit.training.metric_set import (
    MetricSet,
    create_training_metrics,
    create_validation_metrics,
    remove_engine_results,
    to_numpy,
)
from trainer_kit.training.micro_batches import (
    Accumulation,
    check_micro_batch_support,
    warn_of_batch_normalization,
)
from trainer_kit.training.step_tensors import StepTensors
from trainer_kit.training.task import has_state_methods
from trainer_kit.training.task_inputs import TaskInputs, create_validation_sets
from trainer_kit.training.trained_variables import (
    build_task_optimizers,
    create_moving_average,
    create_optimizers,
    freeze,
)
from trainer_kit.typing import (
    CheckpointExporter,
    DataIterator,
    Dataset,
    ExperimentLike,
    IntLike,
    Metric,
    Model,
    Optimizers,
    TaskLike,
    Variable,
)

_LOG = logging.getLogger(__name__)
# The key of the global step in a loop's results. Reading the variable after the loop costs 2 % of a
# loop of 10 ms.
_STEP_KEY = "trainer_kit/global_step"


class Trainer(Evaluator):
    """Trains and evaluates a task. Create it in the scope of its strategy.

    Evaluator has the other half. The constructor works in this order, because each part needs those
    before it:

      1. check the config and the task, build the variables of the model, and store the arguments
      2. freeze variables, then create the global step, the optimizer, the average and the state
      3. create the metrics of training, and what adds to them
      4. create the data and the metrics of evaluations
      5. build the variables of all metrics
      6. create the training data and the values that a checkpoint contains beside variables
      7. create what runs the loops

    Args:
      config: An ExperimentConfig, or any object with the same sections.
      task: The task to train and evaluate.
      model: The model of `task.build_model`. A model without variables is built from the specs of a
        batch.
      optimizer: The optimizer of `task.create_optimizer`, or a dict of optimizers by name. None if
        train is False.
      train: Whether this trainer will train.
      evaluate: Whether this trainer will evaluate.
      train_dataset: A dataset to use instead of the task's. With several replicas, it is a
        distributed dataset.
      validation_dataset: The same for evaluation, or a dict of datasets by name. Each evaluation
        starts it again.
      checkpoint_exporter: Keeps the best checkpoint. It has `maybe_export_checkpoint` and
        `best_ckpt_logs`.

    Attributes:
      strategy, config, task, model, global_step: Properties of Evaluator.
      state: The TrainState.
      stop_flag: The StopFlag that loops check before each step.
      validation: The validation sets.
      can_evaluate: Whether this trainer evaluates.
      evaluated_batches, eval_seconds, eval_tensors: See Evaluator.
      can_train: The argument `train`.
      custom_parts: The methods that the class overrides.
      batch_spec: The spec of a replica's batch. Set when the step is traced. None before.
      loop_steps, reached_step, input_seconds: About the last loop. `train` and `train_loop_end` set
        them. See BaseTrainer.
      has_data_ended, weights_finite: The same. A restore sets them back.
      should_continue_metrics: Whether the next loop continues the metrics of the last one.
      is_at_step_boundary: False inside a loop, and after an error of a loop.
      inputs_class: The class that opens the data of the task.
      inputs: The object of that class.
      data: The training data.
      train_tensors: The tensors of training steps that the config asks for by name.
      hyper_parameters: The values that can be changed between loops, by name.
      accumulation: Splits batches into micro-batches, if trainer.accumulate_steps requests it.
      loop_factory: Creates the training loops.
      segmented_loop: Runs the loops, and splits them where work has to be done between two steps.

    Raises:
      AttributeError: when the config lacks a section that is needed.
      UsageError: when the model has no variables, the config asks for XLA where it cannot be used,
        steps cannot be fused, or batches cannot be split into micro-batches.
      TrainerKitError: when a method of the task does not accept the arguments that it is called
        with.
    """

    inputs_class: type[TaskInputs] = TaskInputs

    # Evaluator provides these private names, which the methods below use:
    #
    #   _strategy            the strategy in whose scope the trainer is created
    #   _options             the EngineOptions of the config
    #   _workers             the workers of asynchronous training
    #   _enter_step(inputs)  the context of a training or evaluation step
    #   _read_step()         the global step as an int
    #   _is_inside_epoch()   whether the next loop continues the metrics of this epoch

    def __init__(
        self,
        config: ExperimentLike,
        task: TaskLike,
        model: Model,
        optimizer: Optimizers | None,
        train: bool = True,
        evaluate: bool = True,
        train_dataset: Dataset | None = None,
        validation_dataset: Dataset | Mapping[str, Dataset] | None = None,
        checkpoint_exporter: CheckpointExporter | None = None,
    ) -> None:
        needs_train_data = train and train_dataset is None
        needs_validation_data = evaluate and validation_dataset is None
        check_sections(config, needs_train_data, needs_validation_data)
        check_methods(task, train, evaluate)
        dataset = train_dataset if train else validation_dataset
        build_model(config.task, task, model, train, dataset)
        check_model(model, config.runtime, tf.distribute.get_strategy())

        super().__init__(config, task, model, checkpoint_exporter)
        options = self._options
        self.can_train = train
        self.custom_parts = get_custom_parts(type(self))

        # What is trained, and what a checkpoint contains. Variables are frozen first, because the
        # optimizer gets slots for trainable variables only.
        trainable = freeze(model, options.freeze)
        global_step = self._build_global_step()
        built_optimizer = self._build_optimizers(config, task, model, optimizer)
        average = self._build_average(config, task, model, trainable)
        state = TrainState(
            global_step,
            model,
            built_optimizer,
            average,
            task,
            options.random_seed,
            trainable=trainable,
            require_exact=options.require_exact_resume,
        )
        state.add_root("trainer", self)
        self._global_step = global_step
        self._optimizer = built_optimizer
        self._average = average
        self.state = state

        # What training steps report. The reports and the tensors add metrics to the set.
        train_metrics = self._build_training_metrics(config, task, model, train)
        gradient_reports = GradientReports(
            config.trainer, built_optimizer, global_step, train_metrics, task
        )
        self._train_metric_set = train_metrics
        self._gradient_reports = gradient_reports
        self.train_tensors = StepTensors("training", config, train_metrics)

        # What evaluations use. Training loops share the stop flag and the asynchronous workers.
        inputs = self.inputs_class(config, task)
        self.inputs = inputs
        validation_data = inputs.create_all_validation_data(validation_dataset)
        validation_sets = create_validation_sets(validation_data, config.trainer)
        validation_metrics = self._build_evaluation_metrics(config, task, model, evaluate)
        self._prepare_evaluations(validation_sets, validation_metrics, can_evaluate=evaluate)

        # Some metrics create their variables at the first update. Loops need all variables before.
        build_metrics(
            config.task,
            task,
            model,
            train_metrics.metrics,
            train=True,
            ready_made_dataset=train_dataset,
        )
        build_metrics(
            config.task,
            task,
            model,
            validation_metrics.metrics,
            train=False,
            ready_made_dataset=validation_dataset,
        )

        # Data and values that a checkpoint contains, and that are not in variables.
        self.data = inputs.create_train_data(global_step, train_dataset)
        self._register_python_state()
        self.hyper_parameters = HyperParameters(task, built_optimizer, state.python_state)

        # What runs the loops. A trainer that only evaluates has none, so its options for loops are
        # not checked.
        fuse_steps = options.fuse_steps if train else 1
        custom_loop_class = type(self).__name__ if self.custom_parts.overrides_train_loop else ""
        self.loop_factory = LoopFactory(config, self.stop_flag, fuse_steps, custom_loop_class)
        self.loop_factory.check_fusing(self.data.prebuilt_dataset)
        self.data.set_stack_size(fuse_steps)

        accumulate_steps = options.accumulate_steps if train else 1
        if accumulate_steps > 1:
            check_micro_batch_support(
                self.class_name, self.custom_parts, built_optimizer, accumulate_steps
            )
            warn_of_batch_normalization(model, accumulate_steps)
        self.accumulation = Accumulation(
            accumulate_steps, self.class_name, task, train_metrics, is_fused=fuse_steps > 1
        )
        self.segmented_loop = SegmentedLoop(
            global_step, [self.accumulation, gradient_reports, state]
        )

        self._weights_check: FiniteWeightsCheck | None = None
        if train and options.recovery_max_trials >= 0:
            self._weights_check = FiniteWeightsCheck(state, global_step, config.trainer)
        self._run_options = build_run_options(config.runtime)

        # The loop function is created when it is first needed.
        self._train_loop: Callable[..., Any] | None = None
        self.is_at_step_boundary = True

    @classmethod
    def create(
        cls,
        config: ExperimentLike,
        task: TaskLike,
        train: bool,
        evaluate: bool,
        checkpoint_exporter: CheckpointExporter | None = None,
    ) -> Any:
        """Returns a trainer with the task's model and, to train, its optimizer.

        Called in strategy scope.
        """
        model = create_model(task)
        optimizer = create_optimizers(task, config.trainer, config.runtime) if train else None
        return cls(
            config, task, model, optimizer, train, evaluate, checkpoint_exporter=checkpoint_exporter
        )

    # ---- Training, in the order of the calls.

    def train(self, num_steps: IntLike) -> dict[str, Any]:
        """Runs `num_steps` training steps and returns what `train_loop_end` returns.

        Runs eagerly, on the host. Afterwards `loop_steps` is `num_steps`, or a smaller number after
        a stop request. It is None where only the global step shows the number: at the end of the
        data, which leaves the loop as an error, and if a subclass has created the loop.

        Raises:
          DataError: when there is no data at all.
        """
        self.train_loop_begin()
        iterator = self.data.iterator()
        loop = self._get_train_loop()
        self.loop_steps = None
        self.input_seconds = None
        self.reached_step = None

        with self._handle_end_of_data():
            if isinstance(loop, FactoryLoop):
                # See "Restores and saves". trace_training does the same, but would be one more
                # function on the stack above the task's train_step.
                if not self.state.is_step_tracked:
                    with self._enter_loop(iterator):
                        if loop.loop_function is not None:
                            loop.loop_function.trace_graph(iterator)
                    self._track_step(loop.newest_graph)

                # An earlier loop may have failed inside a step, and hooks run before this one.
                self.is_at_step_boundary = True
                enter_loop = functools.partial(self._enter_loop, iterator)
                should_reset_metrics = not self.should_continue_metrics
                self.loop_steps = self.segmented_loop.run(
                    loop, iterator, num_steps, should_reset_metrics, enter_loop
                )

                self.input_seconds = self.segmented_loop.wait_seconds
                was_interrupted = 0 < self.loop_steps < int(num_steps)
                self.should_continue_metrics = was_interrupted or self._is_inside_epoch()
            else:
                # The loop of a subclass does not reset metrics. The scheduled loop of asynchronous
                # training does.
                if self.custom_parts.overrides_train_loop:
                    self._train_metric_set.reset()
                with self._enter_loop(iterator):
                    loop(iterator, num_steps)

        return self.train_loop_end()

    def train_loop_begin(self) -> None:
        """Called eagerly before each loop, before the iterator is created.

        Metrics are reset inside the loop.
        """

    def create_train_loop_fn(self) -> Callable[..., Any]:
        """Returns `loop_fn(iterator, num_steps)`, which runs the steps.

        Asynchronous training schedules it on a worker. Override it to run a different training
        loop.
        """
        steps = TrainingSteps(self, self._train_metric_set, self._weights_check)
        loop = self.loop_factory.create_loop(steps)
        # Asynchronous steps are never fused.
        if self._workers.uses_parameter_servers and isinstance(loop, TrainLoop):
            return self._workers.create_scheduled_loop(loop)
        return loop

    @tf.autograph.experimental.do_not_convert
    def train_step(self, iterator: DataIterator) -> None:
        """Runs one training step on every replica with the next element of the iterator.

        Runs in graph, in cross-replica context.
        """
        inputs = apply_autograph(self.next_train_inputs)(iterator)
        with self._enter_step(inputs):
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
    def next_train_inputs(self, iterator: DataIterator) -> Any:
        """Returns the next batch for the model.

        Runs in graph, on the host. Override it to change the model's input.
        """
        return next(iterator)

    @tf.autograph.experimental.do_not_convert
    def _replica_train_step(
        self,
        inputs: Any,
        optimizer: Optimizers | None = None,
        share: float | tf.Tensor = 1.0,
    ) -> None:
        """Calls the task's train_step, and updates the metrics. Runs in graph, on a replica.

        Args:
          inputs: The replica's batch, or a micro-batch of it.
          optimizer: What the task applies gradients with. None: the trainer's optimizer.
          share: The share of `inputs` in the replica's batch, a float or a float32 scalar.
        """
        self.batch_spec = tf.nest.map_structure(tf.type_spec_from_value, inputs)

        # A tf.function would copy mappings in its arguments, so the batch is its only argument.
        def step(batch: Any) -> tuple[Any, Mapping[str, tf.Tensor]]:
            with self.train_tensors.capture_tensors(self.model) as tensors:
                logs = apply_autograph(self.task.train_step)(
                    batch,
                    model=self.model,
                    optimizer=optimizer or self.optimizer,
                    metrics=self.train_metrics,
                )
            logs = self._train_metric_set.extract_metrics(self.task, logs, self.model)
            return logs, tensors

        if self.config.runtime.enable_xla:
            step = tf.function(step, jit_compile=True, autograph=False)
        logs, tensors = step(inputs)
        self.train_tensors.update_metrics(tensors)
        self._train_metric_set.update_with_step(self.task, logs, inputs, share)

    def train_loop_end(self) -> dict[str, Any]:
        """Returns the logs of the loop: metrics, training_loss, learning_rate.

        Runs eagerly, on the host.
        """
        self.join()
        results = self.segmented_loop.take_results()
        if results is None:
            # The loop of a subclass returns no results, and one on a worker none to this process.
            steps = TrainingSteps(self, self._train_metric_set, self._weights_check)
            results = to_numpy(steps.results())
        if not self.should_continue_metrics:
            self._train_metric_set.reset_returned_metrics()

        self.weights_finite = pop_finite(results)
        loop_end_step = int(results.pop(_STEP_KEY))
        self._gradient_reports.update_results(results)
        self.train_tensors.read_values()

        # A method of a subclass may take more steps than the loop has reported.
        if self.custom_parts.overrides_train or self.custom_parts.overrides_loop_end:
            self.reached_step = None
        else:
            self.reached_step = loop_end_step
        return self.convert_to_logs(results)

    def convert_to_logs(self, results: dict[str, Any]) -> dict[str, Any]:
        """Returns the logs of a training loop by name.

        Args:
          results: The results that the loop returns or that hooks get.
        """
        reported_results = remove_engine_results(results)
        return dict(self._train_metric_set.convert_to_logs(reported_results))

    # ---- Around a loop: its creation, its errors and the end of the data.

    def _get_train_loop(self) -> Callable[..., Any]:
        """Returns the training loop.

        Creates a new one if none exists, or if the loop lacks a factor of a learning rate.
        """
        if self._train_loop is None or self.hyper_parameters.has_new_factor:
            self._train_loop = self.create_train_loop_fn()
            self.hyper_parameters.has_new_factor = False
        return self._train_loop

    def forget_train_loop(self) -> None:
        """Discards the training loop, so that the next one is traced again with changed values."""
        self._train_loop = None

    def set_training_hooks(self, hooks: TrainingHooks) -> None:
        """Has training loops run step by step from now on, with work on the host between two.

        Args:
          hooks: The object whose methods are called before and after each step.
        """
        self.segmented_loop.hooks = hooks

    @contextlib.contextmanager
    def _enter_loop(self, iterator: DataIterator) -> Iterator[None]:
        """A context in which a loop is traced or runs.

        Errors get explanations. `is_at_step_boundary` is False inside. It remains False after an
        error, which may come from the middle of a step. The end of the data is no such error.
        """
        self.is_at_step_boundary = False

        def get_batch_spec() -> Any:
            # An element of the iterator of fused steps is a stack of batches.
            return self.batch_spec or iterator.element_spec

        try:
            with (
                explain_batch_errors("task.train_data", get_batch_spec, self.task, self.model),
                self.data.explain_read_errors(),
                self.loop_factory.use_configured_executor(),
            ):
                yield
        except (tf.errors.OutOfRangeError, StopIteration):
            self.is_at_step_boundary = True
            raise
        self.is_at_step_boundary = True

    @contextlib.contextmanager
    def _handle_end_of_data(self) -> Iterator[None]:
        """Handles the end of the data inside a loop.

        The finished steps count, and global_step shows their number.

        Raises:
          DataError: when there is no data at all.
        """
        try:
            yield
        except (tf.errors.OutOfRangeError, StopIteration):
            self.loop_steps = None
            self.has_data_ended = True
            self.data.reset()

            # Without a single step, the data did not end: it is empty.
            if self._read_step() == 0:
                raise self.data.create_empty_error() from None

    # ---- Restores and saves.
    #
    # A restore has two halves. `after_restore` restores the variables that exist when a run begins.
    # A training step may write more of them, such as a variable of a closure. Only the graph of the
    # loop shows these. `_track_step` adds them to checkpoints, restores them, and ends the restore:
    # what the checkpoint contains and nothing has taken is then reported. An exact resume needs
    # both halves before the first step, before a save, and before an evaluation that uses such
    # variables. So whichever of the three comes first traces the loop.
    #
    # The loop of a subclass may not be one that can be traced. If the subclass overrides
    # create_train_loop_fn, `after_restore` ends the restore. If it overrides train, a save does.

    def initialize(self) -> None:
        """Lets the task load its initial weights, in place of a restore.

        Called when there is no checkpoint to restore. Runs eagerly, in scope.
        """
        self.task.initialize(self.model)
        self.after_restore()

    def after_restore(self, path: str | None = None) -> None:
        """Sets data, metrics and moving average to match the variables that a run begins with.

        Called after each restore, and by `initialize` when there was nothing to restore. Runs
        eagerly, in scope.

        Args:
          path: The path of the restored checkpoint. None when there was none.
        """
        iterator_path = f"{path}{ITERATOR_SUFFIX}" if path else None
        self.data.prepare_iterator_restore(iterator_path)
        self.state.after_restore(path)

        if self.can_train:
            self.state.track_attributes(self._get_transient_variables())
        if self.state.is_step_tracked:
            self.state.end_restore()
        elif self.can_train and self.custom_parts.overrides_train_loop:
            self._track_step(None)

        self.weights_finite = None
        self.has_data_ended = False

    def trace_training(self) -> None:
        """Traces the training loop before the first step.

        Checkpoints then contain all that a step writes. Runs eagerly, on the host.

        It does nothing if this trainer does not train, or the loop is traced already. It does
        nothing either for a subclass that overrides `create_train_loop_fn`, `train_loop_begin`
        (which may change the data), or `train` without this method.
        """
        if not self.can_train or self.state.is_step_tracked:
            return

        # The `train` of a subclass may run another loop. A subclass that overrides this method too
        # runs the loop that is traced here.
        overrides_tracing = type(self).trace_training is not Trainer.trace_training
        may_run_other_loop = self.custom_parts.overrides_train and not overrides_tracing
        if may_run_other_loop or self.custom_parts.overrides_loop_begin:
            return

        iterator = self.data.iterator()
        loop = self._get_train_loop()
        if isinstance(loop, FactoryLoop):
            with self._enter_loop(iterator):
                if loop.loop_function is not None:
                    loop.loop_function.trace_graph(iterator)
            self._track_step(loop.newest_graph)

    def _track_step(self, graph: tf.Graph | None) -> None:
        """Adds and restores what a step writes, checks the graph, and ends the restore.

        Called once, before the first step. Runs eagerly, on the host.

        Args:
          graph: The graph of the loop. None: the loop is not compiled, or a subclass has created
            it.
        """
        is_required = self._options.require_exact_resume
        check_deterministic_kernels(self._strategy, is_required)
        if graph is not None:
            check_exact_resume(graph, is_required)
        self.state.track_step_state(graph, self._get_transient_variables())
        self.loop_factory.check(graph)

    def evaluate(self, num_steps: IntLike, sets: Sequence[str] | None = None) -> dict[str, Any]:
        """Evaluates and returns the logs. See Evaluator. Runs eagerly, on the host."""
        # The evaluation may use values of the checkpoint that only the trace restores.
        if self.state.step_state.needs_trace:
            self.trace_training()
        return super().evaluate(num_steps, sets)

    def before_save(self, prefix: str) -> None:
        """Prepares the state that is not in variables for the checkpoint to be saved at `prefix`.

        Runs eagerly, on the host.
        """
        self.trace_training()
        if self.custom_parts.overrides_train and not self.state.is_step_tracked:
            # The `train` of this subclass may never run the loop that ends the restore.
            self.state.end_restore()
        self.state.before_save(self._get_transient_variables())

        # After a stop request, saving the iterator may take a quarter of the grace period.
        # The request may come before the save begins or in the middle of it.
        patience = self._options.preemption_grace_seconds / 4
        begin = time.monotonic()

        def should_give_up() -> bool:
            seconds_of_save = time.monotonic() - begin
            return seconds_of_save > patience and self.seconds_since_stop_request > patience

        self.data.save_iterator(
            f"{prefix}{ITERATOR_SUFFIX}",
            is_at_position=self.loop_factory.stack.is_empty,
            should_give_up=should_give_up,
        )

    def _get_transient_variables(self) -> list[Variable]:
        """Returns the variables that steps write and no checkpoint needs. See Evaluator."""
        variables = super()._get_transient_variables()
        variables += self._train_metric_set.variables()
        variables += self.train_tensors.value_variables
        variables += self.hyper_parameters.factors
        variables += self.accumulation.variables
        return variables

    # ---- State of checkpoints that is not in variables.

    def _register_python_state(self) -> None:
        """Adds the state that is not in variables to every checkpoint."""
        rates = ConfiguredRates(self.optimizer)
        parts = self.state.python_state
        parts.add("data", self.data.state, self.data.restore)
        parts.add("metrics", self._read_interrupted_metrics, self._restore_metrics)
        parts.add("learning rates", rates.state, rates.restore)
        self.state.add_replica_states()

        if has_state_methods(self.task):
            restore = self.task.restore

            def restore_task(task_state: Any) -> None:
                if task_state is not None:
                    restore(task_state)

            parts.add("task", self.task.state, restore_task)

    def _read_interrupted_metrics(self) -> Any:
        """Returns the training metrics on each replica, for a checkpoint.

        None if no loop was interrupted.
        """
        if not self.should_continue_metrics:
            return None
        return read_replica_values(self._train_metric_set.variables(), self._strategy)

    def _restore_metrics(self, state: Any) -> None:
        """Restores the metrics of an interrupted loop.

        Warns and begins the metrics again if the run has other metrics now.
        """
        fits = state is not None and restore_replica_values(
            self._train_metric_set.variables(), self._strategy, state
        )
        self.should_continue_metrics = fits

        if state is not None and not fits:
            _LOG.warning(
                "the checkpoint holds the state of other metrics than this run has, "
                "so the first training metrics leave out a few steps"
            )

    # ---- The training data.

    @property
    def train_dataset(self) -> Dataset:
        """The training dataset, created when it is first needed.

        Setting it takes effect with the next loop. With fused steps, an element is (number of
        batches, stacked batches). See inputs.fused_batches. A dataset that is set contains single
        batches.

        Raises:
          UsageError: when steps are fused and the dataset that is set is already distributed. The
            trainer then keeps its data.
        """
        return self.data.dataset

    @train_dataset.setter
    def train_dataset(self, dataset: Dataset) -> None:
        self.loop_factory.check_fusing(dataset)
        self.data.replace(dataset)

    def next_batch(self) -> Any:
        """Takes the next batch from the training data and returns it.

        Runs eagerly, on the host.
        """
        iterator = self.data.iterator()
        return self.loop_factory.next_batch(iterator)

    def probe_end_of_data(self) -> bool:
        """Whether the training data has ended. Takes a batch to find out, which is lost.

        Called after a loop that has run no step. Runs eagerly, on the host.

        Raises:
          DataError: when there is no data at all.
        """
        with self._handle_end_of_data():
            self.next_batch()
        return self.has_data_ended

    def check_data(self) -> None:
        """Checks datasets after the restore.

        Raises:
          DataError: when a dataset is known to be empty, or endless where it must end.
        """
        if self.can_train:
            self.data.check_not_empty()
        if self.can_evaluate:
            self.check_aggregation()
            self.validation.check(self.config.trainer.validation_steps)

    def data_identities(self) -> dict[str, Any]:
        """Returns what describes the data that `check_data` has opened.

        The keys are the paths of the sections of the config. See Source.
        """
        return self.inputs.data_identities(self.data.source)

    # ---- What a trainer consists of.

    @property
    def optimizer(self) -> Any:
        """The optimizer, a dict of optimizers by name, or None."""
        return self._optimizer

    @property
    def train_loss(self) -> Metric:
        """The metric of the training loss, a mean over the loop."""
        return self._train_metric_set.loss

    @property
    def train_metrics(self) -> list[Metric]:
        """All training metrics but the loss."""
        return self._train_metric_set.metrics

    @property
    def fuse_steps(self) -> int:
        """The number of training steps in one XLA program. 1 means that steps are not fused."""
        return self.loop_factory.fuse_steps

    @property
    def current_loop(self) -> FactoryLoop | None:
        """The training loop that runs now or ran last.

        None if it is not a TrainLoop or FusedLoop.
        """
        if isinstance(self._train_loop, FactoryLoop):
            return self._train_loop
        return None

    @property
    def first_step_at(self) -> float:
        """The time.perf_counter() when a loop function had last run its first step.

        0 before that. Loops that call the same function again do not change it, so it may lie
        before their start.
        """
        return self.segmented_loop.first_step_at

    def find_fusing_problem(self) -> str:
        """Returns why training steps cannot be fused in one XLA program.

        Only what is known before a try counts. Returns "" if there is no known reason.
        """
        return self.loop_factory.find_fusing_problem(self.data.prebuilt_dataset)

    # ---- Parts that a subclass may replace. The constructor calls each method once.

    def _build_global_step(self) -> tf.Variable:
        """Returns the global step, an int64 scalar."""
        return tf.Variable(
            0,
            dtype=tf.int64,
            name="global_step",
            trainable=False,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    def _build_optimizers(
        self,
        config: ExperimentLike,
        task: TaskLike,
        model: Model,
        optimizer: Optimizers | None,
    ) -> Optimizers | None:
        """Returns the optimizer of the constructor with its variables, or NamedOptimizers."""
        return build_task_optimizers(optimizer, config.trainer, task, model)

    def _build_average(
        self,
        config: ExperimentLike,
        task: TaskLike,
        model: Model,
        trainable: Sequence[Variable],
    ) -> Average | None:
        """Returns the moving average of the weights. None: the run keeps none.

        Args:
          config: The experiment's config.
          task: The task.
          model: The built model.
          trainable: The variables that were trainable before some were frozen. Empty: none were.
        """
        return create_moving_average(config.trainer, task, model, trainable)

    def _build_training_metrics(
        self, config: ExperimentLike, task: TaskLike, model: Model, enabled: bool
    ) -> MetricSet:
        """Returns the metrics of training steps. Without `enabled`, this trainer never trains."""
        return create_training_metrics(task, model, config, enabled=enabled)

    def _build_evaluation_metrics(
        self, config: ExperimentLike, task: TaskLike, model: Model, enabled: bool
    ) -> MetricSet:
        """Returns the metrics of evaluations. Without `enabled`, this trainer never evaluates."""
        return create_validation_metrics(task, model, config, enabled=enabled)


class TrainingSteps:
    """What the training loops of a trainer run. It has the methods of LoopSteps.

    Args:
      trainer: The trainer.
      metrics: The training metrics.
      weights_check: Checks the weights at the end of a loop. None: nothing checks them.

    Attributes:
      step: The method `train_step` that the trainer has now.
    """

    def __init__(
        self, trainer: Trainer, metrics: MetricSet, weights_check: FiniteWeightsCheck | None
    ) -> None:
        self._trainer = trainer
        self.step = trainer.train_step
        self._metrics = metrics
        self._weights_check = weights_check

    def reset(self) -> None:
        """Resets the metrics. Runs eagerly or in graph, in cross-replica context."""
        self._metrics.reset()

    def after_step(self) -> None:
        """Stops all workers at the same step if one of them was asked to stop. Runs in graph."""
        self._trainer.stop_flag.sync_workers(self._trainer.global_step)

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns the results of a loop, and what `train_loop_end` reads besides the metrics.

        Runs eagerly or in graph, in cross-replica context.
        """
        trainer = self._trainer
        results = self._metrics.results()
        results["learning_rate"] = current_learning_rate(trainer.optimizer)

        # A float64 is exact up to 2**53. An int64 would need a separate transfer.
        results[_STEP_KEY] = tf.cast(trainer.global_step, tf.float64)

        if self._weights_check is not None:
            is_segmented = trainer.segmented_loop.hooks is not None
            results |= self._weights_check.result(is_segmented=is_segmented)
        return results


def get_custom_parts(kind: type[Trainer]) -> CustomParts:
    """Returns the parts of a class of trainers that differ from Trainer.

    They are the methods that the class overrides.
    """
    return CustomParts(
        overrides_train_loop=kind.create_train_loop_fn is not Trainer.create_train_loop_fn,
        overrides_train=kind.train is not Trainer.train,
        overrides_loop_begin=kind.train_loop_begin is not Trainer.train_loop_begin,
        overrides_loop_end=kind.train_loop_end is not Trainer.train_loop_end,
        overrides_replica_step=kind._replica_train_step is not Trainer._replica_train_step,
        overrides_eval_reduce=kind.eval_reduce is not Trainer.eval_reduce,
        overrides_eval_end=kind.eval_end is not Trainer.eval_end,
    )
