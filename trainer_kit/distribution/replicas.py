"""What the Trainer needs to run a step on every replica."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.runtime import RuntimeConfig


def local_tensors(inputs: Any, strategy: tf.distribute.Strategy) -> list[tf.Tensor]:
    """Returns all tensors of a distributed batch, of every replica of this worker; runs in graph, cross-replica."""
    values = [local for value in tf.nest.flatten(inputs) for local in strategy.experimental_local_results(value)]
    return [tensor for tensor in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(tensor)]


def run_options(runtime: RuntimeConfig) -> tf.distribute.RunOptions | None:
    """Returns the options of strategy.run that the config asks for; None if it asks for none."""
    padder = runtime.tpu_enable_xla_dynamic_padder
    if padder is None:
        return None
    return tf.distribute.RunOptions(experimental_xla_options=tf.tpu.XLAOptions(enable_xla_dynamic_padder=padder))
