"""A tf_keras that `build_model` imports has the seeds and the precision of the run."""

from __future__ import annotations

from tests.fork_server import ForkServer
from trainer_kit.config.schema.experiment import ExperimentConfig


def build_keras_2_model() -> None:
    """Prints the policy and the random numbers of layers made after a run is prepared."""
    from trainer_kit.run.launcher import prepare_runtime

    runtime = {"mixed_precision_dtype": "bfloat16", "random_seed": 7}
    config = ExperimentConfig().replace(runtime=runtime)
    with prepare_runtime(config).scope():
        import tensorflow as tf
        import tf_keras

        layer = tf_keras.layers.Dense(3)
        dropout = tf_keras.layers.Dropout(0.5)
        outputs = layer(tf.ones([1, 2]))
        policy = tf_keras.mixed_precision.global_policy()
        print(policy.name, outputs.dtype.name, layer.kernel.numpy().tolist())
        print(dropout(tf.ones([20]), training=True).numpy().tolist())


def test_two_runs_draw_equal_numbers_at_the_precision_set() -> None:
    with ForkServer() as server:
        first = server.run(build_keras_2_model)
        second = server.run(build_keras_2_model)
    assert first.code == 0, first.text

    numbers = first.text.splitlines()[-2:]  # TensorFlow may print lines of its own before them
    assert numbers[0].startswith("mixed_bfloat16 bfloat16 ")
    assert second.text.splitlines()[-2:] == numbers
