"""What the Trainer needs to run a step on every replica."""

from __future__ import annotations

import tensorflow as tf

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.runtime.replica_values import local_tensors, run_options


def test_one_replica_has_the_tensors_of_its_batch() -> None:
    batch = {"a": tf.constant([1]), "b": (tf.constant([2]), "no tensor")}
    assert [tensor.numpy().tolist() for tensor in local_tensors(batch, tf.distribute.get_strategy())] == [[1], [2]]


def test_local_tensors_include_all_replicas_and_sparse_parts() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    batch = next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(4))))
    assert [tensor.numpy().tolist() for tensor in local_tensors(batch, strategy)] == [[0, 1], [2, 3]]
    assert len(local_tensors(tf.sparse.eye(2), tf.distribute.get_strategy())) == 3


def test_there_are_options_only_when_the_config_asks_for_them() -> None:
    assert run_options(RuntimeConfig()) is None
    for wanted in (True, False):
        options = run_options(RuntimeConfig(tpu_enable_xla_dynamic_padder=wanted))
        assert options is not None
        assert options.experimental_xla_options.enable_xla_dynamic_padder is wanted
