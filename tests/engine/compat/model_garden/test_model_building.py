"""Models that the first training step would build have their variables before it."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from tests.engine.compat.model_garden.garden_task import (
    BATCH,
    FEATURES,
    SmallConfig,
    SmallTask,
    small_config,
)
from trainer_kit.compat.model_garden.garden_trainer import Trainer, create_trainer
from trainer_kit.errors import UsageError
from trainer_kit.training.checks.batch_spec import build_model


class _Late(tf_keras.Model):  # type: ignore[misc]
    """A model that knows the shape of its weights when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = tf_keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


class LateTask(SmallTask):
    """Its model is built by the first step."""

    def build_model(self) -> Any:
        return _Late()


class ByName(LateTask):
    """Batches are dicts."""

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        return SmallTask.build_inputs(self, params).map(
            lambda features, labels: {"x": features, "y": labels}
        )

    def inference_step(self, inputs: Any, model: Any) -> Any:
        return model(inputs["x"], training=False)


class Strange(LateTask):
    """Cannot be called on its own data."""

    def inference_step(self, inputs: Any, model: Any) -> Any:
        return model(inputs["pictures"])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", [LateTask, ByName])
def test_a_model_without_variables_gets_them(kind: type[LateTask], train: bool) -> None:
    task = kind(SmallConfig())
    model = _Late()

    build_model(task.task_config, task, model, train)

    assert [tuple(variable.shape) for variable in model.variables] == [(FEATURES, 3), (3,)]
    assert model(tf.zeros([BATCH, FEATURES])).shape == (BATCH, 3)


@pytest.mark.parametrize(("train", "part"), [(True, "train_data"), (False, "validation_data")])
def test_a_model_that_cannot_be_called_on_the_data_is_told(train: bool, part: str) -> None:
    with pytest.raises(TypeError) as error:
        build_model(SmallConfig(), Strange(SmallConfig()), _Late(), train)

    note = f"_Late has no variables yet, so it was called on a batch of task.{part}"
    assert note in error.value.__notes__[0]


def test_a_trainer_builds_its_model_first() -> None:
    config = small_config()
    task = LateTask(config.task)
    optimizer = task.create_optimizer(config.trainer.optimizer_config, config.runtime)
    trainer = Trainer(config, task, task.build_model(), optimizer)
    assert len(trainer.model.variables) == 2
    before = trainer.model.variables[0].numpy()

    trainer.train(tf.constant(1))

    assert (before != trainer.model.variables[0].numpy()).any()
    assert len(trainer.model.variables) == 2


def test_a_wrong_model_or_metrics_list_names_the_method() -> None:
    config = small_config()

    class Forgetful(SmallTask):
        def build_model(self) -> Any:
            super().build_model()

    class OneMetric(SmallTask):
        def build_metrics(self, training: bool = True) -> Any:
            return tf_keras.metrics.Mean("one")

    message = r"^Forgetful\.build_model returned None; return the model"
    with pytest.raises(UsageError, match=message):
        create_trainer(config, Forgetful(config.task), True, True)
    message = r"^OneMetric\.build_metrics returned a Mean; return a list of metrics"
    with pytest.raises(UsageError, match=message):
        create_trainer(config, OneMetric(config.task), True, True)


def test_a_model_that_has_a_part_of_its_variables_gets_the_rest() -> None:
    class Half(_Late):
        def __init__(self) -> None:
            super().__init__()
            self.shared = tf_keras.layers.Dense(2)
            self.shared.build((None, 2))

    task = LateTask(SmallConfig())
    model = Half()
    assert len(model.variables) == 2
    build_model(task.task_config, task, model, train=True)
    assert len(model.variables) == 4

    # A model that cannot be called on the data is left to the first step.
    uncallable = Half()
    build_model(SmallConfig(), Strange(SmallConfig()), uncallable, train=True)
    assert len(uncallable.variables) == 2
