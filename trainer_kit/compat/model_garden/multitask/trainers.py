"""Trainers and the evaluator of several Model Garden tasks.

The signatures are those of official.modeling.multitask. The engine trains one task with one data
stream, so MultiTaskAdapter presents a MultiTask of Model Garden to it as one task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import orbit
import tensorflow as tf
from official.modeling.multitask.multitask import MultiTask
from official.modeling.multitask.task_sampler import TaskSampler as OriginalTaskSampler

from trainer_kit.compat.model_garden.build_errors import explain_config_errors
from trainer_kit.compat.model_garden.conversion import TrainerSections, convert
from trainer_kit.compat.model_garden.garden_trainer import Trainer
from trainer_kit.config.schema.evaluation import ValidationSetConfig
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.inputs.sources.multitask_source import combine_task_data
from trainer_kit.inputs.sources.source_protocol import call_build_inputs
from trainer_kit.inputs.task_sampler import BLOCK, TaskSampler
from trainer_kit.telemetry.scalars import LOSS
from trainer_kit.training.checks.batch_spec import build_model
from trainer_kit.training.metric_set import MetricSet, task_metrics
from trainer_kit.training.multitask.multi_task import model_of_task
from trainer_kit.training.multitask.multi_task_trainer import MultiTaskMetrics, MultiTaskTrainer
from trainer_kit.training.task_inputs import ValidationSet, ValidationSets
from trainer_kit.typing import CheckpointExporter, ExperimentLike, Metric, Model, TaskLike

if TYPE_CHECKING:
    from trainer_kit.compat.model_garden.garden_types import (
        AdaptableTrainer,
        ExperimentParams,
        GardenConfig,
        GardenOptimizer,
        GardenTask,
    )
    from trainer_kit.inputs.sources.source_protocol import Source

TOTAL_LOSS = "total_loss"


class MultiTaskAdapter:
    """Presents a MultiTask of Model Garden to the engine as one task. Created in strategy scope.

    Args:
      multi_task: A MultiTask of Model Garden. For evaluations alone, an object with `tasks`.
      model: The model of all tasks. None: `multi_task.build_multitask_model` builds it.
      task_sampler: A task sampler of Model Garden, which draws the task of each step. None: each
        step trains all tasks.

    Attributes:
      sampler: Draws the task of each step as Model Garden does. None: each step trains all tasks.
      step_counters: The int64 scalar variables that count the steps of each task. Empty if each
        step trains all tasks. The run finds the variables here and saves them.
    """

    loss = "loss"

    def __init__(
        self,
        multi_task: MultiTask | SimpleNamespace,
        model: Model | None = None,
        task_sampler: OriginalTaskSampler | None = None,
    ) -> None:
        self.multi_task: MultiTask = multi_task
        self._model = model
        self.sampler: GardenTaskSampler | None = None
        self.step_counters: dict[str, tf.Variable] = {}
        if task_sampler is not None:
            self.sampler = GardenTaskSampler(task_sampler, len(self.tasks))
            self.step_counters = {name: orbit.utils.create_global_step() for name in self.tasks}

    @property
    def tasks(self) -> dict[str, GardenTask]:
        """The tasks of Model Garden by name."""
        return dict(self.multi_task.tasks)

    @property
    def is_joint(self) -> bool:
        """Whether each step trains all tasks."""
        return self.sampler is None

    def build_model(self) -> Model:
        """Returns the model of all tasks. Called in strategy scope.

        Raises:
          UsageError: When no model was given and the MultiTask cannot build one.
        """
        if self._model is not None:
            return self._model

        if not hasattr(self.multi_task, "build_multitask_model"):
            raise UsageError(
                f"there is no model for the tasks: {type(self.multi_task).__name__} has no method"
                " build_multitask_model(), which returns a MultiTaskBaseModel; define it in a"
                " subclass of MultiTask, registered for the class of its config by"
                " official.core.task_factory.register_task_cls"
            )
        return self.multi_task.build_multitask_model()

    def build_inputs(
        self,
        params: Mapping[str, GardenConfig],
        input_context: tf.distribute.InputContext | None = None,
    ) -> tf.data.Dataset | Source:
        """Returns the training data of all tasks as one stream. See trainer_kit.MultiTask.

        Args:
          params: A dict from task name to the section of its training data.
          input_context: The worker's place among the others.
        """
        datasets: dict[str, tf.data.Dataset | Source] = {}
        for number, (name, task) in enumerate(self.tasks.items()):
            with explain_config_errors(f"task.task_routines.{number}.task_config.train_data"):
                datasets[name] = call_build_inputs(task.build_inputs, params[name], input_context)
        return combine_task_data(datasets, self.sampler, input_context)

    @tf.autograph.experimental.do_not_convert
    def train_step(
        self,
        inputs: Any,
        model: Model,
        optimizer: GardenOptimizer,
        metrics: Mapping[str, list[Metric]] | None = None,
    ) -> dict[str, Any]:
        """Trains all tasks by `joint_train_step`. Runs in graph, on a replica.

        Returns:
          Logs: the weighted sum of the losses, and the loss of each task under its name.

        Raises:
          UsageError: When the step returns a loss of an unknown name.
        """
        step = apply_autograph(self.multi_task.joint_train_step)
        step_losses = step(
            inputs, multi_task_model=model, optimizer=optimizer, task_metrics=metrics
        )
        losses = dict(step_losses)
        total = losses.pop(TOTAL_LOSS, None)
        unknown_names = losses.keys() - self.tasks.keys()
        if unknown_names:
            raise UsageError(
                "the training step returned losses of unknown names:"
                f" {', '.join(unknown_names)}; it may return {TOTAL_LOSS} and one for each task:"
                f" {', '.join(self.tasks)}"
            )

        if total is None or type(self.multi_task).joint_train_step is MultiTask.joint_train_step:
            # In float64, so that the order of the sum does not matter.
            weighted_losses = []
            for name, loss in losses.items():
                weight = self.multi_task.task_weight(name)
                weighted_losses.append(tf.cast(loss, tf.float64) * weight)
            total = tf.add_n(weighted_losses)

        logs = {self.loss: total}
        for name, loss in losses.items():
            task = self.tasks[name]
            logs[name] = {task.loss: loss}
        return logs

    def initialize(self, model: Model) -> None:
        """Calls the model's `initialize`, if it has one, to load initial weights."""
        if hasattr(model, "initialize"):
            model.initialize()


class GardenTaskSampler(TaskSampler):
    """Draws the tasks that Model Garden's interleaving trainer draws.

    Args:
      sampler: A task sampler of Model Garden.
      number_of_tasks: The number of tasks.
    """

    def __init__(self, sampler: OriginalTaskSampler, number_of_tasks: int) -> None:
        self._sampler = sampler
        self.number_of_tasks = number_of_tasks

    @tf.autograph.experimental.do_not_convert
    def _block(self, block: tf.Tensor) -> tf.Tensor:
        """Returns the numbers of the tasks of a block of steps, int64 [BLOCK]. Runs in graph."""
        steps = block * BLOCK + tf.range(BLOCK, dtype=tf.int64)
        return tf.map_fn(self._draw_task_at, steps, fn_output_signature=tf.int64)

    @tf.autograph.experimental.do_not_convert
    def _draw_task_at(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the number of the task trained after `step` steps, an int64 scalar.

        Runs in graph. A draw beyond the last bound gives the last task: rounded sums of
        probabilities may stay below 1.
        """
        # The seed of Model Garden's trainer.
        draw = tf.random.stateless_uniform(shape=[], seed=(0, step))
        get_bounds = apply_autograph(self._sampler.task_cumulative_distribution)
        bounds = get_bounds(step)
        are_passed = draw >= bounds[:-1]
        return tf.reduce_sum(tf.cast(are_passed, tf.int64))


class TaskMetrics(MultiTaskMetrics):
    """Metric sets by task, under Model Garden's names. Created in strategy scope.

    Args:
      task: The MultiTaskAdapter. Its `step_counters` count the steps of each task.
    """

    def __init__(self, task: MultiTaskAdapter) -> None:
        metric_sets = {}
        for name, garden_task in task.tasks.items():
            metrics = task_metrics(garden_task, True)
            metric_sets[name] = MetricSet(LOSS, metrics)
        super().__init__(metric_sets, count_steps=False)
        self._task = task

    @property
    def losses(self) -> dict[str, Metric]:
        """The metrics of the losses by task.

        If each step trains all tasks, `total_loss` is the metric of their sum.
        """
        losses: dict[str, Metric] = {}
        if self._task.is_joint:
            losses[TOTAL_LOSS] = self.loss
        for name, metrics in self.sets.items():
            losses[name] = metrics.loss
        return losses

    @tf.autograph.experimental.do_not_convert
    def count_step(self, name: str) -> None:
        """Counts a step of the task `name`. Runs in graph, in cross-replica context."""
        self._task.step_counters[name].assign_add(1)

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns a dict from task name to results. Called in cross-replica context."""
        results = super().results()
        task_results = {name: results.pop(name) for name in self.sets}
        if not self._task.is_joint:
            return task_results
        # What is left is the loss of all tasks.
        return {TOTAL_LOSS: results, **task_results}


class MultiTaskBaseTrainer(Trainer, MultiTaskTrainer):
    """Trains several Model Garden tasks in each step, by `joint_train_step`.

    It also evaluates the tasks that are passed to `set_evaluation_tasks`. Created in strategy
    scope.

    Args:
      multi_task: A MultiTask of Model Garden.
      multi_task_model: A MultiTaskBaseModel, or one model for all tasks.
      optimizer: An optimizer of tf_keras.
      trainer_options: Options of orbit.StandardTrainer. None: those in `config`.
      config: The experiment's config, Model Garden's or trainer_kit's. None: all defaults.
    """

    # None: each step trains all tasks.
    _task_sampler: OriginalTaskSampler | None = None
    _train_metric_set: TaskMetrics

    def __init__(
        self,
        multi_task: MultiTask,
        multi_task_model: Model,
        optimizer: GardenOptimizer,
        trainer_options: orbit.StandardTrainerOptions | None = None,
        *,
        config: ExperimentParams | None = None,
    ) -> None:
        task = MultiTaskAdapter(multi_task, task_sampler=self._task_sampler)
        sections = _build_trainer_sections(config, task.tasks, trainer_options)
        # The engine's multi-task trainer calls only what the adapter has.
        engine_task = cast("TaskLike", task)
        super().__init__(sections, engine_task, multi_task_model, optimizer, evaluate=False)

    @property
    def multi_task(self) -> MultiTask:
        """The MultiTask of Model Garden."""
        return self.task.multi_task

    @property
    def multi_task_model(self) -> Model:
        """The model of all tasks."""
        return self.model

    @property
    def training_losses(self) -> dict[str, Metric]:
        """The metrics of the training losses by task, and of their sum as `total_loss`."""
        return dict(self._train_metric_set.losses)

    @property
    def training_metrics(self) -> dict[str, list[Metric]]:
        """The training metrics by task, without the losses."""
        return dict(self.train_metrics)

    def _build_training_metrics(
        self, config: ExperimentLike, task: TaskLike, model: Model, enabled: bool
    ) -> TaskMetrics:
        assert isinstance(task, MultiTaskAdapter)
        return TaskMetrics(task)


class MultiTaskInterleavingTrainer(MultiTaskBaseTrainer):
    """Trains one of several Model Garden tasks in each step, by its `train_step`.

    As in Model Garden, the task is a pure function of the step and the sampler, so a resumed run
    draws the same tasks. Created in strategy scope.

    Args:
      multi_task: A MultiTask of Model Garden.
      multi_task_model: A MultiTaskBaseModel, or one model for all tasks.
      optimizer: An optimizer of tf_keras.
      task_sampler: A task sampler of Model Garden.
      trainer_options: Options of orbit.StandardTrainer. None: those in `config`.
      config: The experiment's config, Model Garden's or trainer_kit's. None: all defaults.
    """

    def __init__(
        self,
        multi_task: MultiTask,
        multi_task_model: Model,
        optimizer: GardenOptimizer,
        task_sampler: OriginalTaskSampler,
        trainer_options: orbit.StandardTrainerOptions | None = None,
        *,
        config: ExperimentParams | None = None,
    ) -> None:
        # The base class reads it.
        self._task_sampler = task_sampler
        super().__init__(multi_task, multi_task_model, optimizer, trainer_options, config=config)

    def task_step_counter(self, name: str) -> tf.Variable:
        """Returns the int64 scalar variable that counts a task's steps.

        Checkpoints contain it.
        """
        return self.task.step_counters[name]


class MultiTaskEvaluator(Trainer):
    """Evaluates several Model Garden tasks without training. Created in strategy scope.

    Args:
      eval_tasks: Model Garden's tasks.
      model: A MultiTaskBaseModel, or one model for all tasks.
      global_step: An int64 scalar variable. None: a new one.
      eval_steps: A dict from task name to batches per evaluation. For other tasks the argument of
        `evaluate` counts.
      checkpoint_exporter: An exporter of the best checkpoint.
      config: The experiment's config, Model Garden's or trainer_kit's. None: all defaults.
      optimizer: The optimizer. If it averages the weights, its averages are evaluated.
    """

    def __init__(
        self,
        eval_tasks: Iterable[GardenTask],
        model: Model,
        global_step: tf.Variable | None = None,
        eval_steps: Mapping[str, int | None] | None = None,
        checkpoint_exporter: CheckpointExporter | None = None,
        *,
        config: ExperimentParams | None = None,
        optimizer: GardenOptimizer | None = None,
    ) -> None:
        self._shared_global_step = global_step
        self._eval_tasks = list(eval_tasks)
        tasks = {task.name: task for task in self._eval_tasks}
        for number, (name, task) in enumerate(tasks.items()):
            with explain_config_errors(f"task.task_routines.{number}.task_config"):
                task_model = model_of_task(model, name)
                build_model(task.task_config, task, task_model, train=False)

        # Only the evaluated tasks are called, and not the adapter.
        adapter = cast("TaskLike", MultiTaskAdapter(SimpleNamespace(tasks=tasks)))
        sections = _build_trainer_sections(config, tasks)
        super().__init__(sections, adapter, model, optimizer, train=False, evaluate=False)
        set_evaluation_tasks(self, self._eval_tasks, eval_steps, checkpoint_exporter)

    @property
    def tasks(self) -> list[GardenTask]:
        """The tasks that are evaluated."""
        return self._eval_tasks

    @property
    def validation_losses(self) -> dict[str, Metric]:
        """The metrics of the validation losses by task."""
        losses: dict[str, Metric] = {}
        for validation_set in self.validation:
            metrics = self._get_metrics(validation_set)
            losses[validation_set.name] = metrics.loss
        return losses

    @property
    def validation_metrics(self) -> Any:
        """The validation metrics by task, without the losses."""
        metrics_by_task = {}
        for validation_set in self.validation:
            metrics = self._get_metrics(validation_set)
            metrics_by_task[validation_set.name] = metrics.metrics
        return metrics_by_task

    def _build_global_step(self) -> tf.Variable:
        if self._shared_global_step is None:
            return super()._build_global_step()
        return self._shared_global_step


def set_evaluation_tasks(
    trainer: AdaptableTrainer,
    tasks: Iterable[GardenTask],
    steps: Mapping[str, int | None] | None = None,
    checkpoint_exporter: CheckpointExporter | None = None,
) -> None:
    """Makes the trainer evaluate `tasks` from now on, in place of its validation sets.

    Runs eagerly, on the host.

    Args:
      trainer: A Trainer of trainer_kit.compat.model_garden.
      tasks: Model Garden's tasks. Each evaluates the model's part with its name on its own
        validation_data.
      steps: A dict from task name to batches per evaluation. For other tasks the argument of
        `evaluate` counts.
      checkpoint_exporter: An exporter of the best checkpoint, by metrics such as `task|metric`.

    Raises:
      UsageError: When the trainer is one of Model Garden, two tasks have one name, or the model
        lacks a part.
    """
    if not isinstance(trainer, Trainer):
        # A TrainerAdapter has the trainer as _inner.
        cls = type(getattr(trainer, "_inner", trainer))
        raise UsageError(
            f"{cls.__module__}.{cls.__name__} cannot evaluate several tasks in trainer_kit's run;"
            " pass a trainer of trainer_kit.compat.model_garden (its arguments are the same), or"
            " no trainer"
        )

    tasks = list(tasks)
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise UsageError(
            f"two tasks to evaluate have the same name: {', '.join(names)}; give each a name of"
            " its own"
        )

    inputs = trainer.inputs
    trained_tasks = list(getattr(trainer.task, "tasks", {}).values())
    validation_sets = []
    with trainer.strategy.scope():
        for number, task in enumerate(tasks):
            # Messages about the data name its place in the config.
            list_name = "task.task_routines" if task in trained_tasks else "eval_tasks"
            section_path = f"{list_name}.{number}.task_config.validation_data"
            inputs.section_paths[inputs.validation_section(task.name)] = section_path

            section = task.task_config.validation_data
            data = inputs.create_validation_data(task.name, section, task)
            metrics = MetricSet("validation_loss", task_metrics(task, False), exact=True)
            model = model_of_task(trainer.model, task.name)

            # A number of steps in the config, an option of trainer_kit, comes before Model
            # Garden's.
            set_configs = getattr(trainer.config.trainer, "validation_sets", {})
            set_config = set_configs.get(task.name) or ValidationSetConfig()
            if steps and set_config.steps is None:
                set_config = set_config.replace(steps=steps.get(task.name) or None)
            validation_sets.append(ValidationSet(task.name, data, set_config, task, model, metrics))
        trainer.set_validation_sets(ValidationSets(validation_sets))
    trainer.checkpoint_exporter = checkpoint_exporter


def _build_trainer_sections(
    config: ExperimentParams | None,
    tasks: Mapping[str, GardenTask],
    trainer_options: orbit.StandardTrainerOptions | None = None,
) -> TrainerSections:
    """Returns the config sections for a trainer of `tasks`.

    Without a config they have the defaults.
    """
    converted = ExperimentConfig() if config is None else convert(config)
    trainer_section = converted.trainer
    if trainer_options is not None:
        # A while loop needs a tf.function around it.
        has_loop = trainer_options.use_tf_while_loop and trainer_options.use_tf_function
        trainer_section = trainer_section.replace(
            train_tf_function=trainer_options.use_tf_function, train_tf_while_loop=has_loop
        )

    # The engine passes them to MultiTaskAdapter.build_inputs.
    data = {}
    for name, task in tasks.items():
        data[name] = getattr(task.task_config, "train_data", None)
    task_section = SimpleNamespace(train_data=data)
    return TrainerSections(task_section, trainer_section, converted.runtime)
