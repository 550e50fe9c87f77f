"""accumulate_steps=auto: the smallest number that fits, found without a change of the run."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.errors import UsageError
from trainer_kit.testing import CLASSES, FEATURES
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_parts.micro_batch_trials import candidates


class _Limited(LinearTask):
    """Runs out of memory in the backward pass of more than `most` examples; draws random numbers and counts steps."""

    most = 8
    sizes: list[int]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps, self.sizes = tf.Variable(0, trainable=False), []

    def build_model(self) -> Any:
        layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3, seed=1)]
        return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        @tf.custom_gradient
        def limited(outputs: tf.Tensor) -> Any:
            def backward(gradient: tf.Tensor) -> tf.Tensor:
                return tf.ensure_shape(tf.numpy_function(self._allocate, [gradient], tf.float32), gradient.shape)

            return tf.identity(outputs), backward

        self.steps.assign_add(1)
        return super().build_losses(labels, limited(model_outputs), aux_losses)

    def _allocate(self, gradient: np.ndarray) -> np.ndarray:
        self.sizes.append(len(gradient))
        if len(gradient) > self.most:
            raise MemoryError("no memory for so many examples")  # TensorFlow makes it a ResourceExhaustedError
        return gradient


def _trainer(
    steps: int | str, task_type: type[LinearTask] = _Limited, strategy: Any = None, batch: int = 32, **trainer: Any
) -> Trainer:
    keras.utils.set_random_seed(3)
    config = linear_experiment().replace(task={"train_data": {"global_batch_size": batch}})
    config = config.replace(trainer={"accumulate_steps": steps, **trainer})
    with (strategy or tf.distribute.get_strategy()).scope():
        task = task_type(config.task)
        return Trainer(config, task, task.build_model(), task.create_optimizer(config.trainer.optimizer_config))


def _state(trainer: Trainer) -> list[Any]:
    trainer.state.python_state.store()
    held = tf.train.TrackableView(trainer.checkpoint).descendants()
    metrics = [variable.value for variable in trainer._train_set.variables()]
    own = [trainer.task.steps] if hasattr(trainer.task, "steps") else []
    return [one.numpy() for one in [*held, *metrics, *own] if isinstance(one, tf.Variable)]


def _alike(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_auto_finds_the_smallest_number_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trainer = _trainer("auto")
    trainer.train(tf.constant(1))
    assert trainer.accumulation.steps == 4 and trainer.task.sizes == [32, 16, 8] + [8] * 4
    (told,) = [text for text in caplog.messages if "accumulate_steps=auto" in text]
    assert told.endswith(": 4, so a replica trains on 8 examples at a time; more do not fit into memory")
    trainer.train(tf.constant(1))
    assert trainer.task.sizes[7:] == [8] * 4


def test_trials_change_no_state_and_take_no_batch() -> None:
    trainer = _trainer("auto", batch=16)
    before = _state(trainer)
    trainer.accumulation.prepare(trainer.data.iterator())
    assert trainer.accumulation.steps == 2 and _alike(before, _state(trainer))
    given = _trainer(2, batch=16)
    trainer.train(tf.constant(6)), given.train(tf.constant(6))
    assert _alike(_state(trainer), _state(given))


def test_two_replicas_choose_one_number() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    trainer = _trainer("auto", strategy=strategy)
    before = _state(trainer)
    trainer.accumulation.prepare(trainer.data.iterator())
    assert trainer.accumulation.steps == 2 and _alike(before, _state(trainer))
    assert np.isfinite(trainer.train(tf.constant(2))["training_loss"])


def test_a_batch_that_fits_is_not_split(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trainer = _trainer("auto", batch=8)
    trainer.accumulation.prepare(trainer.data.iterator())
    assert trainer.accumulation.steps == 1 and not trainer.accumulation.variables
    assert any("=auto: 1, so a replica trains on 8 examples at a time; they fit" in text for text in caplog.messages)
    assert not any("batch normalization" in text for text in caplog.messages)


def test_fused_steps_are_tried_as_programs_of_xla() -> None:
    trainer = _trainer("auto", LinearTask, fuse_steps=5)
    trainer.train(tf.constant(5))
    assert trainer.accumulation.steps == 1 and trainer.global_step.numpy() == 5


class _None(_Limited):
    most = 0


def test_an_example_that_does_not_fit_is_an_error_with_advice() -> None:
    trainer = _trainer("auto", _None, batch=6)
    with pytest.raises(UsageError, match="even the forward and backward pass of a single example does not fit") as told:
        trainer.train(tf.constant(1))
    assert "use a device with more memory, a smaller model" in str(told.value) and told.value.exit_code == 2
    assert isinstance(told.value.__cause__, tf.errors.ResourceExhaustedError)
    assert trainer.task.sizes == [6, 3, 2, 1]


class _Failing(LinearTask):
    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        raise TypeError("a bug")


def test_other_errors_of_a_step_are_raised_as_they_are() -> None:
    with pytest.raises(TypeError, match="a bug"):
        _trainer("auto", _Failing).train(tf.constant(1))


class _Unpadded(LinearTask):
    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        data = tf.data.Dataset.from_tensors((tf.zeros([8, FEATURES]), tf.zeros([8], tf.int32))).repeat()
        return data.map(lambda x, y: (tf.ensure_shape(tf.py_function(lambda z: z, [x], x.dtype), [None, None]), y))


def test_a_batch_of_unknown_shape_needs_a_number() -> None:
    with pytest.raises(UsageError, match=r"which is not known: float32 \[None, None\]; pad the examples"):
        _trainer("auto", _Unpadded).train(tf.constant(1))


def test_a_step_without_memory_names_the_setting() -> None:
    with pytest.raises(tf.errors.ResourceExhaustedError) as told:
        _trainer(2).train(tf.constant(1))
    assert told.value.__notes__[0].startswith("trainer.accumulate_steps=auto trains on each batch in parts")


def test_the_last_candidate_is_one_example_each() -> None:
    assert [candidates(examples) for examples in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
