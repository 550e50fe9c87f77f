"""MultiTaskTrainer: trains the tasks of a MultiTask, and evaluates each on its own data.

Each step trains all tasks jointly, or the next one of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.inputs.dataset_iterator import ValidationData
from trainer_kit.runtime.replica_values import local_tensors
from trainer_kit.runtime.tensorflow_internals import stateless_random_operations
from trainer_kit.training.checks.batch_spec import build_metrics, build_model
from trainer_kit.training.checks.model_and_config import check_methods
from trainer_kit.training.loops.loop_function import control_dependencies_for_writes
from trainer_kit.training.metric_set import (
    MetricSet,
    create_training_metrics,
    create_validation_metrics,
)
from trainer_kit.training.multitask.multi_task import MultiTask, model_of_task
from trainer_kit.training.task import step_loss
from trainer_kit.training.task_inputs import TaskInputs, ValidationSets
from trainer_kit.training.trainer import Trainer
from trainer_kit.typing import Dataset, ExperimentLike, Model, Optimizer, TaskLike

# The metric of the steps that trained a task.
_STEPS = "steps"


class MultiTaskMetrics(MetricSet):
    """A metric set for each task, and the mean loss of all steps.

    Created in the scope of the strategy.

    Args:
      sets: The metrics of each task, by its name.
      count_steps: Whether to report the steps of a loop that trained a task, and to leave out tasks
        without any.

    Attributes:
      sets: The argument of this name.

    Raises:
      UsageError: when a metric has the name under which the steps are reported.
    """

    def __init__(self, sets: Mapping[str, MetricSet], *, count_steps: bool) -> None:
        # In float32 TensorFlow would fuse the sums, and their order, and so the last bit, would
        # vary.
        super().__init__("training_loss", [], exact=True)
        self.sets = dict(sets)

        counted = self.sets if count_steps else {}
        self._step_counts = {}
        for name in counted:
            self._step_counts[name] = tf.Variable(0, trainable=False, dtype=tf.int64)
        for metrics in counted.values():
            metrics.reserve(_STEPS, "task.training=interleaving")

    def update_with_step(
        self, task: Any, logs: Any, inputs: Any, share: float | tf.Tensor = 1.0
    ) -> None:
        """Adds the loss and the other scalars of a joint step. Runs in graph, on a replica.

        Args:
          task: The MultiTask.
          logs: What its step returned, with the logs of each task under its name.
          inputs: The batches by task.
          share: Not used, since batches of several tasks are not split.
        """
        # The logs of the tasks themselves are under their names.
        own = {name: value for name, value in logs.items() if name not in self.sets}
        own[task.loss] = step_loss(task, own)

        # Batches of several tasks have no common number of examples.
        self.update(task, own, inputs, weight=1.0)

        for name, metrics in self.sets.items():
            if name not in logs:
                continue
            member = task.tasks[name]
            member_logs = metrics.extract_metrics(member, logs[name])
            metrics.update_with_step(member, member_logs, inputs[name])

    def update_with_task(self, name: str, task: TaskLike, logs: Any, inputs: Any) -> None:
        """Adds the loss and the other scalars of a step of one task.

        Runs in graph, on a replica.

        Args:
          name: The name of the task.
          task: The task.
          logs: What its step returned.
          inputs: Its batch.
        """
        self.sets[name].update_with_step(task, logs, inputs)
        self.loss.update_state(step_loss(task, logs))

    def count_step(self, name: str) -> None:
        """Counts a step of the task `name`. Runs in graph, in cross-replica context."""
        self._step_counts[name].assign_add(1)

    @tf.autograph.experimental.do_not_convert
    def reset(self) -> None:
        """Resets all metrics. Runs eagerly or in graph, in cross-replica context."""
        super().reset()
        for metrics in self.sets.values():
            metrics.reset()
        for count in self._step_counts.values():
            count.assign(0)

    def reset_returned_metrics(self) -> None:
        """Resets the metrics that the steps of the tasks return. See MetricSet."""
        for metrics in self.sets.values():
            metrics.reset_returned_metrics()

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns the results of each task by its name, and those of all.

        Called in cross-replica context, eagerly or in graph.
        """
        results: dict[str, Any] = {}
        for name, metrics in self.sets.items():
            results[name] = dict(metrics.results())

        # A float64 is transferred with the other scalars. An int64 has a separate transfer.
        for name, count in self._step_counts.items():
            results[name][_STEPS] = tf.cast(count, tf.float64)
        common_results = super().results()
        return results | common_results

    def convert_to_logs(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the results of a loop without those of tasks that no step trained.

        Runs eagerly, on the host.
        """
        reported = dict(results)
        for name in self._step_counts:
            if not results[name][_STEPS]:
                del reported[name]

        # The number of steps is whole, although the graph has returned a float.
        for name in self._step_counts.keys() & reported.keys():
            task_results = reported[name]
            steps = int(task_results[_STEPS])
            reported[name] = {**task_results, _STEPS: steps}
        return reported

    def variables(self) -> list[Any]:
        """Returns the variables of all metrics, always in the same order."""
        variables = [*super().variables()]
        for metrics in self.sets.values():
            variables += metrics.variables()
        return [*variables, *self._step_counts.values()]


class MultiTaskInputs(TaskInputs):
    """Opens the data of several tasks. Each validation set is that of one task."""

    def create_validation_data(
        self, name: str, params: Any, task: Any, ready_made_dataset: Dataset | None = None
    ) -> ValidationData:
        """Returns the ValidationData of the validation data of one task. See TaskInputs."""
        member = task.tasks[name]
        return super().create_validation_data(name, params, member, ready_made_dataset)

    def validation_section(self, name: str) -> str:
        """Returns the dotted path of a task's validation data below the section `task`."""
        return f"task_routines.{name}.task_config.validation_data"


class MultiTaskTrainer(Trainer):
    """Trains and evaluates a MultiTask. The arguments are those of Trainer.

    Create it in the scope of its strategy.

    Training reports the metrics of each task under its name, and the loss of all as
    `training_loss`. With interleaving, it also reports the steps of each task in the loop, and
    nothing of tasks without any.

    Raises:
      UsageError: when the task is not a MultiTask, or the model of a task is missing.
      TrainerKitError: when a method of a task does not accept the arguments of its calls.
    """

    inputs_class: Any = MultiTaskInputs
    _train_metric_set: MultiTaskMetrics

    def __init__(
        self,
        config: ExperimentLike,
        task: MultiTask,
        model: Model,
        optimizer: Optimizer,
        train: bool = True,
        evaluate: bool = True,
        *datasets: Any,
        **options: Any,
    ) -> None:
        if not hasattr(task, "tasks"):
            kind = type(task).__name__
            raise UsageError(
                f"{kind} has the config of several tasks; let it inherit from trainer_kit.MultiTask"
            )

        for name, member in task.tasks.items():
            check_methods(member, train, evaluate)
            member_model = model_of_task(model, name)
            build_model(member.task_config, member, member_model, train)
        super().__init__(config, task, model, optimizer, train, evaluate, *datasets, **options)

        for name, member in task.tasks.items():
            self.state.add_root(f"task/tasks/{name}", member)
        if not evaluate:
            return

        # Each validation set has the task, the model and the metrics that evaluate it.
        with self.strategy.scope():
            validation_sets = []
            for validation_set in self.validation:
                member = task.tasks[validation_set.name]
                member_model = model_of_task(model, validation_set.name)
                metrics = create_validation_metrics(member, member_model, config, enabled=True)
                build_metrics(member.task_config, member, member_model, metrics.metrics, False)
                bound_set = dataclasses.replace(
                    validation_set, task=member, model=member_model, metrics=metrics
                )
                validation_sets.append(bound_set)
            self.set_validation_sets(ValidationSets(validation_sets))

    @property
    def train_metrics(self) -> Any:
        """The training metrics of each task by its name, without the losses."""
        return {name: metrics.metrics for name, metrics in self._train_metric_set.sets.items()}

    @tf.autograph.experimental.do_not_convert
    def train_step(self, iterator: tf.data.Iterator) -> None:
        """Trains all tasks or the next one on every replica. Runs in graph.

        Args:
          iterator: An iterator over the data. The step takes the next element.
        """
        if self.task.is_joint:
            super().train_step(iterator)
            return

        next_train_inputs = apply_autograph(self.next_train_inputs)
        number, batches = next_train_inputs(iterator)
        local_numbers = self.strategy.experimental_local_results(number)
        turn = local_numbers[0]

        random = stateless_random_operations(self.state.random_generator)
        tensors = local_tensors((number, batches), self.strategy)
        with control_dependencies_for_writes(tensors), random:
            steps = []
            for name in self.task.tasks:
                step = functools.partial(self._task_step, name, batches[name])
                steps.append(step)
            task_number = tf.cast(turn, tf.int32)
            done = tf.switch_case(task_number, steps)

        # The step counts only when the task has been trained.
        with control_dependencies_for_writes([done]):
            self.global_step.assign_add(1)
            if self._average is not None:
                self._average.update(self.global_step)

    def _task_step(self, name: str, batch: Any) -> tf.Tensor:
        """Trains one task on its batch, on every replica.

        Returns a tensor that is ready afterwards.
        """
        task = self.task.tasks[name]
        task_metrics = self.train_metrics[name]
        options = {"optimizer": self.optimizer, "metrics": task_metrics}
        metric_set = self._train_metric_set.sets[name]

        @tf.autograph.experimental.do_not_convert
        def train_on_replica(batch: Any) -> None:
            # A tf.function would copy the mappings in the options, so they are no arguments.
            def step(batch: Any) -> Any:
                model = model_of_task(self.model, name)
                train_step = apply_autograph(task.train_step)
                logs = train_step(batch, model=model, **options)
                return metric_set.extract_metrics(task, logs)

            if self.config.runtime.enable_xla:
                step = tf.function(step, jit_compile=True, autograph=False)
            logs = step(batch)
            self._train_metric_set.update_with_task(name, task, logs, batch)

        self.strategy.run(train_on_replica, args=(batch,), options=self._run_options)
        self._train_metric_set.count_step(name)
        return tf.constant(True)

    @tf.autograph.experimental.do_not_convert
    def _replica_train_step(
        self, inputs: Any, optimizer: Optimizer | None = None, share: float | tf.Tensor = 1.0
    ) -> None:
        super()._replica_train_step(inputs, optimizer, share)

        # The element has a batch of each task, on which the whole model cannot be called.
        self.batch_spec = None

    def _build_training_metrics(
        self, config: ExperimentLike, task: Any, model: Model, enabled: bool
    ) -> MultiTaskMetrics:
        """Returns the metrics of each task. See Trainer."""
        sets = {}
        for name, member in task.tasks.items():
            member_model = model_of_task(model, name)
            metrics = create_training_metrics(member, member_model, config, enabled=enabled)
            build_metrics(member.task_config, member, member_model, metrics.metrics, True)
            sets[name] = metrics
        return MultiTaskMetrics(sets, count_steps=not task.is_joint)
