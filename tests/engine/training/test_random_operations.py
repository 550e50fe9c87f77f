"""Random operations inside training and evaluation steps: a resumed run draws what was next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearConfig, LinearTask, linear_experiment
from trainer_kit import configclass, launch, register_task


class Noise(keras.layers.Layer):  # type: ignore[misc]
    """Drops features, and adds noise on the first replica only, which so draws more often."""

    def call(self, inputs: Any) -> Any:
        dropped = tf.nn.dropout(inputs, 0.3)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.cond(
            tf.equal(replica, 0), lambda: dropped + tf.random.normal([]), lambda: dropped
        )


@configclass
class NoisyConfig(LinearConfig):
    """See NoisyTask."""


@register_task(NoisyConfig)
class NoisyTask(LinearTask):
    """Draws random numbers in training and in evaluation."""

    def build_model(self) -> Any:
        return keras.Sequential([Noise(), super().build_model()])


@pytest.mark.parametrize(("replicas", "trainer"), [(1, {}), (1, {"fuse_steps": 5}), (2, {})])
def test_a_resumed_run_draws_the_numbers_that_come_next(
    replicas: int, trainer: dict[str, Any], tmp_path: Path
) -> None:
    config = linear_experiment(require_exact_resume=True, **trainer)
    # Without TensorFlow's collectives: only one strategy of a process may use them.
    mirrored = {
        "virtual_cpus": 2,
        "distribution_strategy": "mirrored",
        "all_reduce_alg": "hierarchical_copy",
    }
    config = config.replace(task=NoisyConfig(), runtime=mirrored if replicas == 2 else {})
    tf.random.set_global_generator(None)  # that of another test may have one state for all replicas
    results = []

    for from_step in (None, 10):
        model, logs = launch(config, "train_and_eval", str(tmp_path), from_step=from_step)
        results.append(
            ([variable.numpy() for variable in model.variables], logs["validation_loss"])
        )

    (weights, loss), (resumed_weights, resumed_loss) = results

    for value, resumed in zip(weights, resumed_weights, strict=True):
        np.testing.assert_array_equal(value, resumed)

    assert loss == resumed_loss
