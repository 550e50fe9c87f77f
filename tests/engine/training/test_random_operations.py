"""Random operations inside training and evaluation steps: a resumed run draws what was next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tests.builders import assert_all_close, seeded_trainer, trained_weights
from tests.engine.linear_task import LinearTask, linear_experiment
from tests.engine.training.saved_state import restore_trainer, save_trainer


class Noise(keras.layers.Layer):  # type: ignore[misc]
    """Drops features, and adds noise on the first replica only, which so draws more often."""

    def call(self, inputs: Any) -> Any:
        dropped = tf.nn.dropout(inputs, 0.3)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.cond(
            tf.equal(replica, 0), lambda: dropped + tf.random.normal([]), lambda: dropped
        )


class NoisyTask(LinearTask):
    """Draws random numbers in training and in evaluation."""

    def build_model(self) -> Any:
        return keras.Sequential([Noise(), super().build_model()])


def test_a_resume_on_replicas_draws_the_numbers_that_come_next(tmp_path: Path) -> None:
    config = linear_experiment(require_exact_resume=True)
    tf.random.set_global_generator(None)  # that of another test may have one state for all replicas
    whole = seeded_trainer(config, NoisyTask, 2)
    whole.initialize()
    whole.train(tf.constant(10))
    path = save_trainer(whole, tmp_path)
    whole.evaluate(tf.constant(-1))  # which leaves the training as it is
    whole.train(tf.constant(10))

    tf.random.set_global_generator(None)
    resumed = seeded_trainer(config, NoisyTask, 2)
    restore_trainer(resumed, path)
    resumed.train(tf.constant(10))

    assert_all_close(trained_weights(resumed), trained_weights(whole))
    assert resumed.evaluate(tf.constant(-1)) == whole.evaluate(tf.constant(-1))


def test_resumed_fused_steps_draw_the_numbers_that_come_next(tmp_path: Path) -> None:
    config = linear_experiment(require_exact_resume=True, fuse_steps=5)
    tf.random.set_global_generator(None)
    whole = seeded_trainer(config, NoisyTask)
    whole.initialize()
    whole.train(tf.constant(10))
    path = save_trainer(whole, tmp_path)
    whole.train(tf.constant(10))

    tf.random.set_global_generator(None)
    resumed = seeded_trainer(config, NoisyTask)
    restore_trainer(resumed, path)
    resumed.train(tf.constant(10))

    assert_all_close(trained_weights(resumed), trained_weights(whole))
