"""Sets the dtype policy of Keras as RuntimeConfig asks for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import keras

from trainer_kit.config.schema.runtime import RuntimeConfig

_POLICIES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}


def set_precision(runtime: RuntimeConfig) -> None:
    """Sets the policy of layers that are created afterwards.

    Under float16 and bfloat16 layers compute in that type and keep float32 weights. Without a
    mixed_precision_dtype the policy does not change. An imported tf_keras gets the same policy.
    An installed tf_keras is imported with trainer_kit.training.

    Args:
      runtime: Its mixed_precision_dtype is used. The loss scale of float16 belongs to the
        optimizer.
    """
    dtype = runtime.mixed_precision_dtype
    if dtype is None:
        return
    policy = _POLICIES.get(dtype, dtype)
    keras.config.set_dtype_policy(policy)
    keras_2 = sys.modules.get("tf_keras")
    if keras_2 is not None:
        keras_2.mixed_precision.set_global_policy(policy)


@contextlib.contextmanager
def precision_scope(runtime: RuntimeConfig) -> Iterator[None]:
    """Sets the policy as `set_precision` does, and restores the previous one after the block."""
    previous_policy = keras.config.dtype_policy()
    keras_2 = sys.modules.get("tf_keras")
    previous_policy_2 = keras_2.mixed_precision.global_policy() if keras_2 is not None else None

    set_precision(runtime)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(previous_policy)
        if keras_2 is not None:
            keras_2.mixed_precision.set_global_policy(previous_policy_2)
