"""Models that are built from what a batch looks like, without one being read."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import assert_all_close
from tests.engine.linear_task import LinearTask, linear_experiment
from tests.engine.training.saved_state import restore_trainer, save_trainer
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig
from trainer_kit.errors import DataError, UsageError
from trainer_kit.testing import TinyConfig
from trainer_kit.training.checks.batch_spec import build_model, explain_batch_errors, is_built
from trainer_kit.training.trainer import Trainer


class Net(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(3)

    def call(self, points: Any, training: bool = False) -> Any:
        return self.layer(points)


class _Module(tf.Module):
    def __call__(self, points: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not hasattr(self, "weights"):
            self.weights = tf.Variable(tf.ones([points.shape[1], 3]))
        return points @ self.weights


def _build_sequential() -> Any:
    return keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(3)])


def _build_tf_keras() -> Any:
    import tf_keras

    return tf_keras.Sequential([tf_keras.layers.Dense(3)])


def _create_task(make: Any, **methods: Any) -> LinearTask:
    return type("Unbuilt", (LinearTask,), {"build_model": lambda self: make(), **methods})(
        TinyConfig()
    )


def _build_config(**trainer: Any) -> ExperimentConfig:
    return linear_experiment(train_steps=2, steps_per_loop=2, summary_interval=2, **trainer)


@pytest.mark.parametrize("make", [Net, _build_sequential, _build_tf_keras, _Module])
def test_an_unbuilt_model_is_built_trained_and_resumed(make: Any, tmp_path: Any) -> None:
    trainer, resumed = (
        Trainer.create(_build_config(), _create_task(make), True, True) for _ in range(2)
    )
    trainer.initialize()
    trainer.train(tf.constant(2))
    trained = [variable.numpy() for variable in trainer.model.variables]

    restore_trainer(resumed, save_trainer(trainer, tmp_path))

    assert trained
    assert_all_close([variable.numpy() for variable in resumed.model.variables], trained)
    assert "accuracy" in resumed.evaluate(tf.constant(-1))


class _Net(Net):
    """Keras names it "__net", which TensorFlow refuses at the root of a graph."""


# Forms of graphs: eager steps have no root that could refuse a name.
_FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"fuse_steps": 2},
    {"train_tf_while_loop": False, "eval_tf_while_loop": False},
)


@pytest.mark.parametrize("form", _FORMS)
def test_a_class_of_models_may_begin_with_an_underscore(form: dict[str, Any]) -> None:
    task = _create_task(_Net)
    task.second = _Net()
    task.second(tf.zeros([1, 3]))

    def build_losses(labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        return tf.reduce_mean(task.second(model_outputs) ** 2)

    task.build_losses = build_losses

    trainer = Trainer.create(_build_config(**form), task, True, True)

    assert np.isfinite(trainer.train(tf.constant(2))["training_loss"])
    assert np.isfinite(trainer.evaluate(tf.constant(1))["validation_loss"])
    assert trainer.model.name.startswith("private__net")


@pytest.mark.parametrize("make", [Net, _build_sequential])
def test_replicas_share_a_model_that_is_built_for_them(make: Any) -> None:
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.HierarchicalCopyAllReduce()
    )

    with strategy.scope():
        trainer = Trainer.create(_build_config(), _create_task(make), True, False)

    assert all(
        isinstance(v.value, tf.distribute.DistributedValues)
        for v in trainer.model.trainable_variables
    )

    if make is Net:
        assert np.isfinite(trainer.train(tf.constant(2))["training_loss"])


def test_building_a_model_reads_nothing() -> None:
    read = []

    def rows() -> Iterator[Any]:
        read.append(1)
        yield np.ones(8, np.float32), np.int32(1)

    def build_inputs(self: Any, params: Any, input_context: Any = None) -> tf.data.Dataset:
        assert input_context.num_replicas_in_sync == 1
        spec = (tf.TensorSpec([8]), tf.TensorSpec([], tf.int32))
        return tf.data.Dataset.from_generator(rows, output_signature=spec).batch(1)

    trainer = Trainer.create(
        _build_config(), _create_task(Net, build_inputs=build_inputs), True, False
    )

    assert is_built(trainer.model)
    assert read == []


def test_the_data_are_not_opened_for_a_model_that_is_built() -> None:
    opened: list[Any] = []

    class Built(LinearTask):
        def build_inputs(self, params: Any, input_context: Any = None) -> Any:
            opened.append(params)
            return super().build_inputs(params, input_context)

    trainer = Trainer.create(_build_config(), Built(TinyConfig()), True, False)

    assert is_built(trainer.model)
    assert opened == []


@pytest.mark.parametrize("validation", [{}, None, DataConfig()])
def test_without_validation_data_the_training_batch_is_used(validation: Any) -> None:
    sections = types.SimpleNamespace(train_data=TinyConfig().train_data, validation_data=validation)
    model = Net()

    build_model(sections, LinearTask(TinyConfig()), model, train=False)

    assert is_built(model)


def test_the_task_calls_the_model_in_a_step_of_its_own() -> None:
    def train_step(self: Any, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        model(inputs["points"], training=True)
        raise AssertionError("there is no optimizer")

    def build_inputs(self: Any, params: Any, input_context: Any = None) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors({"points": tf.zeros([2, 8]), "labels": tf.zeros([2])})

    task = _create_task(Net, build_inputs=build_inputs, train_step=train_step)

    assert is_built(Trainer.create(_build_config(), task, True, False).model)


def test_a_model_that_cannot_be_built_says_what_was_tried() -> None:
    class Misfit(Net):
        def call(self, points: Any, training: bool = False) -> Any:
            return tf.reshape(points, [3, 5])

    with pytest.raises(ValueError) as caught:
        Trainer.create(_build_config(), _create_task(Misfit), True, False)

    [note] = caught.value.__notes__
    assert "Misfit has no variables yet" in note
    assert "task.train_data, which is (float32 [8, 8], int32 [8])" in note


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (None, "None"),
        (Net, "the class Net"),
        ((Net, Net), r"\(<class"),
        (len, "<built-in function len>"),
    ],
)
def test_what_is_no_model_is_told(model: Any, told: str) -> None:
    with pytest.raises(UsageError, match=rf"build_model returned {told}.*; return the model"):
        Trainer.create(_build_config(), _create_task(lambda: model), True, False)


def test_an_error_in_a_loop_gets_batch_and_outputs() -> None:
    task = LinearTask(TinyConfig())
    spec = (tf.TensorSpec([None, 8]), tf.TensorSpec([None], tf.int32))

    with (
        pytest.raises(KeyError) as caught,
        explain_batch_errors("task.train_data", lambda: spec, task, task.build_model()),
    ):
        raise KeyError("lost")

    [note] = caught.value.__notes__
    assert note.splitlines() == [
        "a batch of task.train_data is (float32 [None, 8], int32 [None])",
        "the model gives float32 [None, 3]",
    ]


@pytest.mark.parametrize(
    "error", [tf.errors.UnavailableError(None, None, "gone"), DataError("damaged")]
)
def test_an_error_that_is_not_the_models_gets_no_note(error: Exception) -> None:
    task = LinearTask(TinyConfig())

    with (
        pytest.raises(type(error)),
        explain_batch_errors("task.train_data", pytest.fail, task, task.build_model()),
    ):
        raise error

    assert not hasattr(error, "__notes__")
