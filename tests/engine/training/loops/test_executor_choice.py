"""The executor that runtime.executor=auto chooses, by the size of a training step."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.errors import UsageError
from trainer_kit.telemetry.profile_window import ProfileSteps, ProfileWindow
from trainer_kit.training.loops.executor_choice import executor_by_graph, executor_by_weights
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_creation import create_trainer


class _Images(LinearTask):
    """A convolution: few weights, and much work."""

    def build_model(self) -> Any:
        layers = [keras.Input((8,)), keras.layers.Reshape((2, 4, 1)), keras.layers.UpSampling2D(32)]
        layers += [keras.layers.Conv2D(16, 5), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3)]
        return keras.Sequential(layers)


class _Branches(LinearTask):
    """A branch in the step, whose work is not counted."""

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        loss = super().build_losses(labels, model_outputs, aux_losses)
        return tf.cond(loss > 100.0, lambda: loss * 0.5, lambda: loss)


def _trained(task: type[LinearTask] = LinearTask, **overrides: Any) -> Any:
    config = linear_experiment().replace(runtime={"executor": "auto"}).replace(**overrides)
    trainer = create_trainer(config, task(config.task), True, False, None)
    trainer.initialize()
    trainer.train(tf.constant(3))
    assert int(trainer.global_step.numpy()) == 3
    return trainer


def test_a_small_step_runs_on_one_thread() -> None:
    assert _trained().executor == "single_threaded"


@pytest.mark.parametrize("task", [_Images, _Branches])
def test_a_large_step_and_one_of_unknown_size_run_by_default(task: type[LinearTask]) -> None:
    assert _trained(task).executor == "default"


def test_fused_steps_run_by_default() -> None:
    assert _trained(trainer={"fuse_steps": 3}).executor == "default"


class _ReturnsOurLoop(Trainer):
    """A loop of its own, by name: it is the loop of the superclass."""

    def create_train_loop_fn(self) -> Any:
        return super().create_train_loop_fn()


def test_a_trainer_with_a_loop_of_its_own_runs_by_default() -> None:
    config = linear_experiment().replace(runtime={"executor": "auto"})
    trainer = _ReturnsOurLoop.create(config, LinearTask(config.task), True, False)
    trainer.initialize()
    trainer.train(tf.constant(3))
    assert trainer.executor == "default"
    assert trainer.current_loop is not None and trainer.current_loop.last_batch is None


def test_a_profile_makes_a_small_step_run_by_default_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = linear_experiment().replace(runtime={"executor": "auto"})
    trainer = create_trainer(config, LinearTask(config.task), True, False, None)
    trainer.initialize()
    trainer.loop_parts.window = ProfileWindow(ProfileSteps(100, 110), lambda: False, lambda: None)
    trainer.train(tf.constant(3))
    assert trainer.executor == "default"
    assert "chooses default for the whole run" in caplog.text


def test_steps_that_are_not_compiled_run_by_default() -> None:
    tf.config.run_functions_eagerly(True)
    try:
        assert _trained().executor == "default"
    finally:
        tf.config.run_functions_eagerly(False)


def test_many_weights_tell_without_a_graph() -> None:
    assert executor_by_weights([np.zeros([100, 100]), np.zeros([10**9])], batch_size=10) is None
    choice = executor_by_weights([np.zeros([1000, 1000])], batch_size=10)
    assert choice is not None and choice.name == "default" and "at least 60 MFLOP" in choice.reason


def test_a_batch_of_unknown_size_counts_as_the_configs() -> None:
    weight = tf.Variable(tf.zeros([64, 64]))
    iterator = iter(tf.data.Dataset.from_tensor_slices(tf.zeros([100, 64])).batch(40))

    @tf.function
    def loop(iterator: Any) -> Any:
        total = tf.zeros([])
        for _ in tf.range(2):
            total += tf.reduce_sum(next(iterator) @ weight)
        return total

    graph = loop.get_concrete_function(iterator).graph
    assert executor_by_graph(graph, 40).name == "single_threaded"
    assert executor_by_graph(graph, 4000).name == "default"


def test_without_a_compiled_loop_the_default_runs_it() -> None:
    assert executor_by_graph(None, 32).name == "default"


class _ResetsOnCondition(keras.metrics.Mean):
    """A metric whose reset has a tf.cond; the loop itself calls it inside of one."""

    def reset_state(self) -> None:
        tf.cond(self.count > 0.0, super().reset_state, lambda: None)


class _WithSuchAMetric(LinearTask):
    def build_metrics(self, training: bool = True) -> Any:
        return [_ResetsOnCondition("conditional")]

    def process_metrics(self, metrics: Any, labels: Any, model_outputs: Any) -> None:
        metrics[0].update_state(1.0)


def test_a_condition_inside_of_a_condition_runs_by_default() -> None:
    assert _trained(_WithSuchAMetric).executor == "default"


def test_one_thread_refuses_a_condition_inside_of_a_condition() -> None:
    with pytest.raises(UsageError, match=r"tf\.cond, tf\.case or tf\.switch_case inside of another one"):
        _trained(_WithSuchAMetric, runtime={"executor": "single_threaded"})
