"""Gradient accumulation in a Trainer: a batch in micro-batches trains as the whole batch does."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import assert_all_close, seeded_trainer, trained_weights
from tests.engine.linear_task import LinearTask, linear_experiment
from tests.engine.training.saved_state import restore_trainer, save_trainer
from trainer_kit import apply_gradients
from trainer_kit.callbacks.recovery import compute_gradient_norms
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import UsageError
from trainer_kit.runtime.precision import precision_scope
from trainer_kit.testing import CLASSES, FEATURES, TinyTask, tiny_arrays
from trainer_kit.training.task import split_batch
from trainer_kit.training.trainer import Trainer

STEPS = 4
# What an optimizer does once for an update, and not for a gradient.
OPTIMIZATION: dict[str, Any] = {
    "optimizer": {"type": "adamw", "adamw": {"weight_decay_rate": 0.1, "gradient_clip_norm": 0.3}},
    "learning_rate": {
        "type": "cosine",
        "cosine": {"initial_learning_rate": 0.01, "decay_steps": 20},
    },
    "ema": {"average_decay": 0.9},
}
# Plain sums of gradients, in which no factor is hidden; a step takes half the time to trace.
MOMENTUM: dict[str, Any] = {
    "optimizer": {"type": "sgd", "sgd": {"momentum": 0.9}},
    "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.1}},
}


def _create_trainer(
    task_type: type[TinyTask] = LinearTask,
    count: int = 1,
    cls: type[Trainer] = Trainer,
    task: dict[str, Any] | None = None,
    runtime: dict[str, Any] | None = None,
    **trainer: Any,
) -> Trainer:
    data = task or {"train_data": {"global_batch_size": 32}}
    config = linear_experiment(optimizer_config=MOMENTUM).replace(task=data, runtime=runtime or {})
    return seeded_trainer(
        config.replace(trainer=trainer), task_type, count, evaluate=False, cls=cls
    )


@dataclass(frozen=True)
class _TrainingResult:
    """What STEPS steps have made of a trainer.

    Attributes:
      logs: The values of the logs.
      state: The values of weights, averages and optimizers.
    """

    logs: list[Any]
    state: list[np.ndarray]

    @property
    def values(self) -> list[Any]:
        """All values."""
        return [*self.logs, *self.state]


def _train(trainer: Trainer) -> _TrainingResult:
    logs = trainer.train(tf.constant(STEPS))
    return _TrainingResult(
        tf.nest.flatten(logs), [*_read_state(trainer), trainer.global_step.numpy()]
    )


@pytest.fixture(scope="module")
def whole() -> _TrainingResult:
    """Whole batches of 32 on one replica."""
    return _train(_create_trainer())


def _read_state(trainer: Trainer) -> list[np.ndarray]:
    """Returns the values of weights, averages and optimizers."""
    values = trained_weights(trainer)
    if trainer.average_names:
        with trainer.use_weights("average"):
            values += trained_weights(trainer)
    optimizers = trainer.optimizer
    if not isinstance(optimizers, dict):
        optimizers = {"": optimizers}
    for optimizer in optimizers.values():
        values += [variable.numpy() for variable in optimizer.variables]
    return values


def test_4_times_8_examples_train_as_32_do(caplog: pytest.LogCaptureFixture) -> None:
    """On two replicas, with an optimizer that does much."""
    whole = _train(_create_trainer(optimizer_config=OPTIMIZATION))
    options = {
        "accumulate_steps": 4,
        "require_exact_resume": True,
        "optimizer_config": OPTIMIZATION,
    }
    trainer = _create_trainer(count=2, **options)

    split = _train(trainer)

    assert_all_close(split.values, whole.values, atol=1e-6)
    assert trainer.global_step.numpy() == STEPS
    # There is no warning of state that no checkpoint contains, or of batch normalization.
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(trainer.accumulation.variables) == 2


# 3 does not divide 32, and with 32 parts each example is one.
FORMS: dict[str, dict[str, Any]] = {
    "fused": {"accumulate_steps": 3, "fuse_steps": 2},
    "steps from Python": {"accumulate_steps": 3, "train_tf_while_loop": False},
    "eager": {"accumulate_steps": 3, "train_tf_while_loop": False, "train_tf_function": False},
    "XLA": {"accumulate_steps": 4, "runtime": {"enable_xla": True}},
    "one thread": {"accumulate_steps": 32, "runtime": {"executor": "single_threaded"}},
    "more parts than examples of a replica": {"accumulate_steps": 32, "count": 2},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_loop_splits_batches(form: str, whole: _TrainingResult) -> None:
    trainer = _create_trainer(**{"steps_per_loop": 4, "summary_interval": 4, **FORMS[form]})

    split = _train(trainer)

    assert_all_close(split.values, whole.values, atol=1e-6)
    assert trainer.global_step.numpy() == STEPS


# The last batch has 6 examples, fewer than 8 micro-batches: 3 for each of two replicas.
RAGGED: dict[str, Any] = {
    "train_data": {"global_batch_size": 32, "drop_remainder": False, "is_training": False},
    "examples": 102,
}


def test_a_ragged_last_batch_counts_each_example_once() -> None:
    whole = _train(_create_trainer(task=RAGGED))
    on_two_replicas = _train(_create_trainer(task=RAGGED, accumulate_steps=8, count=2))
    fused = _train(_create_trainer(task=RAGGED, accumulate_steps=8, fuse_steps=5))

    assert_all_close(on_two_replicas.values, whole.values, atol=1e-6)
    assert_all_close(fused.values, whole.values, atol=1e-6)


class _OwnStep(LinearTask):
    """Applies gradients by a method of Keras, and returns its own kind of loss and logs."""

    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        features, labels = split_batch(inputs)
        with tf.GradientTape() as tape:
            outputs = model(features, training=True)
            loss = self.build_losses(labels, outputs)
            share = loss / tf.distribute.get_strategy().num_replicas_in_sync
        gradients = tape.gradient(share, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        self.process_metrics(metrics or [], labels, outputs)
        return {self.loss: loss}


def test_own_train_steps_may_call_the_optimizer(whole: _TrainingResult) -> None:
    split = _train(_create_trainer(_OwnStep, 2, accumulate_steps=2))

    assert_all_close(split.values, whole.values, atol=1e-6)


class _TwoOptimizers(LinearTask):
    """Trains each variable with an optimizer of its own, and uses a third one never."""

    @classmethod
    def create_optimizer(cls, optimizer_config: Any, runtime_config: Any = None) -> Any:
        first = keras.optimizers.SGD(0.05, momentum=0.9)
        return {"first": first, "last": keras.optimizers.SGD(0.1), "idle": keras.optimizers.SGD()}

    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        features, labels = split_batch(inputs)
        with tf.GradientTape() as tape:
            loss = self.build_losses(labels, model(features, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        pairs = list(zip(gradients, model.trainable_variables, strict=True))
        apply_gradients(optimizer["first"], pairs[:1])
        apply_gradients(optimizer["last"], pairs[1:])
        return {self.loss: loss}


class _Regularized(LinearTask):
    """Adds the loss of a layer."""

    def build_model(self) -> Any:
        return keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, kernel_regularizer="l2")]
        )


class _Compiled(LinearTask):
    """Has the loss and the metrics of `compile`, which Keras builds in the first step."""

    def build_model(self) -> Any:
        model = super().build_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(loss=loss, metrics=["sparse_categorical_accuracy"])
        return model

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        return tf.constant(0.0)


@pytest.mark.parametrize("task_type", [_TwoOptimizers, _Regularized, _Compiled])
def test_sums_losses_and_metrics_are_those_of_the_batch(task_type: type[TinyTask]) -> None:
    whole = _train(_create_trainer(task_type))
    split = _train(_create_trainer(task_type, accumulate_steps=2))

    assert_all_close(split.values, whole.values, atol=1e-6)


def test_float16_scales_and_skips_whole_batches() -> None:
    runtime = {"mixed_precision_dtype": "float16"}
    with precision_scope(RuntimeConfig(**runtime)):
        split = _create_trainer(_Overflowing, 2, runtime=runtime, accumulate_steps=2)
        whole = _create_trainer(_Overflowing, runtime=runtime)

    for trainer in (split, whole):
        trainer.train(tf.constant(3))
        assert float(trainer.optimizer.dynamic_scale.numpy()) == 2.0**14  # halved once
        assert int(trainer.optimizer.inner_optimizer.iterations.numpy()) == 2
        assert trainer.global_step.numpy() == 3

    # Activations are float16.
    assert_all_close(trained_weights(split), trained_weights(whole), atol=5e-3)


class _Overflowing(LinearTask):
    """Has a loss whose gradient is infinite for one example of the second batch."""

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        points, labels = tiny_arrays(True)
        points = points.copy()
        points[40] = 1e5
        size = input_context.get_per_replica_batch_size(32) if input_context else 32
        return tf.data.Dataset.from_tensor_slices((points[:96], labels[:96])).batch(
            size, drop_remainder=True
        )


class _Normalized(LinearTask):
    """Has batch normalization inside a layer of its own."""

    def build_model(self) -> Any:
        block = keras.Sequential(
            [keras.layers.Dense(CLASSES), keras.layers.BatchNormalization(name="norm")]
        )
        return keras.Sequential([keras.Input((FEATURES,)), block])


def test_batch_normalization_gets_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    trainer = _create_trainer(_Normalized, 2, accumulate_steps=2)

    for _ in range(2):
        assert np.isfinite(trainer.train(tf.constant(2))["training_loss"])

    (told,) = [text for text in caplog.messages if "batch normalization" in text]
    assert told.startswith(
        "trainer.accumulate_steps=2: batch normalization (norm) takes mean and variance of micro"
    )


class _Alive(LinearTask):
    """Counts the forward passes whose backward pass has not run yet."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.alive: list[int] = [0]

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        def count(change: int, value: tf.Tensor) -> tf.Tensor:
            def record(array: np.ndarray) -> np.ndarray:
                self.alive.append(self.alive[-1] + change)
                return array

            # Stateful operations would keep their order anyway.
            return tf.ensure_shape(
                tf.numpy_function(record, [value], value.dtype, stateful=False), value.shape
            )

        @tf.custom_gradient
        def count_outputs(outputs: tf.Tensor) -> Any:
            return count(1, outputs), lambda gradient: count(-1, gradient)

        return super().build_losses(labels, count_outputs(model_outputs), aux_losses)


@pytest.mark.parametrize("task", [{}, {"train_data": RAGGED["train_data"]}])
def test_activations_of_one_micro_batch_are_in_memory(task: dict[str, Any]) -> None:
    trainer = _create_trainer(_Alive, task=task, accumulate_steps=8)

    trainer.train(tf.constant(3))

    assert trainer.task.alive == [0] + [1, 0] * 8 * 3


def test_sums_of_an_interrupted_step_do_not_count(whole: _TrainingResult) -> None:
    split = _create_trainer(accumulate_steps=4, fuse_steps=2)

    split.train(tf.constant(STEPS // 2))

    assert len(split.accumulation.variables) == 2

    for variable in split.accumulation.variables:
        variable.assign(np.full(variable.shape, np.nan, np.float32))

    split.train(tf.constant(STEPS // 2))

    result = [*_read_state(split), split.global_step.numpy()]
    assert_all_close(result, whole.state, atol=1e-6)


def test_gradients_of_a_diverged_step_are_those_of_the_batch() -> None:
    split, whole = (
        compute_gradient_norms(trainer, trainer.next_batch())
        for trainer in (_create_trainer(accumulate_steps=2), _create_trainer())
    )

    assert split == pytest.approx(whole, abs=1e-6)
    assert len(split) == 2


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    task = {"dropout": 0.2, "train_data": {"global_batch_size": 20}}
    whole, resumed = (
        _create_trainer(task=task, accumulate_steps=9, require_exact_resume=True) for _ in range(2)
    )
    whole.initialize()
    whole.train(tf.constant(4))
    path = save_trainer(whole, tmp_path)
    whole.train(tf.constant(4))

    restore_trainer(resumed, path)
    resumed.train(tf.constant(4))

    assert_all_close(_read_state(resumed), _read_state(whole))
    assert not [name for name, _ in tf.train.list_variables(path) if "accumulated" in name]


class _ReplacedStep(Trainer):
    def train_step(self, iterator: Any) -> None:
        arguments = (next(iterator), self.model, self.optimizer, self.train_metrics)
        self.strategy.run(self.task.train_step, args=arguments)
        self.global_step.assign_add(1)


class _WrappedStep(Trainer):
    def train_step(self, iterator: Any) -> None:
        super().train_step(iterator)


def test_a_trainers_own_step_has_to_call_ours() -> None:
    _create_trainer(cls=_WrappedStep, accumulate_steps=2).train(tf.constant(1))

    with pytest.raises(
        UsageError, match=r"_ReplacedStep\.train_step does not call super\(\)\.train_step"
    ):
        _create_trainer(cls=_ReplacedStep, accumulate_steps=2).train(tf.constant(1))


class _OwnOptimizer(LinearTask):
    """Updates the weights by an optimizer that it was not called with."""

    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        if not hasattr(self, "own"):
            with tf.init_scope():
                self.own = keras.optimizers.SGD(0.1)
                self.own.build(model.trainable_variables)
        return super().train_step(inputs, model, self.own, metrics)


def test_a_step_that_applies_no_gradients_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"_OwnOptimizer\.train_step applied no gradients through the optimizer"
    ):
        _create_trainer(_OwnOptimizer, accumulate_steps=2).train(tf.constant(1))


class _ReplacingTrainer(Trainer):
    """Has another optimizer from the moment when it is set."""

    replacement: Any = None

    @property
    def optimizer(self) -> Any:
        return self.replacement or super().optimizer


def test_a_replaced_optimizer_is_the_one_that_updates() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    trainer = _create_trainer(cls=_ReplacingTrainer, accumulate_steps=2)
    trainer.train(tf.constant(1))
    optimizer.build(trainer.model.trainable_variables)

    trainer.replacement = optimizer
    trainer.forget_train_loop()
    trainer.train(tf.constant(2))

    assert int(optimizer.iterations.numpy()) == 2


class _OutOfMemory(LinearTask):
    """Has no memory for a backward pass."""

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        def fail(loss: np.ndarray) -> np.ndarray:
            raise MemoryError("no memory")  # TensorFlow makes it a ResourceExhaustedError

        loss = super().build_losses(labels, model_outputs, aux_losses)
        return tf.ensure_shape(tf.numpy_function(fail, [loss], tf.float32), []) + loss


def test_a_step_without_memory_names_the_number_to_try_next() -> None:
    with pytest.raises(tf.errors.ResourceExhaustedError) as raised:
        _create_trainer(_OutOfMemory, accumulate_steps=4).train(tf.constant(1))

    assert raised.value.__notes__[0].startswith(
        "try trainer.accumulate_steps=8, which trains on a batch in so many"
    )
