"""Models that the first training step would build have their variables before it, and nothing is read for that."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from tests.engine.compat.model_garden.garden_task import BATCH, FEATURES, SmallConfig, SmallTask, small_config
from trainer_kit.compat.model_garden.trainer import Trainer, create_trainer
from trainer_kit.errors import UsageError
from trainer_kit.training.checks.batch_spec import build_model


class _Late(tf_keras.Model):  # type: ignore[misc]
    """A model that knows the shape of its weights when it is called; it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.calls = tf_keras.layers.Dense(3), 0

    def call(self, inputs: Any) -> Any:
        self.calls += 1
        return self.dense(inputs)


class LateTask(SmallTask):
    """Its model is built by the first step; the data count what is read of them."""

    read = 0

    def build_model(self) -> Any:
        return _Late()

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        def count(features: Any, labels: Any) -> Any:
            self.read += 1
            return features, labels

        dataset = super().build_inputs(params, input_context)

        def noted(features: Any, labels: Any) -> Any:
            tf.py_function(count, [features, labels], [tf.float32, tf.int32])
            return features, labels

        return dataset.map(noted)


class ByName(LateTask):
    """Batches are dicts."""

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        return SmallTask.build_inputs(self, params).map(lambda features, labels: {"x": features, "y": labels})

    def inference_step(self, inputs: Any, model: Any) -> Any:
        return model(inputs["x"], training=False)


class Strange(LateTask):
    """Cannot be called on its own data."""

    def inference_step(self, inputs: Any, model: Any) -> Any:
        return model(inputs["pictures"])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", [LateTask, ByName])
def test_a_model_without_variables_gets_them_and_nothing_is_read(kind: type[LateTask], train: bool) -> None:
    task, model = kind(SmallConfig()), _Late()
    assert not model.variables
    build_model(task.task_config, task, model, train)
    assert [tuple(variable.shape) for variable in model.variables] == [(FEATURES, 3), (3,)]
    if kind is LateTask:
        assert task.read == 0
        next(iter(task.build_inputs(task.task_config.train_data).take(1)))
        assert task.read > 0
    assert model(tf.zeros([BATCH, FEATURES])).shape == (BATCH, 3)


def test_a_model_with_variables_is_left_alone() -> None:
    task, model = LateTask(SmallConfig()), _Late()
    model(tf.zeros([1, 7]))
    build_model(task.task_config, task, model, train=True)
    assert model.calls == 1 and model.variables[0].shape == (7, 3)


def test_the_variables_are_there_on_every_replica() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        task, model = LateTask(SmallConfig()), _Late()
        build_model(task.task_config, task, model, train=True)
    assert [len(variable.values) for variable in model.variables] == [2, 2]


@pytest.mark.parametrize(("train", "part"), [(True, "train_data"), (False, "validation_data")])
def test_a_model_that_cannot_be_called_on_the_data_is_told(train: bool, part: str) -> None:
    with pytest.raises(TypeError) as error:
        build_model(SmallConfig(), Strange(SmallConfig()), _Late(), train)
    assert f"_Late has no variables yet, so it was called on a batch of task.{part}" in error.value.__notes__[0]


def test_a_trainer_builds_its_model_first() -> None:
    config = small_config()
    task = LateTask(config.task)
    optimizer = task.create_optimizer(config.trainer.optimizer_config, config.runtime)
    trainer = Trainer(config, task, task.build_model(), optimizer)
    assert len(trainer.model.variables) == 2
    before = trainer.model.variables[0].numpy()
    trainer.train(tf.constant(1))
    assert (before != trainer.model.variables[0].numpy()).any() and len(trainer.model.variables) == 2


def test_a_wrong_model_or_metrics_list_names_the_method() -> None:
    config = small_config()

    class Forgetful(SmallTask):
        def build_model(self) -> Any:
            super().build_model()

    with pytest.raises(UsageError, match=r"^Forgetful\.build_model returned None; return the model"):
        create_trainer(config, Forgetful(config.task), True, True)

    class OneMetric(SmallTask):
        def build_metrics(self, training: bool = True) -> Any:
            return tf_keras.metrics.Mean("one")

    with pytest.raises(UsageError, match=r"^OneMetric\.build_metrics returned a Mean; return a list of metrics"):
        create_trainer(config, OneMetric(config.task), True, True)


def test_a_model_that_has_a_part_of_its_variables_gets_the_rest() -> None:
    shared = tf_keras.layers.Dense(2)
    shared.build((None, 2))

    class Half(_Late):
        def __init__(self) -> None:
            super().__init__()
            self.shared = shared

    task, model = LateTask(SmallConfig()), Half()
    assert len(model.variables) == 2
    build_model(task.task_config, task, model, train=True)
    assert len(model.variables) == 4
    build_model(SmallConfig(), Strange(SmallConfig()), Half(), train=True)  # the first step will have to do it
