"""MultiTask: a task that consists of tasks, which train one model. MultiTaskModel is that model."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.config.experiment_registry import lookup_task_class
from trainer_kit.config.schema.multitask import MultiTaskConfig
from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.inputs.registered_datasets import get_build_inputs
from trainer_kit.inputs.sources.multitask_source import combine_task_data
from trainer_kit.inputs.sources.source_protocol import call_build_inputs
from trainer_kit.inputs.task_sampler import TaskSampler
from trainer_kit.optimizers.gradients import apply_gradients, scale_loss
from trainer_kit.training.task import Task, full_precision, has_state_methods, split_batch
from trainer_kit.typing import Model, Optimizer

# The beginning of the attribute that has the model of a task.
_ATTRIBUTE = "sub_task_"


class MultiTaskModel(keras.Model):
    """The models of several tasks as one.

    Args:
      sub_tasks: The Keras 3 model of each task, by the task's name. Layers that several models have
        are shared.
    """

    def __init__(self, sub_tasks: Mapping[str, keras.Model]) -> None:
        super().__init__(name="multi_task")
        self._names = tuple(sub_tasks)

        # The models are attributes, since tf.train.Checkpoint does not look into a dict.
        for name, model in sub_tasks.items():
            setattr(self, f"{_ATTRIBUTE}{name}", model)
        self.built = True

    @property
    def sub_tasks(self) -> dict[str, keras.Model]:
        """The model of each task, by the task's name."""
        models = {}
        for name in self._names:
            models[name] = getattr(self, f"{_ATTRIBUTE}{name}")
        return models

    def call(self, inputs: Any, training: bool | None = None) -> dict[str, Any]:
        """Returns {task: outputs} for features that all tasks take.

        Runs in graph or eagerly, on a replica.

        Args:
          inputs: The features.
          training: Whether the models are called for training.
        """
        outputs = {}
        for name, model in self.sub_tasks.items():
            outputs[name] = model(inputs, training=training)
        return outputs


def model_of_task(model: Model, name: str) -> Any:
    """Returns the model of a task: its entry in `model.sub_tasks`, or the model without them.

    Args:
      model: The model of a MultiTask.
      name: The name of the task.

    Raises:
      UsageError: when the model has an attribute sub_tasks without this task.
    """
    models = getattr(model, "sub_tasks", {name: model})
    if name not in models:
        raise UsageError(
            f"{type(model).__name__}.sub_tasks has no model for the task {name!r}; "
            f"it has {[*models]}"
        )
    return models[name]


class MultiTask(Task):
    """A task that consists of tasks. Define build_models. Its config is a MultiTaskConfig.

    Each task keeps its data, losses, metrics and steps. Its `build_model` is not called. Created in
    strategy scope.

    Args:
      params: The config.
      logging_dir: The folder of the run's files, the same as model_dir.
      name: The name. The default is `params.name`, or else the class's name.

    Attributes:
      tasks: The tasks by name, sorted by name.

    Raises:
      UsageError: when no task class is registered for the config of a task.
      UsageError: when joint training would not call the `train_step` of a task.
    """

    # These exist only if a task has its own.
    state: Callable[[], dict[str, Any]]
    restore: Callable[[Mapping[str, Any]], None]

    def __init__(
        self, params: MultiTaskConfig, logging_dir: str | None = None, name: str | None = None
    ) -> None:
        super().__init__(params, logging_dir, name)
        self.tasks: dict[str, Any] = {}
        has_default_step = type(self).train_step is MultiTask.train_step
        has_joint_step = self.is_joint and has_default_step

        for task_name, routine in sorted(params.task_routines.items()):
            section = routine.task_config
            task_class = lookup_task_class(section)
            task = task_class(section, logging_dir=logging_dir)
            task.name = task_name
            self.tasks[task_name] = task

            task_step = getattr(type(task), "train_step", None)
            has_own_step = task_step is not Task.train_step
            if has_joint_step and has_own_step:
                raise UsageError(
                    f"task.training=joint does not call the train_step of the task {task_name!r} "
                    f"({type(task).__name__}); "
                    "set task.training=interleaving, or override train_step of the MultiTask"
                )

        if any(map(has_state_methods, self.tasks.values())):
            self.state = self._states
            self.restore = self._restore

    @property
    def is_joint(self) -> bool:
        """Whether each step trains all tasks."""
        return bool(self.task_config.training == "joint")

    @abc.abstractmethod
    def build_models(self) -> Mapping[str, Any]:
        """Returns the Keras 3 model of each task by its name. Called in strategy scope.

        Models that have the same layers share them.
        """

    def build_model(self) -> Any:
        """Returns the models of all tasks as one model. See MultiTaskModel.

        An override may return any model or tf.Module. Each task then gets its entry in the
        attribute `sub_tasks`, or the whole model if no such attribute exists.
        """
        return MultiTaskModel(self.build_models())

    def initialize(self, model: Model) -> None:
        """Loads the `init_checkpoint` of this task into the model, and then that of each task.

        The one of a task is loaded into its own model. Runs eagerly, in strategy scope.
        """
        super().initialize(model)
        for name, task in self.tasks.items():
            task.initialize(model_of_task(model, name))

    def build_inputs(
        self, params: Any, input_context: tf.distribute.InputContext | None = None
    ) -> Any:
        """Returns the training data of all tasks as one stream.

        An element is {task: batch} in joint training, and else (number of the task, {task: batch}).

        Args:
          params: Not used, since each task has separate training data.
          input_context: This worker's place. None means one replica.
        """
        data = {}
        for name, task in self.tasks.items():
            section = task.task_config.train_data
            build_inputs = get_build_inputs(task, section)
            data[name] = call_build_inputs(build_inputs, section, input_context)

        # In interleaved training the sampler chooses the task of each step.
        sampler = None
        if not self.is_joint:
            config = self.task_config
            routines = config.task_routines
            weights = [routines[name].task_weight for name in self.tasks]
            sampler = TaskSampler(config.task_sampler, weights, config.sampling_seed)
        return combine_task_data(data, sampler, input_context)

    @tf.autograph.experimental.do_not_convert
    def inference_step(self, inputs: Any, model: Model) -> dict[str, Any]:
        """Returns the outputs of each task by its name. Runs in graph, on a replica.

        Args:
          inputs: Features that all tasks take.
          model: The model of build_model.
        """
        return {
            name: apply_autograph(task.inference_step)(inputs, model_of_task(model, name))
            for name, task in self.tasks.items()
        }

    def _states(self) -> dict[str, Any]:
        states = {}
        for name, task in self.tasks.items():
            if has_state_methods(task):
                states[name] = task.state()
        return states

    def _restore(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            task = self.tasks[name]
            task.restore(state)

    @tf.autograph.experimental.do_not_convert
    def train_step(
        self, inputs: Any, model: Model, optimizer: Optimizer, metrics: Any = None
    ) -> dict[str, Any]:
        """Trains all tasks by the weighted sum of their losses. Runs in graph, on a replica.

        This is the step of joint training.

        Args:
          inputs: A batch of each task, by name.
          model: The model of build_model.
          optimizer: The optimizer of create_optimizer.
          metrics: The metrics of each task, by name.

        Returns:
          Logs: the weighted sum of the losses, and the loss of each task under its name.
        """
        models = {name: model_of_task(model, name) for name in self.tasks}
        batches = {name: split_batch(inputs[name]) for name in self.tasks}
        routines = self.task_config.task_routines
        outputs = {}
        task_logs = {}
        weighted_losses = []

        with tf.GradientTape() as tape:
            for name, task in self.tasks.items():
                task_model = models[name]
                features, labels = batches[name]
                converted_model = apply_autograph(task_model)
                predictions = converted_model(features, training=True)
                outputs[name] = full_precision(predictions)
                loss = task.batch_loss(task_model, features, labels, outputs[name])
                task_logs[name] = {task.loss: loss}
                weighted_losses.append(loss * routines[name].task_weight)
            total = tf.add_n(weighted_losses)

            # The gradients of all replicas are added.
            strategy = tf.distribute.get_strategy()
            replicas = strategy.num_replicas_in_sync
            share = scale_loss(optimizer, total / replicas)

        variables = model.trainable_variables
        gradients = tape.gradient(share, variables)
        pairs = list(zip(gradients, variables, strict=True))
        apply_gradients(optimizer, pairs)

        for name, task in self.tasks.items():
            features, labels = batches[name]
            task_metrics = metrics[name] if metrics else ()
            task.update_metrics(task_metrics, models[name], features, labels, outputs[name])

        return {self.loss: total, **task_logs}
