"""MultiTaskTrainer: trains the tasks of a MultiTask jointly or one per step, and evaluates each on its own data."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import tensorflow as tf

from trainer_kit.distribution.replicas import local_tensors
from trainer_kit.distribution.tensorflow_internals import stateless_random_operations
from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import converted
from trainer_kit.inputs.dataset_iterator import DatasetIterator
from trainer_kit.training.checks.batch_spec import build_metrics, build_model
from trainer_kit.training.checks.method_signatures import check_methods
from trainer_kit.training.configured_metrics import configured_metrics
from trainer_kit.training.loops.read_before_write import writes_after
from trainer_kit.training.metrics import training_metrics, validation_metrics
from trainer_kit.training.multitask.metrics import MultiTaskMetrics
from trainer_kit.training.multitask.model import model_of_task
from trainer_kit.training.multitask.task import MultiTask
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_parts.task_inputs import TaskInputs
from trainer_kit.training.trainer_parts.validation_sets import ValidationSet, ValidationSets


class MultiTaskInputs(TaskInputs):
    """Opens the data of several tasks; each validation set is that of one task."""

    def validation_feed(self, name: str, params: Any, task: Any, given: Any = None) -> DatasetIterator:
        """Returns the DatasetIterator of the validation data of one task; see TaskInputs."""
        return super().validation_feed(name, params, task.tasks[name], given)

    def validation_section(self, name: str) -> str:
        """Returns the dotted path of a task's validation data below the section `task`."""
        return f"task_routines.{name}.task_config.validation_data"


class MultiTaskTrainer(Trainer):
    """Trains and evaluates a MultiTask. Create it in the scope of its strategy; the arguments are those of Trainer.

    Training reports the metrics of each task under its name, and the loss of all as `training_loss`. With
    interleaving, it also reports the steps of each task in the loop, and nothing of tasks without any.
    """

    inputs_class: Any = MultiTaskInputs

    def __init__(
        self,
        config: Any,
        task: MultiTask,
        model: Any,
        optimizer: Any,
        train: bool = True,
        evaluate: bool = True,
        train_dataset: Any = None,
        validation_dataset: Any = None,
        checkpoint_exporter: Any = None,
    ) -> None:
        self._build_models(task, model, train, evaluate)
        super().__init__(
            config, task, model, optimizer, train, evaluate, train_dataset, validation_dataset, checkpoint_exporter
        )
        self.state.step_state.roots |= {f"task/tasks/{name}": one for name, one in task.tasks.items()}
        if evaluate:
            with self.strategy.scope():
                self.set_validation_sets(ValidationSets(map(self._of_task, self.validation)))

    @classmethod
    def create(cls, config: Any, task: Any, train: bool, evaluate: bool, checkpoint_exporter: Any = None) -> Any:
        """Returns a trainer with the task's model and, to train, its optimizer. Called in strategy scope.

        Raises:
          UsageError: when the task is no MultiTask, or joint training would not call the step of one of its tasks.
        """
        if not isinstance(task, MultiTask):
            kind = type(task).__name__
            raise UsageError(f"{kind} has the config of several tasks; let it inherit from trainer_kit.MultiTask")
        if train:
            task.check_joint()
        return super().create(config, task, train, evaluate, checkpoint_exporter)

    @property
    def train_metrics(self) -> Any:
        """The training metrics of each task by its name, without the losses."""
        return {name: one.metrics for name, one in self._train_set.sets.items()}

    @tf.autograph.experimental.do_not_convert
    def train_step(self, iterator: Any) -> None:
        """Trains all tasks or the next one on every replica, with the next element of the iterator; runs in graph."""
        if self.task.is_joint:
            super().train_step(iterator)
            return
        number, batches = converted(self.next_train_inputs)(iterator)
        turn = self.strategy.experimental_local_results(number)[0]
        random = stateless_random_operations(self.state.random_generator)
        with writes_after(local_tensors((number, batches), self.strategy)), random:
            steps = [functools.partial(self._task_step, name, batches[name]) for name in self.task.tasks]
            done = tf.switch_case(tf.cast(turn, tf.int32), steps)
        with writes_after([done]):
            self.global_step.assign_add(1)
            if self._average is not None:
                self._average.update(self.global_step)

    @tf.autograph.experimental.do_not_convert
    def _task_step(self, name: str, batch: Any) -> tf.Tensor:
        """Trains one task on its batch, on every replica; returns a tensor that is ready afterwards."""
        self.strategy.run(functools.partial(self._replica_task_step, name), args=(batch,), options=self._run_options)
        self._train_set.count_step(name)
        return tf.constant(True)

    @tf.autograph.experimental.do_not_convert
    def _replica_train_step(self, inputs: Any, optimizer: Any = None, share: Any = None) -> None:
        super()._replica_train_step(inputs, optimizer, share)
        self.batch_spec = None  # that of a batch of each task, on which the whole model cannot be called

    @tf.autograph.experimental.do_not_convert
    def _replica_task_step(self, name: str, batch: Any) -> None:
        task, metrics = self.task.tasks[name], self.train_metrics[name]
        given = {"model": model_of_task(self.model, name), "optimizer": self.optimizer, "metrics": metrics}
        step = lambda batch: converted(task.train_step)(batch, **given)  # noqa: E731  a tf.function copies mappings
        step = self._train_set.sets[name].without_metrics(task, step)
        if self.config.runtime.enable_xla:
            step = tf.function(step, jit_compile=True, autograph=False)
        self._train_set.update_with_task(name, task, step(batch), batch)

    def _build_models(self, task: Any, model: Any, train: bool, evaluate: bool) -> None:
        """Checks the methods of each task, and creates the missing variables of its model; called in scope."""
        for name, one in task.tasks.items():
            check_methods(one, train, evaluate)
            build_model(one.task_config, one, model_of_task(model, name), train)

    def _training_metrics(self, config: Any, task: Any, model: Any) -> MultiTaskMetrics:
        def of_task(name: str) -> Any:
            configured = configured_metrics(config, self.trains)
            own_task, own_model = task.tasks[name], model_of_task(model, name)
            made = training_metrics(own_task, own_model, wanted=self.trains, configured=configured)
            build_metrics(own_task.task_config, own_task, own_model, made.metrics, True)
            return made

        return MultiTaskMetrics({name: of_task(name) for name in task.tasks}, count_steps=not task.is_joint)

    def _of_task(self, one: ValidationSet) -> ValidationSet:
        """Returns a validation set with the task, the model and new metrics that evaluate it; called in scope."""
        task, model = self.task.tasks[one.name], model_of_task(self.model, one.name)
        metrics = validation_metrics(task, model, wanted=True, configured=configured_metrics(self.config, True))
        build_metrics(task.task_config, task, model, metrics.metrics, False)
        return dataclasses.replace(one, task=task, model=model, metrics=metrics)
