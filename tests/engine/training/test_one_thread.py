"""Training loops on one thread (runtime.executor=single_threaded): refusals and warnings."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.errors import UsageError
from trainer_kit.training.trainer_creation import create_trainer


def _create_trainer(task: type[LinearTask], executor: str) -> Any:
    config = linear_experiment().replace(runtime={"executor": executor})
    trainer = create_trainer(config, task(config.task), True, False, None)
    trainer.initialize()
    return trainer


class _ResetsOnCondition(keras.metrics.Mean):
    """A metric whose reset has a tf.cond; the loop itself calls it inside of one."""

    def reset_state(self) -> None:
        tf.cond(self.count > 0.0, super().reset_state, lambda: None)


class _WithSuchAMetric(LinearTask):
    def build_metrics(self, training: bool = True) -> Any:
        return [_ResetsOnCondition("conditional")]

    def process_metrics(self, metrics: Any, labels: Any, model_outputs: Any) -> None:
        metrics[0].update_state(1.0)


def test_one_thread_refuses_a_condition_inside_of_a_condition() -> None:
    trainer = _create_trainer(_WithSuchAMetric, "single_threaded")

    with pytest.raises(
        UsageError, match=r"tf\.cond, tf\.case or tf\.switch_case inside of another one"
    ):
        trainer.train(tf.constant(3))

    on_all_threads = _create_trainer(_WithSuchAMetric, "default")

    on_all_threads.train(tf.constant(3))

    assert int(on_all_threads.global_step.numpy()) == 3


class _FailsInItsStep(LinearTask):
    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        loss = super().build_losses(labels, model_outputs, aux_losses)
        return loss * tf.gather(tf.ones([1]), labels[0] + 100)


@pytest.mark.parametrize(("executor", "has_note"), [("default", False), ("single_threaded", True)])
def test_an_error_on_one_thread_says_how_to_see_its_operation(
    executor: str, has_note: bool
) -> None:
    trainer = _create_trainer(_FailsInItsStep, executor)

    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        trainer.train(tf.constant(3))

    notes = " ".join(error.value.__notes__)
    assert (
        "start the run again in a new model_dir with runtime.executor=default to see it" in notes
    ) is has_note
