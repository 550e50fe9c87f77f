"""MultiTaskInterleavingTrainer: trains one task in each step; its signature is official.modeling.multitask's."""

from __future__ import annotations

import functools
from typing import Any

import orbit
import tensorflow as tf

from trainer_kit.compat.model_garden.multitask.base_trainer import MultiTaskBaseTrainer
from trainer_kit.compat.model_garden.multitask.engine_task import EngineTask, part_for
from trainer_kit.distribution.replicas import local_tensors
from trainer_kit.inputs.autograph import converted
from trainer_kit.training.loops.iterators import WaitingClock, no_waits
from trainer_kit.training.loops.read_before_write import writes_after


class MultiTaskInterleavingTrainer(MultiTaskBaseTrainer):
    """Trains one of several Model Garden tasks in each step, by its `train_step`. Created in strategy scope.

    As in Model Garden, the task is a pure function of the step and the sampler, so a resumed run draws the same tasks.

    Args:
      multi_task: A MultiTask of Model Garden.
      multi_task_model: A MultiTaskBaseModel, or one model for all tasks.
      optimizer: An optimizer of tf_keras.
      task_sampler: A task sampler of Model Garden.
      trainer_options: Options of orbit.StandardTrainer; None: those in `config`.
      config: The experiment's config, Model Garden's or trainer_kit's; None: all defaults.
    """

    has_total_loss = False

    def __init__(
        self,
        multi_task: Any,
        multi_task_model: Any,
        optimizer: Any,
        task_sampler: Any,
        trainer_options: Any = None,
        *,
        config: Any = None,
    ) -> None:
        self._task_sampler = task_sampler
        self._drawn = tf.function(self._draw, autograph=False)
        super().__init__(multi_task, multi_task_model, optimizer, trainer_options, config=config)

    def task_step_counter(self, name: str) -> Any:
        """Returns the int64 scalar variable that counts a task's steps; checkpoints hold it."""
        return self.task.step_counters[name]

    @tf.autograph.experimental.do_not_convert
    def train_step(self, iterator: Any) -> None:
        """Trains one task for one step on every replica, with one element of the task's data; in graph."""
        names = list(self.multi_task.tasks)
        branches = [functools.partial(self._task_step, iterator, name) for name in names]
        waited = tf.switch_case(self._draw(self._global_step), branches)
        with writes_after([waited]):
            self._global_step.assign_add(1)
            if self._average is not None:
                self._average.update(self._global_step)
        if isinstance(iterator, WaitingClock):
            iterator.waited += waited

    @tf.autograph.experimental.do_not_convert
    def _task_step(self, iterator: Any, name: str) -> tf.Tensor:
        """Trains one task, in its own graph; returns the seconds spent waiting for its batch."""
        clock = WaitingClock(iterator[name], no_waits())
        inputs = converted(self.next_train_inputs)(clock)
        with writes_after(local_tensors(inputs, self._strategy)):
            step = functools.partial(self._replica_task_step, name)
            self._strategy.run(step, args=(inputs,), options=self._run_options)
            self.task_step_counter(name).assign_add(1)
        return clock.waited

    @tf.autograph.experimental.do_not_convert
    def _replica_task_step(self, name: str, inputs: Any) -> None:
        task, model = self.multi_task.tasks[name], part_for(self.multi_task_model, name)

        def step(inputs: Any) -> Any:
            metrics = self.training_metrics[name]
            return converted(task.train_step)(inputs, model=model, optimizer=self.optimizer, metrics=metrics)

        self._train_set.update_losses({name: self._compiled(step)(inputs)[task.loss]})

    @tf.autograph.experimental.do_not_convert
    def _draw(self, step: Any) -> tf.Tensor:
        """Returns the index of the task trained after `step` steps, an int32 scalar; in graph or eager.

        A draw beyond the last bound gives the last task: rounded sums of probabilities may stay below 1.
        """
        drawn = tf.random.stateless_uniform(shape=[], seed=(0, step))
        bounds = converted(self._task_sampler.task_cumulative_distribution)(step)
        return tf.reduce_sum(tf.cast(drawn >= bounds[:-1], tf.int32))

    def _engine_task(self, multi_task: Any) -> EngineTask:
        task = super()._engine_task(multi_task)
        task.step_counters = {name: orbit.utils.create_global_step() for name in task.tasks}
        return task

    def _steps(self, name: str) -> Any:
        return self.task_step_counter(name)

    def _steps_of(self, step: int) -> dict[str, int]:
        """Returns {task: its own step number}; the task is drawn for each step between now and `step`, either way."""
        now, names = int(self._global_step.numpy()), list(self.task.tasks)
        drawn = functools.cache(lambda number: names[int(self._drawn(tf.constant(number, tf.int64)))])
        name = drawn(step - 1)
        count = int(self.task_step_counter(name).numpy())
        if step > now:
            return {name: count + sum(drawn(number) == name for number in range(now, step))}
        return {name: count - sum(drawn(number) == name for number in range(step, now))}
