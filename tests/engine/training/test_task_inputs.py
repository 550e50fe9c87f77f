"""Which data a trainer opens for a task, when, and how it is shared by replicas."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import replicas
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig
from trainer_kit.errors import ConfigError, UsageError
from trainer_kit.inputs.worker_pipeline import WorkerPipeline
from trainer_kit.training.task_inputs import TaskInputs


class _Task(LinearTask):
    """Notes the batch size of each section that it opens."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.opened: list[int] = []

    def build_inputs(self, params: DataConfig, input_context: Any = None) -> Any:
        self.opened.append(params.global_batch_size)
        return super().build_inputs(params, input_context)


class _PipelineTask(LinearTask):
    """Its pipeline has one batch size for all replicas."""

    def build_inputs(self, params: DataConfig, input_context: Any = None) -> Any:
        return tf.data.Dataset.range(20).batch(
            input_context.get_per_replica_batch_size(params.global_batch_size)
        )


def _create_inputs(task: type[LinearTask] = _Task, **batch_sizes: int) -> tuple[TaskInputs, Any]:
    """Returns inputs of a task, and the task, with validation sets of these batch sizes."""
    config: ExperimentConfig = linear_experiment().replace(
        task={"train_data": {"global_batch_size": 6}}
    )
    if batch_sizes:
        data = config.task.validation_data
        sets = {name: data.replace(global_batch_size=size) for name, size in batch_sizes.items()}
        config = config.replace(task={"validation_data": sets})
    task_object = task(config.task)
    return TaskInputs(config, task_object), task_object


def test_data_is_opened_when_it_is_first_needed() -> None:
    inputs, task = _create_inputs()
    (feed,) = inputs.create_all_validation_data(None).values()

    data = inputs.create_train_data(tf.Variable(0, dtype=tf.int64), None)

    assert task.opened == []

    for needed in (feed, data, feed):
        assert needed.dataset is not None

    assert task.opened == [8, 6]


def test_ready_made_data_takes_the_place_of_the_tasks() -> None:
    inputs, task = _create_inputs()
    ready_made = tf.data.Dataset.range(3)

    assert inputs.create_all_validation_data(ready_made)[""].dataset is ready_made
    assert (
        inputs.create_train_data(tf.Variable(0, dtype=tf.int64), ready_made).dataset is ready_made
    )
    assert task.opened == []


def test_ready_made_sets_come_first_and_the_others_after_them() -> None:
    inputs, task = _create_inputs(dev=4, test=5)
    ready_made = {"new": tf.data.Dataset.range(3), "test": tf.data.Dataset.range(2)}

    feeds = inputs.create_all_validation_data(ready_made)

    assert list(feeds) == ["new", "test", "dev"]
    assert [feeds[name].dataset for name in ready_made] == list(ready_made.values())
    features, _ = next(feeds["dev"].iterator())
    assert features.shape[0] == 4
    assert task.opened == [4]


def test_ready_made_sets_replace_a_single_one() -> None:
    inputs, _ = _create_inputs()
    assert list(inputs.create_all_validation_data({"new": tf.data.Dataset.range(3)})) == ["new"]


def test_a_batch_that_replicas_cannot_share_names_its_set() -> None:
    with replicas(2).scope():
        inputs, _ = _create_inputs(_PipelineTask, dev=8, test=7)
        feeds = inputs.create_all_validation_data(None)
        assert feeds["dev"].dataset is not None
        with pytest.raises(
            ConfigError, match=r"task\.validation_data\.test\.global_batch_size: batch 7 on 2"
        ):
            assert feeds["test"].dataset is None


def test_overfit_batches_are_trained_on_and_evaluated() -> None:
    config: ExperimentConfig = linear_experiment(overfit_batches=2)
    inputs = TaskInputs(config, LinearTask(config.task))
    (feed,) = inputs.create_all_validation_data(None).values()
    evaluated = [batch[0].numpy() for batch in feed.dataset.take(9)]

    iterator = inputs.create_train_data(tf.Variable(3, dtype=tf.int64), None).iterator()

    np.testing.assert_array_equal(evaluated[1], next(iterator)[0].numpy())
    np.testing.assert_array_equal(evaluated, [next(iterator)[0].numpy() for _ in range(2)])


def test_ready_made_data_cannot_be_cut() -> None:
    config: ExperimentConfig = linear_experiment(overfit_batches=2)
    inputs = TaskInputs(config, LinearTask(config.task))
    ready_made = tf.data.Dataset.range(3)

    with pytest.raises(
        UsageError, match=r"task\.train_data: .*this dataset is ready-made; cut it with take\(2\)"
    ):
        inputs.create_train_data(tf.Variable(0, dtype=tf.int64), ready_made)

    with pytest.raises(UsageError, match=r"task\.validation_data: "):
        inputs.create_all_validation_data(ready_made)


class _PlainTask(LinearTask):
    """Its dataset of 0 to 19 is the same on each worker."""

    def build_inputs(self, params: DataConfig, input_context: Any = None) -> Any:
        return tf.data.Dataset.range(20).batch(2)


class _ShardedTask(_PlainTask):
    """Shards the dataset as the message says."""

    def build_inputs(self, params: DataConfig, input_context: Any = None) -> Any:
        dataset = super().build_inputs(params, input_context)
        return dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)


class _InputsOfWorker(TaskInputs):
    """Opens the data of one of several workers."""

    def __init__(
        self, config: ExperimentConfig, task: LinearTask, context: tf.distribute.InputContext
    ) -> None:
        super().__init__(config, task)
        self._context = context

    def distribute(self, pipeline: WorkerPipeline) -> Any:
        return pipeline(self._context)


def _read(task_type: type[LinearTask], section: str, worker: int, **changes: Any) -> list[Any]:
    """Returns the first elements that one of two workers reads of a section."""
    config: ExperimentConfig = linear_experiment().replace(task={section: changes})
    context = tf.distribute.InputContext(
        num_input_pipelines=2, input_pipeline_id=worker, num_replicas_in_sync=2
    )
    inputs = _InputsOfWorker(config, task_type(config.task), context)
    data = inputs.create_train_data(tf.Variable(0, dtype=tf.int64), None)
    feed = data if section == "train_data" else inputs.create_all_validation_data(None)[""]
    return list(feed.dataset.take(5).as_numpy_iterator())


@pytest.mark.parametrize("section", ["train_data", "validation_data"])
def test_workers_that_would_all_read_a_whole_dataset_are_refused(section: str) -> None:
    line = (
        "dataset = dataset.shard(input_context.num_input_pipelines, "
        "input_context.input_pipeline_id)"
    )

    with pytest.raises(
        UsageError, match=rf"_PlainTask.build_inputs .* 2 workers .*{re.escape(line)}"
    ):
        _read(_PlainTask, section, 0)


def test_workers_read_their_own_parts() -> None:
    parts = [np.concatenate(_read(_ShardedTask, "validation_data", worker)) for worker in (0, 1)]

    assert sorted(np.concatenate(parts)) == list(range(20))

    points = [
        np.concatenate([batch[0] for batch in _read(LinearTask, "train_data", worker)])
        for worker in (0, 1)
    ]
    assert len(np.unique(np.concatenate(points), axis=0)) == 40  # a Source shards itself


@pytest.mark.parametrize("change", [{"data_is_sharded": True}, {"enable_tf_data_service": True}])
def test_a_section_may_say_that_its_data_is_sharded(change: dict[str, Any]) -> None:
    assert np.concatenate(_read(_PlainTask, "validation_data", 1, **change)).tolist() == list(
        range(10)
    )
