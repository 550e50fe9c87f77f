"""Dtype policies of Keras 3 and, where it is imported, tf_keras."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.runtime.precision import set_precision


@pytest.fixture(autouse=True)
def policies_as_before() -> Iterator[None]:
    yield
    keras.config.set_dtype_policy("float32")
    tf_keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize(
    ("dtype", "policy", "computed"),
    [
        ("float32", "float32", tf.float32),
        ("float16", "mixed_float16", tf.float16),
        ("mixed_float16", "mixed_float16", tf.float16),
        ("bfloat16", "mixed_bfloat16", tf.bfloat16),
        ("mixed_bfloat16", "mixed_bfloat16", tf.bfloat16),
    ],
)
def test_layers_compute_in_the_dtype_and_keep_float32_weights(
    dtype: str, policy: str, computed: tf.DType
) -> None:
    set_precision(RuntimeConfig(mixed_precision_dtype=dtype))

    assert keras.config.dtype_policy().name == policy
    assert tf_keras.mixed_precision.global_policy().name == policy

    for layer in (keras.layers.Dense(2), tf_keras.layers.Dense(2)):
        assert layer(tf.ones([1, 3])).dtype == computed
        assert tf.as_dtype(layer.kernel.dtype) == tf.float32


def test_without_a_dtype_the_policy_of_the_user_stays() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    set_precision(RuntimeConfig())

    assert tf_keras.mixed_precision.global_policy().name == "mixed_float16"
    assert keras.config.dtype_policy().name == "mixed_bfloat16"
