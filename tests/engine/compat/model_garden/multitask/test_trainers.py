"""The trainers and the evaluator by themselves, as a program of one's own uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbit
import pytest
import tensorflow as tf
import tf_keras
from official.modeling import optimization
from official.modeling.multitask import evaluator as their_evaluator
from official.modeling.multitask import interleaving_trainer as their_interleaving
from official.modeling.multitask import multitask, task_sampler

from tests.builders import assert_all_close
from tests.engine.compat.model_garden.garden_task import eagerly
from tests.engine.compat.model_garden.tiny import multi_task
from trainer_kit.compat.model_garden.multitask import (
    MultiTaskBaseTrainer,
    MultiTaskEvaluator,
    MultiTaskInterleavingTrainer,
)
from trainer_kit.compat.model_garden.multitask.trainers import (
    GardenTaskSampler,
    set_evaluation_tasks,
)
from trainer_kit.errors import UsageError
from trainer_kit.testing.tiny_task import tiny_experiment


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the data."""
    folder = tmp_path_factory.mktemp("data")
    multi_task.write(folder)
    return folder


@pytest.fixture
def tasks(data: Path) -> multitask.MultiTask:
    """Two tasks."""
    return multitask.MultiTask.from_config(multi_task.config_joint(data).task)


def test_a_joint_trainer_trains_all_in_each_step(tasks: multitask.MultiTask) -> None:
    trainer = MultiTaskBaseTrainer(tasks, multi_task.model(), tf_keras.optimizers.SGD(0.05))

    logs = [trainer.train(tf.constant(5)) for _ in range(4)]

    assert list(logs[0]) == ["total_loss", "sum", "difference", "learning_rate"]
    first = logs[0]["total_loss"]["training_loss"]
    last = logs[-1]["total_loss"]["training_loss"]
    assert last < first
    losses = [logs[-1][name]["training_loss"] for name in multi_task.TASKS]
    assert last == pytest.approx(losses[0] + 2 * losses[1], rel=1e-6)  # by their weights
    assert int(trainer.global_step.numpy()) == 20
    assert set(trainer.training_losses) == {"total_loss", *multi_task.TASKS}
    assert set(trainer.training_metrics) == set(multi_task.TASKS)


def test_the_options_of_an_interleaving_trainer_count(tasks: multitask.MultiTask) -> None:
    eager = orbit.StandardTrainerOptions(use_tf_function=False, use_tf_while_loop=False)
    sampler = task_sampler.ProportionalTaskSampler(tasks.task_weights)
    model = multi_task.model()
    begin = [variable.numpy() for variable in model.variables]
    logs = []
    for options in (None, eager):
        for variable, value in zip(model.variables, begin, strict=True):
            variable.assign(value)
        optimizer = tf_keras.optimizers.SGD(0.05)
        trainer = MultiTaskInterleavingTrainer(tasks, model, optimizer, sampler, options)
        logs.append(trainer.train(tf.constant(6)))
        counts = [int(trainer.task_step_counter(name).numpy()) for name in multi_task.TASKS]
        assert counts == GardenTaskSampler(sampler, 2).count_steps_per_task(6)

    for name in multi_task.TASKS:
        assert logs[1][name] == pytest.approx(logs[0][name], rel=1e-5)


def test_the_tasks_are_drawn_as_theirs_are(tasks: multitask.MultiTask) -> None:
    drawing = task_sampler.ProportionalTaskSampler({"sum": 3.0, "difference": 1.0})
    theirs = their_interleaving.MultiTaskInterleavingTrainer(
        tasks, multi_task.model(), tf_keras.optimizers.SGD(0.05), drawing
    )
    # Theirs draws, and trains nothing.
    theirs._task_train_step_map = dict.fromkeys(multi_task.TASKS, lambda inputs: None)
    with eagerly():
        theirs.train(tf.constant(40))

    counts = [int(theirs.task_step_counter(name).numpy()) for name in multi_task.TASKS]
    assert GardenTaskSampler(drawing, 2).count_steps_per_task(40) == counts
    assert min(counts) > 0


class RoundedSampler(task_sampler.TaskSampler):
    """The last bound stays below 1, as that of a sum of rounded numbers may."""

    def task_cumulative_distribution(self, global_step: tf.Tensor) -> tf.Tensor:
        """Bounds."""
        return tf.constant([0.1, 0.2])


def test_a_draw_beyond_the_last_bound_is_the_last_task() -> None:
    # Model Garden's would draw the same number permanently.
    rare, often = GardenTaskSampler(RoundedSampler({}), 2).count_steps_per_task(20)
    assert rare + often == 20
    assert often > 10

    without_weight = task_sampler.ProportionalTaskSampler({"sum": 0.0, "difference": 1.0})
    assert GardenTaskSampler(without_weight, 2).count_steps_per_task(40) == [0, 40]


class TheirOwnStep(MultiTaskBaseTrainer):
    """Overrides the step as one does with theirs."""

    def train_step(self, iterator_map: Any) -> None:
        """Trains one task only."""
        if self.global_step % 2 == 0:  # AutoGraph makes graph of it
            self.global_step.assign_add(1)
        else:
            self.strategy.run(self.replica_step, args=(tf.nest.map_structure(next, iterator_map),))

    def replica_step(self, inputs: Any) -> None:
        """On a replica."""
        losses = self.multi_task.joint_train_step(
            inputs,
            multi_task_model=self.multi_task_model,
            optimizer=self.optimizer,
            task_metrics=self.training_metrics,
        )
        for name, loss in losses.items():
            self.training_losses[name].update_state(loss)
        self.global_step.assign_add(1)


def test_a_step_written_for_theirs_runs(tasks: multitask.MultiTask) -> None:
    trainer = TheirOwnStep(tasks, multi_task.model(), tf_keras.optimizers.SGD(0.05))
    trainer.train(tf.constant(6))
    assert int(trainer.optimizer.iterations.numpy()) == 3


def test_batches_of_several_tasks_are_not_split(tasks: multitask.MultiTask) -> None:
    config = tiny_experiment(accumulate_steps=4)
    optimizer = tf_keras.optimizers.SGD(0.05)

    message = r"=4: MultiTaskBaseTrainer has a training step of its own on each replica"
    with pytest.raises(UsageError, match=message):
        MultiTaskBaseTrainer(tasks, multi_task.model(), optimizer, config=config)


def test_an_evaluator_tells_what_theirs_tells(tasks: multitask.MultiTask) -> None:
    step = tf.Variable(7, dtype=tf.int64)
    arguments = (list(tasks.tasks.values()), multi_task.model(), step, {"sum": 1})
    ours = MultiTaskEvaluator(*arguments)
    theirs = their_evaluator.MultiTaskEvaluator(*arguments)

    logs = ours.evaluate(tf.constant(-1))
    with eagerly():
        expected_logs = theirs.evaluate(tf.constant(-1))

    assert logs.keys() == expected_logs.keys()
    for name, expected in expected_logs.items():
        assert list(logs[name]) == list(expected)
        assert logs[name] == pytest.approx({key: float(value) for key, value in expected.items()})
    assert ours.global_step is step
    assert ours.tasks == list(tasks.tasks.values())
    assert set(ours.validation_losses) == set(ours.validation_metrics) == set(multi_task.TASKS)
    assert ours.validation_metric_names() == [
        "sum|sum_error",
        "sum|validation_loss",
        "difference|difference_error",
        "difference|validation_loss",
    ]


class Aggregating(multi_task.RegressionTask):
    """Counts the examples that it has evaluated by aggregating logs."""

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        """Logs the number of examples."""
        return {
            **super().validation_step(inputs, model, metrics),
            "examples": tf.shape(inputs[0])[0],
        }

    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        """Adds them up."""
        return (state or 0) + int(np.sum(step_logs["examples"]))

    def reduce_aggregated_logs(
        self, aggregated_logs: Any, global_step: Any = None
    ) -> dict[str, Any]:
        """Tells them."""
        return {"examples": aggregated_logs, "step": int(global_step.numpy())}


def test_aggregating_and_other_tasks_are_evaluated_together(tasks: multitask.MultiTask) -> None:
    aggregating = Aggregating(tasks.tasks["sum"].task_config, name="sum")
    evaluator = MultiTaskEvaluator([aggregating, tasks.tasks["difference"]], multi_task.model())

    for _ in range(2):
        logs = evaluator.evaluate(tf.constant(-1))
        assert logs["sum"]["examples"] == 16
        assert logs["sum"]["step"] == 0
        assert list(logs["difference"]) == ["difference_error", "validation_loss"]
    assert evaluator.validation_metric_names() is None


def test_an_evaluator_refuses_tasks_that_do_not_fit(tasks: multitask.MultiTask) -> None:
    task = tasks.tasks["sum"]
    model = multi_task.model()
    with pytest.raises(UsageError, match="two tasks to evaluate have the same name: sum, sum"):
        MultiTaskEvaluator([task, task], model)

    other = multi_task.RegressionTask(task.task_config, name="product")
    message = r"has no model for the task 'product'; it has \['sum', 'difference'\]"
    with pytest.raises(UsageError, match=message):
        MultiTaskEvaluator([other], model)


def test_averaged_weights_are_evaluated(tasks: multitask.MultiTask) -> None:
    model = multi_task.model()
    average = optimization.ExponentialMovingAverage(
        tf_keras.optimizers.legacy.SGD(0.05), trainable_weights_only=False, average_decay=0.5
    )
    trainer = MultiTaskBaseTrainer(tasks, model, average)
    set_evaluation_tasks(trainer, tasks.tasks.values())
    evaluator = MultiTaskEvaluator(tasks.tasks.values(), model)

    with eagerly():
        trainer.train(tf.constant(3))
        before = [variable.numpy() for variable in model.variables]
        logs = trainer.evaluate(tf.constant(-1))
        after = [variable.numpy() for variable in model.variables]
        logs_of_weights = evaluator.evaluate(tf.constant(-1))

    assert_all_close(after, before)
    assert logs["sum"]["validation_loss"] != logs_of_weights["sum"]["validation_loss"]
